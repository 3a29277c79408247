"""Stands in for vLLM: SGLang imports one name of it where there is no GPU, and does not use it."""

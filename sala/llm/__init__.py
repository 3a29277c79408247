"""LLM and AsyncLLM: a checkpoint, ready to answer. Thin facades over `engine.requests` and `engine.service`."""

from sala.llm.asynchronous import AsyncLLM
from sala.llm.base import LLM, BaseLLM, read_stop_ids

__all__ = ["LLM", "AsyncLLM", "BaseLLM", "read_stop_ids"]

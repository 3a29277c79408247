"""LLM and AsyncLLM: a checkpoint, ready to answer. Thin facades over `engine.requests` and `engine.service`."""

from sala.llm.asynchronous import AsyncLLM
from sala.llm.base import BaseLLM, read_stop_ids
from sala.llm.sync import LLM

__all__ = ["LLM", "AsyncLLM", "BaseLLM", "read_stop_ids"]

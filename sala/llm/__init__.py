"""LLM and AsyncLLM: a checkpoint, ready to answer. Thin facades over `engine.requests` and `engine.service`."""

from sala.llm.asynchronous import AsyncLLM
from sala.llm.base import LLM, BaseLLM

__all__ = ["LLM", "AsyncLLM", "BaseLLM"]

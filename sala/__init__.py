"""MiniCPM-SALA on your machine.

Importing this package is free: names below are loaded when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sala.plugins.arrival import expect as _expect_transformers

__version__ = "0.1.0"

_HOMES = {
    "LLM": "sala.llm",
    "Completion": "sala.engine.stream",
    "Sampling": "sala.protocol",
    "SalaConfig": "sala.config",
    "SalaError": "sala.errors",
    "ThinkFilter": "sala.text.reasoning",
    "create_layer_caches": "sala.lowlevel",
    "format_chat_prompt": "sala.lowlevel",
    "forward": "sala.lowlevel",
    "get_model_args": "sala.lowlevel",
    "is_stop_token": "sala.lowlevel",
    "load_model": "sala.lowlevel",
    "load_tokenizer": "sala.lowlevel",
    "sample": "sala.lowlevel",
}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from sala.config import SalaConfig as SalaConfig
    from sala.engine.stream import Completion as Completion
    from sala.errors import SalaError as SalaError
    from sala.llm import LLM as LLM
    from sala.lowlevel import create_layer_caches as create_layer_caches
    from sala.lowlevel import format_chat_prompt as format_chat_prompt
    from sala.lowlevel import forward as forward
    from sala.lowlevel import get_model_args as get_model_args
    from sala.lowlevel import is_stop_token as is_stop_token
    from sala.lowlevel import load_model as load_model
    from sala.lowlevel import load_tokenizer as load_tokenizer
    from sala.lowlevel import sample as sample
    from sala.protocol import Sampling as Sampling
    from sala.text.reasoning import ThinkFilter as ThinkFilter


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sala' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)


_expect_transformers()

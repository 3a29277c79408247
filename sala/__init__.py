"""MiniCPM-SALA on your machine.

Importing this package is free: names below are loaded when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = {
    "sala.llm": ("LLM", "AsyncLLM"),
    "sala.engine.requests": ("Call",),
    "sala.engine.stream": ("Completion", "Event", "Usage", "Timings"),
    "sala.options": ("Options", "Sampling"),
    "sala.config": ("SalaConfig",),
    "sala.errors": (
        "SalaError", "CacheTooSmall", "CheckpointError", "ConfigError", "ContextTooLong", "EngineClosed", "EngineDead",
        "InputError", "MissingExtra", "ModelNotFound", "DiskFull", "NoTokenizer", "NotWritable", "TemplateError",
    ),
    "sala.text.tools": ("ToolCall",),
    "sala.text.answer": ("ThinkFilter",),
    "sala.text.tokenizer": ("Tokenizer",),
    "sala.lowlevel": (
        "create_layer_caches", "format_chat_prompt", "forward", "get_model_args", "is_stop_token", "load_model",
        "load_tokenizer", "sample",
    ),
    "sala.plugins.registration": ("register",),
}  # fmt: skip
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from sala.config import SalaConfig as SalaConfig
    from sala.engine.requests import Call as Call
    from sala.engine.stream import Completion as Completion
    from sala.engine.stream import Event as Event
    from sala.engine.stream import Timings as Timings
    from sala.engine.stream import Usage as Usage
    from sala.errors import CacheTooSmall as CacheTooSmall
    from sala.errors import CheckpointError as CheckpointError
    from sala.errors import ConfigError as ConfigError
    from sala.errors import ContextTooLong as ContextTooLong
    from sala.errors import DiskFull as DiskFull
    from sala.errors import EngineClosed as EngineClosed
    from sala.errors import EngineDead as EngineDead
    from sala.errors import InputError as InputError
    from sala.errors import MissingExtra as MissingExtra
    from sala.errors import ModelNotFound as ModelNotFound
    from sala.errors import NoTokenizer as NoTokenizer
    from sala.errors import NotWritable as NotWritable
    from sala.errors import SalaError as SalaError
    from sala.errors import TemplateError as TemplateError
    from sala.llm import LLM as LLM
    from sala.llm import AsyncLLM as AsyncLLM
    from sala.lowlevel import create_layer_caches as create_layer_caches
    from sala.lowlevel import format_chat_prompt as format_chat_prompt
    from sala.lowlevel import forward as forward
    from sala.lowlevel import get_model_args as get_model_args
    from sala.lowlevel import is_stop_token as is_stop_token
    from sala.lowlevel import load_model as load_model
    from sala.lowlevel import load_tokenizer as load_tokenizer
    from sala.lowlevel import sample as sample
    from sala.options import Options as Options
    from sala.options import Sampling as Sampling
    from sala.plugins.registration import register as register
    from sala.text.answer import ThinkFilter as ThinkFilter
    from sala.text.tokenizer import Tokenizer as Tokenizer
    from sala.text.tools import ToolCall as ToolCall


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sala' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)

"""The public names: `sala/__init__.py` reads from here in which module each of them is defined."""

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

__version__: str
__all__: list[str]

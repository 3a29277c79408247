"""SALA in vLLM: `vllm serve` and `vllm.LLM` load SALA checkpoints where this package is installed beside it.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). It registers the
configuration, the model and its parsers; these are imported when vLLM needs them. Other models must
still run in a vLLM that is too old or too new for SALA: there, `register` says so in the log and does nothing else.
"""

# mypy: disable-error-code="import-not-found"

import functools
import importlib.util
import logging

from sala.errors import MissingExtra
from sala.plugins import ARCHITECTURE, versions

PARSERS = "sala"  # what --reasoning-parser and --tool-call-parser call ours
_OP = "vllm::sala_lightning"

log = logging.getLogger(__name__)


@functools.cache
def register() -> None:
    """Register with vLLM, which calls this in every process."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra("vllm", "vllm")
    from vllm.version import __version__

    try:
        versions.check(versions.VLLM, __version__)
        _register()
    except versions.UnsupportedVersion as error:
        log.error("SALA is not registered: %s", error)
    except (ImportError, AttributeError) as error:
        if not versions.VLLM.is_newer(__version__):
            raise
        remedy = f"pip install '{versions.VLLM.requirement}'"
        log.error("SALA is not registered: it does not fit vLLM %s (%s); run: %s", __version__, error, remedy)


def _register() -> None:
    from vllm import ModelRegistry
    from vllm.config import CompilationConfig
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    from sala.plugins.vllm.config import register_config

    register_config()
    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.model:SalaForCausalLM")
    ReasoningParserManager.register_lazy_module(PARSERS, f"{__name__}.parsers", "SalaReasoningParser")
    ToolParserManager.register_lazy_module(PARSERS, f"{__name__}.parsers", "SalaToolParser")
    if _OP not in CompilationConfig._attention_ops:  # compiled graphs are split where a layer reads its cache
        CompilationConfig._attention_ops.append(_OP)

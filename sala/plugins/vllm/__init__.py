"""SALA in vLLM 0.32: `vllm serve` and `vllm.LLM` load SALA checkpoints where this package is installed beside vLLM.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). It registers the
configuration, the model and the attention backend; the model itself is imported when vLLM needs it.
"""

# mypy: disable-error-code="import-not-found"

import functools
import importlib.util
import logging

from sala.errors import MissingExtra
from sala.plugins.transformers import ARCHITECTURE

BACKEND = "SALA_INFLLM_V2"
VERSION = "0.32"  # the plug-in uses parts of vLLM that change with every minor version
_OP = "vllm::sala_lightning"

log = logging.getLogger(__name__)


@functools.cache
def register() -> None:
    """Register with vLLM, which calls this in every process."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra("vllm", "vllm")
    from vllm.version import __version__

    if not fits(__version__):  # other models must still run there
        log.warning("SALA is not registered: vLLM is %s, and the plug-in needs %s", __version__, VERSION)
        return
    from vllm import ModelRegistry
    from vllm.config import CompilationConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from sala.plugins.vllm.config import register_config

    register_config()
    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.model:SalaForCausalLM")
    if BACKEND not in AttentionBackendEnum.__members__:
        register_backend(BACKEND, f"{__name__}.sparse.SparseBackend")
    if _OP not in CompilationConfig._attention_ops:  # compiled graphs are split where a layer reads its cache
        CompilationConfig._attention_ops.append(_OP)


def fits(version: str) -> bool:
    return version.startswith(f"{VERSION}.")

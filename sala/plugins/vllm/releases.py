"""What differs between the releases of vLLM that the plug-in supports: one adapter per difference.

| difference | before | since |
|---|---|---|
| who says how many bytes a token takes | the layer, by its spec | 0.28: the backend, in `customize_spec` |
| how much a state is padded | to a block of plain keys and values | 0.28: to what the backend's block takes |
| who says how a cache is laid out | the backend, in `get_kv_cache_shape` | 0.29: vLLM; the backend names layouts |
| what a backend of others is called | `CUSTOM` | 0.32: any name, once registered |
| where the classes of answers are defined | `entrypoints.openai.engine` | 0.29: `entrypoints.generate.base` |

An adapter asks vLLM for the method or field itself, not for a version: a patched build, or a release that is newer
than this module, gets what fits it.
"""

# mypy: disable-error-code="import-not-found, misc, no-any-return"

from dataclasses import fields, replace
from typing import Any

from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MambaSpec

BACKEND_SIZES_PAGES = hasattr(AttentionBackend, "customize_spec")


def opaque_page(bytes_per_token: int) -> dict[str, int]:
    """Return the fields of a spec whose pages vLLM does not interpret; before 0.28 a spec computes its own bytes."""
    known = {entry.name for entry in fields(AttentionSpec)}
    wanted = {"num_head_slots": 1, "state_content_bytes": bytes_per_token}
    return {name: value for name, value in wanted.items() if name in known}


class SizedAttention(Attention):
    """Attention whose backend says what a page takes, in releases that do not ask it too."""

    def get_kv_cache_spec(self, vllm_config: Any) -> KVCacheSpec | None:
        spec = super().get_kv_cache_spec(vllm_config)
        return spec if BACKEND_SIZES_PAGES or spec is None else self.attn_backend.customize_spec(spec)


def pad_state(spec: MambaSpec, block_bytes: int) -> MambaSpec:
    """Return the spec of a state that takes as much as a block of the sparse layers, whose memory it may get.

    Since 0.28 vLLM asks the backend for these bytes.
    """
    return spec if BACKEND_SIZES_PAGES else replace(spec, page_size_padded=block_bytes)


class LaidOutBackend(AttentionBackend):
    """A backend whose cache is [blocks, 1, tokens, elements per token], contiguous within a block."""

    @classmethod
    def elements_per_token(cls, num_kv_heads: int, head_size: int) -> int:
        raise NotImplementedError

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Before 0.29."""
        return (num_blocks, 1, block_size, cls.elements_per_token(num_kv_heads, head_size))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Since 0.29: a block is contiguous, whether its heads or its tokens come first."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)


def name_backend(name: str, path: str) -> str:
    """Register the backend at a path of modules under a name, and return the name that vLLM knows it by."""
    if not hasattr(AttentionBackendEnum, "register"):
        register_backend(AttentionBackendEnum.CUSTOM, path)
        return str(AttentionBackendEnum.CUSTOM.name)
    if name not in AttentionBackendEnum.__members__:
        register_backend(name, path)
    return name


def answer_types() -> Any:
    """Return the module with the classes of answers: messages, pieces of them, tool calls."""
    try:
        from vllm.entrypoints.generate.base import protocol
    except ImportError:
        from vllm.entrypoints.openai.engine import protocol
    return protocol

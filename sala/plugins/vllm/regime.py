"""Keep prefixes of dense and sparse prompts apart in vLLM's prefix cache where they differ.

A prompt of dense_len tokens or more is sparse from its first row, a shorter one dense. Rows below the agreement bound
are equal in both regimes; beyond it, a block of a sparse prompt gets its own key in vLLM's prefix cache.
"""

# mypy: disable-error-code="import-not-found"

from typing import Any, Protocol

from sala.config import SparseConfig

SPARSE_KEY = ("sala_regime", "sparse")


class HasPromptLength(Protocol):
    num_prompt_tokens: int


def block_keys(request: HasPromptLength, end: int, sparse: SparseConfig) -> tuple[tuple[str, str], ...]:
    """Return the extra keys for the hash of a request's block that ends before token `end`."""
    is_apart = end > sparse.agreement_len and sparse.sparse_from(request.num_prompt_tokens) == 0
    return (SPARSE_KEY,) if is_apart else ()


_known: list[SparseConfig] = []  # the geometry of the model that this process schedules


def keep_apart(sparse: SparseConfig) -> None:
    """Make vLLM's block hashes distinguish the regimes; a later call replaces the geometry."""
    from vllm.v1.core import kv_cache_utils

    is_first = not _known
    _known[:] = [sparse]
    if not is_first:
        return
    usual = kv_cache_utils.generate_block_hash_extra_keys

    def generate(request: Any, start: int, end: int, first_feature: int) -> tuple[tuple[Any, ...] | None, int]:
        keys, next_feature = usual(request, start, end, first_feature)
        own = block_keys(request, end, _known[0])
        return ((*(keys or ()), *own) if own else keys), next_feature

    kv_cache_utils.generate_block_hash_extra_keys = generate

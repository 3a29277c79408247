"""The one place that selects Metal kernels or the reference.

A Metal kernel takes and returns what its op does. At its first use on a GPU it is compared with the op and timed
(`selftest.py`); it is used only if it is correct, and only for the numbers of queries with which it is faster: those of
decode steps, of prompts, or both. `metal="on"` uses every kernel unchecked; `metal="off"` and `kernels="off"` use none.

To see a step in Python, set a breakpoint in `model.SalaModel.__call__`: MLX builds every step there. What it builds is
computed later, when `MlxExecutor.start` asks for it.
"""

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from sala.backends.mlx import selftest
from sala.backends.mlx.kernels import DECODE_QUERIES, KERNELS, Kernel
from sala.backends.mlx.ops import REFERENCE, Ops, lightning, sparse


def select_ops(kernels: str = "auto", metal: str = "auto") -> Ops:
    """Return the operations that a batch carries through the model."""
    if "off" in (kernels, metal):
        return REFERENCE

    def lightning_step(q: mx.array, *rest: Any) -> Any:
        return (find("lightning_step", q, metal=metal) or lightning.lightning_step)(q, *rest)

    def lightning_ragged(
        q: mx.array, k: mx.array, v: mx.array, states: mx.array, lengths: Sequence[int], *rest: Any
    ) -> Any:
        is_decode = all(length == 1 for length in lengths)
        kernel = None if is_decode else find("lightning_ragged", q, metal=metal)
        kernel = kernel or partial(lightning.lightning_ragged, step=lightning_step)
        return kernel(q, k, v, states, lengths, *rest)

    def score_blocks(q: mx.array, k1: mx.array, *rest: Any) -> Any:
        return (find("score_blocks", q, k1.shape[0], metal) or sparse.score_blocks)(q, k1, *rest)

    def sparse_attention(q: mx.array, k_pages: mx.array, *rest: Any) -> Any:
        return (find("sparse_attention", q, k_pages.shape[0], metal) or sparse.sparse_attention)(q, k_pages, *rest)

    return Ops(lightning_ragged, partial(sparse.select_blocks, score=score_blocks), sparse_attention)


def find(name: str, q: mx.array, groups: int = 1, metal: str = "auto") -> Kernel | None:
    """Return the kernel of an op for queries q [n, H, D] and this number of kv groups; None to run the op itself."""
    entry = KERNELS[name]
    if selftest.why_not() is not None or not entry.fits(q, groups):
        return None
    size = "decode" if q.shape[0] <= DECODE_QUERIES else "prefill"
    return entry.kernel if metal == "on" or _is_trusted(name, size) else None


@functools.cache
def _is_trusted(name: str, size: str) -> bool:
    verdict = selftest.verdict(name)
    return bool(verdict.is_equal and verdict.is_faster(size))

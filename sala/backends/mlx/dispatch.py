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
from sala.backends.mlx.ops import lightning, sparse
from sala.backends.mlx.ops.table import REFERENCE, Ops
from sala.config import SparseConfig


def select_ops(kernels: str = "auto", metal: str = "auto") -> Ops:
    """Return the operations that a batch carries through the model."""
    if "off" in (kernels, metal):
        return REFERENCE
    return Ops(
        partial(_lightning_ragged, metal=metal),
        partial(_select_blocks, metal=metal),
        partial(_sparse_attention, metal=metal),
    )


def find(name: str, q: mx.array, groups: int = 1, metal: str = "auto") -> Kernel | None:
    """Return the kernel of the op `name` for queries q [n, H, D] of so many kv groups, or None to run the op itself."""
    entry = KERNELS[name]
    if selftest.why_not() is not None or not entry.fits(q, groups):
        return None
    size = "decode" if q.shape[0] <= DECODE_QUERIES else "prefill"
    return entry.kernel if metal == "on" or _is_trusted(name, size) else None


@functools.cache
def _is_trusted(name: str, size: str) -> bool:
    verdict = selftest.verdict(name)
    return bool(verdict.is_equal and verdict.is_faster(size))


def _lightning_step(q: mx.array, *rest: Any, metal: str) -> tuple[mx.array, mx.array]:
    kernel = find("lightning_step", q, metal=metal) or lightning.lightning_step
    output, state = kernel(q, *rest)
    return output, state


def _lightning_ragged(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    states: mx.array,
    lengths: Sequence[int],
    slopes: mx.array,
    scale: float,
    metal: str,
) -> tuple[mx.array, mx.array]:
    is_decode = all(length == 1 for length in lengths)
    kernel = None if is_decode else find("lightning_ragged", q, metal=metal)
    if kernel is None:
        step = partial(_lightning_step, metal=metal)
        return lightning.lightning_ragged(q, k, v, states, lengths, slopes, scale, step)
    output, states = kernel(q, k, v, states, lengths, slopes, scale)
    return output, states


def _select_blocks(
    q: mx.array,
    k1: mx.array,
    k2: mx.array,
    positions: mx.array,
    num_blocks: int,
    sparse_config: SparseConfig,
    scale: float,
    metal: str,
) -> mx.array:
    def score(q: mx.array, k1: mx.array, *rest: Any) -> mx.array:
        kernel = find("score_blocks", q, k1.shape[0], metal) or sparse.score_blocks
        scores: mx.array = kernel(q, k1, *rest)
        return scores

    return sparse.select_blocks(q, k1, k2, positions, num_blocks, sparse_config, scale, score)


def _sparse_attention(q: mx.array, k_pages: mx.array, *rest: Any, metal: str) -> mx.array:
    kernel = find("sparse_attention", q, k_pages.shape[0], metal) or sparse.sparse_attention
    output: mx.array = kernel(q, k_pages, *rest)
    return output

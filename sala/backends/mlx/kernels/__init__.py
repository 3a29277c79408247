"""Metal kernels of the ops. `find` is the only door: a kernel that has proved itself on this GPU, or None.

A kernel takes and gives what its op does. At its first use on a GPU it is compared with the op and timed; it is used
only if it is equal, and for as many queries as it is faster with: few or many. SALA_METAL=1 uses every kernel unasked,
SALA_METAL=0 none.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import mlx.core as mx

from sala.backends.mlx.kernels import lightning, sparse

Kernel = Callable[..., Any]
WAYS = ("auto", "0", "1")  # of SALA_METAL
FEW = 16  # queries of a step; a chunk of a prompt has many


@dataclass(frozen=True, slots=True)
class Entry:
    """`fits(q, groups)`: whether the kernel can take heads of this number and width."""

    kernel: Kernel
    sources: tuple[str, ...]
    fits: Callable[[mx.array, int], bool]


KERNELS = {
    "lightning_step": Entry(lightning.lightning_step, ("lightning_step",), lightning.can_run),
    "lightning_ragged": Entry(lightning.lightning_ragged, ("lightning_prefill",), lightning.can_run),
    "score_blocks": Entry(sparse.score_blocks, ("coarse_scores", "block_scores"), sparse.can_run),
    "sparse_attention": Entry(sparse.sparse_attention, ("block_attention",), sparse.can_run),
}

_is_off = 0  # inside `use_kernels(False)`


@contextmanager
def use_kernels(is_wanted: bool) -> Iterator[None]:
    """Inside, if false, the ops compute everything themselves."""
    global _is_off
    _is_off += not is_wanted
    try:
        yield
    finally:
        _is_off -= not is_wanted


def find(name: str, q: mx.array, groups: int = 1) -> Kernel | None:
    """The kernel of the op `name` for queries q [n, H, D] of so many kv groups; None: the op computes it itself."""
    if _is_off or why_not() is not None:
        return None
    entry = KERNELS[name]
    if not entry.fits(q, groups):
        return None
    is_used = _way() == "1" or _is_trusted(name, "few" if q.shape[0] <= FEW else "many")
    return entry.kernel if is_used else None


def why_not() -> str | None:
    """What stands in the way of all kernels here, in words for people; None if nothing does."""
    if _way() == "0":
        return "they are switched off (SALA_METAL=0)"
    if not mx.metal.is_available() or mx.default_device() != mx.gpu:
        return "there is no Metal GPU"
    return None


def _way() -> str:
    way = os.environ.get("SALA_METAL", "auto")
    return way if way in WAYS else "auto"


@functools.cache
def _is_trusted(name: str, size: str) -> bool:
    # by name: the self-check compares with the ops, which stand above the kernels
    verdict = import_module("sala.backends.mlx.selftest").verdict(name)
    return bool(verdict.is_equal and verdict.is_faster(size))

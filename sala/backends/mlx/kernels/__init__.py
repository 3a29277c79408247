"""The Metal kernels by the names of their ops; `mlx/dispatch.py` decides which of them run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from sala.backends.mlx.kernels import lightning, sparse

Kernel = Callable[..., Any]
DECODE_QUERIES = 16  # a decode step has at most so many queries per sequence; a chunk of a prompt has more


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

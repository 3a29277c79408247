"""The Metal kernels: lightning attention, block scores and attention over selected blocks.

A kernel takes and returns what the op of its name does. `mlx/dispatch.py` decides which of them run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx

from sala.backends.mlx.kernels import metal
from sala.backends.mlx.kernels.metal import THREADS, Launch, Run
from sala.config import SparseConfig

Kernel = Callable[..., Any]
DECODE_QUERIES = 16  # a decode step has at most this many queries per sequence; a chunk of a prompt has more
LANES = 32
TILE = 32
WANTED = 64  # threadgroups that keep a GPU busy: the work of a few queries is cut into pieces
MAX_DIM = 128  # a thread of lightning prefill keeps an eighth of the rows of a state in registers
MAX_HEADS = 16  # heads of a kv group: a thread keeps the scores of all of them in registers
LEAST_WINDOWS = 512  # windows in a piece of the log-sum-exp


def lightning_step(
    q: mx.array, k: mx.array, v: mx.array, state: mx.array, slopes: mx.array, scale: float, run: Run = metal.run
) -> tuple[mx.array, mx.array]:
    """One token per sequence: q, k, v [S, H, D], state [S, H, D, D] fp32 → output [S, H, D] fp32, next state."""
    return _lightning("lightning_step", {"q": q, "k": k, "v": v, "state": state}, slopes, scale, run)


def lightning_ragged(
    q: mx.array, k: mx.array, v: mx.array, states: mx.array, lengths: Sequence[int], slopes: mx.array, scale: float,
    run: Run = metal.run,
) -> tuple[mx.array, mx.array]:  # fmt: skip
    """Packed sequences of any lengths: q, k, v [T, H, D], states [S, H, D, D] → output [T, H, D] fp32, next states."""
    edges = mx.array([0, *accumulate(lengths)], dtype=mx.int32)
    inputs = {"q": q, "k": k, "v": v, "state": states, "edges": edges}
    return _lightning("lightning_prefill", inputs, slopes, scale, run)


def _lightning(
    kernel: str, inputs: Mapping[str, mx.array], slopes: mx.array, scale: float, run: Run
) -> tuple[mx.array, mx.array]:
    q, state = inputs["q"], inputs["state"]
    heads, dim = q.shape[1:]
    output, after = run(
        Launch(
            kernel,
            inputs={**inputs, "slopes": slopes, "scale": mx.array(scale, dtype=mx.float32)},
            template={"T": q.dtype, "D": dim},
            outputs={"out": (q.shape, mx.float32), "state_out": (state.shape, mx.float32)},
            threadgroups=(-(-dim // LANES), heads, state.shape[0]),
        )
    )
    return output, after


def score_blocks(
    q: mx.array,
    k1: mx.array,
    k2: mx.array,
    positions: mx.array,
    num_blocks: int,
    sparse: SparseConfig,
    scale: float,
    run: Run = metal.run,
) -> mx.array:
    """q [n, H, D], k1 [G, n1, D], k2 [G, n2, D], positions [n] → the scores of blocks [n, G, num_blocks] in fp32."""
    (num, heads, dim), groups = q.shape, k1.shape[0]
    if not k1.shape[1] or not k2.shape[1]:  # no window is visible yet
        return mx.zeros((num, groups, num_blocks))
    per_group, wide = heads // groups, mx.float32
    ratio = sparse.block_size // sparse.kernel_stride  # windows that begin in a block
    before = sparse.kernel_size // sparse.kernel_stride - 1  # earlier ones that reach into it
    pieces = _pieces(num * groups, -(-k2.shape[1] // LEAST_WINDOWS))
    inputs = {"q": q, "positions": positions.astype(mx.int32), "scale": mx.array(scale, dtype=wide)}
    template: dict[str, mx.Dtype | int] = {"T": q.dtype, "D": dim, "M": per_group}
    partial = ((num, groups, pieces, per_group), wide)
    most, total = run(
        Launch(
            "coarse_scores",
            inputs={**inputs, "k2": k2},
            template={**template, "KERNEL": 4 * sparse.kernel_size, "STRIDE": 4 * sparse.kernel_stride},
            outputs={"most": partial, "total": partial},
            threadgroups=(pieces, groups, num),
        )
    )
    tiles = -(-num_blocks // ((THREADS - before) // ratio))
    fine = {"KERNEL": sparse.kernel_size, "STRIDE": sparse.kernel_stride, "RATIO": ratio, "BEFORE": before}
    (scores,) = run(
        Launch(
            "block_scores",
            inputs={**inputs, "k1": k1, "most": most, "total": total, "num_blocks": mx.array(num_blocks, mx.int32)},
            template={**template, **fine},
            outputs={"out": ((num, groups, num_blocks), wide)},
            threadgroups=(tiles, groups, num),
        )
    )
    return scores


def sparse_attention(
    q: mx.array, k_pages: mx.array, v_pages: mx.array, table: mx.array, selected: mx.array, positions: mx.array,
    scale: float, run: Run = metal.run,
) -> mx.array:  # fmt: skip
    """q [n, H, D]; pages [G, P, B, D]; table [N]: block → page; selected [n, G, C]; positions [n] → [n, H, D]."""
    (num, heads, dim), (groups, _, block, _) = q.shape, k_pages.shape
    per_group, wide = heads // groups, mx.float32
    pieces = _pieces(num * groups, -(-selected.shape[2] * block // TILE))
    partial = (num, groups, pieces, per_group)
    sums, most, total = run(
        Launch(
            "block_attention",
            inputs={
                "q": q,
                "k_pages": k_pages,
                "v_pages": v_pages,
                "table": table.astype(mx.int32),
                "selected": selected.astype(mx.int32),
                "positions": positions.astype(mx.int32),
                "scale": mx.array(scale, dtype=wide),
            },
            template={"T": q.dtype, "D": dim, "M": per_group, "BLOCK": block},
            outputs={"sums": ((*partial, dim), wide), "most": (partial, wide), "total": (partial, wide)},
            threadgroups=(pieces, groups, num),
        )
    )
    return _join(sums, most, total).reshape(num, heads, dim).astype(q.dtype)


def _join(sums: mx.array, most: mx.array, total: mx.array) -> mx.array:
    """Join pieces of a softmax: [n, G, pieces, M, D], largest score and total [n, G, pieces, M] → [n, G, M, D]."""
    if most.shape[2] == 1:
        return (sums / total[..., None])[:, :, 0]
    share = mx.exp(most - most.max(axis=2, keepdims=True))
    return (sums * share[..., None]).sum(axis=2) / (total * share).sum(axis=2)[..., None]


def _pieces(num_groups: int, most: int) -> int:
    """Return the number of pieces into which the work of a threadgroup is cut, at most `most`."""
    return max(1, min(WANTED // num_groups, most))


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """A kernel, its Metal sources, and the most heads of a kv group that it can take."""

    kernel: Kernel
    sources: tuple[str, ...]
    max_heads: int | None = None

    def fits(self, q: mx.array, groups: int) -> bool:
        """Return whether the kernel can take heads of this number and width."""
        heads, dim = q.shape[-2:]
        return dim <= MAX_DIM and (self.max_heads is None or heads // groups <= self.max_heads)


KERNELS = {
    "lightning_step": KernelEntry(lightning_step, ("lightning_step",)),
    "lightning_ragged": KernelEntry(lightning_ragged, ("lightning_prefill",)),
    "score_blocks": KernelEntry(score_blocks, ("coarse_scores", "block_scores"), MAX_HEADS),
    "sparse_attention": KernelEntry(sparse_attention, ("block_attention",), MAX_HEADS),
}

"""Block scores and attention over selected blocks in Metal."""

import mlx.core as mx

from sala.backends.mlx.kernels import metal
from sala.backends.mlx.kernels.metal import Launch, Run
from sala.config import SparseConfig

THREADS = 256
TILE = 32
WANTED = 64  # threadgroups that keep a GPU busy: the work of a few queries is cut into pieces
MAX_DIM = 128
MAX_HEADS = 16  # of a group: a thread keeps the scores of all of them in registers
LEAST_WINDOWS = 512  # of a piece of the log-sum-exp


def can_run(q: mx.array, groups: int) -> bool:
    """Return whether queries of a group and a tile of keys fit into threadgroup memory, and scores into registers."""
    dim, heads = q.shape[-1], q.shape[-2] // groups
    return dim <= MAX_DIM and heads <= MAX_HEADS


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
    ratio, before = _windows(sparse)
    pieces = _pieces(num * groups, -(-k2.shape[1] // LEAST_WINDOWS))
    inputs = {"q": q, "positions": positions.astype(mx.int32), "scale": mx.array(scale, dtype=wide)}
    template: dict[str, mx.Dtype | int] = {"T": q.dtype, "D": dim, "M": per_group}
    partial = ((num, groups, pieces, per_group), wide)
    most, total = run(
        Launch(
            kernel="coarse_scores",
            inputs={**inputs, "k2": k2},
            template={**template, "KERNEL": 4 * sparse.kernel_size, "STRIDE": 4 * sparse.kernel_stride},
            outputs={"most": partial, "total": partial},
            grid=(pieces * THREADS, groups, num),
            threadgroup=(THREADS, 1, 1),
        )
    )
    tiles = -(-num_blocks // ((THREADS - before) // ratio))
    fine = {"KERNEL": sparse.kernel_size, "STRIDE": sparse.kernel_stride, "RATIO": ratio, "BEFORE": before}
    (scores,) = run(
        Launch(
            kernel="block_scores",
            inputs={**inputs, "k1": k1, "most": most, "total": total, "num_blocks": mx.array(num_blocks, mx.int32)},
            template={**template, **fine},
            outputs={"out": ((num, groups, num_blocks), wide)},
            grid=(tiles * THREADS, groups, num),
            threadgroup=(THREADS, 1, 1),
        )
    )
    return scores


def sparse_attention(
    q: mx.array,
    k_pages: mx.array,
    v_pages: mx.array,
    table: mx.array,
    selected: mx.array,
    positions: mx.array,
    scale: float,
    run: Run = metal.run,
) -> mx.array:
    """q [n, H, D]; pages [G, P, B, D]; table [N]: block → page; selected [n, G, C]; positions [n] → [n, H, D]."""
    (num, heads, dim), (groups, _, block, _) = q.shape, k_pages.shape
    per_group, wide = heads // groups, mx.float32
    pieces = _pieces(num * groups, -(-selected.shape[2] * block // TILE))
    partial = (num, groups, pieces, per_group)
    sums, most, total = run(
        Launch(
            kernel="block_attention",
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
            grid=(pieces * THREADS, groups, num),
            threadgroup=(THREADS, 1, 1),
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


def _windows(sparse: SparseConfig) -> tuple[int, int]:
    """Return how many windows begin in a block, and how many earlier ones reach into it."""
    return sparse.block_size // sparse.kernel_stride, sparse.kernel_size // sparse.kernel_stride - 1

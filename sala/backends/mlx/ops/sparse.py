"""InfLLM-v2: select a few blocks of the context for every query and attend to nothing else.

The rules and the layout of pages and pooled keys are those of `backends/torch/ops/sparse.py`.
"""

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import numpy as np

from sala.backends.rows import TIE_ULPS
from sala.config import SparseConfig

# Bytes of a tile of queries: its scores of all windows in fp32; the keys and values of its selected blocks.
TILE_BYTES = {"cpu": 8 << 20, "gpu": 256 << 20}
_GREATEST = float(np.finfo(np.float32).max)
_ID_BITS = 32  # of a sorting key; the rest is the score
_FORCED = (1 << 31) - 1 - 2 * TIE_ULPS  # the rank of a forced block, above that of any score


def tile_bytes() -> int:
    return TILE_BYTES["gpu" if mx.default_device() == mx.gpu else "cpu"]


def pool_keys(keys: mx.array, kernel: int, stride: int) -> mx.array:
    """Return means over full windows: keys [G, n, D] → [G, (n - kernel) // stride + 1, D], computed in fp32."""
    groups, n, dim = keys.shape
    overlap, strides = kernel // stride, n // stride
    if n < kernel:
        return keys[:, :0]
    sums = keys[:, : strides * stride].reshape(groups, strides, stride, dim).astype(mx.float32).sum(2)
    count = strides - overlap + 1
    windows = sum((sums[:, at : at + count] for at in range(1, overlap)), start=sums[:, :count])
    return (windows / kernel).astype(keys.dtype)


def num_visible(positions: mx.array, kernel: int, stride: int) -> mx.array:
    """Return how many windows end at or before each position."""
    return mx.maximum((positions + 1 - kernel + stride) // stride, 0)


def window_scores(
    q: mx.array, k1: mx.array, k2: mx.array, positions: mx.array, sparse: SparseConfig, scale: float
) -> mx.array:
    """q [n, H, D], k1 [G, n1, D], k2 [G, n2, D], positions [n] → scores [n, G, n1] in fp32; invisible windows are 0."""
    (n, heads, dim), groups = q.shape, k1.shape[0]
    if not k2.shape[1]:
        return mx.zeros((n, groups, k1.shape[1]))
    rows = (q.astype(mx.float32) * scale).reshape(n, groups, heads // groups, dim).swapaxes(0, 1)  # [G, n, H/G, D]
    rows = rows.reshape(groups, -1, dim)
    kernel, stride = sparse.kernel_size, sparse.kernel_stride
    seen1 = mx.arange(k1.shape[1]) < num_visible(positions, kernel, stride)[:, None]
    seen2 = mx.arange(k2.shape[1]) < num_visible(positions, 4 * kernel, 4 * stride)[:, None]
    coarse = (rows @ k2.astype(mx.float32).swapaxes(1, 2)).reshape(groups, n, heads // groups, -1)
    lse = mx.logsumexp(mx.where(seen2[:, None], coarse, -mx.inf), axis=-1, keepdims=True)
    fine = (rows @ k1.astype(mx.float32).swapaxes(1, 2)).reshape(groups, n, heads // groups, -1)
    weights = mx.minimum(mx.exp(fine - lse).sum(2), _GREATEST)  # [G, n, n1]; inf means forced
    return mx.where(seen1 & seen2[:, :1], weights, 0.0).swapaxes(0, 1)  # no score without a visible k2 window


def block_scores(windows: mx.array, num_blocks: int, sparse: SparseConfig) -> mx.array:
    """Return the score of the best window that overlaps each block: [n, G, n1] → [n, G, num_blocks]."""
    ratio = sparse.block_size // sparse.kernel_stride
    before = sparse.kernel_size // sparse.kernel_stride - 1  # windows that start earlier and reach into the block
    count = num_blocks * ratio
    padded = mx.pad(windows[..., :count], [(0, 0), (0, 0), (before, max(0, count - windows.shape[-1]))])
    best = padded[..., before:].reshape(*windows.shape[:2], num_blocks, ratio).max(-1)
    for at in range(before):
        best = mx.maximum(best, padded[..., at:count:ratio])
    return best


def score_blocks(
    q: mx.array, k1: mx.array, k2: mx.array, positions: mx.array, num_blocks: int, sparse: SparseConfig, scale: float
) -> mx.array:
    """Score windows and pool them to blocks: q [n, H, D] → [n, G, num_blocks] in fp32."""
    return block_scores(window_scores(q, k1, k2, positions, sparse, scale), num_blocks, sparse)


def top_blocks(scores: mx.array, positions: mx.array, sparse: SparseConfig) -> mx.array:
    """scores [n, G, N] in fp32, none negative; positions [n] → selected block ids [n, G, C], -1 where fewer exist.

    Forced blocks come first, then the best. Scores within TIE_ULPS of the C-th best are tied with it, and ties go to
    the lowest id: see `backends/rows.py`. The sorting key is one integer of score and id, so that the sort need not
    be stable.
    """
    num_blocks = scores.shape[-1]
    block = mx.arange(num_blocks)
    own = (positions // sparse.block_size)[:, None]
    is_forced = (block < sparse.init_blocks) | (block >= own - sparse.num_window_blocks)
    ranks = mx.where(is_forced[:, None], _FORCED, scores.view(mx.int32))  # in the order of the scores
    ranks = mx.where((block > own)[:, None], -1, ranks)
    first = num_blocks - min(sparse.num_selected, num_blocks)
    last = mx.sort(ranks, axis=-1)[..., first : first + 1]
    ranks = mx.where(mx.abs(ranks - last) <= TIE_ULPS, last, ranks)
    keys = (ranks.astype(mx.int64) << _ID_BITS) | (num_blocks - 1 - block).astype(mx.int64)
    best = mx.sort(keys, axis=-1)[..., first:][..., ::-1]
    ids = num_blocks - 1 - (best & ((1 << _ID_BITS) - 1))
    return mx.where(ids > own[:, None], -1, ids).astype(mx.int32)


def select_blocks(
    q: mx.array,
    k1: mx.array,
    k2: mx.array,
    positions: mx.array,
    num_blocks: int,
    sparse: SparseConfig,
    scale: float,
    score: Callable[..., mx.array] = score_blocks,
) -> mx.array:
    """Score the blocks and select the best, in tiles of queries: q [n, H, D] → [n, G, C]."""
    if num_blocks <= sparse.num_selected:  # all existing blocks
        own = (positions // sparse.block_size)[:, None, None]
        block = mx.arange(num_blocks, dtype=mx.int32)
        return mx.broadcast_to(mx.where(block <= own, block, -1), (q.shape[0], k1.shape[0], num_blocks))
    row_bytes = 4 * q.shape[1] * max(1, k1.shape[1] + k2.shape[1])
    selected: list[mx.array] = []
    for q_tile, at in _tiles((q, positions), row_bytes, selected):
        scores = score(q_tile, k1, k2, at, num_blocks, sparse, scale)
        selected.append(top_blocks(scores, at, sparse))
    return selected[0] if len(selected) == 1 else mx.concatenate(selected)


def sparse_attention(
    q: mx.array,
    k_pages: mx.array,
    v_pages: mx.array,
    table: mx.array,
    selected: mx.array,
    positions: mx.array,
    scale: float,
) -> mx.array:
    """Attention over the selected blocks only.

    q [n, H, D]; pages [G, P, B, D]; table [N] maps block to page; selected [n, G, C]; positions [n] → [n, H, D].
    """
    groups, num_pages, block_size, dim = k_pages.shape
    pools = [pages.reshape(groups * num_pages, block_size, dim) for pages in (k_pages, v_pages)]
    first_page = mx.arange(groups, dtype=mx.int32)[:, None] * num_pages
    row_bytes = 2 * groups * selected.shape[-1] * block_size * dim * k_pages.itemsize
    outputs: list[mx.array] = []
    for q_tile, ids, at in _tiles((q, selected, positions), row_bytes, outputs):
        n, heads = q_tile.shape[:2]
        ids = mx.stop_gradient(ids)  # indices have no gradient; keys and values do
        pages = first_page + table[mx.maximum(ids, 0)]  # [n, G, C], into the pools of all kv heads
        keys, values = (pool[pages].reshape(n, groups, -1, dim) for pool in pools)
        token = ids[..., None] * block_size + mx.arange(block_size, dtype=mx.int32)
        is_seen = (ids[..., None] >= 0) & (token <= at[:, None, None, None])
        mask = is_seen.reshape(n, groups, 1, -1)
        rows = q_tile.reshape(n, groups, heads // groups, dim)
        output = mx.fast.scaled_dot_product_attention(rows, keys, values, scale=scale, mask=mask)
        outputs.append(output.reshape(n, heads, dim))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def block_shares(
    q: mx.array, k_pages: mx.array, table: mx.array, selected: mx.array, positions: mx.array, scale: float
) -> mx.array:
    """Return the share of attention that each head gives each selected block, as in `sparse_attention`: [n, H, C]."""
    groups, num_pages, block_size, dim = k_pages.shape
    n, heads = q.shape[:2]
    pages = mx.arange(groups, dtype=mx.int32)[:, None] * num_pages + table[mx.maximum(selected, 0)]
    keys = k_pages.reshape(groups * num_pages, block_size, dim)[pages].reshape(n, groups, -1, dim)
    token = selected[..., None] * block_size + mx.arange(block_size, dtype=mx.int32)
    is_seen = (selected[..., None] >= 0) & (token <= positions[:, None, None, None])
    rows = (q.astype(mx.float32) * scale).reshape(n, groups, heads // groups, dim)
    scores = rows @ keys.astype(mx.float32).swapaxes(2, 3)
    weights = mx.softmax(mx.where(is_seen.reshape(n, groups, 1, -1), scores, -mx.inf), axis=-1)
    return weights.reshape(n, heads, -1, block_size).sum(-1)


def _tiles(arrays: Sequence[mx.array], row_bytes: int, done: Sequence[mx.array]) -> Iterator[list[mx.array]]:
    """Yield tiles of rows, each of which depends on the one before it: only one is in memory at a time."""
    tile = max(1, tile_bytes() // row_bytes)
    for begin in range(0, arrays[0].shape[0], tile):
        rows = [array[begin : begin + tile] for array in arrays]
        yield mx.depends(rows, list(done[-1:])) if done else rows

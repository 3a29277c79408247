"""InfLLM-v2: select a few blocks of the context for every query and attend to nothing else.

Keys are pooled twice over sliding windows (k1: kernel_size every kernel_stride; k2: four times as coarse).
A query scores the k1 windows, normalised by the log-sum-exp over the k2 windows; a block's score is the best of
the windows that touch it, summed over the heads of a kv group. Initial and recent blocks are always selected.

Pages hold one block each. A pooled key lives in the page where its window *ends*: pooled row e of stride s
is the mean of the `kernel` keys up to and including position (e + 1) * s - 1.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sala.backends.rows import TIE_ULPS
from sala.config import SparseConfig

SelectWhole = Callable[[Tensor, Tensor, SparseConfig, float], Tensor]

# Bytes of a tile of queries: its fp32 scores of all windows; the keys and values of its selected blocks.
TILE_BYTES = {"cpu": 8 << 20, "cuda": 512 << 20}
_FORCED = torch.iinfo(torch.int32).max - 2 * TIE_ULPS  # the rank of a forced block, above that of any score


def tile_bytes(q: Tensor) -> int:
    return TILE_BYTES.get(q.device.type, TILE_BYTES["cpu"])


def pool_keys(keys: Tensor, kernel: int, stride: int) -> Tensor:
    """Return means over full windows: keys [G, n, D] → [G, (n - kernel) // stride + 1, D], computed in fp32."""
    if keys.shape[1] < kernel:
        return keys[:, :0]
    return keys.float().unfold(1, kernel, stride).mean(-1).to(keys.dtype)


def num_visible(positions: Tensor, kernel: int, stride: int) -> Tensor:
    """Return how many windows end at or before each position."""
    return ((positions + 1 - kernel) // stride + 1).clamp(min=0)


def window_scores(q: Tensor, k1: Tensor, k2: Tensor, positions: Tensor, sparse: SparseConfig, scale: float) -> Tensor:
    """q [n, H, D], k1 [G, n1, D], k2 [G, n2, D], positions [n] → scores [n, G, n1] in fp32; invisible windows are 0."""
    (n, heads, dim), groups = q.shape, k1.shape[0]
    q = (q.float() * scale).view(n, groups, heads // groups, dim).transpose(0, 1)  # [G, n, H/G, D]
    kernel, stride = sparse.kernel_size, sparse.kernel_stride
    seen1 = torch.arange(k1.shape[1], device=q.device) < num_visible(positions, kernel, stride)[:, None]
    seen2 = torch.arange(k2.shape[1], device=q.device) < num_visible(positions, 4 * kernel, 4 * stride)[:, None]
    coarse = q.flatten(1, 2) @ k2.float().transpose(1, 2)  # [G, n * H/G, n2]
    coarse = coarse.view(groups, n, heads // groups, k2.shape[1]).masked_fill(~seen2[:, None], float("-inf"))
    lse = coarse.logsumexp(-1, keepdim=True)  # -inf where no k2 window is visible yet
    fine = (q.flatten(1, 2) @ k1.float().transpose(1, 2)).view(groups, n, heads // groups, k1.shape[1])
    weights = torch.exp(fine - lse).sum(2).clamp(max=torch.finfo(torch.float32).max)  # [G, n, n1]; inf means forced
    has_lse = seen2.any(-1) if k2.shape[1] else torch.zeros(n, dtype=torch.bool, device=q.device)
    return weights.masked_fill(~(seen1 & has_lse[:, None]), 0.0).transpose(0, 1)


def block_scores(windows: Tensor, num_blocks: int, sparse: SparseConfig) -> Tensor:
    """Return the score of the best window that overlaps each block: [n, G, n1] → [n, G, num_blocks]."""
    ratio = sparse.block_size // sparse.kernel_stride
    before = sparse.kernel_size // sparse.kernel_stride - 1  # windows that start earlier and reach into the block
    after = max(0, num_blocks * ratio - windows.shape[-1])
    padded = F.pad(windows, (before, after))[..., : before + num_blocks * ratio]
    return padded.unfold(-1, ratio + before, ratio).amax(-1)


def top_blocks(scores: Tensor, positions: Tensor, sparse: SparseConfig) -> Tensor:
    """scores [n, G, N] in fp32, none negative; positions [n] → selected block ids [n, G, C], -1 where fewer exist.

    Forced blocks come first, then the best. Scores within TIE_ULPS of the C-th best are tied with it, and ties go to
    the lowest id: see `backends/rows.py`.
    """
    num_blocks = scores.shape[-1]
    block = torch.arange(num_blocks, device=scores.device)
    own = (positions // sparse.block_size)[:, None]
    is_forced = (block < sparse.init_blocks) | (block >= own - sparse.num_window_blocks)
    ranks = scores.view(torch.int32)  # in the order of the scores, for none is negative
    ranks = ranks.masked_fill(is_forced[:, None], _FORCED).masked_fill((block > own)[:, None], -1)
    count = min(sparse.num_selected, num_blocks)
    last = ranks.topk(count).values[..., -1:]
    ranks = torch.where((ranks - last).abs() <= TIE_ULPS, last, ranks)
    ids = ranks.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return ids.masked_fill(ids > own[:, None], -1)


def select_blocks(
    q: Tensor, k1: Tensor, k2: Tensor, positions: Tensor, num_blocks: int, sparse: SparseConfig, scale: float
) -> Tensor:
    """Score the blocks and select the best, in tiles of queries: q [n, H, D] → [n, G, C]."""
    row_bytes = 4 * q.shape[1] * max(1, k1.shape[1] + k2.shape[1])
    tile = max(1, tile_bytes(q) // row_bytes)
    selected = []
    for q_tile, at in zip(q.split(tile), positions.split(tile), strict=True):
        scores = block_scores(window_scores(q_tile, k1, k2, at, sparse, scale), num_blocks, sparse)
        selected.append(top_blocks(scores, at, sparse))
    return torch.cat(selected)


def sparse_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    selected: Tensor,
    positions: Tensor,
    scale: float,
) -> Tensor:
    """Attention over the selected blocks only.

    q [n, H, D]; pages [G, P, B, D]; table [N] maps block to page; selected [n, G, C]; positions [n] → [n, H, D].
    """
    groups, num_pages, block_size, dim = k_pages.shape
    k_flat, v_flat = (pages.reshape(groups * num_pages, block_size, dim) for pages in (k_pages, v_pages))
    first_page = torch.arange(groups, device=q.device)[:, None] * num_pages
    row_bytes = 2 * groups * selected.shape[-1] * block_size * dim * k_pages.element_size()
    tile = max(1, tile_bytes(q) // row_bytes)
    offsets = torch.arange(block_size, device=q.device)
    outputs = []
    num_blocks = min(tile, q.shape[0]) * groups * selected.shape[-1]
    k_buffer, v_buffer = (k_flat.new_empty(num_blocks, block_size, dim) for _ in range(2))  # shared by all tiles
    for q_tile, ids, at in zip(q.split(tile), selected.split(tile), positions.split(tile), strict=True):
        n, heads = q_tile.shape[:2]
        pages = first_page + table[ids.clamp(min=0)]  # [n, G, C]
        keys, values = (_gather(flat, pages, buffer) for flat, buffer in ((k_flat, k_buffer), (v_flat, v_buffer)))
        token = ids[..., None] * block_size + offsets
        is_seen = (ids[..., None] >= 0) & (token <= at[:, None, None, None])
        mask = is_seen.flatten(2)[:, :, None]  # [n, G, 1, C * B]
        rows = q_tile.reshape(n, groups, heads // groups, dim)
        output = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
        outputs.append(output.reshape(n, heads, dim))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def block_shares(
    q: Tensor, k_pages: Tensor, table: Tensor, selected: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """Return the share of its attention that each head gives to each selected block, as in `sparse_attention`.

    q [n, H, D]; k_pages [G, P, B, D]; table [N]; selected [n, G, C], -1 for none; positions [n] → [n, H, C] in fp32.
    """
    groups, _, block_size, dim = k_pages.shape
    heads, count = q.shape[1], selected.shape[2]
    group = torch.arange(groups, device=q.device)[:, None]
    offsets = torch.arange(block_size, device=q.device)
    shares = []
    for row, ids, at in zip(q.float(), selected, positions, strict=True):
        keys = k_pages[group, table[ids.clamp(min=0)]].float().flatten(1, 2)  # [G, C * B, D]
        is_seen = (ids[..., None] >= 0) & (ids[..., None] * block_size + offsets <= at)
        scores = row.view(groups, heads // groups, dim) @ keys.transpose(1, 2) * scale
        scores = scores.masked_fill(~is_seen.flatten(1)[:, None], float("-inf")).softmax(-1)
        shares.append(scores.view(heads, count, block_size).sum(-1))
    return torch.stack(shares)


def _gather(flat: Tensor, pages: Tensor, buffer: Tensor) -> Tensor:
    """Write blocks flat[pages] into `buffer`: [pages, B, D], [n, G, C] → [n, G, C * B, D]."""
    if torch.is_grad_enabled() and flat.requires_grad:
        return flat[pages].flatten(2, 3)
    out = buffer[: pages.numel()]
    torch.index_select(flat, 0, pages.flatten(), out=out)
    return out.view(*pages.shape[:2], -1, flat.shape[-1])


def whole_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, sparse: SparseConfig, scale: float, select: SelectWhole | None = None
) -> Tensor:
    """One whole sequence, every row by the sparse rule: q [n, H, D], k and v [n, G, D] → [n, H, D].

    Blocks are selected without a gradient (by `select`, or `select_whole`); keys and values of the selected ones get
    theirs.
    """
    num_blocks = -(-q.shape[0] // sparse.block_size)
    with torch.no_grad():
        selected = (select or select_whole)(q.detach(), k.detach().transpose(0, 1), sparse, scale)
    pad = num_blocks * sparse.block_size - q.shape[0]
    pages = [F.pad(x.transpose(0, 1), (0, 0, 0, pad)).unflatten(1, (num_blocks, -1)) for x in (k, v)]
    row_bytes = 2 * pages[0].numel() // num_blocks * selected.shape[-1] * k.element_size()
    tile = max(1, tile_bytes(q) // row_bytes)
    table, positions = (torch.arange(count, device=q.device) for count in (num_blocks, q.shape[0]))
    tiles = zip(q.split(tile), selected.split(tile), positions.split(tile), strict=True)
    # The backward pass gathers a tile's blocks again: keeping those of all tiles would fill the memory.
    outputs = [
        checkpoint(sparse_attention, rows, *pages, table, ids, at, scale, use_reentrant=False)
        for rows, ids, at in tiles
    ]
    return torch.cat(outputs)


def select_whole(q: Tensor, keys: Tensor, sparse: SparseConfig, scale: float) -> Tensor:
    """Return the blocks of all queries of a whole sequence: q [n, H, D], keys [G, n, D] → [n, G, C]."""
    k1 = pool_keys(keys, sparse.kernel_size, sparse.kernel_stride)
    k2 = pool_keys(keys, 4 * sparse.kernel_size, 4 * sparse.kernel_stride)
    positions = torch.arange(q.shape[0], device=q.device)
    return select_blocks(q, k1, k2, positions, -(-q.shape[0] // sparse.block_size), sparse, scale)

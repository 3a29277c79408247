"""InfLLM-v2: choose a few blocks of the past for every query, attend to nothing else.

Keys are pooled twice over sliding windows (k1: kernel_size every kernel_stride; k2: four times as coarse).
A query scores the k1 windows, normalised by the log-sum-exp over the k2 windows; a block's score is the best of
the windows that touch it, summed over the heads of a kv group. Initial and recent blocks are always in.

Pages hold one block each. A pooled key lives in the page where its window *ends*: pooled row e of stride s
is the mean of the `kernel` keys up to and including position (e + 1) * s - 1.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sala.backends.torch.kernels import native, triton_kernels
from sala.config import SparseConfig

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

FLEX_TILE = 128

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # that the CPU's kernel reads
_WIDEST_HEAD = 256

# Bytes of a tile of queries: its scores of all windows in fp32; the keys and values of its chosen blocks.
TILE_BYTES = {"cpu": 8 << 20, "cuda": 512 << 20}


def tile_bytes(q: Tensor) -> int:
    return TILE_BYTES.get(q.device.type, TILE_BYTES["cpu"])


def pool_keys(keys: Tensor, kernel: int, stride: int) -> Tensor:
    """Means over full windows: keys [G, n, D] → [G, (n - kernel) // stride + 1, D], computed in fp32."""
    if keys.shape[1] < kernel:
        return keys[:, :0]
    return keys.float().unfold(1, kernel, stride).mean(-1).to(keys.dtype)


def num_visible(positions: Tensor, kernel: int, stride: int) -> Tensor:
    """How many windows lie wholly at or before each position."""
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
    """The best window that overlaps each block: [n, G, n1] → [n, G, num_blocks]."""
    ratio = sparse.block_size // sparse.kernel_stride
    before = sparse.kernel_size // sparse.kernel_stride - 1  # windows that start earlier and reach into the block
    after = max(0, num_blocks * ratio - windows.shape[-1])
    padded = F.pad(windows, (before, after))[..., : before + num_blocks * ratio]
    return padded.unfold(-1, ratio + before, ratio).amax(-1)


def choose_blocks(scores: Tensor, positions: Tensor, sparse: SparseConfig) -> Tensor:
    """scores [n, G, N], positions [n] → chosen block ids [n, G, C]; -1 where fewer than C blocks exist.

    Forced blocks come first, then the best; equal scores (neighbours share a window) go to the lowest id.
    """
    num_blocks = scores.shape[-1]
    block = torch.arange(num_blocks, device=scores.device)
    own = (positions // sparse.block_size)[:, None]
    is_forced = (block < sparse.init_blocks) | (block >= own - sparse.num_window_blocks)
    scores = scores.masked_fill(is_forced[:, None], float("inf"))
    scores = scores.masked_fill((block > own)[:, None], float("-inf"))
    ranked, ids = scores.sort(dim=-1, descending=True, stable=True)
    count = min(sparse.num_chosen, num_blocks)
    return ids[..., :count].masked_fill(ranked[..., :count] == float("-inf"), -1)


def select_blocks(
    q: Tensor, k1: Tensor, k2: Tensor, positions: Tensor, num_blocks: int, sparse: SparseConfig, scale: float
) -> Tensor:
    """Scores and choice together, in tiles of queries: q [n, H, D] → [n, G, C]."""
    row_bytes = 4 * q.shape[1] * max(1, k1.shape[1] + k2.shape[1])
    tile = max(1, tile_bytes(q) // row_bytes)
    chosen = []
    for q_tile, at in zip(q.split(tile), positions.split(tile), strict=True):
        scores = block_scores(window_scores(q_tile, k1, k2, at, sparse, scale), num_blocks, sparse)
        chosen.append(choose_blocks(scores, at, sparse))
    return torch.cat(chosen)


def sparse_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    chosen: Tensor,
    positions: Tensor,
    scale: float,
) -> Tensor:
    """Attention over chosen blocks alone.

    q [n, H, D]; pages [G, P, B, D]; table [N] maps block to page; chosen [n, G, C]; positions [n] → [n, H, D].
    """
    groups, num_pages, block_size, dim = k_pages.shape
    k_flat, v_flat = (pages.reshape(groups * num_pages, block_size, dim) for pages in (k_pages, v_pages))
    first_page = torch.arange(groups, device=q.device)[:, None] * num_pages
    row_bytes = 2 * groups * chosen.shape[-1] * block_size * dim * k_pages.element_size()
    tile = max(1, tile_bytes(q) // row_bytes)
    offsets = torch.arange(block_size, device=q.device)
    outputs = []
    num_blocks = min(tile, q.shape[0]) * groups * chosen.shape[-1]
    k_room, v_room = (k_flat.new_empty(num_blocks, block_size, dim) for _ in range(2))  # one place for all tiles
    for q_tile, ids, at in zip(q.split(tile), chosen.split(tile), positions.split(tile), strict=True):
        n, heads = q_tile.shape[:2]
        pages = first_page + table[ids.clamp(min=0)]  # [n, G, C]
        keys, values = (_gather(flat, pages, room) for flat, room in ((k_flat, k_room), (v_flat, v_room)))
        token = ids[..., None] * block_size + offsets
        is_seen = (ids[..., None] >= 0) & (token <= at[:, None, None, None])
        mask = is_seen.flatten(2)[:, :, None]  # [n, G, 1, C * B]
        rows = q_tile.reshape(n, groups, heads // groups, dim)
        output = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
        outputs.append(output.reshape(n, heads, dim))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _gather(flat: Tensor, pages: Tensor, room: Tensor) -> Tensor:
    """Blocks flat[pages], written into `room`: [pages, B, D], [n, G, C] → [n, G, C * B, D]."""
    if torch.is_grad_enabled() and flat.requires_grad:
        return flat[pages].flatten(2, 3)
    out = room[: pages.numel()]
    torch.index_select(flat, 0, pages.flatten(), out=out)
    return out.view(*pages.shape[:2], -1, flat.shape[-1])


def attend_chosen(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    chosen: Tensor,
    positions: Tensor,
    scale: float,
) -> Tensor:
    """`sparse_attention`, by the CPU's kernel where there is one for it; no query may have chosen a block twice."""
    kernel = native.load() if _fits_native(q, k_pages, v_pages) else None
    if kernel is None:
        return sparse_attention(q, k_pages, v_pages, table, chosen, positions, scale)
    return _attend_natively(kernel, q, k_pages, v_pages, table, chosen, positions, scale)


def _fits_native(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> bool:
    block_size, dim = k_pages.shape[2:]
    is_plain = all(x.device.type == "cpu" and x.dtype in _FLOATS for x in (q, k_pages, v_pages))
    is_paged = k_pages.dtype == v_pages.dtype and k_pages.is_contiguous() and v_pages.is_contiguous()
    has_shape = dim % native.LANES == 0 and dim <= _WIDEST_HEAD and block_size % native.LANES == 0
    return is_plain and is_paged and has_shape and not torch.is_grad_enabled()


def _attend_natively(
    kernel: native.Kernel,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    chosen: Tensor,
    positions: Tensor,
    scale: float,
) -> Tensor:
    """In fp32, keys and values being read where they lie."""
    groups, num_pages, block_size, dim = k_pages.shape
    assert not chosen.numel() or int(chosen.max()) < len(table), "a block that has no page"
    table, chosen, positions = (x.long().contiguous() for x in (table, chosen, positions))
    queries = q.float().contiguous()
    out = torch.empty_like(queries)
    attention = native.Attention(
        *(x.data_ptr() for x in (queries, k_pages, v_pages, table, chosen, positions, out)),
        num_queries=q.shape[0],
        num_heads=q.shape[1],
        num_groups=groups,
        dim=dim,
        num_pages=num_pages,
        block_size=block_size,
        num_blocks=table.shape[0],
        num_chosen=chosen.shape[-1],
        page_type=native.SCALE_TYPES[str(k_pages.dtype).removeprefix("torch.")],
        num_threads=torch.get_num_threads(),
        scale=scale,
    )
    kernel.attend(ctypes.addressof(attention))
    return out.to(q.dtype)


def whole_sparse_attention(q: Tensor, k: Tensor, v: Tensor, sparse: SparseConfig, scale: float) -> Tensor:
    """One whole sequence, every row by the sparse rule: q [n, H, D], k and v [n, G, D] → [n, H, D].

    Blocks are chosen without a gradient; keys and values of the chosen ones get theirs.
    """
    num_blocks = -(-q.shape[0] // sparse.block_size)
    with torch.no_grad():
        chosen = choose_whole(q.detach(), k.detach().transpose(0, 1), sparse, scale)
    if q.is_cuda and FLEX_TILE % sparse.block_size == 0:
        return _fused_block_attention(q, k, v, chosen, sparse.block_size, scale)
    pad = num_blocks * sparse.block_size - q.shape[0]
    pages = [F.pad(x.transpose(0, 1), (0, 0, 0, pad)).unflatten(1, (num_blocks, -1)) for x in (k, v)]
    row_bytes = 2 * pages[0].numel() // num_blocks * chosen.shape[-1] * k.element_size()
    tile = max(1, tile_bytes(q) // row_bytes)
    table, positions = (torch.arange(count, device=q.device) for count in (num_blocks, q.shape[0]))
    tiles = zip(q.split(tile), chosen.split(tile), positions.split(tile), strict=True)
    # a tile's gathered blocks are gathered again for its gradient: held for all tiles they would fill the memory
    outputs = [
        checkpoint(sparse_attention, rows, *pages, table, ids, at, scale, use_reentrant=False)
        for rows, ids, at in tiles
    ]
    return torch.cat(outputs)


def choose_whole(q: Tensor, keys: Tensor, sparse: SparseConfig, scale: float) -> Tensor:
    """The blocks of all queries of a whole sequence: q [n, H, D], keys [G, n, D] → [n, G, C]."""
    k1 = pool_keys(keys, sparse.kernel_size, sparse.kernel_stride)
    k2 = pool_keys(keys, 4 * sparse.kernel_size, 4 * sparse.kernel_stride)
    num_blocks = -(-q.shape[0] // sparse.block_size)
    kernels = _choice_kernels(q, sparse)
    if kernels is None:
        positions = torch.arange(q.shape[0], device=q.device)
        return select_blocks(q, k1, k2, positions, num_blocks, sparse, scale)
    before = sparse.kernel_size // sparse.kernel_stride - 1
    rows = []
    for pooled, stride in ((k1, sparse.kernel_stride), (k2, 4 * sparse.kernel_stride)):
        behind = num_blocks * sparse.block_size // stride - before - pooled.shape[1]
        rows.append(F.pad(pooled.to(q.dtype), (0, 0, before, behind)))
    chosen: Tensor = kernels.choose_rows(q, rows[0], rows[1], 0, sparse, scale)
    return chosen.long()


def _choice_kernels(q: Tensor, sparse: SparseConfig) -> Any:
    """The module whose kernels choose for these queries, if there is one."""
    if not triton_kernels.can_run(q.device):
        return None
    from sala.backends.torch.kernels import block_selection

    return block_selection if block_selection.supports(sparse, q.shape[2], q.dtype) else None


def _fused_block_attention(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, block_size: int, scale: float) -> Tensor:
    """The same on a GPU: PyTorch's flex attention, which skips the tiles that no query of a tile has chosen."""
    length, heads = q.shape[:2]
    num_blocks, per_group = -(-length // block_size), heads // k.shape[1]
    is_chosen = torch.zeros(length, k.shape[1], num_blocks + 1, dtype=torch.bool, device=q.device)
    is_chosen = is_chosen.scatter_(2, torch.where(chosen < 0, num_blocks, chosen), True)

    def is_seen(_: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return is_chosen[row, head // per_group, column // block_size] & (row >= column)

    attend = _compiled_flex_attention()
    mask = _tile_mask(is_chosen[:, :, :num_blocks], block_size, per_group, is_seen)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=per_group > 1)[0].transpose(0, 1)


def _tile_mask(is_chosen: Tensor, block_size: int, per_group: int, is_seen: Callable[..., Tensor]) -> "BlockMask":
    """Which key tiles each query tile must look at: those in which some query of it chose a block."""
    from torch.nn.attention.flex_attention import BlockMask

    length, groups, num_blocks = is_chosen.shape
    rows, columns = -(-length // FLEX_TILE), -(-length // FLEX_TILE)
    per_tile = FLEX_TILE // block_size
    padded = F.pad(is_chosen, (0, columns * per_tile - num_blocks, 0, 0, 0, rows * FLEX_TILE - length))
    tiles = padded.view(rows, FLEX_TILE, groups, columns, per_tile).any(4).any(1)  # [rows, G, columns]
    tile = torch.arange(columns, device=is_chosen.device)
    tiles &= tile[None, None] <= tile[:rows, None, None]
    tiles = tiles.permute(1, 0, 2).repeat_interleave(per_group, 0)[None]  # [1, H, rows, columns]
    counts = tiles.sum(-1, dtype=torch.int32)
    order = tiles.int().argsort(dim=-1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(counts, order, BLOCK_SIZE=FLEX_TILE, mask_mod=is_seen, seq_lengths=(length, length))


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)

"""Whole sequences with gradients: on a GPU flash-linear-attention, PyTorch's flex attention and Triton block selection.

On a CPU the selected blocks are a mask of dense attention, as long as most of the keys are selected by some query.

Called by `dispatch.py`; the references are `ops.lightning.lightning_whole` and `ops.sparse.whole_sparse_attention`.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sala.backends.torch.ops.sparse import SelectWhole, pool_keys
from sala.config import SparseConfig

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

FLEX_TILE = 128  # flex attention's tile of queries and of keys
MASKED = 8  # times as many keys as a query selects are read as fast as the selected ones are gathered, or faster
MASK_BYTES = 64 << 20  # of a tile's mask in fp32


@functools.cache
def simple_gla() -> Callable[..., Any] | None:
    """Return flash-linear-attention's kernel for the lightning recurrence; None where it cannot be imported."""
    try:
        from fla.ops.simple_gla import chunk_simple_gla
    except Exception:
        return None
    return chunk_simple_gla


def lightning_whole(
    library: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], slopes: Tensor, scale: float
) -> Tensor:
    """`ops.lightning.lightning_whole` by `simple_gla()`, in fp32 so that its states between chunks are fp32 too."""
    is_even = len(set(lengths)) == 1
    rows = len(lengths) if is_even else 1
    edges = None if is_even else torch.tensor([0, *itertools.accumulate(lengths)], device=q.device)
    batch = (x.float().unflatten(0, (rows, -1)) for x in (q, k, v))
    output, _ = library(*batch, g_gamma=-slopes, scale=scale, cu_seqlens=edges)
    return output.flatten(0, 1)


def select_whole(q: Tensor, keys: Tensor, sparse: SparseConfig, scale: float) -> Tensor:
    """`ops.sparse.select_whole` by the Triton kernels of block selection."""
    from sala.backends.torch.kernels import block_selection

    num_blocks, before = -(-q.shape[0] // sparse.block_size), sparse.kernel_size // sparse.kernel_stride - 1
    rows = []
    for factor in (1, 4):
        stride = factor * sparse.kernel_stride
        pooled = pool_keys(keys, factor * sparse.kernel_size, stride)
        after = num_blocks * sparse.block_size // stride - before - pooled.shape[1]
        rows.append(F.pad(pooled.to(q.dtype), (0, 0, before, after)))
    selected: Tensor = block_selection.select_rows(q, rows[0], rows[1], 0, sparse, scale)
    return selected.long()


def whole_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, sparse: SparseConfig, scale: float, select: SelectWhole
) -> Tensor:
    """`ops.sparse.whole_sparse_attention` by flex attention, which skips tiles of keys that no query selected."""
    block_size, (length, heads) = sparse.block_size, q.shape[:2]
    with torch.no_grad():
        selected = select(q.detach(), k.detach().transpose(0, 1), sparse, scale)
    num_blocks, per_group = -(-length // block_size), heads // k.shape[1]
    is_selected = _is_selected(selected, num_blocks)

    def is_seen(_: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return is_selected[row, head // per_group, column // block_size] & (row >= column)

    attend = _compiled_flex_attention()
    mask = _tile_mask(is_selected[:, :, :num_blocks], block_size, per_group, is_seen)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=per_group > 1)[0].transpose(0, 1)


def _is_selected(selected: Tensor, num_blocks: int) -> Tensor:
    """Blocks [n, G, C], -1 for none → whether each is selected [n, G, num_blocks + 1]; the last column is of none."""
    found = torch.zeros(*selected.shape[:2], num_blocks + 1, dtype=torch.bool, device=selected.device)
    return found.scatter_(2, torch.where(selected < 0, num_blocks, selected), True)


def can_mask(num_tokens: int, sparse: SparseConfig) -> bool:
    """Return whether `masked_attention` is faster than the reference on a CPU."""
    return num_tokens <= MASKED * sparse.num_selected * sparse.block_size


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, sparse: SparseConfig, scale: float, select: SelectWhole
) -> Tensor:
    """`ops.sparse.whole_sparse_attention` as dense attention with a mask: a CPU multiplies faster than it gathers."""
    with torch.no_grad():
        selected = select(q.detach(), k.detach().transpose(0, 1), sparse, scale)
    length, heads = q.shape[:2]
    size = max(1, MASK_BYTES // (4 * heads * length))
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    # The backward pass makes a tile's mask again: those of all tiles would fill the memory.
    outputs = []
    for begin in range(0, length, size):
        end = min(begin + size, length)
        tile = q[begin:end], keys[:, :end], values[:, :end], selected[begin:end]
        outputs.append(checkpoint(_masked_tile, *tile, begin, sparse.block_size, scale, use_reentrant=False))
    return torch.cat(outputs)


def _masked_tile(
    q: Tensor, keys: Tensor, values: Tensor, selected: Tensor, start: int, block_size: int, scale: float
) -> Tensor:
    """Queries at positions start, start+1, …: q [n, H, D], keys and values [G, start + n, D] → [n, H, D].

    The heads of a group are folded into the query rows, as in `ops.dense`.
    """
    (n, heads, dim), (groups, visible) = q.shape, keys.shape[:2]
    is_seen = _is_selected(selected, -(-visible // block_size))[..., :-1]
    mask = is_seen.repeat_interleave(block_size, -1)[..., :visible]  # [n, G, visible]
    rows = torch.arange(start, start + n, device=q.device)[:, None, None]
    mask &= torch.arange(visible, device=q.device) <= rows
    folded = q.view(n, groups, -1, dim).permute(1, 2, 0, 3).reshape(1, groups, -1, dim)
    mask = mask.transpose(0, 1).repeat(1, heads // groups, 1)[None]
    output = F.scaled_dot_product_attention(folded, keys[None], values[None], attn_mask=mask, scale=scale)
    return output.view(groups, -1, n, dim).permute(2, 0, 1, 3).reshape(n, heads, dim)


def _tile_mask(is_selected: Tensor, block_size: int, per_group: int, is_seen: Callable[..., Tensor]) -> "BlockMask":
    """Return the key tiles that each query tile must read: those of which some query of it selected a block."""
    from torch.nn.attention.flex_attention import BlockMask

    length, groups, num_blocks = is_selected.shape
    rows, columns = -(-length // FLEX_TILE), -(-length // FLEX_TILE)
    per_tile = FLEX_TILE // block_size
    padded = F.pad(is_selected, (0, columns * per_tile - num_blocks, 0, 0, 0, rows * FLEX_TILE - length))
    tiles = padded.view(rows, FLEX_TILE, groups, columns, per_tile).any(4).any(1)  # [rows, G, columns]
    tile = torch.arange(columns, device=is_selected.device)
    tiles &= tile[None, None] <= tile[:rows, None, None]
    tiles = tiles.permute(1, 0, 2).repeat_interleave(per_group, 0)[None]  # [1, H, rows, columns]
    counts = tiles.sum(-1, dtype=torch.int32)
    order = tiles.int().argsort(dim=-1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(counts, order, BLOCK_SIZE=FLEX_TILE, mask_mod=is_seen, seq_lengths=(length, length))


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)

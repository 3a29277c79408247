"""The contents of vLLM's blocks as plain tensors: pages of the sparse layers, states of the lightning layers.

vLLM allocates blocks of many tokens and does not interpret them. A block of a sparse layer is N pages:

    keys [G, N, B, D]    values [G, N, B, D]    k1 [G, N, B / stride, D]    k2 [G, N, B / 4 stride, D]    spare rows

Pooled keys are stored in the page in which their window ends, so they are shared and freed with their block. The spare
rows make a block a whole number of tiles [B, D]: keys and values of all blocks are tiles of one tensor, and sala's
kernels address a page by the number of its tile.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sala.backends.torch.ops.dense import dense_attention
from sala.backends.torch.ops.sparse import pool_keys, select_blocks, sparse_attention
from sala.config import SparseConfig
from sala.errors import ConfigError


@dataclass(frozen=True)
class BlockLayout:
    """The layout of a block of a sparse layer for the `num_groups` kv heads of this rank."""

    sparse: SparseConfig
    num_groups: int
    head_dim: int

    @property
    def page_rows(self) -> int:
        """Rows [D] of one page and kv head: keys, values, pooled keys, spare."""
        block, stride = self.sparse.block_size, self.sparse.kernel_stride
        pooled = block // stride + block // (4 * stride)
        space = 1 << (pooled - 1).bit_length()
        return 2 * block + (space if block % space == 0 else -(-pooled // block) * block)

    @property
    def block_tokens(self) -> int:
        """The number of tokens that vLLM's blocks must be a multiple of, so that they are whole tiles."""
        block = self.sparse.block_size
        return block * (block // math.gcd(block, self.page_rows))

    def token_bytes(self, element_size: int) -> int:
        """Return the bytes per token of all kv heads, pooled keys and spare rows included."""
        size, rest = divmod(self.page_rows * self.head_dim * element_size, self.sparse.block_size)
        if rest or size % element_size:
            raise ConfigError(
                f"head_dim {self.head_dim} with sparse blocks of {self.sparse.block_size} tokens does not fill blocks",
                "vLLM cannot run this model; sala serve can",
            )
        return self.num_groups * size


@dataclass(frozen=True)
class RequestRow:
    """The tokens of one request in this step: positions start … end - 1, row `index` of the block tables."""

    index: int
    start: int
    length: int
    sparse_from: int  # first position with sparse attention

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class StepMetadata:
    """Metadata of a step that all sparse layers share. A token's slot is block * tokens per block + offset."""

    rows: tuple[RequestRow, ...]
    tables: Tensor  # [requests, blocks], from vLLM
    slots: Tensor  # [T]
    fine: Tensor  # [m, kernel], the slots of the keys of each window that the step completes
    coarse: Tensor  # the same for windows of four times the size

    @property
    def num_tokens(self) -> int:
        return self.slots.shape[0]


def plan_step(rows: Sequence[RequestRow], tables: Tensor, block_tokens: int, sparse: SparseConfig) -> StepMetadata:
    rows = tuple(row for row in rows if row.length)
    at = [torch.arange(row.start, row.end) for row in rows]
    slots = _slots(rows, at, tables, block_tokens)
    kernel, stride = sparse.kernel_size, sparse.kernel_stride
    fine, coarse = (_windows(rows, tables, block_tokens, size * kernel, size * stride) for size in (1, 4))
    return StepMetadata(rows, tables, slots, fine, coarse)


def _windows(rows: Sequence[RequestRow], tables: Tensor, block_tokens: int, kernel: int, stride: int) -> Tensor:
    """Return the slots [m, kernel] of the keys of each window that ends in these rows."""
    ends = []
    for row in rows:
        first = max(row.start // stride, kernel // stride - 1)  # the first window that ends here
        ends.append(torch.arange(first, max(first, row.end // stride)) * stride + stride - 1)
    window = torch.arange(1 - kernel, 1)
    keys = [(last[:, None] + window).flatten() for last in ends]
    return _slots(rows, keys, tables, block_tokens).view(-1, kernel)


def _slots(rows: Sequence[RequestRow], positions: Sequence[Tensor], tables: Tensor, block_tokens: int) -> Tensor:
    """Return the slots of positions[i] of rows[i], concatenated; only indices are copied to the device."""
    counts = torch.tensor([len(some) for some in positions], dtype=torch.long)
    index = torch.tensor([row.index for row in rows], dtype=torch.long).repeat_interleave(counts)
    at = torch.cat(list(positions)) if positions else index
    index, at = torch.stack((index, at)).to(tables.device, non_blocking=True)
    return tables[index, at // block_tokens].long() * block_tokens + at % block_tokens


class Pages:
    """One sparse layer's view of its cache: any contiguous tensor whose first dimension is vLLM's blocks."""

    def __init__(self, cache: Tensor, layout: BlockLayout, block_tokens: int) -> None:
        self.layout, self.block_tokens = layout, block_tokens
        sparse, groups, dim = layout.sparse, layout.num_groups, layout.head_dim
        self.num_pages = block_tokens // sparse.block_size  # per block
        self.num_tiles = groups * self.num_pages  # tiles of keys, and as many of values
        blocks = cache.view(cache.shape[0], -1)
        self.tiles = blocks.view(-1, sparse.block_size, dim)
        self.stride = self.tiles.shape[0] // cache.shape[0]
        self.groups = torch.arange(groups, device=cache.device) * self.num_pages
        first = 2 * self.num_tiles * sparse.block_size * dim
        rows = sparse.block_size // sparse.kernel_stride
        middle, last = first + self.num_tiles * rows * dim, first + self.num_tiles * (rows + rows // 4) * dim
        self.k1 = blocks[:, first:middle].unflatten(1, (groups, self.num_pages, rows, dim))
        self.k2 = blocks[:, middle:last].unflatten(1, (groups, self.num_pages, rows // 4, dim))

    @property
    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Return pools [G, P, B, D] for the kernels; a page's number is the number of its tile."""
        shape = (self.layout.num_groups, self.num_pages, *self.tiles.shape[1:])
        return self.tiles[: self.num_tiles].view(shape), self.tiles[self.num_tiles : 2 * self.num_tiles].view(shape)

    def tile_table(self, blocks: Tensor) -> Tensor:
        """Return the tiles [..., n * N] of the first kv head's keys in vLLM's blocks [..., n], page by page."""
        page = torch.arange(self.num_pages, device=blocks.device)
        return (blocks.long()[..., None] * self.stride + page).flatten(-2)

    def _places(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split slots into block, page in the block, and row in the page."""
        offset = slots % self.block_tokens
        block_size = self.layout.sparse.block_size
        return slots // self.block_tokens, offset // block_size, offset % block_size

    def append(self, step: StepMetadata, k: Tensor, v: Tensor) -> None:
        """Write k, v [T, G, D] and pool the windows that they complete."""
        block, page, row = self._places(step.slots)
        tile = (block * self.stride + page)[:, None] + self.groups
        self.tiles[tile, row[:, None]] = k.to(self.tiles.dtype)
        self.tiles[tile + self.num_tiles, row[:, None]] = v.to(self.tiles.dtype)
        stride = self.layout.sparse.kernel_stride
        self._pool(self.k1, step.fine, stride)
        self._pool(self.k2, step.coarse, 4 * stride)

    def _pool(self, target: Tensor, windows: Tensor, stride: int) -> None:
        """Write the mean of each window's keys [m, kernel] to the page where it ends."""
        num_windows, kernel = windows.shape
        if not num_windows:
            return
        block, page, row = self._places(windows)
        tile = (block * self.stride + page)[:, None] + self.groups[:, None]  # [m, G, kernel]
        keys = self.tiles[tile, row[:, None]].flatten(0, 1)
        pooled = pool_keys(keys, kernel, kernel).view(num_windows, self.layout.num_groups, -1)
        block, page, row = self._places(windows[:, -1])
        target[block, :, page, row // stride] = pooled

    def pooled(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the pooled keys of these blocks, k1 and k2, as pools [G, P, rows, D]."""
        k1, k2 = (pool[blocks].transpose(0, 1).flatten(1, 2).contiguous() for pool in (self.k1, self.k2))
        return k1, k2

    def attend_dense(self, q: Tensor, start: int, blocks: Tensor, scale: float) -> Tensor:
        """Return the dense attention of q [n, H, D] from a position by the reference: [n, H, D]."""
        length, table = start + len(q), self.tile_table(blocks)
        table = table[: -(-length // self.layout.sparse.block_size)]
        keys, values = (
            self.tiles[self.groups[:, None] + table + shift].flatten(1, 2)[:, :length] for shift in (0, self.num_tiles)
        )
        return dense_attention(q, keys, values, start, scale)

    def attend_sparse(self, q: Tensor, start: int, blocks: Tensor, scale: float) -> Tensor:
        """Return the sparse attention of q [n, H, D] from a position by the reference: [n, H, D]."""
        sparse, end, table = self.layout.sparse, start + len(q), self.tile_table(blocks)
        unused = sparse.kernel_size // sparse.kernel_stride - 1  # rows whose window would start before the sequence
        strides = (sparse.kernel_stride, 4 * sparse.kernel_stride)
        k1, k2 = (
            pool.flatten(1, 2)[:, unused : max(unused, end // stride)]
            for pool, stride in zip(self.pooled(blocks), strides, strict=True)
        )
        at = torch.arange(start, end, device=q.device)
        selected = select_blocks(q, k1, k2, at, -(-end // sparse.block_size), sparse, scale)
        keys, values = self.tiles[None, : -self.num_tiles], self.tiles[None, self.num_tiles :]
        parts = zip(q.chunk(self.layout.num_groups, 1), self.groups.tolist(), strict=True)
        outputs = [
            sparse_attention(part, keys, values, table + shift, selected[:, group, None], at, scale)
            for group, (part, shift) in enumerate(parts)
        ]
        return torch.cat(outputs, 1)

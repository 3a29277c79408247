"""The cache on the device: pages for the sparse layers, slots for the lightning layers, allocated once.

A page holds one block of keys and values and the pooled keys whose windows end in it. A slot holds the recurrent
state of one sequence. `engine/cache` decides which sequence owns which; this module only stores them.

Keys and values may be kept in FP8, half as large as in bf16. They are rounded when they are written, and all readers,
pooling included, read the rounded values: the result does not depend on how a prompt was cut into chunks.
"""

from collections.abc import Sequence
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from sala.backends.rows import CachedTensor, rows_per_page
from sala.backends.torch.batch import Batch, Span
from sala.backends.torch.ops.sparse import pool_keys
from sala.config import SalaConfig, SparseConfig

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0  # of e4m3


def raw(pool: Tensor) -> Tensor:
    """Return the pool for copying rows: as bytes if it is FP8, for which torch has few operations."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x as a pool of that dtype holds it; numbers too large for FP8 become its largest number."""
    return x.clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8) if dtype == FP8 else x


class KVPages:
    """Keys, values and pooled keys of one sparse layer; every pool is [G, P, rows per page, D].

    `kv_dtype` is that of keys and values; pooled keys have `dtype`, and readers get `dtype`.
    """

    def __init__(
        self,
        num_pages: int,
        config: SalaConfig,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.sparse: SparseConfig = config.sparse_config
        self.dtype = dtype
        heads, dim, kv = config.num_key_value_heads, config.head_dim, kv_dtype or dtype
        self.k, self.v, self.k1, self.k2 = (
            torch.empty(heads, num_pages, rows, dim, dtype=kind, device=device)
            for rows, kind in zip(rows_per_page(config).values(), (kv, kv, dtype, dtype), strict=True)
        )

    @property
    def pools(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k, self.v, self.k1, self.k2

    @property
    def is_fp8(self) -> bool:
        return self.k.dtype == FP8

    def append(self, span: Span, k: Tensor, v: Tensor) -> None:
        """Write k, v [n, G, D] at the span's positions and pool the windows that they complete."""
        block, offset = divmod(span.end, self.sparse.block_size)
        if offset and block * self.sparse.block_size >= span.start:
            # Masked rows are still multiplied by 0, and 0 * NaN is NaN: numbers of an earlier owner must not leak in.
            for pool in (self.k, self.v):
                raw(pool)[:, span.table[block]] = 0
        for pool, new in ((self.k, k), (self.v, v)):
            _write(raw(pool), span, span.start, raw(rounded(new, pool.dtype)).transpose(0, 1))
        kernel, stride = self.sparse.kernel_size, self.sparse.kernel_stride
        self._pool(self.k1, span, kernel, stride)
        self._pool(self.k2, span, 4 * kernel, 4 * stride)

    def _pool(self, target: Tensor, span: Span, kernel: int, stride: int) -> None:
        overlap = kernel // stride
        first, end = max(span.start // stride, overlap - 1), span.end // stride
        if first >= end:
            return
        keys = self._read(self.k, span, (first + 1 - overlap) * stride, end * stride)
        _write(target, span, first, pool_keys(keys, kernel, stride))

    def keys_values(self, span: Span, length: int) -> tuple[Tensor, Tensor]:
        """Return the first `length` keys and values of the sequence, [G, length, D] each."""
        return self._read(self.k, span, 0, length), self._read(self.v, span, 0, length)

    def _read(self, pool: Tensor, span: Span, start: int, end: int) -> Tensor:
        rows = raw(pool).flatten(1, 2)[:, _rows(pool, span, start, end)]
        return rows.view(FP8).to(self.dtype) if pool.dtype == FP8 else rows

    def blocks(self, span: Span) -> tuple[Tensor, Tensor]:
        """Return copies of all keys and values of the sequence as pages [G, N, B, D], one per block, in order."""
        block = self.sparse.block_size
        spare = -span.end % block
        keys, values = (F.pad(x, (0, 0, 0, spare)).unflatten(1, (-1, block)) for x in self.keys_values(span, span.end))
        return keys.contiguous(), values.contiguous()

    def pooled(self, span: Span, length: int) -> tuple[Tensor, Tensor]:
        """Return the pooled keys over the first `length` tokens: k1 [G, n1, D] and k2 [G, n2, D]."""
        kernel, stride = self.sparse.kernel_size, self.sparse.kernel_stride
        unused = kernel // stride - 1  # rows whose window would begin before the sequence
        k1 = self._read(self.k1, span, unused, max(unused, length // stride))
        k2 = self._read(self.k2, span, unused, max(unused, length // (4 * stride)))
        return k1, k2


def _rows(pool: Tensor, span: Span, start: int, end: int) -> Tensor | slice:
    """Return where rows start…end of the sequence lie in the flattened pool [G, P * rows per page, D]."""
    per_page = pool.shape[2]
    if span.first_page is not None:
        base = span.first_page * per_page
        return slice(base + start, base + end)
    rows = torch.arange(start, end, device=pool.device)
    return span.table[rows // per_page] * per_page + rows % per_page


def _write(pool: Tensor, span: Span, start: int, new: Tensor) -> None:
    pool.flatten(1, 2)[:, _rows(pool, span, start, start + new.shape[1])] = new


class HybridCache:
    """All layers: `pages[layer]` of the sparse ones, `states[layer]` [slots, H, D, D] in fp32 of the lightning ones."""

    def __init__(
        self,
        config: SalaConfig,
        num_pages: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        dim = config.lightning_head_dim
        shape = (num_slots, config.lightning_nh, dim, dim)
        self.pages = {layer: KVPages(num_pages, config, dtype, device, kv_dtype) for layer in config.sparse_layers}
        self.states = {layer: torch.zeros(shape, device=device) for layer in config.lightning_layers}

    def for_drafts(self, slots: Sequence[int], num_layers: int) -> "HybridCache":
        """Return a view for drafting: the same pages, but copies of the states, numbered as `slots` are."""
        view = copy(self)
        view.states = {
            layer: states[list(slots)].clone() for layer, states in self.states.items() if layer < num_layers
        }
        return view

    def fold(self, batch: Batch, num_accepted: Sequence[int]) -> None:
        """Advance the states of spans with drafts by the tokens that were accepted."""
        for settle in batch.settle:
            settle(num_accepted)
        batch.fold(num_accepted, batch.ops.lightning_fold)

    def copy_page(self, source: int, target: int, num_rows: int) -> None:
        for layer in self.pages.values():
            for pool in (raw(layer.k), raw(layer.v)):
                pool[:, target] = 0
                pool[:, target, :num_rows] = pool[:, source, :num_rows]
            for pool in (layer.k1, layer.k2):
                pool[:, target] = pool[:, source]

    def pool_of(self, entry: CachedTensor) -> Tensor:
        if entry.pool == "state":
            return self.states[entry.layer]
        pool: Tensor = getattr(self.pages[entry.layer], entry.pool)
        return pool

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        for states in self.states.values():
            for source, target in pairs:
                states[target] = states[source]

    def clear_state(self, slot: int) -> None:
        for states in self.states.values():
            states[slot] = 0

"""The cache on the device: pages for the sparse layers, slots for the lightning layers, allocated once.

A page holds one block of keys and values and the pooled keys whose windows end in it. A slot holds the recurrent
state of one sequence. `engine/cache` decides which sequence owns which; this module only stores them.

Keys and values may be kept in FP8, half as large as in bf16, with a power of two for every token and head: so large
numbers are not clipped and small ones keep their digits. A row is rounded when it is written, by itself alone, and all
readers, pooling included, read the rounded values. A difference in the last bit before rounding may become one of 6%.

States are fp32 or, half as large, bf16. All arithmetic is fp32; a state in bf16 is rounded after each token in decoding
and after each chunk of 64 tokens in prefill, wherever a prompt is cut.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sala.backends.rows import CachedTensor, RowSpan, rows_per_page
from sala.backends.torch.hot_pages import HotPages
from sala.backends.torch.ops.sparse import pool_keys
from sala.config import SalaConfig, SparseConfig

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0  # of e4m3
INFINITY_BITS = 0x7F800000  # of fp32
MIN_EXPONENT, MAX_EXPONENT = 63, 246  # biased: all numbers are normal and finite in fp32
Allocate = Callable[..., Tensor]  # by shape and dtype, as torch.empty


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy values to the device; to a GPU asynchronously, so that the host can go on launching kernels."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


@dataclass(frozen=True)
class Span(RowSpan):
    """One row, with its page table."""

    device: torch.device

    @cached_property
    def table(self) -> Tensor:
        """[N] block → page."""
        return send(torch.tensor(self.pages, dtype=torch.long), self.device)


def raw(pool: Tensor) -> Tensor:
    """Return the pool for copying rows: as bytes if it is FP8, for which torch has few operations."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] → codes in FP8 and exponents [...] in uint8, biased as in fp32: a number is code * 2^(exponent - 127).

    The exponent of a row is the smallest with which FP8 holds its largest number. Infinite numbers become finite.
    """
    bits = (x.float().view(torch.int32) & 0x7FFFFFFF).clamp(max=INFINITY_BITS)  # in the order of the magnitudes
    exponents = ((bits.amax(-1) + 0x1FFFFF >> 23) - 8).clamp(MIN_EXPONENT, MAX_EXPONENT)  # 448 is 1.75 * 2^8
    codes = x.float() * _power_of_two(254 - exponents).unsqueeze(-1)
    return codes.clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8), exponents.to(torch.uint8)


def from_fp8(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that `to_fp8` rounded to."""
    return (codes.float() * _power_of_two(exponents.int()).unsqueeze(-1)).to(dtype)


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return 2^(exponent - 127) in fp32, 0 for an exponent of 0; int32 exponents."""
    return (exponents << 23).view(torch.float32)


class KVPages:
    """Keys, values and pooled keys of one sparse layer; every pool is [G, P, rows per page, D].

    `kv_dtype` is that of keys and values; pooled keys have `dtype`, and readers get `dtype`. With FP8, keys and values
    have `exponents` [G, P, rows per page, 2], see `to_fp8`.
    """

    def __init__(
        self,
        num_pages: int,
        config: SalaConfig,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
        empty: Allocate | None = None,
    ) -> None:
        """`empty` allocates keys and values elsewhere than on the device."""
        self.sparse: SparseConfig = config.sparse_config
        self.dtype = dtype
        own: Allocate = partial(torch.empty, device=device)
        heads, dim, kv = config.num_key_value_heads, config.head_dim, kv_dtype or dtype
        kinds: tuple[tuple[torch.dtype, Allocate], ...]
        kinds = ((kv, empty or own), (kv, empty or own), (dtype, own), (dtype, own))
        self.k, self.v, self.k1, self.k2 = (
            allocate((heads, num_pages, rows, dim), dtype=kind)
            for rows, (kind, allocate) in zip(rows_per_page(config).values(), kinds, strict=True)
        )
        shape = (*self.k.shape[:3], 2)
        self.exponents = (empty or own)(shape, dtype=torch.uint8) if kv == FP8 else None
        self.hot: HotPages | None = None  # what kernels read instead of pages that lie in host memory

    @property
    def pools(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k, self.v, self.k1, self.k2

    @property
    def token_pools(self) -> list[Tensor]:
        """The pools with a row per token, for copying."""
        return [raw(self.k), raw(self.v), *([] if self.exponents is None else [self.exponents])]

    @property
    def is_fp8(self) -> bool:
        return self.exponents is not None

    def append(self, span: Span, k: Tensor, v: Tensor) -> None:
        """Write k, v [n, G, D] at the span's positions and pool the windows that they complete."""
        block, offset = divmod(span.end, self.sparse.block_size)
        if offset and block * self.sparse.block_size >= span.start:
            # Masked rows are still multiplied by 0, and 0 * NaN is NaN: numbers of an earlier owner must not leak in.
            for pool in self.token_pools:
                pool[:, span.table[block]] = 0
        for index, (pool, new) in enumerate(((self.k, k), (self.v, v))):
            if self.exponents is not None:
                new, exponents = to_fp8(new)
                _write(self.exponents[..., index], span, span.start, exponents.T)
            _write(raw(pool), span, span.start, raw(new).transpose(0, 1))
        kernel, stride = self.sparse.kernel_size, self.sparse.kernel_stride
        self._pool(self.k1, span, kernel, stride)
        self._pool(self.k2, span, 4 * kernel, 4 * stride)
        if self.hot is not None:
            self.hot.forget(span.table[span.start // self.sparse.block_size : -(-span.end // self.sparse.block_size)])

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
        index = _rows(pool, span, start, end)
        rows = raw(pool).flatten(1, 2)[:, index]
        if self.exponents is None or pool.dtype != FP8:
            return rows
        exponents = self.exponents[..., int(pool is self.v)].flatten(1, 2)[:, index]
        return from_fp8(rows.view(FP8), exponents, self.dtype)

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


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU they take no memory until they are used, as numpy's do and torch's do not."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class HybridCache:
    """All layers: `pages[layer]` of the sparse ones, `states[layer]` [slots, H, D, D] of the lightning ones."""

    def __init__(
        self,
        config: SalaConfig,
        num_pages: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype = torch.float32,
        empty: Allocate | None = None,
    ) -> None:
        """`empty` allocates keys and values elsewhere than on the device."""
        dim = config.lightning_head_dim
        shape = (num_slots, config.lightning_nh, dim, dim)
        self.pages = {
            layer: KVPages(num_pages, config, dtype, device, kv_dtype, empty) for layer in config.sparse_layers
        }
        self.states = {layer: _zeros(shape, state_dtype, device) for layer in config.lightning_layers}

    def for_drafts(self, slots: Sequence[int], num_layers: int) -> "HybridCache":
        """Return a view for drafting: the same pages, but copies of the states, numbered as `slots` are."""
        view = copy(self)
        view.states = {
            layer: states[list(slots)].clone() for layer, states in self.states.items() if layer < num_layers
        }
        return view

    def copy_page(self, source: int, target: int, num_rows: int) -> None:
        for layer in self.pages.values():
            for pool in layer.token_pools:
                pool[:, target] = 0
                pool[:, target, :num_rows] = pool[:, source, :num_rows]
            for pool in (layer.k1, layer.k2):
                pool[:, target] = pool[:, source]
        self.forget_hot([target])

    def add_hot_pool(self, num_frames: int) -> None:
        """Keep copies of blocks on the device, `num_frames` of each kv group and layer; see `hot_pages.py`."""
        shared = None
        for layer in self.pages.values():
            layer.hot = HotPages(layer.k, layer.exponents, num_frames, layer.k1.device, shared)
            shared = layer.hot.clock, layer.hot.claims

    def begin_step(self) -> None:
        """Let the hot pool tell what this step uses from what earlier ones did."""
        hot = next(iter(self.pages.values())).hot if self.pages else None
        if hot is not None:
            hot.clock += 1

    def forget_hot(self, pages: Sequence[int]) -> None:
        """Let pages be read in host memory again: they were written there."""
        for layer in self.pages.values():
            if layer.hot is not None:
                layer.hot.forget(torch.tensor(list(pages), device=layer.hot.frames.device))

    @property
    def is_fp8(self) -> bool:
        return any(pages.is_fp8 for pages in self.pages.values())

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

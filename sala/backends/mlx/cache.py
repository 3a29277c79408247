"""The cache on the device: pages for the sparse layers, slots for the lightning layers.

A page holds one block of keys and values and the pooled keys whose windows end in it. A slot holds the recurrent
state of one sequence. `engine/cache` decides which sequence owns which; this module only stores them.

Pools double, up to the capacity, when a page beyond their end is used for the first time: MLX fills an array when it
creates it, and unused memory should stay free. Otherwise no token allocates memory.

MLX updates an array in place if nothing else refers to it when the update is computed, and copies it otherwise; a
pending read counts as a reference. So a step writes each pool once, for all rows, before any of them reads it. A state
is replaced as a whole, so that every slot has its own array and a copy costs nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from sala.backends.mlx.ops.sparse import pool_keys
from sala.backends.rows import POOLS, RowSpan, rows_per_page
from sala.config import SalaConfig, SparseConfig

FIRST_PAGES = 64  # pages of a new pool: 4,096 tokens
Numbers = np.ndarray[Any, np.dtype[np.int32]]
Indices = dict[object, mx.array]  # rows of pools that a batch writes, by pool: all layers share them


@dataclass(frozen=True)
class Span(RowSpan):
    """One row, with its page table."""

    @cached_property
    def numbers(self) -> Numbers:
        """[N] block → page, on the host."""
        return np.asarray(self.pages, np.int32)

    @cached_property
    def table(self) -> mx.array:
        """[N] block → page."""
        return mx.array(self.numbers)

    def rows(self, start: int, end: int, per_page: int) -> Numbers:
        """Return the indices of rows start…end of the sequence in a pool with `per_page` rows per page."""
        rows = np.arange(start, end, dtype=np.int32)
        return self.numbers[rows // per_page] * per_page + rows % per_page


class KVPages:
    """Keys, values and pooled keys of one sparse layer; every pool is [G, P, rows per page, D]."""

    def __init__(self, num_pages: int, config: SalaConfig, dtype: mx.Dtype) -> None:
        self.sparse: SparseConfig = config.sparse_config
        self.k, self.v, self.k1, self.k2 = (
            mx.zeros((config.num_key_value_heads, num_pages, rows, config.head_dim), dtype=dtype)
            for rows in rows_per_page(config).values()
        )

    def grow(self, num_pages: int) -> None:
        """Grow to so many pages, one pool after another: only one pool is in memory twice."""
        for name in POOLS:
            pool: mx.array = getattr(self, name)
            groups, have, rows, dim = pool.shape
            more = mx.zeros((groups, num_pages - have, rows, dim), dtype=pool.dtype)
            setattr(self, name, mx.concatenate([pool, more], axis=1))
            mx.eval(getattr(self, name))

    @property
    def pools(self) -> list[mx.array]:
        return [self.k, self.v, self.k1, self.k2]

    def append(self, spans: Sequence[Span], indices: Indices, k: mx.array, v: mx.array) -> None:
        """Write k, v [T, G, D] at the spans' positions and pool the windows that they complete.

        The first layer of a batch fills `indices`.
        """
        rows, num_tails = _token_rows(spans, self.sparse.block_size)
        # Masked rows are still multiplied by 0, and 0 * NaN is NaN: numbers of an earlier owner must not leak in.
        tails = mx.zeros((num_tails, *k.shape[1:]), dtype=k.dtype)
        for name, new in (("k", k), ("v", v)):
            new = mx.concatenate([new, tails]) if num_tails else new
            self._write(name, indices, rows, new.swapaxes(0, 1))
        kernel, stride = self.sparse.kernel_size, self.sparse.kernel_stride
        self._pool("k1", spans, indices, kernel, stride)
        self._pool("k2", spans, indices, 4 * kernel, 4 * stride)

    def _pool(self, name: str, spans: Sequence[Span], indices: Indices, kernel: int, stride: int) -> None:
        overlap, per_page = kernel // stride, self.sparse.block_size // stride
        rows, pooled = [], []
        for span in spans:
            first, end = max(span.start // stride, overlap - 1), span.end // stride
            if first < end:
                keys = _read(self.k, span, (first + 1 - overlap) * stride, end * stride)
                rows.append(span.rows(first, end, per_page))
                pooled.append(pool_keys(keys, kernel, stride))
        if rows:
            self._write(name, indices, np.concatenate(rows), mx.concatenate(pooled, axis=1))

    def _write(self, name: str, indices: Indices, rows: Numbers, new: mx.array) -> None:
        """Write new [G, R, D] into rows [R] of the pool's pages, in one update."""
        pool: mx.array = getattr(self, name)
        groups, num_pages, per_page, dim = pool.shape
        key = "k" if name == "v" else name  # keys and values have the same rows
        if key not in indices:
            heads = np.arange(groups, dtype=np.int32)[:, None] * (num_pages * per_page)
            indices[key] = mx.array((heads + rows).reshape(-1))
        flat = pool.reshape(-1, dim)
        flat[indices[key]] = new.reshape(-1, dim)
        setattr(self, name, flat.reshape(pool.shape))

    def keys_values(self, span: Span, length: int) -> tuple[mx.array, mx.array]:
        """Return the first `length` keys and values of the sequence, [G, length, D] each."""
        return _read(self.k, span, 0, length), _read(self.v, span, 0, length)

    def pooled(self, span: Span, length: int) -> tuple[mx.array, mx.array]:
        """Return the pooled keys over the first `length` tokens: k1 [G, n1, D] and k2 [G, n2, D]."""
        kernel, stride = self.sparse.kernel_size, self.sparse.kernel_stride
        unused = kernel // stride - 1  # rows whose window would begin before the sequence
        k1 = _read(self.k1, span, unused, max(unused, length // stride))
        k2 = _read(self.k2, span, unused, max(unused, length // (4 * stride)))
        return k1, k2


def _token_rows(spans: Sequence[Span], block_size: int) -> tuple[Numbers, int]:
    """Return the rows of the tokens in [P * B] followed by the rest of every new page, and the number of the latter."""
    rows = [span.rows(span.start, span.end, block_size) for span in spans]
    tails = []
    for span in spans:
        block, offset = divmod(span.end, block_size)
        if offset and block * block_size >= span.start:
            tails.append(span.rows(span.end, (block + 1) * block_size, block_size))
    return np.concatenate((*rows, *tails)), sum(map(len, tails))


def _read(pool: mx.array, span: Span, start: int, end: int) -> mx.array:
    """Return rows start…end of the sequence, [G, end - start, D]: a view, or gathered pages."""
    groups, _, per_page, dim = pool.shape
    if span.first_page is not None:
        base = span.first_page * per_page
        return pool.reshape(groups, -1, dim)[:, base + start : base + end]
    first, last = start // per_page, -(-end // per_page)
    pages = mx.take(pool, span.table[first:last], axis=1).reshape(groups, -1, dim)
    return pages[:, start - first * per_page : end - first * per_page]


class HybridCache:
    """All layers: `pages[layer]` of the sparse ones, `states[layer][slot]` [H, D, D] in fp32 of the lightning ones."""

    def __init__(self, config: SalaConfig, num_pages: int, num_slots: int, dtype: mx.Dtype) -> None:
        dim = config.lightning_head_dim
        self.empty = mx.zeros((config.lightning_nh, dim, dim))
        self.num_pages, self.max_pages = min(num_pages, FIRST_PAGES), num_pages
        self.pages = {layer: KVPages(self.num_pages, config, dtype) for layer in config.sparse_layers}
        self.states = {layer: [self.empty] * num_slots for layer in config.lightning_layers}
        self.joined: set[int] = set()  # slots whose states are views of one array, left by a batch

    def reach(self, pages: Iterable[int]) -> None:
        """Grow the pools so that these pages exist."""
        wanted = 1 + max(pages, default=-1)
        assert wanted <= self.max_pages
        if wanted > self.num_pages:
            self.num_pages = min(self.max_pages, max(wanted, 2 * self.num_pages))
            for layer in self.pages.values():
                layer.grow(self.num_pages)

    def arrays(self, slots: Sequence[int]) -> Iterator[mx.array]:
        """Yield all arrays that a step may have changed."""
        for layer in self.pages.values():
            yield from layer.pools
        for states in self.states.values():
            for slot in slots:
                yield states[slot]

    def fork(self) -> "HybridCache":
        """Return a copy that can advance without changing this one; arrays are shared."""
        other = copy(self)
        other.pages = {layer: copy(pages) for layer, pages in self.pages.items()}
        other.states = {layer: list(states) for layer, states in self.states.items()}
        other.joined = set(self.joined)
        return other

    def for_drafts(self, slots: Sequence[int], num_layers: int) -> "HybridCache":
        """Return a view for drafting: the same pages, but copies of the states, numbered as `slots` are."""
        view = copy(self)
        view.joined = set()
        view.states = {
            layer: [states[slot] for slot in slots] for layer, states in self.states.items() if layer < num_layers
        }
        return view

    def join(self, slots: Sequence[int]) -> None:
        """Note that these slots run as one batch; copy states that left it, as they would keep its array alive."""
        for slot in self.joined - set(slots):
            for states in self.states.values():
                states[slot] = _own(states[slot])
        self.joined = set(slots) if len(slots) > 1 else set()

    def copy_page(self, source: int, target: int, num_rows: int) -> None:
        places = [(layer, name) for layer in self.pages.values() for name in POOLS]
        pages = [mx.take(getattr(layer, name), mx.array([source]), axis=1) for layer, name in places]
        mx.eval(pages)  # a pending read would turn the write into a copy of the pool
        for (layer, name), page in zip(places, pages, strict=True):
            pool: mx.array = getattr(layer, name)
            if name in ("k", "v"):
                page = mx.where(mx.arange(pool.shape[2])[:, None] < num_rows, page, 0.0)
            pool[:, target : target + 1] = page

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        for states in self.states.values():
            for source, target in pairs:
                states[target] = _own(states[source]) if source in self.joined else states[source]
        self.joined -= {target for _, target in pairs}

    def clear_state(self, slot: int) -> None:
        for states in self.states.values():
            states[slot] = self.empty
        self.joined.discard(slot)


def _own(state: mx.array) -> mx.array:
    """Return a copy in its own memory."""
    own = state * 1.0
    mx.async_eval(own)
    return own

"""Prefill over pages in host memory: the context of a pass comes to the device layer by layer, into two buffers.

While a layer attends in one buffer, the next sparse layer's part of the context is copied into the other, beside the
matrix products. What the pass itself writes goes to host memory, and from there to the buffer. Kernels then attend as
if the buffer were the pages.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sala.backends.torch.cache import HybridCache, KVPages, Span, raw
from sala.backends.torch.fast.gpu_layers import FusedLayer
from sala.backends.torch.fast.gpu_prefill import PassSize, PrefillSpans
from sala.backends.torch.host_memory import HostMemory
from sala.backends.torch.kernels import hot_pages
from sala.backends.torch.kernels.spans import MAX_SPANS

MOST_RUNS = 16  # of neighbouring pages that are copied one by one; more are copied by a kernel


class Buffer(NamedTuple):
    """Keys and values [G, F, B, D] of one sparse layer; exponents [G, F, B, 2] of FP8 pages."""

    k: Tensor
    v: Tensor
    exponents: Tensor | None

    @property
    def pools(self) -> list[Tensor]:
        return [raw(self.k), raw(self.v), *([] if self.exponents is None else [self.exponents])]


class Staging:
    """The buffers: room for the context of one sequence, of as many tokens as the longest has, in two sparse layers."""

    def __init__(self, cache: HybridCache, memory: HostMemory, num_frames: int, device: torch.device) -> None:
        self.cache, self.memory, self.num_frames, self.device = cache, memory, num_frames, device
        layers = list(cache.pages.values())
        self.block_size = layers[0].sparse.block_size
        self.buffers = [self._buffer(layers[0]) for _ in layers[:2]]
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _buffer(self, pages: KVPages) -> Buffer:
        (groups, _, block, dim), frames = pages.k.shape, self.num_frames
        k, v = (torch.empty(groups, frames, block, dim, dtype=pages.k.dtype, device=self.device) for _ in range(2))
        if pages.exponents is None:
            return Buffer(k, v, None)
        return Buffer(k, v, torch.empty(groups, frames, block, 2, dtype=torch.uint8, device=self.device))

    def can_hold(self, size: PassSize) -> bool:
        """Return whether all blocks of a pass of this size have frames."""
        return size.spans * size.blocks <= self.num_frames

    def num_fitting(self, spans: Sequence[Span]) -> int:
        """Return how many of the spans, from the first on, one pass has room for: at least one."""
        ends = accumulate(-(-span.end // self.block_size) for span in spans)
        return max(1, sum(end <= self.num_frames for end in ends))


class Staged:
    """A captured pass: each layer copies its context when it attends; `tables` [S, N] are block to frame."""

    def __init__(self, staging: Staging, rows: PrefillSpans) -> None:
        self.staging, self.page_tables, self.spans = staging, rows.tables, rows.spans
        num_spans, width = rows.tables.shape
        self.first_frames = torch.arange(0, num_spans * width, width, dtype=torch.int32, device=staging.device)
        self._lay_out()

    def _lay_out(self) -> None:
        blocks = torch.arange(self.page_tables.shape[1], dtype=torch.int32, device=self.page_tables.device)
        self.tables = self.first_frames[:, None] + blocks

    def take(self, pages: KVPages) -> Buffer:
        """Return the keys and values of a layer, after the pass has written its own."""
        buffer = self.staging.buffers[0]
        hot_pages.stage(*_pools(pages), *buffer, self.page_tables, self.spans, self.first_frames)
        return buffer

    def release(self, pages: KVPages) -> None:
        """Let the buffer of a layer be used again."""


class StreamedPass(Staged):
    """A pass whose context is copied beside its products."""

    def __init__(
        self, staging: Staging, rows: PrefillSpans, spans: Sequence[Span], layers: Sequence[FusedLayer]
    ) -> None:
        """Begin to copy the context of `spans`, which are in `rows`; `layers` are all that the pass goes through."""
        super().__init__(staging, rows)
        block = staging.block_size
        counts = [-(-span.end // block) for span in spans]
        firsts = [0, *accumulate(counts)][:-1]
        assert sum(counts) <= staging.num_frames
        padding = [0] * (len(self.first_frames) - len(spans))
        self.first_frames = torch.tensor([*firsts, *padding], dtype=torch.int32).to(staging.device, non_blocking=True)
        self._lay_out()
        past = [(first, span.pages[: -(-span.start // block)]) for first, span in zip(firsts, spans, strict=True)]
        self.runs = [run for first, pages in past for run in _runs(first, pages)]
        self.layers = [staging.cache.pages[layer.index] for layer in _attending(rows, layers)]
        self.at = {id(pages): at for at, pages in enumerate(self.layers)}
        self.events: list[Any] = []
        if staging.stream is not None:
            staging.stream.wait_stream(torch.cuda.current_stream(staging.device))
        for at in range(min(len(self.layers), len(staging.buffers))):
            self._begin(at)

    def _begin(self, at: int) -> None:
        """Start to copy the context of a layer."""
        stream = self.staging.stream
        if stream is None:
            self._copy(at)
            return
        with torch.cuda.stream(stream):
            self._copy(at)
            self.events.append(stream.record_event())

    def _copy(self, at: int) -> None:
        pages, buffer = self.layers[at], self.staging.buffers[at % len(self.staging.buffers)]
        if len(self.runs) > MOST_RUNS:
            where = (self.page_tables, self.spans, self.first_frames)
            hot_pages.stage(*_pools(pages), *buffer, *where, hot_pages.PAST)
            return
        pairs = zip(pages.token_pools, buffer.pools, strict=True)
        for source, target in ((self.staging.memory.at_host(pool), target) for pool, target in pairs):
            for frame, page, count in self.runs:
                for group in range(len(target)):
                    target[group, frame : frame + count].copy_(source[group, page : page + count], non_blocking=True)

    def take(self, pages: KVPages) -> Buffer:
        at = self.at[id(pages)]
        buffer = self.staging.buffers[at % len(self.staging.buffers)]
        if self.events:
            torch.cuda.current_stream(self.staging.device).wait_event(self.events[at])
        where = (self.page_tables, self.spans, self.first_frames)
        hot_pages.stage(*_pools(pages), *buffer, *where, hot_pages.OWN)
        return buffer

    def release(self, pages: KVPages) -> None:
        after = self.at[id(pages)] + len(self.staging.buffers)
        if after < len(self.layers):
            if self.staging.stream is not None:
                self.staging.stream.wait_stream(torch.cuda.current_stream(self.staging.device))
            self._begin(after)


def passes(groups: Sequence[Sequence[int]], spans: Sequence[Span], staging: Staging | None) -> Iterator[Sequence[int]]:
    """Yield the indices of spans that one prefill pass has room for, group by group."""
    for rest in groups:
        while rest:
            some = rest[:MAX_SPANS]
            some = some if staging is None else some[: staging.num_fitting([spans[i] for i in some])]
            yield some
            rest = rest[len(some) :]


def _attending(rows: PrefillSpans, layers: Sequence[FusedLayer]) -> list[FusedLayer]:
    """Return the sparse layers in which all rows of a pass attend."""
    if rows.wanted is not None and layers and layers[-1].can_skip_rows(rows.angles):
        layers = layers[:-1]
    return [layer for layer in layers if not layer.is_lightning]


def _pools(pages: KVPages) -> tuple[Tensor, Tensor, Tensor | None]:
    return pages.k, pages.v, pages.exponents


def _runs(first: int, pages: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the runs of neighbouring pages that go to frames from `first` on: frame, page, how many."""
    if not len(pages):
        return []
    numbers = np.asarray(pages)
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
    counts = np.diff(starts, append=len(numbers))
    return [(first + int(at), int(numbers[at]), int(count)) for at, count in zip(starts, counts, strict=True)]

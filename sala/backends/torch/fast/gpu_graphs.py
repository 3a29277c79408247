"""Decode steps as CUDA graphs: fixed sizes, inputs in place, one launch per step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sala.backends.torch.batch import Span
from sala.backends.torch.cache import HybridCache
from sala.backends.torch.fast.gpu_spans import DecodeSpans
from sala.backends.torch.kernels import lightning
from sala.backends.torch.ops.lightning import decay_slopes


class DecodeGraph:
    """A decode step of fixed size: its inputs and, if it has a `pool`, the captured graph that computes it.

    `forward` runs all layers over `rows` on top of `cache`. The pool is memory that graphs share.
    """

    def __init__(
        self, rows: DecodeSpans, forward: Callable[[DecodeSpans], Tensor], cache: HybridCache, pool: Any = None
    ) -> None:
        self.rows, self.forward, self.cache = rows, forward, cache
        self.pages: list[tuple[int, ...]] = [()] * rows.num_spans
        self.graph: Any = None
        self.hidden: Tensor | None = None
        is_cuda = rows.inputs.is_cuda
        self.host = torch.empty(rows.inputs.shape, dtype=torch.long, pin_memory=is_cuda)
        self.is_copied = torch.cuda.Event() if is_cuda else None
        if pool is not None:
            self.capture(pool)

    def run(self) -> Tensor:
        self.rows.prepare()
        return self.forward(self.rows)

    def capture(self, pool: Any) -> None:
        """Run once on padding only, which changes nothing but compiles the kernels, then capture."""
        self.rows.all_positions.fill_(-1)
        self.rows.slots.fill_(-1)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.hidden = self.run()

    def replay(self) -> Tensor:
        if self.graph is None:
            return self.run()
        self.graph.replay()
        assert self.hidden is not None
        return self.hidden

    def fill(self, spans: Sequence[Span], ids: Sequence[tuple[int, ...]]) -> None:
        """Set the inputs of the next step: the spans, each with its tokens."""
        rows, count = self.rows, self.rows.count
        spare = rows.num_spans - len(spans)
        tokens: list[int] = []
        positions: list[int] = []
        for span, some in zip(spans, ids, strict=True):
            rest = count - span.length
            tokens += [*some, *([0] * rest)]
            positions += [*range(span.start, span.end), *([-1] * rest)]
        rest = rows.num_padded - len(tokens)
        values = [*tokens, *([0] * rest), *positions, *([-1] * rest)]
        values += [span.slot for span in spans] + [-1] * spare
        values += [span.start for span in spans] + [0] * spare
        values += [min(span.sparse_from, 1 << 40) for span in spans] + [0] * spare
        values += [0 if span.num_drafts else span.length for span in spans] + [0] * spare
        if self.is_copied is not None:
            self.is_copied.synchronize()  # the last copy may still be reading
        self.host.copy_(torch.tensor(values))
        rows.inputs.copy_(self.host, non_blocking=True)
        if self.is_copied is not None:
            self.is_copied.record()
        for index, span in enumerate(spans):
            self.fill_table(index, span.pages)

    def fill_table(self, index: int, pages: tuple[int, ...]) -> None:
        """Copy new pages only: the table of a million tokens has thousands of entries."""
        old = self.pages[index]
        if old == pages:
            return
        first = len(old) if len(old) < len(pages) and pages[: len(old)] == old else 0
        new = torch.tensor(pages[first:], dtype=torch.int32)
        self.rows.tables[index, first : len(pages)].copy_(new, non_blocking=True)
        self.pages[index] = pages

    def settler(self, spans: Sequence[Span], indices: Sequence[int]) -> Callable[[Sequence[int]], None]:
        """Return what advances the states of spans with drafts, once the numbers of accepted tokens are known."""

        def settle(num_accepted: Sequence[int]) -> None:
            rows = self.rows
            counts = [num_accepted[i] if span.num_drafts else 0 for i, span in zip(indices, spans, strict=True)]
            counts += [0] * (rows.num_spans - len(spans))
            accepted = torch.zeros_like(rows.slots)
            accepted.copy_(torch.tensor(counts, dtype=accepted.dtype), non_blocking=True)
            for index, (k, v, heads) in rows.kept.items():
                slopes = decay_slopes(k.shape[2], k.device)
                lightning.lightning_fold(k, v, self.cache.states[index], rows.slots, accepted, slopes, heads)

        return settle

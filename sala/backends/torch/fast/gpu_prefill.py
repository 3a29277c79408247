"""Prefill on a GPU: all prefill spans of a plan in one pass, and the CUDA graphs that replay short passes.

The rows of all spans are packed: projections, norms and the MLP run over all of them at once. A pass has enough rows
for the library's products, and a number of rows (`stable_rows`) with which these give each row the same bits in every
pass: results are batch-invariant and do not depend on chunks. Only rows whose hidden states are wanted go through the
whole last layer; the others only write its KV cache.
"""

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sala.backends.torch.cache import KVPages, Span
from sala.backends.torch.fast.gpu_layers import Angles, FusedLayer, capture, rotate
from sala.backends.torch.gather import Gather
from sala.backends.torch.kernels import (
    attention,
    block_selection,
    decode_attention,
    fused,
    hot_pages,
    lightning,
    linear,
    pooling,
)
from sala.backends.torch.kernels import spans as span_table
from sala.backends.torch.ops.lightning import decay_slopes
from sala.config import SalaConfig, SparseConfig

MIN_ROWS, ROW_MULTIPLE = 192, 64  # more rows than our own product kernels take
MOST_TRIED = 2048  # rows; longer products are not split
GRAPH_ROWS = (192, 256, 320, 384, 512, 640, 768, 896, 1024)  # a graph for each
GRAPH_SPANS = GRAPH_WANTED = 16
GRAPH_PARALLEL = 4  # spans whose states advance at a time in a graph: most passes have few, and programs cost time
MAX_WANTED = linear.MAX_ROWS  # more wanted rows go through the whole last layer with all others
ALIGNMENT = 4  # numbers of 16 bytes: kernels are compiled again for tensors that begin elsewhere


@functools.cache
def stable_rows(shapes: tuple[tuple[int, int], ...], dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
    """Return the numbers of rows up to MOST_TRIED with which the library's products have the bits of longer ones.

    With few rows it may split the sums of a product with a long matrix; for which numbers, only a trial tells. `shapes`
    are those of the matrices. Only precisions of 16 bits are tried: products in fp32 are not promised to be stable.
    """
    counts = list(range(MIN_ROWS, MOST_TRIED + 1, ROW_MULTIPLE))
    generator = torch.Generator(device).manual_seed(0)
    for outputs, inputs in shapes if device.type == "cuda" and dtype.itemsize == 2 else ():
        x, weight = (
            torch.randn(size, inputs, dtype=dtype, device=device, generator=generator) for size in (MOST_TRIED, outputs)
        )
        whole = F.linear(x, weight)
        counts = [count for count in counts if torch.equal(F.linear(x[:count], weight), whole[:count])]
    return tuple(counts)


class PassSize(NamedTuple):
    """How much a pass has room for."""

    rows: int
    spans: int
    wanted: int | None  # None: the hidden states of all rows
    blocks: int  # most blocks of a sequence

    @classmethod
    def of(cls, spans: Sequence[Span], num_wanted: int | None, block: int, stable: Sequence[int] = ()) -> "PassSize":
        """Return the size of a pass over these spans, with one of the `stable` numbers of rows if it has that few."""
        num_rows = max(sum(span.length for span in spans), MIN_ROWS)
        num_rows = next(iter(stable[bisect_left(stable, num_rows) :]), num_rows)
        is_all = num_wanted is None or num_wanted > MAX_WANTED
        num_blocks = max(-(-span.end // block) for span in spans)
        num_spans, num_blocks = _round_up(len(spans), ALIGNMENT), _round_up(num_blocks, ALIGNMENT)
        return cls(_round_up(num_rows, ROW_MULTIPLE), num_spans, None if is_all else num_wanted, num_blocks)

    @classmethod
    def of_graph(cls, num_rows: int, max_blocks: int, sparse: SparseConfig) -> "PassSize":
        """Return the size of a graph, in which all rows are dense."""
        num_blocks = min(max_blocks, -(-sparse.dense_len // sparse.block_size))
        return cls(num_rows, GRAPH_SPANS, GRAPH_WANTED, _round_up(num_blocks, ALIGNMENT))

    def fit(self, graph: "PassSize") -> bool:
        """Return whether a graph of that size can compute this pass."""
        is_wanted = self.wanted is not None and graph.wanted is not None and self.wanted <= graph.wanted
        return is_wanted and self.rows <= graph.rows and self.spans <= graph.spans and self.blocks <= graph.blocks


class SparseRows(NamedTuple):
    """The rows of a span from `first` to `end` among the packed ones, in the sparse regime; positions from `start`."""

    span: int
    first: int
    end: int
    start: int


class PrefillGather(NamedTuple):
    """A span whose sampled row wants sources: its number in the batch, that row among the packed ones, layers by index.

    `wanted` is its place among the wanted rows.
    """

    gather: Gather
    number: int
    span: Span
    row: int
    wanted: int
    layers: dict[int, int]

    def take(self, layer: FusedLayer, q: Tensor, pages: KVPages, is_wanted: bool = False) -> None:
        row = self.wanted if is_wanted else self.row
        scale = layer.head_dim**-0.5
        self.gather.attend(self.number, self.layers[layer.index], q[row : row + 1], self.span, pages, scale)


def prefill_gathers(
    gather: Gather | None,
    indices: Sequence[int],
    spans: Sequence[Span],
    wanted: Sequence[Sequence[int]],
    config: SalaConfig,
) -> list[PrefillGather]:
    """Return what gathers for these prefill spans of a batch, each sampled after its last row, if any wants sources."""
    if gather is None:
        return []
    layers = {layer: at for at, layer in enumerate(config.sparse_layers)}
    found, end, num_wanted = [], 0, 0
    for index, span, rows in zip(indices, spans, wanted, strict=True):
        end, num_wanted = end + span.length, num_wanted + len(rows)
        if index in gather.asked.places:
            found.append(PrefillGather(gather, index, span, end - 1, num_wanted - 1, layers))
    return found


class StagedContext(Protocol):
    """Keys and values that lie in host memory, and come to the device for a pass."""

    tables: Tensor  # [S, N] block → frame of a buffer

    def take(self, pages: KVPages) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys, values and exponents of a layer, after the pass has written its own."""
        ...

    def release(self, pages: KVPages) -> None:
        """Let the buffer of a layer be used again."""
        ...


class PrefillSpans:
    """The packed rows of several prefill spans; rows, spans and wanted rows up to the size of the pass are padding.

    Everything that changes from pass to pass is in one tensor, `inputs`: one copy brings it to the device. Only the
    block selection of sparse rows needs to know more on the host.
    """

    def __init__(
        self, sparse: SparseConfig, angles_of: Callable[[Tensor], Angles], size: PassSize, device: torch.device,
        num_parallel: int | None = None,
    ) -> None:  # fmt: skip
        self.sparse, self.angles_of, self.size, self.num_parallel = sparse, angles_of, size, num_parallel
        lists = [(size.rows,)] * 3 + [(_round_up(size.wanted or 0, ALIGNMENT),)] * 4
        shapes = [*lists, (span_table.NUM_FIELDS, size.spans), (size.spans, size.blocks)]
        sizes = [int(np.prod(shape)) for shape in shapes]
        self.inputs = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        parts, at_host = (
            [part.view(shape) for part, shape in zip(x.split(sizes), shapes, strict=True)]
            for x in (self.inputs, self.host)
        )
        self.ids, self.positions, self.row_of, *wanted, self.spans, self.tables = parts
        wanted = [part[: size.wanted or 0] for part in wanted]
        self.wanted = None if size.wanted is None else wanted[0]
        self.lengths, self.wanted_spans, self.is_sparse = wanted[1:]  # facts about the wanted rows
        self.at_host = [part.numpy() for part in at_host]
        self.sparse_rows: list[SparseRows] = []
        self.gathers: Sequence[PrefillGather] = ()
        self.features: list[Tensor] = []
        self.staged: StagedContext | None = None  # brings keys and values that lie in host memory
        self.has_dense, self.has_sparse_wanted, self.max_dense = True, False, size.blocks

    def fill(self, spans: Sequence[Span], ids: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> None:
        """Set the inputs: the spans, each with its tokens and the numbers of its wanted rows."""
        all_ids, positions, row_of, rows, lengths, wanted_spans, is_sparse, table, tables = self.at_host
        for part in (all_ids, row_of, rows, lengths, wanted_spans, is_sparse):
            part[:] = 0
        positions[:] = -1
        self.sparse_rows, first, at = [], 0, 0
        packed = []
        for index, span in enumerate(spans):
            num_dense = min(max(span.sparse_from - span.start, 0), span.length)
            packed.append(span_table.PackedSpan(first, span.length, span.start, span.slot, num_dense, span.snapshots))
            here, num_blocks = slice(first, first + span.length), -(-span.end // self.sparse.block_size)
            all_ids[here], positions[here], row_of[here] = ids[index], np.arange(span.start, span.end), index
            tables[index, :num_blocks] = span.pages[:num_blocks]
            if num_dense < span.length:
                self.sparse_rows.append(SparseRows(index, first + num_dense, here.stop, span.start + num_dense))
            if self.wanted is not None:
                asked = slice(at, at + len(wanted[index]))
                rows[asked] = [first + row for row in wanted[index]]
                lengths[asked], wanted_spans[asked] = [span.start + row + 1 for row in wanted[index]], index
                is_sparse[asked] = [row >= num_dense for row in wanted[index]]
                at = asked.stop
            first += span.length
        span_table.fill(table, packed)
        self.has_dense = any(span.num_dense for span in packed)
        self.has_sparse_wanted = bool(is_sparse.any())
        self.max_dense = -(-int((lengths * (is_sparse == 0)).max(initial=1)) // self.sparse.block_size)
        self.inputs.copy_(self.host, non_blocking=True)

    def prepare(self) -> None:
        """Compute on the device what all layers share."""
        self.tokens = self.ids.long()
        self.angles = self.angles_of(self.positions)

    def lightning(self, layer: FusedLayer, q: Tensor, k: Tensor, v: Tensor, states: Tensor) -> Tensor:
        slopes = decay_slopes(layer.num_heads, q.device)
        q, k = rotate(q, k, layer.heads(self.angles.lightning), None)
        scale = layer.head_dim**-0.5
        return lightning.lightning_prefill(
            q, k, v, states, self.spans, slopes, scale, num_parallel=self.num_parallel
        ).flatten(1)

    def attend(self, layer: FusedLayer, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, pages: KVPages) -> Tensor:
        self.append(k, v, pages)
        output, scale = q.new_empty(q.shape), layer.head_dim**-0.5
        tables, (keys, values, exponents) = self.tables, (pages.k, pages.v, pages.exponents)
        if self.staged is not None:
            tables, (keys, values, exponents) = self.staged.tables, self.staged.take(pages)
        if self.has_dense:
            attention.dense_prefill(q, keys, values, tables, self.spans, scale, output, exponents=exponents)
        for span, first, end, start in self.sparse_rows:
            some, own = q[first:end], self.tables[span]
            selected = block_selection.select_prefill(some, pages.k1, pages.k2, own, start, self.sparse, scale)
            attention.prefill(
                some, keys, values, tables[span], selected, start, scale,
                output=output[first:end], exponents=exponents,
            )  # fmt: skip
        if self.staged is not None:
            self.staged.release(pages)
        for one in self.gathers:
            one.take(layer, q, pages)
        o = output.flatten(1)
        return o if gate is None else fused.norm_gate(o, None, gate, layer.eps)

    def append(self, k: Tensor, v: Tensor, pages: KVPages) -> None:
        """Write the KV cache for all rows."""
        where = (self.tables, self.spans[span_table.START.value], self.row_of, self.positions)
        pooling.append(k, v, *pages.pools, *where, pages.sparse, pages.exponents, pages.hot)

    def attend_wanted(self, layer: FusedLayer, q: Tensor, gate: Tensor | None, pages: KVPages) -> Tensor:
        """Attend with the wanted rows alone, as with rows of a decode step: q [W, H, D] → [W, H * D], gated."""
        for one in self.gathers:
            one.take(layer, q, pages, is_wanted=True)
        scale, lengths = layer.head_dim**-0.5, self.lengths
        selected = torch.full((q.shape[0], pages.k.shape[0], 1), -1, dtype=torch.int32, device=q.device)
        if self.has_sparse_wanted:
            tables = self.tables.index_select(0, self.wanted_spans)
            pooled, room = (pages.k1, pages.k2, tables, lengths, self.sparse), self.size.blocks
            selected = block_selection.select_decode(q, *pooled, scale, room, self.is_sparse)
        rows = (self.tables, lengths, self.is_sparse, selected)
        if pages.hot is not None:
            held = (pages.k, pages.v, pages.exponents)
            hot_pages.fetch(pages.hot, *held, *rows, self.max_dense, self.wanted_spans)
        return decode_attention.decode_attention(
            q, pages.k, pages.v, *rows, scale, self.max_dense,
            gate=gate, row_of=self.wanted_spans, exponents=pages.exponents, hot=pages.hot,
        ).flatten(1)  # fmt: skip


class PrefillGraph:
    """The captured graph of a pass in which all rows are dense; `forward` runs all layers over `rows`."""

    def __init__(self, rows: PrefillSpans, forward: Callable[[], Tensor], pool: Any) -> None:
        """Run once on padding only, which changes nothing but compiles the kernels, then capture."""
        self.rows = rows
        self.is_copied = torch.cuda.Event() if rows.inputs.is_cuda else None
        rows.fill((), (), ())
        rows.has_dense, rows.max_dense = True, rows.size.blocks
        self.graph, self.hidden = capture(forward, pool)

    def run(self, spans: Sequence[Span], ids: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> Tensor:
        """Return the hidden states of the wanted rows: a copy, as other graphs may use the same memory."""
        if self.is_copied is not None:
            self.is_copied.synchronize()  # the last copy may still be reading
        self.rows.fill(spans, ids, wanted)
        if self.is_copied is not None:
            self.is_copied.record()
        self.graph.replay()
        return self.hidden[: sum(len(rows) for rows in wanted)].clone()


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple

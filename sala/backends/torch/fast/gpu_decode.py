"""Decode steps on a GPU: the mixers of the decode rows of all sequences, and the CUDA graph that replays a step.

Code of `DecodeSpans` runs in Python only while a graph is captured (`DecodeGraph`); afterwards the GPU replays it. With
a sampler, the graph ends with the sampled tokens, and the next step takes them from the device: the host need not know
them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sala.backends.torch.cache import HybridCache, KVPages, Span
from sala.backends.torch.fast.gpu_layers import ROW_MULTIPLE, Angles, FusedLayer, capture
from sala.backends.torch.fast.gpu_sampling import DeviceSampler
from sala.backends.torch.kernels import block_selection, decode_attention, hot_pages, lightning, linear, pooling
from sala.backends.torch.kernels.fused import Heads
from sala.backends.torch.kernels.sampling import NUM_FIELDS, sample_rows
from sala.backends.torch.ops.lightning import decay_slopes
from sala.config import SalaConfig, SparseConfig
from sala.protocol import Row


class PageTables:
    """The page tables of all slots on the device, [slots, max_blocks]; only what has changed is sent."""

    def __init__(self, num_slots: int, max_blocks: int, device: torch.device) -> None:
        self.tables = torch.zeros(num_slots + 1, max_blocks, dtype=torch.int32, device=device)  # the last is unused
        self.spare = num_slots * max_blocks  # where padding may write
        self._sent: list[tuple[int, ...]] = [()] * num_slots

    def changes(self, spans: Sequence[Span]) -> list[tuple[int, int]]:
        """Return the entries that are new since the last step, (place, page); longer changes are sent at once."""
        width, found = self.tables.shape[1], []
        for span in spans:
            old, pages = self._sent[span.slot], span.pages
            if old == pages:
                continue
            if len(pages) == len(old) + 1 and pages[:-1] == old:
                found.append((span.slot * width + len(old), pages[-1]))
            else:
                new = torch.tensor(pages, dtype=torch.int32)
                self.tables[span.slot, : len(pages)].copy_(new, non_blocking=True)
            self._sent[span.slot] = pages
        return found


class DecodeSpans:
    """`num_spans` sequences of `count` tokens each, as device tensors only; positions of -1 are padding.

    Everything that changes from step to step is in one tensor, `inputs`: one copy brings it to the device.
    """

    def __init__(
        self,
        sparse: SparseConfig,
        angles_of: Callable[[Tensor], Angles],
        num_spans: int,
        count: int,
        max_blocks: int,
        device: torch.device,
        shared: PageTables | None = None,
        sampler: DeviceSampler | None = None,
        has_long: bool = False,
        gathered: "GatheredRows | None" = None,
    ) -> None:
        """With `shared` tables, those of the slots are taken; else the caller fills `tables`.

        Dense rows of dense_len tokens or more need `has_long`.
        """
        self.gathered = gathered
        self.features: list[Tensor] = []
        num_rows = num_spans * count
        self.sparse, self.angles_of, self.max_blocks = sparse, angles_of, max_blocks
        self.num_spans, self.count = num_spans, count
        self.max_dense = most_dense(sparse, max_blocks, has_long)
        self.num_padded = num_rows if num_rows <= linear.MAX_ROWS else -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE
        sizes = [self.num_padded, self.num_padded, *[num_spans] * 6, num_spans * NUM_FIELDS]
        self.inputs = torch.zeros(sum(sizes), dtype=torch.long, device=device)
        self.given, self.all_positions, *rest, parameters = self.inputs.split(sizes)
        self.slots, self.starts, self.sparse_from, self.advances, self.places, self.pages = rest
        self.parameters = parameters.unflatten(0, (num_spans, NUM_FIELDS))
        self.positions = self.all_positions[:num_rows]
        self.shared, self.sampler = shared, sampler
        self.tokens = self.given
        self.tables = torch.zeros(num_spans, max_blocks, dtype=torch.int32, device=device)
        self.row_of = torch.arange(num_spans, device=device).repeat_interleave(count)
        self.kept: dict[int, tuple[Tensor, Tensor, Heads]] = {}  # layer → k and v of drafts to be verified

    def prepare(self) -> None:
        """Compute on the device what all layers of a step share."""
        if self.shared is not None:
            self.shared.tables.view(-1).index_copy_(0, self.places, self.pages.int())
            self.tables = self.shared.tables[self.slots, : self.max_blocks]  # padding takes the last
        if self.sampler is not None and self.count == 1:
            last = self.sampler.buffers.last[self.slots]
            self.tokens = torch.where(self.given < 0, F.pad(last, (0, self.num_padded - self.num_spans)), self.given)
        self.angles = self.angles_of(self.all_positions)
        self.lengths = self.positions + 1
        self.is_sparse = self.positions >= self.sparse_from[self.row_of]
        self.row_tables = self.tables if self.count == 1 else self.tables[self.row_of]

    def lightning(self, layer: FusedLayer, q: Tensor, k: Tensor, v: Tensor, states: Tensor) -> Tensor:
        slopes, scale = decay_slopes(layer.num_heads, q.device), layer.head_dim**-0.5
        heads, first = layer.heads(self.angles.lightning), layer.dependents_first
        output = q.new_empty(q.shape)  # rows of padding stay uninitialised; their results are never read
        q_, k_, v_, o_ = (x[: self.num_spans * self.count] for x in (q, k, v, output))
        if self.count == 1:
            lightning.lightning_decode(q_, k_, v_, states, self.slots, slopes, scale, o_, heads, first)
            return output.flatten(1)
        q_, k_, v_, o_ = (x.unflatten(0, (self.num_spans, self.count)) for x in (q_, k_, v_, o_))
        lightning.lightning_decode(q_, k_, v_, states, self.slots, slopes, scale, o_, heads, first, keeps_states=True)
        self.kept[layer.index] = k_, v_, heads
        lightning.lightning_fold(k_, v_, states, self.slots, self.advances, slopes, heads)  # spans without drafts
        return output.flatten(1)

    def attend(self, layer: FusedLayer, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, pages: KVPages) -> Tensor:
        num_rows, scale = self.num_spans * self.count, layer.head_dim**-0.5
        output = q.new_empty(q.shape)
        q_, k_, v_ = (x[:num_rows] for x in (q, k, v))
        where = (self.tables, self.starts, self.row_of, self.positions)
        pooling.append(k_, v_, *pages.pools, *where, self.sparse, pages.exponents, pages.hot)
        selected = block_selection.select_decode(
            q_, pages.k1, pages.k2, self.row_tables, self.lengths, self.sparse, scale, self.max_blocks, self.is_sparse
        )
        if pages.hot is not None:
            rows = (self.row_tables, self.lengths, self.is_sparse, selected, self.max_dense)
            hot_pages.fetch(pages.hot, pages.k, pages.v, pages.exponents, *rows)
        decode_attention.decode_attention(
            q_, pages.k, pages.v, self.row_tables, self.lengths, self.is_sparse, selected, scale, self.max_dense,
            gate=None if gate is None else gate[:num_rows], output=output[:num_rows],
            dependents_first=layer.dependents_first, exponents=pages.exponents,
            gathered=None if self.gathered is None else self.gathered.of_layer(layer.index), hot=pages.hot,
        )  # fmt: skip
        return output.flatten(1)


def most_dense(sparse: SparseConfig, max_blocks: int, has_long: bool) -> int:
    """Return how many blocks a dense row has at most."""
    return max_blocks if has_long else min(max_blocks, -(-sparse.dense_len // sparse.block_size))


class GatheredRows:
    """What the rows of a decode step attend to: blocks [rows, L, G, W] and shares [rows, L, H, W].

    With `weights` of heads [L, H], `weighed` is the sum of the shares of each group, [rows, L, G, W].
    """

    def __init__(
        self,
        config: SalaConfig,
        sparse: SparseConfig,
        num_rows: int,
        max_blocks: int,
        has_long: bool,
        weights: Tensor | None,
        device: torch.device,
    ) -> None:
        shape, groups = (num_rows, len(config.sparse_layers)), config.num_key_value_heads
        width = max(min(sparse.num_selected, max_blocks), most_dense(sparse, max_blocks, has_long))
        self.layers = {layer: at for at, layer in enumerate(config.sparse_layers)}
        self.weights = weights
        self.blocks = torch.full((*shape, groups, width), -1, dtype=torch.int32, device=device)
        self.shares = torch.zeros(*shape, config.num_attention_heads, width, device=device)
        self.weighed = self.shares if weights is None else torch.zeros(*shape, groups, width, device=device)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        at = self.layers[layer]
        return self.blocks[:, at], self.shares[:, at]

    def weigh(self) -> None:
        if self.weights is not None:
            groups = self.blocks.shape[2]
            torch.sum((self.shares * self.weights[:, :, None]).unflatten(2, (groups, -1)), 3, out=self.weighed)


class DecodeGraph:
    """A decode step of fixed size: its inputs and, if it has a `pool`, the captured graph that computes it.

    `forward` runs all layers over `rows` on top of `cache`, `logits` the head. With a sampler, `sampled` are the tokens
    [num_spans] and `scores` the logits. The pool is memory that graphs share.
    """

    def __init__(
        self,
        rows: DecodeSpans,
        forward: Callable[[], Tensor],
        logits: Callable[[Tensor], Tensor],
        cache: HybridCache,
        pool: Any = None,
    ) -> None:
        self.rows, self.forward, self.logits, self.cache = rows, forward, logits, cache
        self.pages: list[tuple[int, ...]] = [()] * rows.num_spans
        self.graph: Any = None
        self.hidden = self.sampled = self.scores = torch.empty(0)
        device = rows.inputs.device
        if rows.sampler is not None:
            self.sampled = torch.zeros(rows.num_spans, dtype=torch.long, device=device)
            self.masks = rows.sampler.new_masks(rows.num_spans)
        self.host = torch.empty(rows.inputs.shape, dtype=torch.long, pin_memory=device.type == "cuda")
        self.is_copied = torch.cuda.Event() if device.type == "cuda" else None
        if pool is not None:
            self.fill([], [])  # padding only, which changes nothing
            self.graph, _ = capture(self.run, pool)

    def run(self) -> Tensor:
        self.hidden = self.forward()
        rows = self.rows
        if rows.gathered is not None:
            rows.gathered.weigh()
        if rows.sampler is not None:
            self.scores = self.logits(self.hidden[: rows.num_spans])
            sample_rows(self.scores, rows.parameters, rows.sampler.buffers, self.masks, self.sampled)
        return self.hidden

    def replay(self) -> Tensor:
        if self.graph is None:
            return self.run()
        self.graph.replay()
        return self.hidden

    def fill(self, spans: Sequence[Span], ids: Sequence[tuple[int, ...]], plan: Sequence[Row] = ()) -> None:
        """Set the inputs of the next step: the spans, each with its tokens; with `plan`, what is sampled for them."""
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
        values += self.changed_pages(spans)
        if rows.sampler is not None and plan:
            values += rows.sampler.prepare(plan, self.masks)
        values += [0] * (len(rows.inputs) - len(values))
        if self.is_copied is not None:
            self.is_copied.synchronize()  # the last copy may still be reading
        self.host.copy_(torch.tensor(values))
        rows.inputs.copy_(self.host, non_blocking=True)
        if self.is_copied is not None:
            self.is_copied.record()

    def changed_pages(self, spans: Sequence[Span]) -> list[int]:
        """Return the changes of the shared tables, places first; own tables are filled at once."""
        rows = self.rows
        if rows.shared is None:
            for index, span in enumerate(spans):
                if self.pages[index] != span.pages:
                    new = torch.tensor(span.pages, dtype=torch.int32)
                    rows.tables[index, : len(span.pages)].copy_(new, non_blocking=True)
                    self.pages[index] = span.pages
            return [0] * (2 * rows.num_spans)
        changes = rows.shared.changes(spans)
        spare = rows.num_spans - len(changes)
        places = [place for place, _ in changes] + [rows.shared.spare] * spare
        return places + [page for _, page in changes] + [0] * spare

    def state_updater(self, spans: Sequence[Span], indices: Sequence[int]) -> Callable[[Sequence[int]], None]:
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

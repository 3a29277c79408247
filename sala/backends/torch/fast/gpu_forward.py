"""The fused forward on an NVIDIA GPU: the model's layers with projections fused and small operations in Triton kernels.

`SalaModel` is the definition; this computes the same with less memory traffic. A batch runs in two parts that never
mix, so that results are batch-invariant: each prefill span alone (`run_prefill`), and all decode spans together
(`run_decode`), padded to a few sizes and replayed as one CUDA graph. Of a prefill span, only rows whose hidden states
are wanted go through the whole last layer; the others only write its KV cache.

| file | subject |
|---|---|
| `gpu_weights.py` | fused, packed and FP8 matrices, products with them |
| `gpu_layers.py` | one layer: norm, projections, MLP, the mixers of prefill and of decode rows |
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sala.backends.torch.batch import Batch, Span, take
from sala.backends.torch.cache import HybridCache
from sala.backends.torch.fast.gpu_layers import (
    Angles,
    DecodeSpans,
    Fp8Matrices,
    FusedLayer,
    Mixers,
    PrefillSpan,
    norm_rows,
    norm_to_fp8,
)
from sala.backends.torch.fast.gpu_weights import weight_of
from sala.backends.torch.kernels import lightning, linear
from sala.backends.torch.kernels.packed_weight import PackedWeight
from sala.backends.torch.linears import AffineEmbedding
from sala.backends.torch.model import SalaModel
from sala.backends.torch.ops.dense import frequencies, query_growth, rotations
from sala.backends.torch.ops.lightning import decay_slopes

MAX_DECODE_TOKENS = 16  # of a span: a sampled token and its drafts; longer spans are prefill
MAX_SAMPLED_ROWS = 256  # up to here logits are computed in batch-invariant pieces


class GpuForward:
    """`SalaModel.forward` and `SalaModel.logits` on a GPU, equal to the rounding of the model's precision."""

    def __init__(
        self,
        model: SalaModel,
        device: torch.device,
        max_tokens: int,
        has_graphs: bool = True,
        prefill: str = "auto",
    ) -> None:
        """Fuse the model's matrices; `prefill="fp8"` also makes the FP8 copies with which prompts are multiplied."""
        self.model, self.device, self.config = model, device, model.config
        layers: Any = model.model.layers
        self.layers = [FusedLayer(layer, index) for index, layer in enumerate(layers)]
        dims = (self.config.lightning_head_dim, self.config.head_dim)
        self.rates = [frequencies(dim, self.config.rope_theta, device) for dim in dims]
        self.head = weight_of(model.lm_head, model.model.norm.weight.dtype, device)
        embedding: Any = model.model.embed_tokens
        if isinstance(embedding, AffineEmbedding):
            if self.config.tie_word_embeddings and isinstance(self.head, PackedWeight):
                embedding.put_gpu(self.head)
            else:
                embedding.gpu_weight(embedding.dtype, device)
        self.is_fp8 = prefill == "fp8"
        for layer in self.layers[:-1] if self.is_fp8 else []:
            layer.fp8 = Fp8Matrices(layer)
        self.max_blocks = -(-max_tokens // self.config.sparse_config.block_size)
        self.has_graphs = has_graphs
        self.graphs: dict[tuple[int, int], DecodeGraph] = {}  # by sequences and tokens of each
        self.cache: HybridCache | None = None  # whose addresses the graphs hold
        self.pool: Any = None

    def can_run(self, batch: Batch) -> bool:
        return all(span.length <= MAX_DECODE_TOKENS or not span.num_drafts for span in batch.spans)

    def __call__(
        self, batch: Batch, cache: HybridCache, num_layers: int | None = None, wanted: Sequence[int] | None = None
    ) -> Tensor:
        """See `FusedForward`; `wanted` rows are named in ascending order, others skip the last layer."""
        ends = [0, *accumulate(batch.lengths)]
        rows = range(ends[-1]) if wanted is None else wanted
        edges = [bisect_left(rows, end) for end in ends]
        asked = [[row - ends[i] for row in rows[edges[i] : edges[i + 1]]] for i in range(len(batch.spans))]
        hidden: dict[int, Tensor] = {}
        for i, span in enumerate(batch.spans):
            if span.length > MAX_DECODE_TOKENS:
                here = slice(ends[i], ends[i + 1])
                positions = batch.positions[here]
                mixers = PrefillSpan(self.angles(positions), span, positions)
                hidden[i] = self.run_prefill(batch.tokens[here], mixers, cache, num_layers, asked[i])
        decode = [i for i, span in enumerate(batch.spans) if span.length <= MAX_DECODE_TOKENS]
        if not decode:
            return torch.cat(list(hidden.values())) if len(hidden) > 1 else hidden[0]
        ids = [batch.ids[ends[i] : ends[i + 1]] for i in decode]
        decoded, count = self.run_decode(batch, decode, ids, cache, num_layers)
        if not hidden:
            return take(decoded, [at * count + row for at, i in enumerate(decode) for row in asked[i]])
        for at, i in enumerate(decode):
            hidden[i] = take(decoded, [at * count + row for row in asked[i]])
        return torch.cat([hidden[i] for i in range(len(batch.spans))])

    def run_prefill(
        self, tokens: Tensor, span: PrefillSpan, cache: HybridCache, num_layers: int | None, asked: Sequence[int]
    ) -> Tensor:
        """Hidden states of the rows `asked` for of one prefill span; a few at its end skip most of the last layer."""
        length, count = len(tokens), len(asked)
        if count <= MAX_DECODE_TOKENS and list(asked) == list(range(length - count, length)):
            return self.run(tokens, span, cache, num_layers, count)
        return take(self.run(tokens, span, cache, num_layers), asked)

    def run_decode(
        self,
        batch: Batch,
        decode: Sequence[int],
        ids: Sequence[tuple[int, ...]],
        cache: HybridCache,
        num_layers: int | None,
    ) -> tuple[Tensor, int]:
        """Hidden states of all decode spans, `count` rows for each, and that count."""
        spans = [batch.spans[i] for i in decode]
        count = _bucket(max(span.length for span in spans))
        graph = self.graph_of(_bucket(len(spans)), count, cache, num_layers)
        graph.fill(spans, ids)
        hidden = graph.replay()
        if any(span.num_drafts for span in spans):
            batch.settle.append(graph.settler(spans, decode))
        return hidden, count

    def graph_of(self, num_spans: int, count: int, cache: HybridCache, num_layers: int | None) -> "DecodeGraph":
        """Return the graph of this size: captured at first use, uncaptured for drafts or for another cache."""
        sparse = self.config.sparse_config
        is_captured = self.has_graphs and num_layers is None and (self.cache is None or self.cache is cache)
        if is_captured:
            self.cache = cache
            if (num_spans, count) in self.graphs:
                return self.graphs[num_spans, count]
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
        rows = DecodeSpans(sparse, self.angles, num_spans, count, self.max_blocks, self.device)

        def forward() -> Tensor:
            rows.prepare()
            return self.run(rows.tokens, rows, cache, num_layers)

        graph = DecodeGraph(rows, forward, cache, self.pool if is_captured else None)
        if is_captured:
            self.graphs[num_spans, count] = graph
        return graph

    def run(
        self, tokens: Tensor, rows: Mixers, cache: HybridCache, num_layers: int | None, count: int | None = None
    ) -> Tensor:
        """tokens [T] → normed hidden states [T, hidden]; with `count` (prefill only), those of the last rows."""
        x = self.model.model.embed_tokens(tokens)
        if self.config.scale_emb != 1:
            x = x * self.config.scale_emb
        delta: Tensor | None = None
        layers = self.layers[:num_layers]
        is_fp8 = self.is_fp8 and isinstance(rows, PrefillSpan) and len(tokens) > linear.MAX_ROWS
        for layer in layers:
            held = cache.pages[layer.index] if layer.index in cache.pages else cache.states[layer.index]
            norm = norm_to_fp8 if is_fp8 and layer is not layers[-1] else norm_rows
            x, normed = norm(x, delta, layer.scale, layer.input_norm, layer.dependents_first)
            if count is not None and layer is layers[-1]:
                assert isinstance(normed, Tensor)
                assert isinstance(rows, PrefillSpan)
                delta = layer.mix_last(normed, rows, held, count)
                x = x[x.shape[0] - count :]
            else:
                delta = layer.mix(normed, rows, held)
            if delta is None:
                return x[:0]
            x, normed = norm(x, delta, layer.scale, layer.post_norm, layer.dependents_first)
            delta = layer.mlp(normed)
        hidden = norm_rows(x, delta, self.config.residual_scale, self.model.model.norm)[1]
        assert isinstance(hidden, Tensor)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """As `SalaModel.logits`, and batch-invariant."""
        if hidden.shape[0] > MAX_SAMPLED_ROWS or not linear.can_take(1, self.head):
            return linear.product(hidden / self.config.logit_divisor, self.head).float()
        rows = (hidden / self.config.logit_divisor).split(linear.max_rows(self.head))
        parts = [linear.product(some, self.head).float() for some in rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def angles(self, positions: Tensor) -> Angles:
        config, real = self.config, positions.clamp(min=0)
        return Angles(
            rotations(real, self.rates[0]) if config.lightning_use_rope else None,
            rotations(real, self.rates[1]) if config.attn_use_rope else None,
            None if config.attn_log_base is None else query_growth(real, config.attn_log_base),
        )


def _bucket(count: int) -> int:
    """Round up to a power of two: a few sizes of graphs serve all batches."""
    return 1 << (count - 1).bit_length()


class DecodeGraph:
    """A decode step of fixed size: its inputs and, if it has a `pool`, the captured graph that computes it.

    `forward` runs all layers over `rows` on top of `cache`. The pool is memory that graphs share.
    """

    def __init__(self, rows: DecodeSpans, forward: Callable[[], Tensor], cache: HybridCache, pool: Any = None) -> None:
        self.rows, self.forward, self.cache = rows, forward, cache
        self.pages: list[tuple[int, ...]] = [()] * rows.num_spans
        self.graph: Any = None
        self.hidden: Tensor | None = None
        is_cuda = rows.inputs.is_cuda
        self.host = torch.empty(rows.inputs.shape, dtype=torch.long, pin_memory=is_cuda)
        self.is_copied = torch.cuda.Event() if is_cuda else None
        if pool is not None:
            self.capture(pool)

    def capture(self, pool: Any) -> None:
        """Run once on padding only, which changes nothing but compiles the kernels, then capture."""
        self.rows.all_positions.fill_(-1)
        self.rows.slots.fill_(-1)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.forward()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.hidden = self.forward()

    def replay(self) -> Tensor:
        if self.graph is None:
            return self.forward()
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

"""The fused forward on an NVIDIA GPU: the model's layers with projections fused and small operations in Triton kernels.

`SalaModel` is the definition; this computes the same with less memory traffic. A batch runs in two parts that never
mix, so that results are batch-invariant: all prefill spans together (`run_prefill`), and all decode spans together
(`run_decode`). Decode steps and short prefill passes are padded to a few sizes and replayed as one CUDA graph.

| file | subject |
|---|---|
| `gpu_weights.py` | fused, packed and FP8 matrices, products with them |
| `gpu_layers.py` | one layer: norm, projections, MLP |
| `gpu_prefill.py` | the mixers of prefill spans, and the CUDA graph of a short pass |
| `gpu_staging.py` | keys and values of prefill spans, if they lie in host memory |
| `gpu_decode.py` | the mixers of decode rows, and the CUDA graph of a decode step |
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sala.backends.sources import GatherRequest, HeadWeights
from sala.backends.torch.batch import Batch, pack, take
from sala.backends.torch.cache import HybridCache, Span
from sala.backends.torch.fast.gpu_decode import DecodeGraph, DecodeSpans, GatheredRows, PageTables
from sala.backends.torch.fast.gpu_layers import Angles, Fp8Matrices, FusedLayer, Mixers, norm_rows, norm_to_fp8
from sala.backends.torch.fast.gpu_prefill import (
    GRAPH_PARALLEL,
    GRAPH_ROWS,
    PassSize,
    PrefillGather,
    PrefillGraph,
    PrefillSpans,
    prefill_gathers,
    stable_rows,
)
from sala.backends.torch.fast.gpu_sampling import DeviceSampler, SampledRows, to_host
from sala.backends.torch.fast.gpu_staging import Staged, Staging, StreamedPass, passes
from sala.backends.torch.fast.gpu_weights import weight_of
from sala.backends.torch.gather import Gather
from sala.backends.torch.host_memory import HostMemory
from sala.backends.torch.kernels import block_selection, linear, triton_kernels
from sala.backends.torch.kernels.packed_weight import PackedWeight
from sala.backends.torch.linears import AffineEmbedding
from sala.backends.torch.model import SalaModel
from sala.backends.torch.ops.dense import frequencies, query_growth, rotations
from sala.protocol import Gathered, Plan, Result

MAX_DECODE_TOKENS = 16  # of a decode span: a sampled token and its drafts; longer spans and prompts are prefill
MAX_SAMPLED_ROWS = 256  # up to here logits are computed in batch-invariant pieces
MOST_TOPKS = 4  # there are graphs for so many numbers of blocks that requests choose; others run without
MOST_COMPILERS = 8  # threads of a warm-up
CONTEXTS = (8192, 65536)  # tokens: a decode step has as many programs as its longest sequence could need


class GraphSize(NamedTuple):
    """How much a decode step has room for, and the rule of its rows."""

    spans: int
    length: int  # tokens of each
    blocks: int
    topk: int
    has_long: bool = False  # dense rows of dense_len tokens or more
    gathers: bool = False  # what the rows attend to


class GpuForward:
    """`SalaModel.forward` and `SalaModel.logits` on a GPU, equal up to rounding in the model's precision."""

    def __init__(
        self, model: SalaModel, device: torch.device, max_tokens: int, has_graphs: bool = True, prefill: str = "auto"
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
        self.feature_layers: tuple[int, ...] = ()  # after so many layers hidden states are kept, see `Batch.features`
        self.graphs: dict[GraphSize, DecodeGraph] = {}
        self.head_weights = HeadWeights.of(self.config)
        self.source_weights: Tensor | None = torch.from_numpy(self.head_weights.weights).to(device)  # for graphs
        self.prefill_graphs: dict[int, PrefillGraph] = {}  # by rows
        self.staging: Staging | None = None  # if keys and values lie in host memory
        self.cache: HybridCache | None = None  # whose addresses the graphs hold
        self.tables: PageTables | None = None
        self.sampler: DeviceSampler | None = None
        self.pool: Any = None

    def use(self, cache: HybridCache, num_slots: int) -> None:
        """Prepare for decode steps that sample on the device, on top of this cache."""
        self.cache = cache
        self.tables = PageTables(num_slots, self.max_blocks, self.device)
        self.sampler = DeviceSampler(num_slots, self.config.vocab_size, self.device)

    def stream_from(self, cache: HybridCache, memory: HostMemory) -> None:
        """Prepare for prefill on top of a cache whose keys and values lie in host memory."""
        self.staging = Staging(cache, memory, self.max_blocks, self.device)

    def weigh_heads(self, weights: HeadWeights) -> None:
        """Set the weights of heads as sources; graphs that gather with others are dropped."""
        self.head_weights = weights
        self.source_weights = None if weights.keeps_heads else torch.from_numpy(weights.weights).to(self.device)
        self.graphs = {size: graph for size, graph in self.graphs.items() if not size.gathers}

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
        is_prefill = [
            not span.num_drafts and (span.is_prompt or span.length > MAX_DECODE_TOKENS) for span in batch.spans
        ]
        prefill, decode = (
            self.by_topk(batch.spans, [i for i, one in enumerate(is_prefill) if one is kind]) for kind in (True, False)
        )
        hidden: dict[int, Tensor] = {}
        kept: dict[int, Sequence[Tensor]] = {}
        for some in passes(prefill, batch.spans, self.staging_of(cache)):
            ids, spans = [batch.ids[ends[i] : ends[i + 1]] for i in some], [batch.spans[i] for i in some]
            gathers = prefill_gathers(batch.gather, some, spans, [asked[i] for i in some], self.config)
            found, features = self.run_prefill(
                spans, ids, [asked[i] for i in some], cache, num_layers, wanted is None, gathers
            )
            hidden |= dict(zip(some, found, strict=True))
            kept |= zip(some, _by_span(features, [0, *accumulate(span.length for span in spans)], spans), strict=True)
        for some in decode:
            ids = [batch.ids[ends[i] : ends[i + 1]] for i in some]
            decoded, count, features = self.run_decode(batch, some, ids, cache, num_layers)
            spans = [batch.spans[i] for i in some]
            kept |= zip(some, _by_span(features, range(0, count * len(some), count), spans), strict=True)
            self._keep(batch, kept)
            if len(some) == len(batch.spans):
                return take(decoded, [at * count + row for at, i in enumerate(some) for row in asked[i]])
            for at, i in enumerate(some):
                hidden[i] = take(decoded, [at * count + row for row in asked[i]])
        self._keep(batch, kept)
        return torch.cat([hidden[i] for i in range(len(batch.spans))]) if len(hidden) > 1 else hidden[0]

    def _keep(self, batch: Batch, kept: Mapping[int, Sequence[Tensor]]) -> None:
        """Hand over the features of the spans, once there are those of all."""
        if batch.features is not None and len(kept) == len(batch.spans):
            ordered = [kept[i] for i in range(len(batch.spans))]
            batch.features.states = [torch.cat(pieces) for pieces in zip(*ordered, strict=True)]

    def topk_of(self, span: Span) -> int:
        return self.config.sparse_config.topk if span.topk is None else span.topk

    def by_topk(self, spans: Sequence[Span], indices: Sequence[int]) -> list[list[int]]:
        """Return the indices of spans in groups that select the same number of blocks: each runs by itself."""
        groups: dict[int, list[int]] = {}
        for index in indices:
            groups.setdefault(self.topk_of(spans[index]), []).append(index)
        return list(groups.values())

    def staging_of(self, cache: HybridCache) -> Staging | None:
        """Return the staging of a cache whose keys and values lie in host memory."""
        return self.staging if self.staging is not None and self.staging.cache.pages is cache.pages else None

    def run_prefill(
        self,
        spans: Sequence[Span],
        ids: Sequence[tuple[int, ...]],
        asked: Sequence[Sequence[int]],
        cache: HybridCache,
        num_layers: int | None = None,
        is_all: bool = False,
        gathers: "Sequence[PrefillGather]" = (),
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return hidden states of the rows `asked` for of each prefill span, or of all (`is_all`), and the features."""
        counts = [len(rows) for rows in asked]
        block = self.config.sparse_config.block_size
        size = PassSize.of(spans, None if is_all else sum(counts), block, self.stable_rows)
        graph = None
        is_dense = all(span.end <= span.sparse_from for span in spans)
        if self.has_graphs and num_layers is None and is_dense and not gathers:
            graph = self.prefill_graph_of(size, cache)
        if graph is not None:
            return graph.run(spans, ids, asked).split(counts), graph.rows.features
        sparse = self.config.sparse_config.with_topk(spans[0].topk)
        rows = PrefillSpans(sparse, self.angles, size, self.device, len(spans))
        rows.gathers = gathers
        rows.fill(spans, ids, asked)
        rows.prepare()
        if (staging := self.staging_of(cache)) is not None:
            rows.staged = StreamedPass(staging, rows, spans, self.layers[:num_layers])
        hidden = self.run(rows.tokens, rows, cache, num_layers)
        if size.wanted is not None:
            return hidden.split(counts), rows.features
        pieces = hidden.split([*(span.length for span in spans), size.rows - sum(span.length for span in spans)])
        return [take(piece, some) for piece, some in zip(pieces, asked, strict=False)], rows.features

    def prefill_graph_of(self, size: PassSize, cache: HybridCache) -> PrefillGraph | None:
        """Return the smallest graph for a dense pass of this size, captured at first use; None for other caches."""
        num_rows = next((rows for rows in self.graph_rows if size.fit(self.graph_size(rows))), None)
        if num_rows is None or self.cache not in (None, cache):
            return None
        return self.prefill_graphs.get(num_rows) or self.capture_prefill(num_rows, cache)

    @cached_property
    def stable_rows(self) -> tuple[int, ...]:
        """The numbers of rows of short passes, see `gpu_prefill.stable_rows`."""
        last, dtype = self.layers[-1], self.model.model.norm.weight.dtype
        shapes = {shape for layer in self.layers for shape in layer.shapes}
        keys_values = (2 * last.num_kv_heads * last.head_dim, self.config.hidden_size)
        return stable_rows(tuple(sorted({*shapes, keys_values})), dtype, self.device)

    @property
    def graph_rows(self) -> list[int]:
        """The numbers of rows for which passes are captured."""
        found = [num_rows for num_rows in GRAPH_ROWS if num_rows in self.stable_rows]
        if self.staging is not None:
            found = [rows for rows in found if self.staging.can_hold(self.graph_size(rows))]
        return found

    def graph_size(self, num_rows: int) -> PassSize:
        return PassSize.of_graph(num_rows, self.max_blocks, self.config.sparse_config)

    def capture_prefill(self, num_rows: int, cache: HybridCache) -> PrefillGraph:
        """Capture the graph of passes of up to `num_rows` rows, one of `GRAPH_ROWS`."""
        self.cache, self.pool = cache, self.pool or torch.cuda.graph_pool_handle()
        size = self.graph_size(num_rows)
        rows = PrefillSpans(self.config.sparse_config, self.angles, size, self.device, GRAPH_PARALLEL)
        if (staging := self.staging_of(cache)) is not None:
            rows.staged = Staged(staging, rows)

        def forward() -> Tensor:
            rows.prepare()
            return self.run(rows.tokens, rows, cache, None)

        graph = self.prefill_graphs[num_rows] = PrefillGraph(rows, forward, self.pool)
        return graph

    def run_decode(
        self,
        batch: Batch,
        decode: Sequence[int],
        ids: Sequence[tuple[int, ...]],
        cache: HybridCache,
        num_layers: int | None,
    ) -> tuple[Tensor, int, Sequence[Tensor]]:
        """Return the hidden states of all decode spans, `count` rows for each; that count; and the features."""
        spans = [batch.spans[i] for i in decode]
        count = _bucket(max(span.length for span in spans))
        places = {} if batch.gather is None else batch.gather.asked.places
        gathers = any(i in places for i in decode)
        graph = self.graph_of(self.size_of(spans, count, gathers), cache, num_layers)
        graph.fill(spans, ids)
        hidden = graph.replay()
        gathered = graph.rows.gathered
        if batch.gather is not None and gathered is not None:
            blocks, shares = gathered.blocks.cpu(), gathered.shares.cpu()
            for at, i in enumerate(decode):
                if i in places:
                    end = at * count + batch.spans[i].length
                    sampled = slice(end - 1 - batch.spans[i].num_drafts, end)
                    batch.gather.put(i, blocks[sampled], shares[sampled])
        if any(span.num_drafts for span in spans):
            batch.settle.append(graph.state_updater(spans, decode))
        return hidden, count, graph.rows.features

    def launch(self, plan: Plan) -> Callable[[], Result]:
        """Run a plan without drafts and sample on the device. Return what waits for the result."""
        assert self.cache is not None
        assert self.sampler is not None
        found: list[tuple[list[int], SampledRows]] = []  # indices into the plan, and the tokens of these rows
        is_decode = [len(row.tokens) == 1 and row.start >= row.prompt_len for row in plan.rows]
        decode, prefill = ([i for i, one in enumerate(is_decode) if one is kind] for kind in (True, False))
        gathered: list[tuple[Sequence[int], Callable[[], Sequence[Gathered | None]]]] = []
        whole = pack(plan, self.device)
        for some in self.by_topk(whole.spans, decode):
            rows, spans = tuple(plan.rows[i] for i in some), [whole.spans[i] for i in some]
            asked = GatherRequest.of(rows)
            graph = self.graph_of(self.size_of(spans, 1, asked is not None), self.cache, None)
            graph.fill(spans, [row.tokens for row in rows], rows)
            graph.replay()
            if asked is not None and graph.rows.gathered is not None:
                gathered.append((some, self.gathered_of(asked, Plan(rows), graph.rows.gathered)))
            found.append((some, SampledRows(rows, graph.sampled[: len(rows)], graph.scores[: len(rows)])))
        if prefill:
            part = Plan(tuple(plan.rows[i] for i in prefill))
            gather = Gather.of(part, self.config)
            batch = pack(part, self.device, gather=gather)
            hidden = self(batch, self.cache, None, batch.sampled_rows(part))
            if gather is not None:
                gathered.append((prefill, partial(gather.results, part, self.head_weights)))
            sampled = [i for i in prefill if plan.rows[i].sampling is not None]
            if sampled:
                rows, logits = tuple(plan.rows[i] for i in sampled), self.logits(hidden)
                found.append((sampled, SampledRows(rows, self.sampler.sample(logits, rows), logits)))

        is_done = torch.cuda.Event() if self.device.type == "cuda" else None
        if is_done is not None:
            is_done.record()

        def wait() -> Result:
            if is_done is not None:
                is_done.synchronize()  # also where nothing is sampled: no more than one step is to run ahead
            tokens = {i: token for indices, some in found for i, token in zip(indices, some.wait(), strict=True)}
            rows = enumerate(plan.rows)
            sampled = tuple(() if row.sampling is None else (tokens[i],) for i, row in rows)
            sources = {i: one for indices, some in gathered for i, one in zip(indices, some(), strict=True)}
            return Result(sampled, tuple(sources.get(i) for i in range(len(plan.rows))) if sources else ())

        return wait

    def gathered_of(
        self, asked: GatherRequest, plan: Plan, rows: GatheredRows
    ) -> Callable[[], Sequence[Gathered | None]]:
        """Begin to copy what a decode step of these rows has gathered; return what waits for it."""
        copies = [to_host(part[: len(plan.rows)]) for part in (rows.blocks, rows.weighed)]
        index = list(asked.rows)

        def wait() -> Sequence[Gathered | None]:
            blocks, shares = (copy().numpy()[index] for copy in copies)
            return asked.join(plan, blocks, shares, self.config)

        return wait

    def warm_up(
        self, cache: HybridCache, max_batch: int, max_count: int, on_progress: Callable[[int, int], None]
    ) -> None:
        """Compile what grows with the context, up to the longest, and capture the graphs of all sizes of a step."""
        began, config = time.perf_counter(), self.config
        shape = (config.sparse_config, config.num_key_value_heads, self.max_blocks, self.device)
        calls = block_selection.compile_calls(*shape) if config.sparse_layers else []
        captures = self.captures(cache, max_batch, max_count) if self.has_graphs else []
        total = len(calls) + len(captures)
        with ThreadPoolExecutor(MOST_COMPILERS) as pool:
            for done, _ in enumerate(pool.map(self._call, calls), 1):
                on_progress(done, total)
        for call in calls:  # threads that compile the same kernel first may each have kept what they compiled
            call()
        for done, capture in enumerate(captures, len(calls) + 1):
            capture()
            on_progress(done, total)
        kind = "packed" if isinstance(self.head, PackedWeight) else str(self.head.dtype)[6:]
        model = f"{config.num_hidden_layers} layers of {config.hidden_size}, {kind}, up to {max_batch} sequences"
        if self.has_graphs:
            facts = {"model": model, "gpu": torch.cuda.get_device_name(self.device)}
            triton_kernels.note_warm_up(facts | {"seconds": time.perf_counter() - began})

    def _call(self, work: Callable[[], None]) -> None:
        """Do work of a warm-up in a thread, which must select the GPU by itself."""
        with nullcontext() if self.device.type == "cpu" else torch.cuda.device(self.device):
            work()

    def captures(self, cache: HybridCache, max_batch: int, max_count: int) -> list[Callable[[], Any]]:
        """Return what captures the graphs; the largest first, so that the others reuse its memory."""
        block = self.config.sparse_config.block_size
        sizes, counts = (
            [1 << i for i in reversed(range(_bucket(most).bit_length()))] for most in (max_batch, max_count)
        )
        topk = self.config.sparse_config.topk
        decode = [
            GraphSize(size, count, context // block, topk)
            for count in counts
            for size in sizes
            for context in reversed(self.contexts)
            if count == 1 or size * count <= linear.MAX_ROWS
        ]
        prefill = [num_rows for num_rows in reversed(self.graph_rows) if num_rows not in self.prefill_graphs]
        work: list[Callable[[], Any]] = [partial(self.capture_prefill, num_rows, cache) for num_rows in prefill]
        return work + [partial(self.graph_of, size, cache, None) for size in decode]

    def forget(self, slot: int) -> None:
        assert self.sampler is not None
        self.sampler.forget(slot)

    def size_of(self, spans: Sequence[Span], count: int, gathers: bool = False) -> GraphSize:
        """Return the size of a decode step of spans that select the same number of blocks."""
        limit = self.config.sparse_config.dense_len
        has_long = any(span.end > limit and span.start < span.sparse_from for span in spans)
        return GraphSize(_bucket(len(spans)), count, self.context_of(spans), self.topk_of(spans[0]), has_long, gathers)

    def context_of(self, spans: Sequence[Span]) -> int:
        """Return how many blocks a decode step makes room for."""
        longest = max(span.end for span in spans)
        block = self.config.sparse_config.block_size
        return next((size // block for size in self.contexts if longest <= size), self.max_blocks)

    @property
    def contexts(self) -> list[int]:
        """The lengths, in tokens, for which there are graphs."""
        longest = self.max_blocks * self.config.sparse_config.block_size
        return [*(size for size in CONTEXTS if size < longest), longest]

    def graph_of(self, size: GraphSize, cache: HybridCache, num_layers: int | None) -> DecodeGraph:
        """Return the graph of this size: captured at first use, uncaptured for drafts or for another cache."""
        sparse, count = self.config.sparse_config.with_topk(size.topk), size.length
        is_own = num_layers is None and (self.cache is None or self.cache is cache)
        captured = {one.topk for one in self.graphs} | {self.config.sparse_config.topk}
        is_captured = is_own and self.has_graphs and (size.topk in captured or len(captured) < MOST_TOPKS)
        if size in self.graphs and is_own:
            return self.graphs[size]
        if is_captured:
            self.cache, self.pool = cache, self.pool or torch.cuda.graph_pool_handle()
        shared, sampler = (self.tables, self.sampler if count == 1 else None) if is_own else (None, None)
        room = (size.spans, count, size.blocks, self.device)
        gathered = None
        if size.gathers:
            num_rows, weights = size.spans * count, self.source_weights
            gathered = GatheredRows(self.config, sparse, num_rows, size.blocks, size.has_long, weights, self.device)
        rows = DecodeSpans(sparse, self.angles, *room, shared, sampler, size.has_long, gathered)

        def forward() -> Tensor:
            rows.prepare()
            return self.run(rows.tokens, rows, cache, num_layers)

        graph = DecodeGraph(rows, forward, self.logits, cache, self.pool if is_captured else None)
        if is_captured:
            self.graphs[size] = graph
        return graph

    def run(self, tokens: Tensor, rows: Mixers, cache: HybridCache, num_layers: int | None) -> Tensor:
        """tokens [T] → normed hidden states [T, hidden]; those of the wanted rows if prefill spans name them."""
        x = self.model.model.embed_tokens(tokens)
        if self.config.scale_emb != 1:
            x = x * self.config.scale_emb
        delta: Tensor | None = None
        rows.features.clear()
        cache.begin_step()
        layers = self.layers[:num_layers]
        is_fp8 = self.is_fp8 and isinstance(rows, PrefillSpans)
        for layer in layers:
            held = cache.pages[layer.index] if layer.index in cache.pages else cache.states[layer.index]
            norm = norm_to_fp8 if is_fp8 and layer is not layers[-1] else norm_rows
            x, normed = norm(x, delta, layer.scale, layer.input_norm, layer.dependents_first)
            if layer.index in self.feature_layers:
                rows.features.append(x.clone())
            if isinstance(rows, PrefillSpans) and rows.wanted is not None and layer is layers[-1]:
                assert isinstance(normed, Tensor)
                delta = layer.mix_wanted(normed, rows, held)
                x = x.index_select(0, rows.wanted)
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
        """Like `SalaModel.logits`, and batch-invariant."""
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


def _by_span(features: Sequence[Tensor], starts: Sequence[int], spans: Sequence[Span]) -> list[list[Tensor]]:
    """Return the features of each span, which begin at these rows: copies, as a graph's are overwritten."""
    pairs = zip(starts, spans, strict=False)
    return [[one[start : start + span.length].clone() for one in features] for start, span in pairs]


def _bucket(count: int) -> int:
    """Round up to a power of two: a few sizes of graphs serve all batches."""
    return 1 << (count - 1).bit_length()

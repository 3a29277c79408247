"""The fused forward on an NVIDIA GPU: the model's layers with projections fused and small operations in Triton kernels.

`SalaModel` is the definition; this computes the same with less memory traffic. A batch runs in two parts that never
mix, so that results are batch-invariant: each prefill span alone (`run_prefill`), and all decode spans together
(`run_decode`), padded to a few sizes and replayed as one CUDA graph. Of a prefill span, only rows whose hidden states
are wanted go through the whole last layer; the others only write its KV cache.

| file | subject |
|---|---|
| `gpu_weights.py` | fused, packed and FP8 matrices, products with them |
| `gpu_layers.py` | one layer: norm, projections, mixer, MLP |
| `gpu_spans.py` | the mixers of prefill and of decode rows |
| `gpu_graphs.py` | CUDA graphs of decode steps |
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sala.backends.torch.batch import Batch, take
from sala.backends.torch.cache import HybridCache
from sala.backends.torch.fast.gpu_graphs import DecodeGraph
from sala.backends.torch.fast.gpu_layers import Angles, Fp8Matrices, FusedLayer, Mixers, norm_rows, norm_to_fp8
from sala.backends.torch.fast.gpu_spans import DecodeSpans, PrefillSpan
from sala.backends.torch.fast.gpu_weights import can_take, kernels_of, product, weight_of
from sala.backends.torch.kernels import linear
from sala.backends.torch.kernels.packed_weight import PackedWeight
from sala.backends.torch.linears import AffineEmbedding
from sala.backends.torch.model import SalaModel
from sala.backends.torch.ops.dense import frequencies, query_growth, rotations

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
        self.layers = [FusedLayer(layer, index) for index, layer in enumerate(_layers(model))]
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
        asked = [[row - ends[i] for row in rows if ends[i] <= row < ends[i + 1]] for i in range(len(batch.spans))]
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

    def graph_of(self, num_spans: int, count: int, cache: HybridCache, num_layers: int | None) -> DecodeGraph:
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
        forward = partial(self._run_rows, cache=cache, num_layers=num_layers)
        graph = DecodeGraph(rows, forward, cache, self.pool if is_captured else None)
        if is_captured:
            self.graphs[num_spans, count] = graph
        return graph

    def _run_rows(self, rows: DecodeSpans, cache: HybridCache, num_layers: int | None) -> Tensor:
        return self.run(rows.tokens, rows, cache, num_layers)

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
        if hidden.shape[0] > MAX_SAMPLED_ROWS or not can_take(1, self.head):
            return product(hidden / self.config.logit_divisor, self.head).float()
        rows = (hidden / self.config.logit_divisor).split(kernels_of(self.head).max_rows(self.head))
        parts = [product(some, self.head).float() for some in rows]
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


def _layers(model: SalaModel) -> list[Any]:
    return list(model.model.layers)

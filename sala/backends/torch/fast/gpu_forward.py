"""Steps on an NVIDIA GPU: the model's layers with projections fused and small operations in Triton kernels.

`SalaModel` is the definition; here is the same with less traffic. A batch is run in two ways that never mix, so that
a row's numbers do not depend on its neighbours: long spans one at a time (`_Chunk`), and all short ones together
(`_Few`), padded to a few sizes and replayed as one CUDA graph. Of a chunk, only the rows that somebody will look at
go through the last layer; the others are remembered there, and no more. Quantized matrices stay packed: few rows are
multiplied with the codes themselves, many with a copy that is expanded for them and forgotten.

With SALA_PREFILL=fp8 the matrices have copies in FP8, by which long spans are read; the last layer and short spans are
computed as ever.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sala.backends.torch.batch import Batch, Span, take
from sala.backends.torch.cache import HybridCache, KVPages
from sala.backends.torch.kernels import (
    attention,
    block_selection,
    decode_attention,
    fp8,
    fused,
    lightning,
    linear,
    packed,
    pooling,
)
from sala.backends.torch.kernels.lightning import Heads
from sala.backends.torch.kernels.packed import PackedWeight
from sala.backends.torch.model import Layer, LightningMixer, RMSNorm, SalaModel
from sala.backends.torch.ops.lightning import decay_slopes
from sala.backends.torch.ops.rope import frequencies, query_growth, turn
from sala.backends.torch.quantized_linear import AffineEmbedding, AffineLinear
from sala.config import SparseConfig
from sala.errors import InputError

MOST_SHORT = 16  # tokens of a span that counts as short
ROWS = 64  # where rows are too many for kernels of ours, matrix products have a multiple of so many: fewer kernels
MOST_DRAWN = 256  # rows whose logits are made some at a time
PREFILLS = ("exact", "fp8")
Weight = Tensor | PackedWeight
Normed = Tensor | fp8.Rows


@dataclass(frozen=True, slots=True)
class Angles:
    """What depends on the rows' positions alone, shared by all layers."""

    lightning: tuple[Tensor, Tensor] | None
    sparse: tuple[Tensor, Tensor] | None
    growth: Tensor | None


class Mixing:
    """How rows look back: `lightning` takes projected rows, `attend` normed and rotated ones; they give [T, H * D]."""

    angles: Angles

    def lightning(self, layer: "FusedLayer", q: Tensor, k: Tensor, v: Tensor, states: Tensor, index: int) -> Tensor:
        raise NotImplementedError

    def attend(
        self, layer: "FusedLayer", q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, pages: KVPages
    ) -> Tensor:
        raise NotImplementedError


class FusedLayer:
    """A layer whose projections are one matrix each; the model's own linears become views of them."""

    def __init__(self, layer: Layer, index: int) -> None:
        mixer: Any = layer.self_attn
        self.index = index
        self.is_lightning = isinstance(mixer, LightningMixer)
        self.mixer = mixer
        gate = mixer.z_proj if self.is_lightning else mixer.o_gate
        linears = [one for one in (mixer.q_proj, mixer.k_proj, mixer.v_proj, gate) if one is not None]
        self.widths = [one.out_features for one in linears]
        self.has_gate = gate is not None
        dtype, device = layer.input_layernorm.weight.dtype, layer.input_layernorm.weight.device
        self.projection = Projection.of(linears, dtype, device)
        self.out = weight_of(mixer.o_proj, dtype, device)
        self.gate_up = Projection.of([layer.mlp.gate_proj, layer.mlp.up_proj], dtype, device)
        self.down = weight_of(layer.mlp.down_proj, dtype, device)
        self.input_norm, self.post_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.scale = layer.residual_scale
        self.num_heads, self.num_kv_heads, self.head_dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
        self.fp8: Fp8Matrices | None = None
        self.lets_in = isinstance(self.out, PackedWeight)

    def mix(self, x: Normed, rows: Mixing, past: Any) -> Tensor:
        """x [T, hidden], normed → what the mixer adds, as `added` gives it."""
        o = self.look(x, rows, past)
        if isinstance(x, Tensor):
            return added(o, self.out)
        assert self.fp8 is not None
        return fp8.product(fp8.quantize(o), self.fp8.out, o.dtype)

    def project(self, x: Normed) -> Tensor:
        """x [T, hidden], normed → queries, keys, values and gate, side by side."""
        if isinstance(x, Tensor):
            return self.projection(x)
        assert self.fp8 is not None
        out = fp8.product(x, self.fp8.projection, self.input_norm.weight.dtype)
        return out if self.projection.bias is None else out + self.projection.bias

    def look(self, x: Normed, rows: Mixing, past: Any) -> Tensor:
        """x [T, hidden], normed → what the rows found, [T, H * D]."""
        parts = self.project(x).split(self.widths, 1)
        q = parts[0].unflatten(1, (self.num_heads, self.head_dim))
        k, v = (part.unflatten(1, (self.num_kv_heads, self.head_dim)) for part in parts[1:3])
        gate = parts[3] if self.has_gate else None
        if not self.is_lightning:
            heads, growth = self.heads(rows.angles.sparse), rows.angles.growth
            return rows.attend(self, *turned(q, k, heads, growth), v, gate, past)
        if self.num_kv_heads != self.num_heads:
            shared = self.num_heads // self.num_kv_heads
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        o = rows.lightning(self, q, k, v, past, self.index)
        o_norm = _weight(self.mixer.o_norm)
        if o_norm is not None or gate is not None:
            o = fused.norm_gate(o, o_norm, gate, self.eps, self.lets_in)
        return o

    def heads(self, angles: tuple[Tensor, Tensor] | None) -> Heads:
        """What queries and keys go through before they meet."""
        norms = (_weight(self.mixer.q_norm), _weight(self.mixer.k_norm))
        return Heads(*norms, self.eps, *((None, None) if angles is None else angles))

    def mix_last(self, x: Tensor, rows: "_Chunk", past: Any, count: int) -> Tensor | None:
        """As `mix` in the last layer of a chunk: all rows are remembered, the last `count` look back."""
        angles = rows.angles
        if self.is_lightning or self.mixer.q_norm is not None or angles.sparse is not None or angles.growth is not None:
            o = self.look(x, rows, past)[x.shape[0] - count :]
        else:
            q_end, kv_end = self.widths[0], self.widths[0] + 2 * self.widths[1]
            keys_values = self.projection.rows(q_end, kv_end)
            k, v = keys_values(x).unflatten(1, (2, self.num_kv_heads, self.head_dim)).unbind(1)
            rows.append(k, v, past)
            if not count:
                return None
            tail = x[x.shape[0] - count :]
            q = self.projection.rows(0, q_end)(tail).unflatten(1, (self.num_heads, self.head_dim))
            gate = self.projection.rows(kv_end, sum(self.widths))(tail) if self.has_gate else None
            o = rows.attend_from(self, q, rows.span.end - count, gate, past)
        return added(o, self.out) if count else None

    @property
    def eps(self) -> float:
        return float(self.input_norm.eps)

    def widen(self, x: Normed) -> Tensor:
        """The MLP: x [T, hidden], normed → what it adds, as `added` gives it."""
        if isinstance(x, Tensor):
            return added(self.gate_up.silu_mul(x), self.down)
        assert self.fp8 is not None
        dtype = self.input_norm.weight.dtype
        return fp8.product(fp8.silu_mul(fp8.product(x, self.fp8.gate_up, dtype)), self.fp8.down, dtype)


class Fp8Matrices:
    """A layer's matrices in FP8."""

    def __init__(self, layer: FusedLayer) -> None:
        self.projection, self.gate_up = to_fp8(layer.projection.parts), to_fp8(layer.gate_up.parts)
        self.out, self.down = to_fp8([layer.out]), to_fp8([layer.down])


def to_fp8(parts: Sequence[Weight]) -> fp8.Rows:
    """One matrix of all rows."""
    found = [fp8.from_weight(packed.expand(part) if isinstance(part, PackedWeight) else part) for part in parts]
    if len(found) == 1:
        return found[0]
    codes = torch.cat([one.codes.view(torch.uint8) for one in found]).view(torch.float8_e4m3fn)
    return fp8.Rows(codes, torch.cat([one.scales for one in found]))


class Projection:
    """Linears that read the same rows: x [T, K] → [T, N] with all their outputs, by as few matrices as may be."""

    def __init__(self, parts: Sequence[Weight], bias: Tensor | None) -> None:
        self.parts, self.bias = list(parts), bias

    @classmethod
    def of(cls, linears: Sequence[Any], dtype: torch.dtype, device: torch.device) -> "Projection":
        """The linears go on with views of these matrices, so that nothing is held twice."""
        parts: list[Weight] = []
        for alike in _runs(linears, dtype, device):
            parts.append(fuse_packed(alike, dtype, device) if isinstance(alike[0], AffineLinear) else fuse(alike))
        if all(one.bias is None for one in linears):
            return cls(parts, None)
        pieces = [torch.zeros(one.out_features) if one.bias is None else one.bias.detach() for one in linears]
        return cls(parts, torch.cat([piece.to(device, dtype) for piece in pieces]))

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.parts) == 1:
            return product(x, self.parts[0], self.bias)
        packed_parts = [part for part in self.parts if isinstance(part, PackedWeight) and packed.can_take(len(x), part)]
        if len(packed_parts) == len(self.parts):
            out = packed.linears(x, packed_parts)
        else:
            out = torch.cat([product(x, part) for part in self.parts], 1)
        return out if self.bias is None else out + self.bias

    def rows(self, begin: int, end: int) -> "Projection":
        """Some of the outputs alone."""
        parts, first = [], 0
        for part in self.parts:
            size = _num_out(part)
            low, high = max(begin - first, 0), min(end - first, size)
            if low < high:
                parts.append(part.rows(low, high) if isinstance(part, PackedWeight) else part[low:high])
            first += size
        return Projection(parts, None if self.bias is None else self.bias[begin:end])

    def silu_mul(self, x: Tensor) -> Tensor:
        """silu(gate) * up [T, N / 2] of the outputs, the gate first."""
        if len(self.parts) == 1 and self.bias is None and can_take(x.shape[0], self.parts[0]):
            return kernels_of(self.parts[0]).linear_silu_mul(x, self.parts[0])
        return fused.silu_mul(self(x))


def turned(q: Tensor, k: Tensor, heads: Heads, growth: Tensor | None) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k [T, G, D] normed and rotated, where the model does so."""
    if heads.q_weight is None and heads.cos is None and growth is None:
        return q, k
    return fused.qk_norm_rope(q, k, *heads, growth)


def kernels_of(weight: Weight) -> Any:
    """The module whose kernels read it."""
    return packed if isinstance(weight, PackedWeight) else linear


def can_take(rows: int, weight: Weight) -> bool:
    """Whether there are kernels for so few rows."""
    return bool(kernels_of(weight).can_take(rows, weight))


def product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K] → [T, N]; a row of few has the same bits in any company."""
    if isinstance(weight, PackedWeight):
        out = packed.product(x, weight)
    elif linear.can_take(x.shape[0], weight):
        out = linear.linear(x, weight)
    else:
        return F.linear(x, weight, bias)
    return out if bias is None else out + bias


def added(x: Tensor, weight: Weight) -> Tensor:
    """As `product`, for what is added to the residual stream: for few rows in parts [S, T, N] that `_norm` adds up."""
    if not can_take(x.shape[0], weight):
        return product(x, weight)
    parts: Tensor = kernels_of(weight).split_linear(x, weight)
    return parts


def weight_of(module: Any, dtype: torch.dtype, device: torch.device) -> Weight:
    """The matrix of a linear, as the kernels read it."""
    if isinstance(module, AffineLinear):
        return module.gpu_weight(dtype, device)
    weight: Tensor = module.weight.detach()
    return weight


def fuse(linears: Sequence[nn.Linear]) -> Tensor:
    """One matrix of all rows, of which the linears then have views."""
    weight = torch.cat([one.weight.detach() for one in linears])
    for one, part in zip(linears, weight.split([one.out_features for one in linears]), strict=True):
        one.weight = nn.Parameter(part, requires_grad=False)
    return weight


def fuse_packed(linears: Sequence[AffineLinear], dtype: torch.dtype, device: torch.device) -> PackedWeight:
    """As `fuse`."""
    weight = packed.concatenate([one.gpu_weight(dtype, device) for one in linears])
    first = 0
    for one in linears:
        one.put_gpu(weight.rows(first, first + one.out_features))
        first += one.out_features
    return weight


def _runs(linears: Sequence[Any], dtype: torch.dtype, device: torch.device) -> list[list[Any]]:
    """Neighbours that can be one matrix."""
    runs: list[list[Any]] = []
    for one in linears:
        before = runs[-1][-1] if runs else None
        weights = [weight_of(each, dtype, device) for each in (before, one) if each is not None]
        is_plain = all(isinstance(weight, Tensor) for weight in weights)
        if before is not None and (is_plain or packed.are_alike(weights)):
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def _num_out(weight: Weight) -> int:
    return weight.num_out if isinstance(weight, PackedWeight) else weight.shape[0]


class GpuSteps:
    """Takes what `SalaModel.forward` takes and gives what it gives, to the rounding of the model's precision."""

    def __init__(
        self,
        model: SalaModel,
        device: torch.device,
        max_tokens: int,
        has_graphs: bool = True,
        prefill: str | None = None,
    ) -> None:
        """`prefill` is how long spans are read, "exact" or "fp8"; None: as SALA_PREFILL says."""
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
                embedding.put_gpu(embedding.packed.for_gpu(embedding.dtype, device))
        self.is_fp8 = (prefill or wanted_prefill(device)) == "fp8"
        for layer in self.layers[:-1] if self.is_fp8 else []:
            layer.fp8 = Fp8Matrices(layer)
        self.max_blocks = -(-max_tokens // self.config.sparse_config.block_size)
        self.has_graphs = has_graphs
        self.graphs: dict[tuple[int, int], _Graph] = {}
        self.cache: HybridCache | None = None  # whose addresses the graphs hold
        self.pool: Any = None

    def can_run(self, batch: Batch) -> bool:
        return all(span.length <= MOST_SHORT or not span.num_drafts for span in batch.spans)

    def __call__(
        self, batch: Batch, cache: HybridCache, num_layers: int | None = None, wanted: Sequence[int] | None = None
    ) -> Tensor:
        """Rows that nobody wants are not computed through the last layer; wanted ones are named in their order."""
        ends = [0, *accumulate(batch.lengths)]
        rows = range(ends[-1]) if wanted is None else wanted
        asked = [[row - ends[i] for row in rows if ends[i] <= row < ends[i + 1]] for i in range(len(batch.spans))]
        hidden: dict[int, Tensor] = {}
        for i, span in enumerate(batch.spans):
            if span.length > MOST_SHORT:
                here = slice(ends[i], ends[i + 1])
                chunk = _Chunk(self, span, batch.positions[here])
                hidden[i] = self.run_chunk(batch.tokens[here], chunk, cache, num_layers, asked[i])
        short = [i for i, span in enumerate(batch.spans) if span.length <= MOST_SHORT]
        if not short:
            return torch.cat(list(hidden.values())) if len(hidden) > 1 else hidden[0]
        ids = [batch.ids[ends[i] : ends[i + 1]] for i in short]
        all_short, count = self.run_short(batch, short, ids, cache, num_layers)
        if not hidden:
            return take(all_short, [at * count + row for at, i in enumerate(short) for row in asked[i]])
        for at, i in enumerate(short):
            hidden[i] = take(all_short, [at * count + row for row in asked[i]])
        return torch.cat([hidden[i] for i in range(len(batch.spans))])

    def run_chunk(
        self, tokens: Tensor, chunk: "_Chunk", cache: HybridCache, num_layers: int | None, asked: Sequence[int]
    ) -> Tensor:
        length, count = len(tokens), len(asked)
        if count <= MOST_SHORT and list(asked) == list(range(length - count, length)):
            return self.run(tokens, chunk, cache, num_layers, count)
        return take(self.run(tokens, chunk, cache, num_layers), asked)

    def run(
        self, tokens: Tensor, rows: Mixing, cache: HybridCache, num_layers: int | None, count: int | None = None
    ) -> Tensor:
        """tokens [T] → normed hidden states [T, hidden]; with `count` (of a chunk), those of the last rows alone."""
        x = self.model.model.embed_tokens(tokens)
        if self.config.scale_emb != 1:
            x = x * self.config.scale_emb
        delta: Tensor | None = None
        layers = self.layers[:num_layers]
        is_long = self.is_fp8 and isinstance(rows, _Chunk) and len(tokens) > linear.MOST_ROWS
        for layer in layers:
            past = cache.pages[layer.index] if layer.index in cache.pages else cache.states[layer.index]
            norm = _norm_to_fp8 if is_long and layer is not layers[-1] else _norm
            x, normed = norm(x, delta, layer.scale, layer.input_norm, layer.lets_in)
            if count is not None and layer is layers[-1]:
                assert isinstance(rows, _Chunk)
                assert isinstance(normed, Tensor)
                delta = layer.mix_last(normed, rows, past, count)
                x = x[x.shape[0] - count :]
            else:
                delta = layer.mix(normed, rows, past)
            if delta is None:
                return x[:0]
            x, normed = norm(x, delta, layer.scale, layer.post_norm, layer.lets_in)
            delta = layer.widen(normed)
        hidden = _norm(x, delta, self.config.residual_scale, self.model.model.norm)[1]
        assert isinstance(hidden, Tensor)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """As `SalaModel.logits`; a row's scores are the same bits in any company of a batch."""
        if hidden.shape[0] > MOST_DRAWN or not can_take(1, self.head):
            return product(hidden / self.config.logit_divisor, self.head).float()
        rows = (hidden / self.config.logit_divisor).split(kernels_of(self.head).most_rows(self.head))
        parts = [product(some, self.head).float() for some in rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    # short spans

    def run_short(
        self,
        batch: Batch,
        short: Sequence[int],
        ids: Sequence[tuple[int, ...]],
        cache: HybridCache,
        num_layers: int | None,
    ) -> tuple[Tensor, int]:
        """Hidden states of all short spans, `count` rows for each, and that count."""
        spans = [batch.spans[i] for i in short]
        count = _bucket(max(span.length for span in spans))
        graph = self.graph_of(_bucket(len(spans)), count, cache, num_layers)
        graph.fill(spans, ids)
        hidden = graph.replay()
        if any(span.num_drafts for span in spans):
            batch.settle.append(graph.settler(spans, short))
        return hidden, count

    def graph_of(self, num_spans: int, count: int, cache: HybridCache, num_layers: int | None) -> "_Graph":
        is_usual = num_layers is None and (self.cache is None or self.cache is cache)
        if not (self.has_graphs and is_usual):
            return _Graph(self, num_spans, count, cache, num_layers, is_captured=False)
        self.cache = cache
        if (num_spans, count) not in self.graphs:
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            self.graphs[num_spans, count] = _Graph(self, num_spans, count, cache, None, is_captured=True)
        return self.graphs[num_spans, count]

    def angles(self, positions: Tensor) -> Angles:
        config, real = self.config, positions.clamp(min=0)
        return Angles(
            turn(real, self.rates[0]) if config.lightning_use_rope else None,
            turn(real, self.rates[1]) if config.attn_use_rope else None,
            None if config.attn_log_base is None else query_growth(real, config.attn_log_base),
        )


class _Chunk(Mixing):
    """One span of many tokens."""

    def __init__(self, steps: GpuSteps, span: Span, positions: Tensor) -> None:
        self.steps, self.span, self.positions = steps, span, positions
        self.angles = steps.angles(positions)
        self.table = span.table
        self.row_of = torch.zeros_like(positions)
        self.start = positions[:1]

    def lightning(self, layer: FusedLayer, q: Tensor, k: Tensor, v: Tensor, states: Tensor, index: int) -> Tensor:
        slopes, slot = decay_slopes(layer.num_heads, q.device), self.span.slot
        q, k = turned(q, k, layer.heads(self.angles.lightning), None)
        output, after = lightning.lightning_prefill(q, k, v, states[slot], slopes, layer.head_dim**-0.5)
        states[slot] = after
        return output.flatten(1)

    def attend(self, layer: FusedLayer, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, pages: KVPages) -> Tensor:
        self.append(k, v, pages)
        return self.attend_from(layer, q, self.span.start, gate, pages, (k, v))

    def append(self, k: Tensor, v: Tensor, pages: KVPages) -> None:
        pooling.append(
            k, v, pages.k, pages.v, pages.k1, pages.k2, self.table[None], self.start, self.row_of, self.positions,
            pages.sparse,
        )  # fmt: skip

    def attend_from(
        self,
        layer: FusedLayer,
        q: Tensor,
        start: int,
        gate: Tensor | None,
        pages: KVPages,
        fresh: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Queries at start, start + 1, … over the pages; `fresh` keys and values are those of the chunk, if at hand."""
        scale = layer.head_dim**-0.5
        num_dense = min(max(self.span.sparse_from - start, 0), q.shape[0])
        outputs = []
        if num_dense:
            outputs.append(self.attend_dense(q[:num_dense], start, fresh, pages, scale))
        if num_dense < q.shape[0]:
            q, start = q[num_dense:], start + num_dense
            chosen = block_selection.choose_prefill(q, pages.k1, pages.k2, self.table, start, pages.sparse, scale)
            outputs.append(attention.sparse_prefill(q, pages.k, pages.v, self.table, chosen, start, scale))
        o = (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).flatten(1)
        return o if gate is None else fused.norm_gate(o, None, gate, layer.eps)

    def attend_dense(
        self, q: Tensor, start: int, fresh: tuple[Tensor, Tensor] | None, pages: KVPages, scale: float
    ) -> Tensor:
        if start or fresh is None or pages.is_narrow:
            return attention.dense_prefill(q, pages.k, pages.v, self.table, start, scale)
        k, v = fresh
        n, is_grouped = q.shape[0], q.shape[1] != k.shape[1]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k[:n], v[:n]))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped)[0].transpose(
            0, 1
        )


class _Few(Mixing):
    """`num_spans` sequences of `count` tokens each, as device tensors alone; positions of -1 are padding.

    What changes at every step lies in one tensor, `inputs`, so that it comes to the device in one piece.
    """

    def __init__(self, steps: GpuSteps, num_spans: int, count: int) -> None:
        device, num_rows = steps.device, num_spans * count
        self.steps, self.num_spans, self.count = steps, num_spans, count
        self.num_padded = num_rows if num_rows <= linear.MOST_ROWS else -(-num_rows // ROWS) * ROWS
        self.sparse: SparseConfig = steps.config.sparse_config
        sizes = [self.num_padded, self.num_padded, *[num_spans] * 4]
        self.inputs = torch.zeros(sum(sizes), dtype=torch.long, device=device)
        self.tokens, self.all_positions, self.slots, self.starts, self.sparse_from, self.advances = self.inputs.split(
            sizes
        )
        self.positions = self.all_positions[:num_rows]
        self.tables = torch.zeros(num_spans, steps.max_blocks, dtype=torch.int32, device=device)
        self.row_of = torch.arange(num_spans, device=device).repeat_interleave(count)
        self.kept: dict[int, tuple[Tensor, Tensor, Heads]] = {}

    def prepare(self) -> None:
        """What all layers share, computed on the device at every step."""
        self.angles = self.steps.angles(self.all_positions)
        self.lengths = self.positions + 1
        self.is_sparse = self.positions >= self.sparse_from[self.row_of]
        self.row_tables = self.tables if self.count == 1 else self.tables[self.row_of]

    def lightning(self, layer: FusedLayer, q: Tensor, k: Tensor, v: Tensor, states: Tensor, index: int) -> Tensor:
        slopes, scale = decay_slopes(layer.num_heads, q.device), layer.head_dim**-0.5
        heads = layer.heads(self.angles.lightning)
        output = q.new_empty(q.shape)  # nobody reads the rows of padding, which stay as they are
        q_, k_, v_, o_ = (x[: self.num_spans * self.count] for x in (q, k, v, output))
        if self.count == 1:
            lightning.lightning_decode(q_, k_, v_, states, self.slots, slopes, scale, o_, heads, layer.lets_in)
            return output.flatten(1)
        q_, k_, v_, o_ = (x.unflatten(0, (self.num_spans, self.count)) for x in (q_, k_, v_, o_))
        lightning.lightning_verify(q_, k_, v_, states, self.slots, slopes, scale, o_, heads, layer.lets_in)
        self.kept[index] = k_, v_, heads
        lightning.lightning_fold(k_, v_, states, self.slots, self.advances, slopes, heads)  # spans without drafts
        return output.flatten(1)

    def attend(self, layer: FusedLayer, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, pages: KVPages) -> Tensor:
        num_rows, scale = self.num_spans * self.count, layer.head_dim**-0.5
        output = q.new_empty(q.shape)
        q_, k_, v_ = (x[:num_rows] for x in (q, k, v))
        pooling.append(
            k_, v_, pages.k, pages.v, pages.k1, pages.k2, self.tables, self.starts, self.row_of, self.positions,
            self.sparse,
        )  # fmt: skip
        max_blocks = self.steps.max_blocks
        chosen = block_selection.choose_decode(
            q_, pages.k1, pages.k2, self.row_tables, self.lengths, self.sparse, scale, max_blocks, self.is_sparse
        )
        max_dense = min(max_blocks, -(-self.sparse.dense_len // self.sparse.block_size))
        decode_attention.decode_attention(
            q_, pages.k, pages.v, self.row_tables, self.lengths, self.is_sparse, chosen, scale, max_dense,
            gate=None if gate is None else gate[:num_rows], output=output[:num_rows], lets_in=layer.lets_in,
        )  # fmt: skip
        return output.flatten(1)


class _Graph:
    """A step of fixed size: its inputs, and the recorded work."""

    def __init__(
        self, steps: GpuSteps, num_spans: int, count: int, cache: HybridCache, num_layers: int | None, is_captured: bool
    ) -> None:
        self.steps, self.cache, self.num_layers = steps, cache, num_layers
        self.rows = _Few(steps, num_spans, count)
        self.pages: list[tuple[int, ...]] = [()] * num_spans
        self.graph: Any = None
        self.hidden: Tensor | None = None
        is_cuda = steps.device.type == "cuda"
        self.host = torch.empty(self.rows.inputs.shape, dtype=torch.long, pin_memory=is_cuda)
        self.is_copied = torch.cuda.Event() if is_cuda else None
        if is_captured:
            self.capture()

    def run(self) -> Tensor:
        self.rows.prepare()
        return self.steps.run(self.rows.tokens, self.rows, self.cache, self.num_layers)

    def capture(self) -> None:
        """Once with padding alone, which changes nothing and compiles what is needed; then record."""
        self.rows.all_positions.fill_(-1)
        self.rows.slots.fill_(-1)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=self.steps.pool):
            self.hidden = self.run()

    def replay(self) -> Tensor:
        if self.graph is None:
            return self.run()
        self.graph.replay()
        assert self.hidden is not None
        return self.hidden

    def fill(self, spans: Sequence[Span], ids: Sequence[tuple[int, ...]]) -> None:
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
        """Only what is new: the table of a million tokens has thousands of entries."""
        old = self.pages[index]
        if old == pages:
            return
        first = len(old) if len(old) < len(pages) and pages[: len(old)] == old else 0
        new = torch.tensor(pages[first:], dtype=torch.int32)
        self.rows.tables[index, first : len(pages)].copy_(new, non_blocking=True)
        self.pages[index] = pages

    def settler(self, spans: Sequence[Span], indices: Sequence[int]) -> Callable[[Sequence[int]], None]:
        """Advances the states of spans with drafts, once it is known how many tokens were accepted."""

        def settle(num_accepted: Sequence[int]) -> None:
            rows = self.rows
            counts = [num_accepted[i] if span.num_drafts else 0 for i, span in zip(indices, spans, strict=True)]
            accepted = torch.zeros_like(rows.slots)
            _copy(accepted, counts + [0] * (rows.num_spans - len(spans)))
            for index, (k, v, heads) in rows.kept.items():
                slopes = decay_slopes(k.shape[2], k.device)
                lightning.lightning_fold(k, v, self.cache.states[index], rows.slots, accepted, slopes, heads)

        return settle


def _copy(target: Tensor, values: Sequence[int]) -> None:
    target.copy_(torch.tensor(values, dtype=target.dtype), non_blocking=True)


def _bucket(count: int) -> int:
    return 1 << (count - 1).bit_length()


def wanted_prefill(device: torch.device) -> str:
    """What SALA_PREFILL says, if this device can do it."""
    name = os.environ.get("SALA_PREFILL") or "exact"
    if name not in PREFILLS:
        raise InputError("SALA_PREFILL", f"is {name[:100]!r}", "use " + " or ".join(PREFILLS))
    if name == "fp8" and not fp8.can_run(device):
        raise InputError("SALA_PREFILL", "is 'fp8', which needs a GPU of compute capability 8.9 or newer", "use exact")
    return name


def _norm_to_fp8(x: Tensor, delta: Tensor | None, scale: float, norm: RMSNorm, _: bool) -> tuple[Tensor, Normed]:
    if delta is None:
        return x, fp8.rms_norm(x, norm.weight, norm.eps)
    return fp8.add_rms_norm(x, delta, scale, norm.weight, norm.eps)


def _norm(x: Tensor, delta: Tensor | None, scale: float, norm: RMSNorm, lets_in: bool = False) -> tuple[Tensor, Normed]:
    """`delta` is what a layer adds, or the parts of it."""
    if delta is None:
        return x, fused.rms_norm(x, norm.weight, norm.eps)
    if delta.dim() == 3:
        return linear.add_partials_rms_norm(x, delta, scale, norm.weight, norm.eps, lets_in=lets_in)
    return fused.add_rms_norm(x, delta, scale, norm.weight, norm.eps)


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight


def _layers(model: SalaModel) -> list[Any]:
    return list(model.model.layers)

"""Steps on an NVIDIA GPU: the model's layers with projections fused and small operations in Triton kernels.

`SalaModel` is the definition; here is the same with less traffic. A batch is run in two ways that never mix, so that
a row's numbers do not depend on its neighbours: long spans one at a time (`_Chunk`), and all short ones together
(`_Few`), padded to fixed numbers of rows and replayed as one CUDA graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sala.backends.torch.batch import Batch, Span
from sala.backends.torch.cache import HybridCache, KVPages
from sala.backends.torch.kernels import attention, choice, decode_attention, fused, lightning, pooling
from sala.backends.torch.model import Layer, LightningMixer, RMSNorm, SalaModel
from sala.backends.torch.ops.lightning import decay_slopes
from sala.backends.torch.ops.rope import query_growth, rope_angles
from sala.config import SparseConfig

MOST_SHORT = 16  # tokens of a span that counts as short
ROWS = 32  # matrix products of short spans have a multiple of so many rows: one kernel, one order of sums


@dataclass(frozen=True, slots=True)
class Angles:
    """What depends on the rows' positions alone, shared by all layers."""

    lightning: tuple[Tensor, Tensor] | None
    sparse: tuple[Tensor, Tensor] | None
    growth: Tensor | None


class Mixing:
    """How rows look back: `lightning` and `attend` take projected rows and give [T, H * D]."""

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
        linears = [linear for linear in (mixer.q_proj, mixer.k_proj, mixer.v_proj, gate) if linear is not None]
        self.widths = [linear.out_features for linear in linears]
        self.has_gate = gate is not None
        self.weight, self.bias = fuse(linears)
        self.out = mixer.o_proj
        self.gate_up, _ = fuse([layer.mlp.gate_proj, layer.mlp.up_proj])
        self.down = layer.mlp.down_proj
        self.input_norm, self.post_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.scale = layer.residual_scale
        self.num_heads, self.num_kv_heads, self.head_dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim

    def mix(self, x: Tensor, rows: Mixing, past: Any) -> Tensor:
        """x [T, hidden], normed → what the mixer adds."""
        parts = F.linear(x, self.weight, self.bias).split(self.widths, 1)
        q = parts[0].unflatten(1, (self.num_heads, self.head_dim))
        k, v = (part.unflatten(1, (self.num_kv_heads, self.head_dim)) for part in parts[1:3])
        gate = parts[3] if self.has_gate else None
        angles = rows.angles.lightning if self.is_lightning else rows.angles.sparse
        growth = None if self.is_lightning else rows.angles.growth
        cos, sin = (None, None) if angles is None else angles
        norms = (_weight(self.mixer.q_norm), _weight(self.mixer.k_norm))
        if norms[0] is not None or cos is not None or growth is not None:
            q, k = fused.qk_norm_rope(q, k, *norms, self.eps, cos, sin, growth)
        if not self.is_lightning:
            return F.linear(rows.attend(self, q, k, v, gate, past), self.out.weight)
        if self.num_kv_heads != self.num_heads:
            shared = self.num_heads // self.num_kv_heads
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        o = rows.lightning(self, q, k, v, past, self.index)
        o_norm = _weight(self.mixer.o_norm)
        if o_norm is not None or gate is not None:
            o = fused.norm_gate(o, o_norm, gate, self.eps)
        return F.linear(o, self.out.weight)

    @property
    def eps(self) -> float:
        return float(self.input_norm.eps)

    def widen(self, x: Tensor) -> Tensor:
        """The MLP: x [T, hidden], normed → what it adds."""
        return F.linear(fused.silu_mul(F.linear(x, self.gate_up)), self.down.weight)


def fuse(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One matrix of all rows; the linears go on with views of it, so that nothing is held twice."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    for linear, part in zip(linears, weight.split([linear.out_features for linear in linears]), strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)
    if all(linear.bias is None for linear in linears):
        return weight, None
    pieces = [weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
    return weight, torch.cat([piece.detach() for piece in pieces])


class GpuSteps:
    """Takes what `SalaModel.forward` takes and gives what it gives, to the rounding of the model's precision."""

    def __init__(self, model: SalaModel, device: torch.device, max_tokens: int, has_graphs: bool = True) -> None:
        self.model, self.device, self.config = model, device, model.config
        self.layers = [FusedLayer(layer, index) for index, layer in enumerate(_layers(model))]
        self.max_blocks = -(-max_tokens // self.config.sparse_config.block_size)
        self.has_graphs = has_graphs
        self.graphs: dict[tuple[int, int], _Graph] = {}
        self.cache: HybridCache | None = None  # whose addresses the graphs hold
        self.pool: Any = None

    def can_run(self, batch: Batch) -> bool:
        return all(span.length <= MOST_SHORT or not span.num_drafts for span in batch.spans)

    def __call__(self, batch: Batch, cache: HybridCache, num_layers: int | None = None) -> Tensor:
        ends = torch.tensor([0, *batch.lengths]).cumsum(0).tolist()
        short = [i for i, span in enumerate(batch.spans) if span.length <= MOST_SHORT]
        hidden: list[Tensor | None] = [None] * len(batch.spans)
        for i, span in enumerate(batch.spans):
            if span.length > MOST_SHORT:
                tokens = batch.tokens[ends[i] : ends[i + 1]]
                hidden[i] = self.run(
                    tokens, _Chunk(self, span, batch.positions[ends[i] : ends[i + 1]]), cache, num_layers
                )
        if short:
            pieces = [batch.tokens[ends[i] : ends[i + 1]] for i in short]
            for i, rows in zip(short, self.run_short(batch, short, pieces, cache, num_layers), strict=True):
                hidden[i] = rows
        parts = [part for part in hidden if part is not None]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def run(self, tokens: Tensor, rows: Mixing, cache: HybridCache, num_layers: int | None) -> Tensor:
        """tokens [T] → normed hidden states [T, hidden]."""
        x = self.model.model.embed_tokens(tokens)
        if self.config.scale_emb != 1:
            x = x * self.config.scale_emb
        delta: Tensor | None = None
        for layer in self.layers[:num_layers]:
            past = cache.pages[layer.index] if layer.index in cache.pages else cache.states[layer.index]
            x, normed = _norm(x, delta, layer.scale, layer.input_norm)
            x, normed = _norm(x, layer.mix(normed, rows, past), layer.scale, layer.post_norm)
            delta = layer.widen(normed)
        return _norm(x, delta, self.config.residual_scale, self.model.model.norm)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """As `SalaModel.logits`; a row's scores are the same bits in any company of up to 32."""
        count = hidden.shape[0]
        padded = F.pad(hidden, (0, 0, 0, -count % ROWS)) if count < ROWS else hidden
        return self.model.logits(padded)[:count]

    # short spans

    def run_short(
        self, batch: Batch, short: Sequence[int], tokens: Sequence[Tensor], cache: HybridCache, num_layers: int | None
    ) -> list[Tensor]:
        spans = [batch.spans[i] for i in short]
        count = _bucket(max(span.length for span in spans))
        graph = self.graph_of(_bucket(len(spans)), count, cache, num_layers)
        graph.fill(spans, tokens)
        hidden = graph.replay()
        if any(span.num_drafts for span in spans):
            batch.settle.append(graph.settler(spans, short))
        return [hidden[i * count : i * count + span.length] for i, span in enumerate(spans)]

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
            rope_angles(real, config.lightning_head_dim, config.rope_theta) if config.lightning_use_rope else None,
            rope_angles(real, config.head_dim, config.rope_theta) if config.attn_use_rope else None,
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
        output, after = lightning.lightning_prefill(q, k, v, states[slot], slopes, layer.head_dim**-0.5)
        states[slot] = after
        return output.flatten(1)

    def attend(self, layer: FusedLayer, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, pages: KVPages) -> Tensor:
        span, scale = self.span, layer.head_dim**-0.5
        pooling.append(
            k, v, pages.k, pages.v, pages.k1, pages.k2, self.table[None], self.start, self.row_of, self.positions,
            pages.sparse,
        )  # fmt: skip
        num_dense = min(max(span.sparse_from - span.start, 0), span.length)
        outputs = []
        if num_dense:
            outputs.append(self.attend_dense(q[:num_dense], k, v, pages, scale))
        if num_dense < span.length:
            q, start = q[num_dense:], span.start + num_dense
            chosen = choice.choose_prefill(q, pages.k1, pages.k2, self.table, start, pages.sparse, scale)
            outputs.append(attention.sparse_prefill(q, pages.k, pages.v, self.table, chosen, start, scale))
        o = (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).flatten(1)
        return o if gate is None else fused.norm_gate(o, None, gate, layer.eps)

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, pages: KVPages, scale: float) -> Tensor:
        if self.span.start:
            return attention.dense_prefill(q, pages.k, pages.v, self.table, self.span.start, scale)
        n, is_grouped = q.shape[0], q.shape[1] != k.shape[1]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k[:n], v[:n]))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped)[0].transpose(
            0, 1
        )


class _Few(Mixing):
    """`num_spans` sequences of `count` tokens each, as device tensors alone; positions of -1 are padding."""

    def __init__(self, steps: GpuSteps, num_spans: int, count: int) -> None:
        device, num_rows = steps.device, num_spans * count
        self.steps, self.num_spans, self.count = steps, num_spans, count
        self.sparse: SparseConfig = steps.config.sparse_config
        self.tokens, self.positions = (torch.zeros(num_rows, dtype=torch.long, device=device) for _ in range(2))
        self.slots, self.starts, self.sparse_from, self.advances = (
            torch.zeros(num_spans, dtype=torch.long, device=device) for _ in range(4)
        )
        self.tables = torch.zeros(num_spans, steps.max_blocks, dtype=torch.int32, device=device)
        self.row_of = torch.arange(num_spans, device=device).repeat_interleave(count)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def prepare(self) -> None:
        """What all layers share, computed on the device at every step."""
        self.angles = self.steps.angles(self.positions)
        self.lengths = self.positions + 1
        self.is_sparse = self.positions >= self.sparse_from[self.row_of]
        self.row_tables = self.tables if self.count == 1 else self.tables[self.row_of]

    def lightning(self, layer: FusedLayer, q: Tensor, k: Tensor, v: Tensor, states: Tensor, index: int) -> Tensor:
        slopes, scale = decay_slopes(layer.num_heads, q.device), layer.head_dim**-0.5
        num_rows = self.num_spans * self.count
        if self.count == 1:
            q_, k_, v_ = (x[:num_rows] for x in (q, k, v))
            return self.pad(lightning.lightning_decode(q_, k_, v_, states, self.slots, slopes, scale).flatten(1), q)
        q_, k_, v_ = (x[:num_rows].unflatten(0, (self.num_spans, self.count)) for x in (q, k, v))
        output = lightning.lightning_verify(q_, k_, v_, states, self.slots, slopes, scale)
        self.kept[index] = k_, v_
        lightning.lightning_fold(k_, v_, states, self.slots, self.advances, slopes)  # spans without drafts
        return self.pad(output.flatten(2).flatten(0, 1), q)

    def attend(self, layer: FusedLayer, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, pages: KVPages) -> Tensor:
        num_rows, scale = self.num_spans * self.count, layer.head_dim**-0.5
        q_, k_, v_ = (x[:num_rows] for x in (q, k, v))
        pooling.append(
            k_, v_, pages.k, pages.v, pages.k1, pages.k2, self.tables, self.starts, self.row_of, self.positions,
            self.sparse,
        )  # fmt: skip
        max_blocks = self.steps.max_blocks
        chosen = choice.choose_decode(
            q_, pages.k1, pages.k2, self.row_tables, self.lengths, self.sparse, scale, max_blocks, self.is_sparse
        )
        max_dense = min(max_blocks, -(-self.sparse.dense_len // self.sparse.block_size))
        o = decode_attention.decode_attention(
            q_, pages.k, pages.v, self.row_tables, self.lengths, self.is_sparse, chosen, scale, max_dense,
            gate=None if gate is None else gate[:num_rows],
        )  # fmt: skip
        return self.pad(o.flatten(1), q)

    def pad(self, o: Tensor, like: Tensor) -> Tensor:
        """As many rows as the matrix products have."""
        return F.pad(o, (0, 0, 0, like.shape[0] - o.shape[0])) if o.shape[0] < like.shape[0] else o


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
        if is_captured:
            self.capture()

    def run(self) -> Tensor:
        self.rows.prepare()
        padding = -(self.rows.num_spans * self.rows.count) % ROWS
        tokens = F.pad(self.rows.tokens, (0, padding))
        if padding:  # rows that only the matrix products see
            self.rows.angles = _padded(self.rows.angles, padding)
        return self.steps.run(tokens, self.rows, self.cache, self.num_layers)

    def capture(self) -> None:
        """Once with padding alone, which changes nothing and compiles what is needed; then record."""
        self.rows.positions.fill_(-1)
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

    def fill(self, spans: Sequence[Span], tokens: Sequence[Tensor]) -> None:
        rows, count = self.rows, self.rows.count
        spare = rows.num_spans - len(spans)
        ids, positions = [], []
        for span in spans:
            rest = count - span.length
            positions += [*range(span.start, span.end), *([-1] * rest)]
        for span, some in zip(spans, tokens, strict=True):
            ids.append(F.pad(some, (0, count - span.length)))
        slots = [span.slot for span in spans] + [-1] * spare
        starts = [span.start for span in spans] + [0] * spare
        regimes = [span.sparse_from for span in spans] + [0] * spare
        advances = [0 if span.num_drafts else span.length for span in spans] + [0] * spare
        positions += [-1] * (spare * count)
        _copy(rows.positions, positions)
        for target, values in ((rows.slots, slots), (rows.starts, starts), (rows.advances, advances)):
            _copy(target, values)
        _copy(rows.sparse_from, [min(value, 1 << 40) for value in regimes])
        rows.tokens[: len(spans) * count] = torch.cat(ids)
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
            for index, (k, v) in rows.kept.items():
                slopes = decay_slopes(k.shape[2], k.device)
                lightning.lightning_fold(k, v, self.cache.states[index], rows.slots, accepted, slopes)

        return settle


def _copy(target: Tensor, values: Sequence[int]) -> None:
    target.copy_(torch.tensor(values, dtype=target.dtype), non_blocking=True)


def _padded(angles: Angles, padding: int) -> Angles:
    def pad(pair: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
        return None if pair is None else (F.pad(pair[0], (0, 0, 0, padding)), F.pad(pair[1], (0, 0, 0, padding)))

    growth = None if angles.growth is None else F.pad(angles.growth, (0, padding))
    return Angles(pad(angles.lightning), pad(angles.sparse), growth)


def _bucket(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _norm(x: Tensor, delta: Tensor | None, scale: float, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    if delta is None:
        return x, fused.rms_norm(x, norm.weight, norm.eps)
    return fused.add_rms_norm(x, delta, scale, norm.weight, norm.eps)


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight


def _layers(model: SalaModel) -> list[Any]:
    return list(model.model.layers)

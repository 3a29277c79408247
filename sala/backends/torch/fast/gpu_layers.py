"""One layer of the GPU path: fused projections, mixer, MLP, and the norms between them.

A layer computes what `model.Layer` defines with fewer passes over memory. Its mixers are those of one prefill span
(`PrefillSpan`), or of the decode rows of all sequences (`DecodeSpans`): `lightning` takes projected rows, `attend`
normed and rotated ones → [T, H * D].

A breakpoint in `PrefillSpan` is hit for every chunk of a prompt. Code of `DecodeSpans` runs in Python only while a
graph is captured (`gpu_forward.DecodeGraph`); afterwards the GPU replays it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sala.backends.torch.batch import Span
from sala.backends.torch.cache import KVPages
from sala.backends.torch.fast.gpu_weights import Projection, residual_product, to_fp8, weight_of
from sala.backends.torch.kernels import (
    attention,
    block_selection,
    decode_attention,
    fp8,
    fused,
    lightning,
    linear,
    pooling,
)
from sala.backends.torch.kernels.fused import Heads
from sala.backends.torch.kernels.packed_weight import PackedWeight
from sala.backends.torch.model import Layer, LightningMixer, RMSNorm
from sala.backends.torch.ops.lightning import decay_slopes
from sala.config import SparseConfig

Normed = Tensor | fp8.Rows
ROW_MULTIPLE = 64  # rows beyond those of our product kernels are padded to a multiple: fewer library kernels in use


@dataclass(frozen=True, slots=True)
class Angles:
    """What depends on the positions of the rows only and is shared by all layers."""

    lightning: tuple[Tensor, Tensor] | None  # cos and sin of RoPE, [T, D] each
    sparse: tuple[Tensor, Tensor] | None
    growth: Tensor | None  # factors of the queries, [T]


class FusedLayer:
    """A layer whose projections that read the same rows are one matrix; the model's own linears become views of it.

    `cache` of the methods is the layer's part of the cache: `KVPages` of a sparse layer, states of a lightning layer.
    """

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
        self.dependents_first = isinstance(self.out, PackedWeight)  # see kernels/pdl.py

    def mix(self, x: Normed, rows: "Mixers", cache: Any) -> Tensor:
        """x [T, hidden], normed → the mixer's addition to the residual stream, as `residual_product` returns it."""
        o = self.attend(x, rows, cache)
        if isinstance(x, Tensor):
            return residual_product(o, self.out)
        assert self.fp8 is not None
        return fp8.product(fp8.quantize(o), self.fp8.out, o.dtype)

    def project(self, x: Normed) -> Tensor:
        """x [T, hidden], normed → queries, keys, values and gate, side by side."""
        if isinstance(x, Tensor):
            return self.projection(x)
        assert self.fp8 is not None
        out = fp8.product(x, self.fp8.projection, self.input_norm.weight.dtype)
        return out if self.projection.bias is None else out + self.projection.bias

    def attend(self, x: Normed, rows: "Mixers", cache: Any) -> Tensor:
        """x [T, hidden], normed → the mixer's output before the output projection, [T, H * D]."""
        parts = self.project(x).split(self.widths, 1)
        q = parts[0].unflatten(1, (self.num_heads, self.head_dim))
        k, v = (part.unflatten(1, (self.num_kv_heads, self.head_dim)) for part in parts[1:3])
        gate = parts[3] if self.has_gate else None
        if not self.is_lightning:
            heads, growth = self.heads(rows.angles.sparse), rows.angles.growth
            return rows.attend(self, *rotate(q, k, heads, growth), v, gate, cache)
        if self.num_kv_heads != self.num_heads:
            shared = self.num_heads // self.num_kv_heads
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        o = rows.lightning(self, q, k, v, cache)
        o_norm = _weight(self.mixer.o_norm)
        if o_norm is not None or gate is not None:
            o = fused.norm_gate(o, o_norm, gate, self.eps, self.dependents_first)
        return o

    def heads(self, angles: tuple[Tensor, Tensor] | None) -> Heads:
        """Return the norms and rotations of queries and keys."""
        norms = (_weight(self.mixer.q_norm), _weight(self.mixer.k_norm))
        return Heads(*norms, self.eps, *((None, None) if angles is None else angles))

    def mix_last(self, x: Tensor, rows: "PrefillSpan", cache: Any, count: int) -> Tensor | None:
        """`mix` in the last layer of a prefill span: all rows enter the KV cache, only the last `count` attend."""
        angles = rows.angles
        if self.is_lightning or self.mixer.q_norm is not None or angles.sparse is not None or angles.growth is not None:
            o = self.attend(x, rows, cache)[x.shape[0] - count :]
        else:
            q_end, kv_end = self.widths[0], self.widths[0] + 2 * self.widths[1]
            keys_values = self.projection.rows(q_end, kv_end)
            k, v = keys_values(x).unflatten(1, (2, self.num_kv_heads, self.head_dim)).unbind(1)
            rows.append(k, v, cache)
            if not count:
                return None
            tail = x[x.shape[0] - count :]
            q = self.projection.rows(0, q_end)(tail).unflatten(1, (self.num_heads, self.head_dim))
            gate = self.projection.rows(kv_end, sum(self.widths))(tail) if self.has_gate else None
            o = rows.attend_last(self, q, gate, cache)
        return residual_product(o, self.out) if count else None

    @property
    def eps(self) -> float:
        return float(self.input_norm.eps)

    def mlp(self, x: Normed) -> Tensor:
        """x [T, hidden], normed → the MLP's addition to the residual stream, as `residual_product` returns it."""
        if isinstance(x, Tensor):
            return residual_product(self.gate_up.silu_mul(x), self.down)
        assert self.fp8 is not None
        dtype = self.input_norm.weight.dtype
        return fp8.product(fp8.silu_mul(fp8.product(x, self.fp8.gate_up, dtype)), self.fp8.down, dtype)


class Fp8Matrices:
    """FP8 copies of a layer's matrices."""

    def __init__(self, layer: FusedLayer) -> None:
        self.projection, self.gate_up = to_fp8(layer.projection.parts), to_fp8(layer.gate_up.parts)
        self.out, self.down = to_fp8([layer.out]), to_fp8([layer.down])


def rotate(q: Tensor, k: Tensor, heads: Heads, growth: Tensor | None) -> tuple[Tensor, Tensor]:
    """Norm and rotate q [T, H, D] and k [T, G, D] where the model does so."""
    if heads.q_weight is None and heads.cos is None and growth is None:
        return q, k
    return fused.qk_norm_rope(q, k, heads, growth)


def norm_to_fp8(x: Tensor, delta: Tensor | None, scale: float, norm: RMSNorm, _: bool) -> tuple[Tensor, Normed]:
    """`norm_rows` of prefill rows, the normed rows in FP8."""
    if delta is None:
        return x, fp8.rms_norm(x, norm.weight, norm.eps)
    return fp8.add_rms_norm(x, delta, scale, norm.weight, norm.eps)


def norm_rows(
    x: Tensor, delta: Tensor | None, scale: float, norm: RMSNorm, dependents_first: bool = False
) -> tuple[Tensor, Normed]:
    """Add `delta` * scale to the residual stream x and norm it → both; `delta` may be partial sums [S, T, hidden]."""
    if delta is None:
        return x, fused.rms_norm(x, norm.weight, norm.eps)
    if delta.dim() == 3:
        return linear.add_partials_rms_norm(x, delta, scale, norm.weight, norm.eps, dependents_first=dependents_first)
    return fused.add_rms_norm(x, delta, scale, norm.weight, norm.eps)


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight


class PrefillSpan:
    """One span of a prompt.

    In the last layer it writes the KV cache with `append` and then attends with its last rows alone.
    """

    def __init__(self, angles: Angles, span: Span, positions: Tensor) -> None:
        self.angles, self.span, self.positions = angles, span, positions
        self.table = span.table
        self.row_of = torch.zeros_like(positions)
        self.start = positions[:1]

    def lightning(self, layer: FusedLayer, q: Tensor, k: Tensor, v: Tensor, states: Tensor) -> Tensor:
        slopes, slot = decay_slopes(layer.num_heads, q.device), self.span.slot
        q, k = rotate(q, k, layer.heads(self.angles.lightning), None)
        output, after = lightning.lightning_prefill(q, k, v, states[slot], slopes, layer.head_dim**-0.5)
        states[slot] = after
        return output.flatten(1)

    def attend(self, layer: FusedLayer, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, pages: KVPages) -> Tensor:
        self.append(k, v, pages)
        return self.attend_last(layer, q, gate, pages, (k, v))

    def append(self, k: Tensor, v: Tensor, pages: KVPages) -> None:
        where = (self.table[None], self.start, self.row_of, self.positions)
        pooling.append(k, v, *pages.pools, *where, pages.sparse)

    def attend_last(
        self,
        layer: FusedLayer,
        q: Tensor,
        gate: Tensor | None,
        pages: KVPages,
        fresh: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attend with the last rows of the span; `fresh` are its keys and values, which the pages hold, if at hand."""
        start = self.span.end - q.shape[0]
        scale = layer.head_dim**-0.5
        num_dense = min(max(self.span.sparse_from - start, 0), q.shape[0])
        outputs = []
        if num_dense:
            outputs.append(self._attend_dense(q[:num_dense], start, fresh, pages, scale))
        if num_dense < q.shape[0]:
            q, start = q[num_dense:], start + num_dense
            selected = block_selection.select_prefill(q, pages.k1, pages.k2, self.table, start, pages.sparse, scale)
            outputs.append(attention.prefill(q, pages.k, pages.v, self.table, selected, start, scale))
        o = (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).flatten(1)
        return o if gate is None else fused.norm_gate(o, None, gate, layer.eps)

    def _attend_dense(
        self, q: Tensor, start: int, fresh: tuple[Tensor, Tensor] | None, pages: KVPages, scale: float
    ) -> Tensor:
        if start or fresh is None or pages.is_fp8:
            return attention.prefill(q, pages.k, pages.v, self.table, None, start, scale)
        k, v = fresh
        n, is_grouped = q.shape[0], q.shape[1] != k.shape[1]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k[:n], v[:n]))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped)
        return o[0].transpose(0, 1)


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
    ) -> None:
        num_rows = num_spans * count
        self.sparse, self.angles_of, self.max_blocks = sparse, angles_of, max_blocks
        self.num_spans, self.count = num_spans, count
        self.num_padded = num_rows if num_rows <= linear.MAX_ROWS else -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE
        sizes = [self.num_padded, self.num_padded, *[num_spans] * 4]
        self.inputs = torch.zeros(sum(sizes), dtype=torch.long, device=device)
        self.tokens, self.all_positions, *rest = self.inputs.split(sizes)
        self.slots, self.starts, self.sparse_from, self.advances = rest
        self.positions = self.all_positions[:num_rows]
        self.tables = torch.zeros(num_spans, max_blocks, dtype=torch.int32, device=device)
        self.row_of = torch.arange(num_spans, device=device).repeat_interleave(count)
        self.kept: dict[int, tuple[Tensor, Tensor, Heads]] = {}  # layer → k and v of drafts to be verified

    def prepare(self) -> None:
        """Compute on the device what all layers of a step share."""
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
        pooling.append(k_, v_, *pages.pools, *where, self.sparse)
        selected = block_selection.select_decode(
            q_, pages.k1, pages.k2, self.row_tables, self.lengths, self.sparse, scale, self.max_blocks, self.is_sparse
        )
        max_dense = min(self.max_blocks, -(-self.sparse.dense_len // self.sparse.block_size))
        decode_attention.decode_attention(
            q_, pages.k, pages.v, self.row_tables, self.lengths, self.is_sparse, selected, scale, max_dense,
            gate=None if gate is None else gate[:num_rows], output=output[:num_rows],
            dependents_first=layer.dependents_first,
        )  # fmt: skip
        return output.flatten(1)


Mixers = PrefillSpan | DecodeSpans

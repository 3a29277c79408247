"""One layer of the GPU path: fused projections, mixer, MLP, and the norms between them.

A layer computes what `model.Layer` defines with fewer passes over memory. Its mixers are those of prefill spans
(`gpu_prefill.py`), or of the decode rows of all sequences (`gpu_decode.py`).
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sala.backends.torch.cache import KVPages
from sala.backends.torch.fast.gpu_weights import Projection, residual_product, to_fp8, weight_of
from sala.backends.torch.kernels import fp8, fused, linear
from sala.backends.torch.kernels.fused import Heads
from sala.backends.torch.kernels.packed_weight import PackedWeight
from sala.backends.torch.model import Layer, LightningMixer, RMSNorm

Normed = Tensor | fp8.Rows
ROW_MULTIPLE = 64  # rows beyond those of our product kernels are padded to a multiple: fewer library kernels in use


@dataclass(frozen=True, slots=True)
class Angles:
    """What depends on the positions of the rows only and is shared by all layers."""

    lightning: tuple[Tensor, Tensor] | None  # cos and sin of RoPE, [T, D] each
    sparse: tuple[Tensor, Tensor] | None
    growth: Tensor | None  # factors of the queries, [T]


class Mixers(Protocol):
    """What mixes the rows of a step: those of all prefill spans, or the decode rows of all sequences."""

    angles: Angles
    features: list[Tensor]  # the residual stream after the layers that are asked for

    def lightning(self, layer: "FusedLayer", q: Tensor, k: Tensor, v: Tensor, states: Tensor) -> Tensor:
        """Projected q, k, v [T, H, D] → [T, H * D]; advances the states."""
        ...

    def attend(
        self, layer: "FusedLayer", q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, pages: KVPages
    ) -> Tensor:
        """Normed and rotated q [T, H, D] and k, v [T, G, D] → [T, H * D], gated; extends the KV cache."""
        ...


class WantedRows(Mixers, Protocol):
    """Mixers that may write the KV cache for all rows and attend with the wanted ones alone."""

    wanted: Tensor | None  # indices of rows

    def append(self, k: Tensor, v: Tensor, pages: KVPages) -> None: ...

    def attend_wanted(self, layer: "FusedLayer", q: Tensor, gate: Tensor | None, pages: KVPages) -> Tensor: ...


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

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The shapes [outputs, inputs] of the matrices that rows are multiplied with."""
        width, hidden = self.num_heads * self.head_dim, self.input_norm.weight.shape[0]
        joined = [(size, hidden) for size in (*self.projection.sizes, *self.gate_up.sizes)]
        return [*joined, (hidden, width), (hidden, sum(self.gate_up.sizes) // 2)]

    def mix(self, x: Normed, rows: Mixers, cache: Any) -> Tensor:
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

    def attend(self, x: Normed, rows: Mixers, cache: Any) -> Tensor:
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

    def mix_wanted(self, x: Tensor, rows: WantedRows, cache: Any) -> Tensor | None:
        """`mix` in the last layer of prefill spans: all rows enter the KV cache, only wanted ones attend, if any."""
        wanted = rows.wanted
        assert wanted is not None
        if not self.can_skip_rows(rows.angles):
            o = self.attend(x, rows, cache).index_select(0, wanted)
            return residual_product(o, self.out) if len(wanted) else None
        q_end, kv_end = self.widths[0], self.widths[0] + 2 * self.widths[1]
        keys_values = self.projection.rows(q_end, kv_end)
        k, v = keys_values(x).unflatten(1, (2, self.num_kv_heads, self.head_dim)).unbind(1)
        rows.append(k, v, cache)
        if not len(wanted):
            return None
        x = x.index_select(0, wanted)
        q = self.projection.rows(0, q_end)(x).unflatten(1, (self.num_heads, self.head_dim))
        gate = self.projection.rows(kv_end, sum(self.widths))(x) if self.has_gate else None
        return residual_product(rows.attend_wanted(self, q, gate, cache), self.out)

    def can_skip_rows(self, angles: Angles) -> bool:
        """Return whether keys and values do without the queries of their rows, see `mix_wanted`."""
        is_plain = angles.sparse is None and angles.growth is None
        return is_plain and not self.is_lightning and self.mixer.q_norm is None

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


def capture(forward: Callable[[], Tensor], pool: Any) -> tuple[Any, Tensor]:
    """Run once, which compiles the kernels, then capture → the graph and the tensor that it fills.

    The pool is memory that graphs share. Other threads may use the GPU meanwhile. The garbage collector is off: if it
    freed memory of an earlier model, the capture would fail.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward()
    torch.cuda.current_stream().wait_stream(side)
    graph, was_collecting = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            hidden = forward()
    finally:
        if was_collecting:
            gc.enable()
    return graph, hidden


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight

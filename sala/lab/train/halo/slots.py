"""Sample from a dense or hybrid model in thousands of slots at once, each at its own position (continuous batching).

A finished slot starts the next text at once, so that no row idles. All state is on the device; on a GPU a step is a
CUDA graph, and the host checks for finished rows only every few steps. Attention is dense at every length.

This is not the engine, whose host code takes longer per token than a small teacher computes, and which does not
follow weights that are being trained.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sala.backends.torch.model import LightningMixer, SalaModel
from sala.backends.torch.ops.dense import apply_rope, query_growth, rms_norm, rope_angles
from sala.backends.torch.ops.lightning import decay_slopes, lightning_step
from sala.config import SalaConfig
from sala.lab.bench.measure import capture
from sala.lab.train.losses import compiled

_MIN_TEMPERATURE = 1e-3  # sampling is greedy below this temperature
_PAGE = 64  # tokens


class _LayerWeights(NamedTuple):
    """Weights of a layer; projections with the same input (queries, keys, values, output gate) are concatenated."""

    input_norm: Tensor
    projections: Tensor
    bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output_norm: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class _Shape(NamedTuple):
    """The geometry of a layer's mixer."""

    heads: int
    groups: int
    dim: int
    eps: float
    scale: float  # residual scale
    theta: float | None  # of RoPE
    is_lightning: bool


class SlotUpdate(NamedTuple):
    """A new task for a slot: `tokens` are written at `start`, and decoding continues at `position`."""

    slot: int
    start: int
    position: int
    tokens: Sequence[int]
    limit: int  # length at which the row is full
    temperature: float
    min_p: float


class Slots:
    """`num_slots` rows of at most `length` tokens. A row stops at an end token that it sampled, or when full."""

    def __init__(self, model: SalaModel, num_slots: int, length: int, ends: Sequence[int], seed: int) -> None:
        device = model.model.norm.weight.device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model, self.length, self.dtype, self.device = model, length, dtype, device
        self.shapes = [_shape(layer.self_attn, model.config) for layer in model.model.layers]
        self.layers = [_weights(layer, dtype) for layer in model.model.layers]
        self.head = model.lm_head.weight.detach().float()  # bf16 logits would often tie
        self.caches = [_new_cache(shape, num_slots, length, dtype, device) for shape in self.shapes]
        self.tokens = torch.zeros((num_slots, length), dtype=torch.long, device=device)
        whole: dict[str, Any] = {"dtype": torch.long, "device": device}
        self.position, self.given = torch.zeros(num_slots, **whole), torch.zeros(num_slots, **whole)
        self.limit = torch.full((num_slots,), length, **whole)
        self.temperature = torch.ones(num_slots, 1, device=device)
        self.min_p = torch.zeros(num_slots, 1, device=device)
        self.is_active = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.rows, self.ends = torch.arange(num_slots, device=device), torch.tensor(list(ends), **whole)
        self.generator = torch.Generator(device).manual_seed(seed)
        functions: Any = (_project, _recur, _finish_layer, _sample)
        self.project, self.recur, self.finish_layer, self.sample = (compiled(one, device.type) for one in functions)
        self.attend = pick_attention(device, model.kernels)
        self.graph: Any = None  # False if it cannot be captured

    @property
    def has_states(self) -> bool:
        """Whether a row can only continue where it stopped: a recurrent state holds no earlier positions."""
        return any(shape.is_lightning for shape in self.shapes)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the model's current weights."""
        for weights, layer in zip(self.layers, self.model.model.layers, strict=True):
            for target, value in zip(weights, _weights(layer, self.dtype), strict=True):
                if target is not None and value is not None:
                    target.copy_(value)

    def update(self, changes: Sequence[SlotUpdate]) -> None:
        """Start new tasks in slots."""
        if not changes:
            return
        width = max(len(change.tokens) for change in changes)
        ids = torch.zeros((len(changes), width), dtype=torch.long)
        for at, change in enumerate(changes):
            ids[at, : len(change.tokens)] = torch.tensor(change.tokens)
        table = torch.tensor([[c.slot, c.start, c.position, len(c.tokens), c.limit] for c in changes]).to(self.device)
        floats = torch.tensor([[c.temperature, c.min_p] for c in changes]).to(self.device)
        slots, starts, positions, sizes, limits = table.unbind(1)
        column = torch.arange(width, device=self.device)
        is_token = column < sizes[:, None]
        targets = (starts[:, None] + column).clamp(max=self.length - 1)
        self.tokens[slots[:, None].expand_as(targets)[is_token], targets[is_token]] = ids.to(self.device)[is_token]
        self.position[slots], self.given[slots], self.limit[slots] = positions, starts + sizes, limits
        self.temperature[slots], self.min_p[slots] = floats[:, :1], floats[:, 1:]
        self.is_active[slots] = True

    @torch.no_grad()
    def run(self, num_steps: int) -> None:
        if self.device.type == "cuda" and self.graph is None:
            self._capture()
        for _ in range(num_steps):
            if self.graph:
                self.graph.replay()
            else:
                self._step()

    def _capture(self) -> None:
        """Compile and warm up without advancing any row, then capture one step."""
        active = self.is_active.clone()
        self.is_active.zero_()
        try:
            self.graph = capture(self._step, self.generator)
        except RuntimeError as error:
            warnings.warn(f"no CUDA graph, which is slower: {error}", stacklevel=2)
            self.graph = False
        self.is_active.copy_(active)

    def _step(self) -> None:
        """Advance every active row by one token: a given one, or a sampled one."""
        logits = self._forward(self.tokens[self.rows, self.position])
        noise = torch.empty_like(logits).exponential_(generator=self.generator)
        sampled = self.sample(logits, self.temperature, self.min_p, noise)
        after = (self.position + 1).clamp(max=self.length - 1)
        known = self.tokens[self.rows, after]
        is_given = after < self.given
        chosen = torch.where(is_given | ~self.is_active, known, sampled)
        self.tokens[self.rows, after] = chosen
        is_end = (chosen[:, None] == self.ends).any(1) & ~is_given
        is_full = after + 1 >= self.limit
        self.position.copy_(torch.where(self.is_active, after, self.position))
        self.is_active &= ~(is_end | is_full)

    def _forward(self, tokens: Tensor) -> Tensor:
        """Append tokens [R] to the caches at each row's position, and return the logits [R, vocabulary] in fp32."""
        model = self.model
        config = model.config
        angles: dict[Any, tuple[Any, Any]] = {
            (shape.dim, shape.theta): rope_angles(self.position, shape.dim, shape.theta)
            for shape in self.shapes
            if shape.theta is not None
        }
        growth = None if config.attn_log_base is None else query_growth(self.position, config.attn_log_base)
        x = model.model.embed_tokens(tokens).float() * config.scale_emb
        page, place = self.rows * -(-self.length // _PAGE) + self.position // _PAGE, self.position % _PAGE
        for weights, shape, cache in zip(self.layers, self.shapes, self.caches, strict=True):
            cos, sin = angles.get((shape.dim, shape.theta), (None, None))
            q, k, v, gate = self.project(x, weights, cos, sin, growth, shape)
            if shape.is_lightning:
                o = self.recur(q, k, v, cache[0], self.position, self.is_active)
            else:
                cache[0][:, page, place], cache[1][:, page, place] = k.transpose(0, 1), v.transpose(0, 1)
                o = self.attend(q, *cache, self.position + 1)
            x = self.finish_layer(x, o.flatten(1), gate, weights, shape)
        hidden = rms_norm(x, model.model.norm.weight, config.rms_norm_eps) / config.logit_divisor
        return F.linear(hidden, self.head)


def _shape(mixer: Any, config: SalaConfig) -> _Shape:
    heads, is_lightning = (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim), isinstance(mixer, LightningMixer)
    return _Shape(*heads, config.rms_norm_eps, config.residual_scale, mixer.rope_theta, is_lightning)


def _new_cache(
    shape: _Shape, num_slots: int, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Return a recurrent state in fp32, or keys and values in pages [G, P, B, D]: those of a slot follow each other."""
    if shape.is_lightning:
        return (torch.zeros(num_slots, shape.heads, shape.dim, shape.dim, device=device),)
    size = (shape.groups, num_slots * -(-length // _PAGE), _PAGE, shape.dim)
    return torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device)


def _weights(layer: Any, dtype: torch.dtype) -> _LayerWeights:
    mixer, mlp = layer.self_attn, layer.mlp
    inputs = [mixer.q_proj, mixer.k_proj, mixer.v_proj]
    bias = None if mixer.q_proj.bias is None else [part.bias for part in inputs]
    gate = mixer.z_proj if isinstance(mixer, LightningMixer) else mixer.o_gate
    if gate is not None:
        inputs.append(gate)
        if bias is not None:
            bias.append(torch.zeros(gate.weight.shape[0], device=gate.weight.device))
    norms = [getattr(mixer, name, None) for name in ("q_norm", "k_norm", "o_norm")]
    q_norm, k_norm, output_norm = (None if norm is None else norm.weight.detach().clone() for norm in norms)
    return _LayerWeights(
        input_norm=layer.input_layernorm.weight.detach().clone(),
        projections=torch.cat([part.weight for part in inputs]).detach().to(dtype),
        bias=None if bias is None else torch.cat(bias).detach().to(dtype),
        q_norm=q_norm,
        k_norm=k_norm,
        output_norm=output_norm,
        output=mixer.o_proj.weight.detach().to(dtype, copy=True),
        mlp_norm=layer.post_attention_layernorm.weight.detach().clone(),
        gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach().to(dtype),
        down=mlp.down_proj.weight.detach().to(dtype, copy=True),
    )


def _project(
    x: Tensor, weights: _LayerWeights, cos: Tensor | None, sin: Tensor | None, growth: Tensor | None, shape: _Shape
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q [R, H, D], k and v [R, G, D] and the output gate [R, H * D] of x [R, hidden] in fp32."""
    inner = rms_norm(x, weights.input_norm, shape.eps).to(weights.projections.dtype)
    found = F.linear(inner, weights.projections, weights.bias)
    width = (shape.heads + 2 * shape.groups) * shape.dim
    gate = torch.sigmoid(found[:, width:]) if found.shape[1] > width else None
    q, k, v = found[:, :width].unflatten(1, (-1, shape.dim)).split([shape.heads, shape.groups, shape.groups], 1)
    if weights.q_norm is not None and weights.k_norm is not None:
        q, k = rms_norm(q, weights.q_norm, shape.eps), rms_norm(k, weights.k_norm, shape.eps)
    if cos is not None and sin is not None:
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    if growth is not None and not shape.is_lightning:
        q = q * growth[:, None, None]
    return q.to(inner.dtype).contiguous(), k.to(inner.dtype).contiguous(), v.contiguous(), gate


def _recur(q: Tensor, k: Tensor, v: Tensor, state: Tensor, position: Tensor, is_active: Tensor) -> Tensor:
    """Advance the states [R, H, D, D] of active rows by one token, and return the outputs [R, H, D].

    A row at position 0 starts from an empty state.
    """
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    before = torch.where((position > 0)[:, None, None, None], state, 0.0)
    out, after = lightning_step(q, k, v, before, decay_slopes(q.shape[1], q.device), q.shape[-1] ** -0.5)
    state.copy_(torch.where(is_active[:, None, None, None], after, state))
    return out.to(q.dtype)


def _finish_layer(x: Tensor, o: Tensor, gate: Tensor | None, weights: _LayerWeights, shape: _Shape) -> Tensor:
    """Return the output of the layer: norm and gate, output projection, MLP and residuals."""
    if weights.output_norm is not None:
        o = rms_norm(o, weights.output_norm, shape.eps).to(o.dtype)
    if gate is not None:
        o = o * gate
    x = x + F.linear(o.to(weights.output.dtype), weights.output).float() * shape.scale
    inner = rms_norm(x, weights.mlp_norm, shape.eps).to(weights.gate_up.dtype)
    gate, up = F.linear(inner, weights.gate_up).chunk(2, 1)
    return x + F.linear(F.silu(gate) * up, weights.down).float() * shape.scale


def _sample(logits: Tensor, temperature: Tensor, min_p: Tensor, noise: Tensor) -> Tensor:
    """Sample tokens with the Gumbel trick, from those at least `min_p` times as likely as the likeliest."""
    is_greedy = temperature < _MIN_TEMPERATURE
    scaled = logits / torch.where(is_greedy, 1.0, temperature)
    floor = scaled.amax(-1, keepdim=True) + min_p.clamp(min=math.exp(-80)).log()
    noisy = torch.where(is_greedy, scaled, scaled - noise.log())
    return noisy.masked_fill(scaled < floor, float("-inf")).argmax(-1)


def pick_attention(device: torch.device, kernels: str) -> Callable[..., Tensor]:
    return attend_pages if device.type == "cuda" and kernels != "off" else attend_masked


def attend_pages(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """Return what `attend_masked` does, by the engine's kernel."""
    from sala.backends.torch.kernels.decode_attention import decode_attention

    tables = torch.arange(keys.shape[1], device=q.device).view(len(q), -1)
    is_sparse = torch.zeros(len(q), dtype=torch.bool, device=q.device)
    selected = torch.full((len(q), len(keys), 1), -1, dtype=torch.int32, device=q.device)
    return decode_attention(q, keys, values, tables, lengths, is_sparse, selected, q.shape[-1] ** -0.5, tables.shape[1])


def attend_masked(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """Return the attention [R, H, D] of q [R, H, D] over the first lengths[r] tokens of each slot's pages."""
    size = int(lengths.max())
    mask = torch.arange(size, device=q.device) < lengths[:, None, None, None]
    grouped = q.unflatten(1, (len(keys), -1))
    keys, values = (x.flatten(1, 2).unflatten(1, (len(q), -1))[:, :, :size].transpose(0, 1) for x in (keys, values))
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).flatten(1, 2)

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
from torch import Tensor, nn

from sala.backends.torch.batch import Sequences
from sala.backends.torch.model import LightningMixer, SalaModel, SparseMixer
from sala.backends.torch.ops.dense import grow_queries, rms_norm
from sala.backends.torch.ops.lightning import decay_slopes, lightning_step
from sala.config import SalaConfig
from sala.lab.bench.measure import capture
from sala.lab.train.losses import compiled

_MIN_TEMPERATURE = 1e-3  # sampling is greedy below this temperature
_PAGE = 64  # tokens


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
        self.model, self.length, self.device = model, length, device
        self.layers = _new_layers(model.config, dtype, device)
        self.refresh()
        self.head = model.lm_head.weight.detach().float()  # bf16 logits would often tie
        self.caches = [_new_cache(layer.self_attn, num_slots, length, dtype, device) for layer in self.layers]
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
        return bool(self.model.config.lightning_layers)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the model's current weights."""
        for name, target in self.layers.named_parameters():
            module, _, leaf = name.rpartition(".")
            target.copy_(getattr(self.model.model.layers.get_submodule(module), leaf))

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
        config = self.model.config
        batch = Sequences(tokens, self.position, ())
        x = self.model.model.embed_tokens(tokens).float() * config.scale_emb
        page, place = self.rows * -(-self.length // _PAGE) + self.position // _PAGE, self.position % _PAGE
        for layer, cache in zip(self.layers, self.caches, strict=True):
            q, k, v, gate = self.project(layer, x, batch)
            if isinstance(layer.self_attn, LightningMixer):
                o = self.recur(q, k, v, cache[0], self.position, self.is_active)
            else:
                cache[0][:, page, place], cache[1][:, page, place] = k.transpose(0, 1), v.transpose(0, 1)
                o = self.attend(q, *cache, self.position + 1)
            x = self.finish_layer(layer, x, o.flatten(1), gate)
        hidden = rms_norm(x, self.model.model.norm.weight, config.rms_norm_eps) / config.logit_divisor
        return F.linear(hidden, self.head)


def _new_layers(config: SalaConfig, dtype: torch.dtype, device: torch.device) -> nn.ModuleList:
    """Return the layers of a model with linears in `dtype`, norms in fp32, and no values yet."""
    with torch.device("meta"):
        layers = SalaModel(config).model.layers.requires_grad_(False)
    for module in layers.modules():
        if isinstance(module, nn.Linear):
            module.to(dtype)
    return layers.to_empty(device=device)


def _new_cache(mixer: Any, num_slots: int, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Return a recurrent state in fp32, or keys and values in pages [G, P, B, D]: those of a slot follow each other."""
    if isinstance(mixer, LightningMixer):
        return (torch.zeros(num_slots, mixer.num_heads, mixer.head_dim, mixer.head_dim, device=device),)
    size = (mixer.num_kv_heads, num_slots * -(-length // _PAGE), _PAGE, mixer.head_dim)
    return torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device)


def _project(layer: Any, x: Tensor, batch: Sequences) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q [R, H, D], k and v [R, G, D] and the output gate [R, H * D] of x [R, hidden] in fp32."""
    mixer = layer.self_attn
    inner = layer.input_layernorm(x).to(mixer.q_proj.weight.dtype)
    q, k, v = mixer.project(inner, batch)
    if isinstance(mixer, SparseMixer) and mixer.log_base is not None:
        q = grow_queries(q, batch.positions, mixer.log_base)
    gate = mixer.z_proj if isinstance(mixer, LightningMixer) else mixer.o_gate
    q, k, v = (part.to(inner.dtype).contiguous() for part in (q, k, v))
    return q, k, v, None if gate is None else torch.sigmoid(gate(inner))


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


def _finish_layer(layer: Any, x: Tensor, o: Tensor, gate: Tensor | None) -> Tensor:
    """Return the output of the layer: norm and gate, output projection, MLP and residuals."""
    mixer = layer.self_attn
    if isinstance(mixer, LightningMixer) and mixer.o_norm is not None:
        o = mixer.o_norm(o).to(o.dtype)
    if gate is not None:
        o = o * gate
    dtype = mixer.o_proj.weight.dtype
    x = x + mixer.o_proj(o.to(dtype)).float() * layer.residual_scale
    return x + layer.mlp(layer.post_attention_layernorm(x).to(dtype)).float() * layer.residual_scale


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

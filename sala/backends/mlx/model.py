"""The model, in the order in which a token travels: embed, 32 times (mix, then MLP), norm, head.

Parameter names are those of the released checkpoint. `batch` says which tokens belong together, where their pages and
states are in the `cache`, and by which `ops` the mixers run. There is no mode: prefill chunks and decode steps are both
*n tokens from a position*. Nothing is computed here: the executor evaluates the arrays that are returned.
"""

from collections.abc import Callable

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from sala.backends.mlx.batch import Batch
from sala.backends.mlx.cache import HybridCache, KVPages, Span
from sala.backends.mlx.ops import Ops, dense
from sala.backends.mlx.ops.lightning import decay_slopes
from sala.config import SalaConfig


def linear(num_in: int, num_out: int, bias: bool = False) -> Linear:
    return Linear(num_in, num_out, bias=bias)


def angles_of(batch: Batch, dim: int, theta: float) -> tuple[mx.array, mx.array]:
    """RoPE's cos and sin [T, dim / 2]; all layers of a batch share them."""
    if (dim, theta) not in batch.angles:
        batch.angles[dim, theta] = dense.rope_angles(batch.positions, dim, theta)
    return batch.angles[dim, theta]


class Mixer(Module):
    """The projections that both mixers have: queries, keys and values, normed and rotated, and the output."""

    def __init__(
        self, config: SalaConfig, num_heads: int, num_kv_heads: int, dim: int, has_norm: bool, has_rope: bool
    ) -> None:
        super().__init__()
        hidden, width, kv_width = config.hidden_size, num_heads * dim, num_kv_heads * dim
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, dim
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if has_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if has_norm else None
        self.q_proj = linear(hidden, width, config.attention_bias)
        self.k_proj = linear(hidden, kv_width, config.attention_bias)
        self.v_proj = linear(hidden, kv_width, config.attention_bias)
        self.o_proj = linear(width, hidden)
        self.rope_theta = config.rope_theta if has_rope else None

    def project(self, x: mx.array, batch: Batch) -> tuple[mx.array, mx.array, mx.array]:
        """x [T, hidden] → q [T, H, D], k and v [T, G, D]."""
        q = self.q_proj(x).reshape(-1, self.num_heads, self.head_dim)
        k = self.k_proj(x).reshape(-1, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).reshape(-1, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_theta is not None:
            angles = angles_of(batch, self.head_dim, self.rope_theta)
            q, k = dense.apply_rope(q, *angles), dense.apply_rope(k, *angles)
        return q, k, v


class LightningMixer(Mixer):
    """Linear attention with a fixed decay per head, whose state is one matrix of constant size."""

    def __init__(self, config: SalaConfig) -> None:
        heads, kv_heads, dim = config.lightning_nh, config.lightning_nkv, config.lightning_head_dim
        super().__init__(config, heads, kv_heads, dim, config.qk_norm, config.lightning_use_rope)
        width, hidden = heads * dim, config.hidden_size
        self.o_norm = RMSNorm(width, config.rms_norm_eps) if config.use_output_norm else None
        self.z_proj = linear(hidden, width) if config.use_output_gate else None
        self._slopes = decay_slopes(self.num_heads)  # the underscore keeps it out of the parameters

    def __call__(self, x: mx.array, batch: Batch, states: list[mx.array]) -> mx.array:
        q, k, v = self.project(x, batch)
        if self.num_kv_heads != self.num_heads:
            shared = self.num_heads // self.num_kv_heads
            k, v = mx.repeat(k, shared, axis=1), mx.repeat(v, shared, axis=1)
        slots = batch.slots
        before = states[slots[0]][None] if len(slots) == 1 else mx.stack([states[slot] for slot in slots])
        o, after = batch.ops.lightning_ragged(q, k, v, before, batch.lengths, self._slopes, self.head_dim**-0.5)
        batch.advance(states, after, self._slopes, batch.split(k), batch.split(v))
        o = o.reshape(x.shape[0], -1).astype(x.dtype)
        if self.o_norm is not None:
            o = self.o_norm(o)
        if self.z_proj is not None:
            o = dense.sigmoid_gate(self.z_proj(x), o)
        return self.o_proj(o)


class SparseMixer(Mixer):
    """InfLLM-v2: exact softmax attention over the few blocks that a query selects; dense while the context is short."""

    def __init__(self, config: SalaConfig) -> None:
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        super().__init__(config, heads, kv_heads, dim, config.attn_qk_norm, config.attn_use_rope)
        self.sparse = config.sparse_config
        self.log_base = config.attn_log_base
        self.o_gate = linear(config.hidden_size, heads * dim) if config.attn_use_output_gate else None

    def __call__(self, x: mx.array, batch: Batch, pages: KVPages) -> mx.array:
        q, k, v = self.project(x, batch)
        if self.log_base is not None:
            q = dense.grow_queries(q, batch.positions, self.log_base)
        pages.append(batch.spans, batch.indices, k, v)  # of all rows, before any of them reads
        rows = [self.attend(index, row, pages, batch) for index, row in enumerate(batch.split(q))]
        o = (rows[0] if len(rows) == 1 else mx.concatenate(rows)).reshape(x.shape[0], -1)
        if self.o_gate is not None:
            o = dense.sigmoid_gate(self.o_gate(x), o)
        return self.o_proj(o)

    def attend(self, index: int, q: mx.array, pages: KVPages, batch: Batch) -> mx.array:
        """One row, whose keys are in its pages: q [n, H, D] → [n, H, D]. The regime may change inside the row."""
        span, scale, selected = batch.spans[index], self.head_dim**-0.5, None
        num_dense = min(max(span.sparse_from - span.start, 0), span.length)
        outputs = []
        if num_dense:
            keys, values = pages.keys_values(span, span.start + num_dense)
            outputs.append(dense.dense_attention(q[:num_dense], keys, values, scale))
        if num_dense < span.length:
            q_sparse, positions = q[num_dense:], mx.arange(span.start + num_dense, span.end, dtype=mx.int32)
            selected = mx.stop_gradient(self.select(span, q_sparse, positions, pages, batch.ops))  # no gradient in ids
            attend = batch.ops.sparse_attention
            outputs.append(attend(q_sparse, pages.k, pages.v, span.table, selected, positions, scale))
        if batch.gather is not None:
            batch.gather.add(index, span, q, selected, pages, scale)
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def select(self, span: Span, q: mx.array, positions: mx.array, pages: KVPages, ops: Ops) -> mx.array:
        """Return the blocks that each query attends to, [n, G, C]."""
        k1, k2 = pages.pooled(span, span.end)
        num_blocks = -(-span.end // self.sparse.block_size)
        sparse = self.sparse.with_topk(span.topk)
        return ops.select_blocks(q, k1, k2, positions, num_blocks, sparse, self.head_dim**-0.5)


class MLP(Module):
    def __init__(self, config: SalaConfig) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(dense.silu_gate(self.gate_proj(x), self.up_proj(x)))


MIXERS: dict[str, Callable[[SalaConfig], Module]] = {"sparse": SparseMixer, "lightning": LightningMixer}


class Layer(Module):
    def __init__(self, config: SalaConfig, mixer: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MIXERS[mixer](config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.residual_scale = config.residual_scale

    def __call__(self, x: mx.array, batch: Batch, cache: KVPages | list[mx.array]) -> mx.array:
        x = dense.add_scaled(x, self.self_attn(self.input_layernorm(x), batch, cache), self.residual_scale)
        return dense.add_scaled(x, self.mlp(self.post_attention_layernorm(x)), self.residual_scale)


class Decoder(Module):
    def __init__(self, config: SalaConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Layer(config, mixer) for mixer in config.mixers]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class SalaModel(Module):
    """Tokens in, hidden states out; `logits` turns selected hidden states into scores of the vocabulary."""

    def __init__(self, config: SalaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)

    def __call__(self, batch: Batch, cache: HybridCache, num_layers: int | None = None) -> mx.array:
        """Run the batch's tokens on top of the cache, which it extends → normed hidden states [T, hidden].

        With `num_layers`, only the first layers run, which is how drafts are made.
        """
        x = self.model.embed_tokens(batch.tokens) * self.config.scale_emb
        for index, layer in enumerate(self.model.layers[:num_layers]):
            held = cache.pages[index] if index in cache.pages else cache.states[index]
            x = layer(x, batch, held)
        return self.model.norm(x)

    def logits(self, hidden: mx.array) -> mx.array:
        """hidden [n, hidden] → [n, vocab] in fp32."""
        return self.lm_head(hidden / self.config.logit_divisor).astype(mx.float32)

"""The model, in the order in which a token travels: embed, 32 times (mix, then MLP), norm, head.

Parameter names are those of the released checkpoint. `batch` says which tokens belong together, where their pages and
states are in the `cache`, and by which `ops` the mixers run. There is no mode: prefill chunks and decode steps are both
*n tokens from a position*. Without a cache the batch is whole sequences, through which gradients flow.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sala.backends.torch.batch import Batch, Sequences
from sala.backends.torch.cache import HybridCache, KVPages, Span
from sala.backends.torch.ops import Ops, dense
from sala.backends.torch.ops.lightning import decay_slopes, lightning_ragged
from sala.backends.torch.ops.sparse import select_blocks
from sala.config import SalaConfig


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return dense.rms_norm(x, self.weight, self.eps)


def linear(num_in: int, num_out: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(num_in, num_out, bias=bias)


def angles_of(batch: Batch | Sequences, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """RoPE's cos and sin [T, dim]; all layers of a batch share them."""
    if isinstance(batch, Sequences):
        return dense.rope_angles(batch.positions, dim, theta)
    if (dim, theta) not in batch.angles:
        batch.angles[dim, theta] = dense.rope_angles(batch.positions, dim, theta)
    return batch.angles[dim, theta]


class Mixer(nn.Module):
    """The projections that both mixers have: queries, keys and values, normed and rotated, and the output."""

    def __init__(
        self, config: SalaConfig, num_heads: int, num_kv_heads: int, dim: int, has_norm: bool, has_rope: bool
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, dim
        self.rope_theta = config.rope_theta if has_rope else None
        hidden, has_bias = config.hidden_size, config.attention_bias
        self.q_proj = linear(hidden, num_heads * dim, has_bias)
        self.k_proj = linear(hidden, num_kv_heads * dim, has_bias)
        self.v_proj = linear(hidden, num_kv_heads * dim, has_bias)
        self.o_proj = linear(num_heads * dim, hidden)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if has_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if has_norm else None

    def project(self, x: Tensor, batch: Batch | Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden] → q [T, H, D], k and v [T, G, D]."""
        q = self.q_proj(x).view(-1, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(-1, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).view(-1, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_theta is not None:
            cos, sin = angles_of(batch, self.head_dim, self.rope_theta)
            q, k = dense.apply_rope(q, cos, sin), dense.apply_rope(k, cos, sin)
        return q, k, v


class LightningMixer(Mixer):
    """Linear attention with a fixed decay per head: the state is one matrix per head, of constant size."""

    def __init__(self, config: SalaConfig) -> None:
        heads, kv_heads, dim = config.lightning_nh, config.lightning_nkv, config.lightning_head_dim
        super().__init__(config, heads, kv_heads, dim, config.qk_norm, config.lightning_use_rope)
        self.scan: Callable[..., Tensor] | None = None  # replaces `lightning_whole` in training, where it is set
        hidden, width = config.hidden_size, heads * dim
        self.o_norm = RMSNorm(width, config.rms_norm_eps) if config.use_output_norm else None
        self.z_proj = linear(hidden, width) if config.use_output_gate else None

    def forward(self, x: Tensor, batch: Batch | Sequences, states: Tensor | None) -> Tensor:
        q, k, v = self.project(x, batch)
        if self.num_kv_heads != self.num_heads:
            shared = self.num_heads // self.num_kv_heads
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        slopes, scale = decay_slopes(self.num_heads, x.device), self.head_dim**-0.5
        if states is None:
            o = (self.scan or batch.ops.lightning_whole)(q, k, v, batch.lengths, slopes, scale)
        else:
            assert isinstance(batch, Batch)
            slots: slice | list[int] = batch.slots
            if len(batch.slots) == 1:
                slots = slice(batch.slots[0], batch.slots[0] + 1)  # a view is much cheaper than a gather
            num_drafts = [span.num_drafts for span in batch.spans]
            o, after = lightning_ragged(q, k, v, states[slots], batch.lengths, slopes, scale, num_drafts)
            if any(num_drafts):
                batch.advance(states, after, slopes, k.split(batch.lengths), v.split(batch.lengths))
            else:
                states[slots] = after
        o = o.flatten(1).to(x.dtype)
        if self.o_norm is not None:
            o = self.o_norm(o)
        if self.z_proj is not None:
            o = o * torch.sigmoid(self.z_proj(x))
        return self.o_proj(o)


class SparseMixer(Mixer):
    """InfLLM-v2: exact softmax attention over the few blocks that a query selects; dense while the context is short."""

    def __init__(self, config: SalaConfig) -> None:
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        super().__init__(config, heads, kv_heads, dim, config.attn_qk_norm, config.attn_use_rope)
        self.observer: Callable[[Tensor, Tensor], None] | None = None  # called with queries and keys of whole sequences
        self.sparse = config.sparse_config
        self.log_base = config.attn_log_base
        self.o_gate = linear(config.hidden_size, heads * dim) if config.attn_use_output_gate else None

    def forward(self, x: Tensor, batch: Batch | Sequences, pages: KVPages | None) -> Tensor:
        q, k, v = self.project(x, batch)
        if self.log_base is not None:
            q = dense.grow_queries(q, batch.positions, self.log_base)
        if pages is None:
            o = self.attend_whole(q, k, v, batch.lengths, batch.ops).flatten(1)
        else:
            assert isinstance(batch, Batch)
            lengths = batch.lengths
            rows = zip(batch.spans, q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
            o = torch.cat([self.attend(*row, pages, batch.ops) for row in rows]).flatten(1)
            if batch.gather is not None:
                batch.gather.add(q, batch.spans, pages, self.head_dim**-0.5)
        if self.o_gate is not None:
            o = o * torch.sigmoid(self.o_gate(x))
        return self.o_proj(o)

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], ops: Ops) -> Tensor:
        """Attend in whole sequences; each is dense or sparse on all its rows, depending on its length."""
        if self.observer is not None:
            self.observer(q, k)
        scale = self.head_dim**-0.5
        if all(length < self.sparse.dense_len for length in lengths):
            return dense.whole_attention(q, k, v, lengths, scale)
        outputs, sizes = [], list(lengths)
        for q_row, k_row, v_row in zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
            if len(q_row) < self.sparse.dense_len:
                outputs.append(dense.whole_attention(q_row, k_row, v_row, [len(q_row)], scale))
            else:
                outputs.append(ops.whole_sparse_attention(q_row, k_row, v_row, self.sparse, scale))
        return torch.cat(outputs)

    def attend(self, span: Span, q: Tensor, k: Tensor, v: Tensor, pages: KVPages, ops: Ops) -> Tensor:
        """One row: q [n, H, D], k and v [n, G, D] → [n, H, D]. The regime may change inside the row."""
        pages.append(span, k, v)
        num_dense = min(max(span.sparse_from - span.start, 0), span.length)
        outputs = []
        if num_dense:
            keys, values = pages.keys_values(span, span.start + num_dense)
            outputs.append(dense.dense_attention(q[:num_dense], keys, values, span.start, self.head_dim**-0.5))
        if num_dense < span.length:
            outputs.append(self.attend_sparse(span, q[num_dense:], span.start + num_dense, pages, ops))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def attend_sparse(self, span: Span, q: Tensor, start: int, pages: KVPages, ops: Ops) -> Tensor:
        positions = torch.arange(start, span.end, device=q.device)
        selected = self.select(span, q, positions, pages)
        keys, values, table = pages.k, pages.v, span.table
        if pages.is_fp8:
            keys, values = pages.blocks(span)
            table = torch.arange(keys.shape[1], device=q.device)
        return ops.sparse_attention(q, keys, values, table, selected, positions, self.head_dim**-0.5)

    def select(self, span: Span, q: Tensor, positions: Tensor, pages: KVPages) -> Tensor:
        """Return the blocks that each query attends to, [n, G, C]."""
        k1, k2 = pages.pooled(span, span.end)
        num_blocks = -(-span.end // self.sparse.block_size)
        sparse = self.sparse.with_topk(span.topk)
        return select_blocks(q, k1, k2, positions, num_blocks, sparse, self.head_dim**-0.5)


class MLP(nn.Module):
    def __init__(self, config: SalaConfig) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


MIXERS: dict[str, type[nn.Module]] = {"sparse": SparseMixer, "lightning": LightningMixer}


class Layer(nn.Module):
    def __init__(self, config: SalaConfig, mixer: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MIXERS[mixer](config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.residual_scale = config.residual_scale

    def forward(self, x: Tensor, batch: Batch | Sequences, cache: KVPages | Tensor | None = None) -> Tensor:
        x = x + self.scaled(self.self_attn(self.input_layernorm(x), batch, cache))
        return x + self.scaled(self.mlp(self.post_attention_layernorm(x)))

    def scaled(self, x: Tensor) -> Tensor:
        return x if self.residual_scale == 1.0 else x * self.residual_scale


class Decoder(nn.Module):
    def __init__(self, config: SalaConfig) -> None:
        super().__init__()
        # The weight is given, because initializing it on the meta device would load a compiler.
        weight = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=weight)
        self.layers = nn.ModuleList(Layer(config, mixer) for mixer in config.mixers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class SalaModel(nn.Module):
    """Tokens in, hidden states out; `logits` turns selected hidden states into scores of the vocabulary."""

    def __init__(self, config: SalaConfig) -> None:
        super().__init__()
        self.config = config
        self.kernels = "auto"  # for whole sequences: callers pass `select_ops(kernels)` with the batch
        self.is_checkpointing = False  # gradient checkpointing: keep the inputs of layers only
        self.model = Decoder(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, batch: Batch | Sequences, cache: HybridCache | None = None, num_layers: int | None = None
    ) -> Tensor:
        """Run the batch's tokens on top of the cache, which it extends → normed hidden states [T, hidden].

        Without a cache they are whole sequences, and gradients can flow. With `num_layers`, only the first layers run,
        which is how drafts are made.
        """
        x = self.model.embed_tokens(batch.tokens) * self.config.scale_emb
        features = batch.features
        for index, layer in enumerate(self.model.layers[:num_layers]):
            if cache is not None:
                held = cache.pages[index] if index in cache.pages else cache.states[index]
                x = layer(x, batch, held)
            elif self.is_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, batch, use_reentrant=False)
            else:
                x = layer(x, batch)
            if features is not None:
                features.add(index + 1, x)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] → [n, vocab] in fp32."""
        return self.lm_head(hidden / self.config.logit_divisor).float()

"""Initialize the mixers of a hybrid from a dense model's attention, before any training."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sala.backends.torch.model import LightningMixer, SalaModel, SparseMixer
from sala.config import RELEASED_NAMES, SalaConfig, SparseConfig

GATE_SPREAD = 0.02


def hybrid_config(dense: SalaConfig, attention: Iterable[int], sparse: SparseConfig) -> SalaConfig:
    """Return the hybrid of a dense model: attention without RoPE in the given layers, lightning with RoPE elsewhere."""
    kept = set(attention)
    kinds = ("sparse" if index in kept else "lightning" for index in range(dense.num_hidden_layers))
    return replace(
        dense,
        mixer_types=tuple(RELEASED_NAMES[kind] for kind in kinds),  # type: ignore[index]
        lightning_nh=dense.num_attention_heads,
        lightning_nkv=dense.num_attention_heads,
        lightning_head_dim=dense.head_dim,
        sparse_config=sparse,
        attn_use_rope=False,
        attn_use_output_gate=True,
        qk_norm=True,
        use_output_gate=True,
        use_output_norm=True,
        lightning_use_rope=True,
        max_position_embeddings=max(dense.max_position_embeddings, 1 << 20),
    )


def to_lightning(source: SparseMixer, config: SalaConfig, generator: torch.Generator) -> LightningMixer:
    """Return a lightning mixer with the source's weights; each KV head is repeated for the query heads that share it.

    Norms without a counterpart start at one, gates at random.
    """
    mixer = LightningMixer(config)
    _transfer(mixer, source, mixer.z_proj, generator)
    if mixer.o_norm is not None:
        nn.init.ones_(mixer.o_norm.weight)
    return mixer


def to_sparse(source: SparseMixer, config: SalaConfig, generator: torch.Generator) -> SparseMixer:
    """Return the same attention without RoPE and with a gate; the gate starts at 1/2, so the output is doubled."""
    mixer = SparseMixer(config)
    _transfer(mixer, source, mixer.o_gate, generator)
    if mixer.o_gate is not None:
        mixer.o_proj.weight.data.mul_(2.0)
    return mixer


@torch.no_grad()
def _transfer(mixer: Any, source: SparseMixer, gate: nn.Linear | None, generator: torch.Generator) -> None:
    shared = mixer.num_kv_heads // source.num_kv_heads
    for name, times in (("q_proj", 1), ("k_proj", shared), ("v_proj", shared), ("o_proj", 1)):
        new, old = getattr(mixer, name), getattr(source, name)
        new.weight.copy_(_repeat_heads(old.weight, times, source.head_dim))
        if old.bias is not None:
            new.bias.copy_(_repeat_heads(old.bias, times, source.head_dim))
    for norm, known in ((mixer.q_norm, source.q_norm), (mixer.k_norm, source.k_norm)):
        if norm is not None:
            norm.weight.copy_(torch.ones_like(norm.weight) if known is None else known.weight)
    if gate is not None:
        gate.weight.copy_(torch.randn(gate.weight.shape, generator=generator) * GATE_SPREAD)


def to_hybrid(dense: SalaModel, config: SalaConfig, seed: int) -> SalaModel:
    """Return a hybrid with the dense model's embeddings, norms and MLPs, and transferred mixers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = SalaModel(config)
    model.kernels = dense.kernels
    model.model.embed_tokens = dense.model.embed_tokens
    model.model.norm = dense.model.norm
    model.lm_head = dense.lm_head
    for layer, old in zip(model.model.layers, dense.model.layers, strict=True):
        layer.input_layernorm, layer.mlp = old.input_layernorm, old.mlp
        layer.post_attention_layernorm = old.post_attention_layernorm
        make = to_sparse if isinstance(layer.self_attn, SparseMixer) else to_lightning
        layer.self_attn = make(old.self_attn, config, generator)  # type: ignore[arg-type]
    return model


def _repeat_heads(values: Tensor, times: int, head_dim: int) -> Tensor:
    if times == 1:
        return values
    return values.unflatten(0, (-1, head_dim)).repeat_interleave(times, 0).flatten(0, 1)

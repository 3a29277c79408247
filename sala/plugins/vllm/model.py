"""The model for vLLM: vLLM's parallel linears with sala's norms, rotary embedding, states and block selection.

Weights have the released names; q, k and v are one matrix here, and so are the MLP's gate and up. Ranks divide
heads (tensor parallel) or layers (pipeline parallel).
"""

# mypy: disable-error-code="import-not-found, misc, no-any-return, untyped-decorator"

from collections.abc import Iterable
from itertools import islice
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsLoRA, SupportsPP, SupportsQuant
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    WeightsMapper,
    extract_layer_index,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from sala.backends.torch.model import RMSNorm
from sala.backends.torch.ops.dense import rope_angles
from sala.config import SalaConfig
from sala.errors import ConfigError
from sala.plugins.vllm.lightning import STATE_DTYPE, Angles, LightningMixer, state_shape
from sala.plugins.vllm.quantized import expand
from sala.plugins.vllm.sparse import SparseMixer
from sala.quantization_config import QuantConfig

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class MLP(nn.Module):
    def __init__(self, config: SalaConfig, quant: Any, prefix: str) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [wide, wide], bias=False, quant_config=quant, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(wide, hidden, bias=False, quant_config=quant, prefix=f"{prefix}.down_proj")

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)[0].chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)[0]


class Layer(nn.Module):
    def __init__(self, config: SalaConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.is_lightning = config.mixers[extract_layer_index(prefix)] == "lightning"
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        mixer = LightningMixer if self.is_lightning else SparseMixer
        self.self_attn = mixer(config, vllm_config, f"{prefix}.self_attn")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, vllm_config.quant_config, f"{prefix}.mlp")
        self.scale = config.residual_scale

    def forward(self, x: Tensor, positions: Tensor, angles: tuple[Angles | None, Angles | None]) -> Tensor:
        """`angles` are those of lightning and of sparse layers."""
        own_angles = angles[0] if self.is_lightning else angles[1]
        x = x + self.self_attn(self.input_layernorm(x), positions, own_angles) * self.scale
        return x + self.mlp(self.post_attention_layernorm(x)) * self.scale


@support_torch_compile
class Decoder(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = config = read_config(vllm_config)
        pipeline = get_pp_group()
        is_tied_end = config.tie_word_embeddings and pipeline.is_last_rank
        if pipeline.is_first_rank or is_tied_end:
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
            )
        else:
            self.embed_tokens = PPMissingLayer()
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers, lambda prefix: Layer(config, vllm_config, prefix), prefix=f"{prefix}.layers"
        )
        is_last = pipeline.is_last_rank
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if is_last else PPMissingLayer()
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states"], config.hidden_size
        )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids) * self.config.scale_emb

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        if intermediate_tensors is not None and not get_pp_group().is_first_rank:
            x = intermediate_tensors["hidden_states"]
        else:
            x = inputs_embeds if input_ids is None else self.embed_input_ids(input_ids)
        angles = self.angles(positions)
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            x = layer(x, positions, angles)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": x})
        return self.norm(x)

    def angles(self, positions: Tensor) -> tuple[Angles | None, Angles | None]:
        config = self.config
        return (
            rope_angles(positions, config.lightning_head_dim, config.rope_theta) if config.lightning_use_rope else None,
            rope_angles(positions, config.head_dim, config.rope_theta) if config.attn_use_rope else None,
        )


class SalaForCausalLM(nn.Module, HasInnerState, IsHybrid, SupportsLoRA, SupportsPP, SupportsQuant):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = PACKED
    embedding_modules: ClassVar[dict[str, str]] = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={f".{part}_proj": (".qkv_proj", part) for part in "qkv"}
        | {".gate_proj": (".gate_up_proj", 0), ".up_proj": (".gate_up_proj", 1)}
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = config = read_config(vllm_config)
        self.packed, self.dtype = packed_table(vllm_config), vllm_config.model_config.dtype
        check_options(vllm_config)
        check_ranks(config, get_tensor_model_parallel_world_size())
        self.model = Decoder(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
            if config.tie_word_embeddings:
                self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        else:
            self.lm_head = PPMissingLayer()
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states / self.config.logit_divisor)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        if self.packed is not None:
            weights = expand(weights, self.packed, self.dtype)
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

    # the states of the lightning layers, which vLLM asks for before it builds the model

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return (STATE_DTYPE,)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, int, int], ...]:
        return state_shape(read_config(vllm_config), vllm_config.parallel_config.tensor_parallel_size)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        return MambaStateCopyFuncCalculator.linear_attention_state_copy_func()


def read_config(vllm_config: VllmConfig) -> SalaConfig:
    return vllm_config.model_config.hf_config.to_sala()


def packed_table(vllm_config: VllmConfig) -> QuantConfig | None:
    """Return the bits of a checkpoint in MLX's layout, which vLLM does not read; None for any other."""
    quantization = vllm_config.model_config.hf_config.quant_config()
    return None if quantization is None or quantization.layout is not None else quantization


def check_options(vllm_config: VllmConfig) -> None:
    """Raise ConfigError for options with which results would be wrong."""
    if vllm_config.speculative_config is not None:
        raise ConfigError("states cannot roll back a rejected draft in vLLM", "leave out --speculative-config")
    kept, dtype = vllm_config.cache_config.cache_dtype, str(vllm_config.model_config.dtype).removeprefix("torch.")
    if kept not in ("auto", dtype):
        message = f"pages hold keys and values in the model's precision, not in {kept}"
        raise ConfigError(message, "leave out --kv-cache-dtype")


def check_ranks(config: SalaConfig, num_ranks: int) -> None:
    groups = config.num_key_value_heads
    counts = {"num_attention_heads": config.num_attention_heads, "lightning_nh": config.lightning_nh}
    for name, count in counts.items():
        if count % num_ranks:
            message = f"{name} is {count}, which {num_ranks} ranks cannot share"
            raise ConfigError(message, "choose another tensor_parallel_size")
    if groups % num_ranks and num_ranks % groups:
        message = f"{groups} kv heads cannot be shared by {num_ranks} ranks"
        raise ConfigError(message, "choose another tensor_parallel_size")

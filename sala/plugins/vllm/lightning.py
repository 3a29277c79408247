"""The lightning layer in vLLM, and what it shares with the sparse one: projections, and the requests of a step.

The fp32 state of a lightning layer, one matrix per head, is stored in vLLM's blocks like a Mamba state.
"""

# mypy: disable-error-code="import-not-found, misc, no-any-return, untyped-decorator"

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import set_weight_attrs
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.linear_attn import (
    LinearAttentionBackend,
    LinearAttentionMetadata,
    LinearAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from sala.backends.torch.model import RMSNorm
from sala.backends.torch.ops.dense import apply_rope, rms_norm, rms_norm_share
from sala.backends.torch.ops.lightning import decay_slopes
from sala.config import SalaConfig
from sala.plugins.vllm.dispatch import advance_states
from sala.plugins.vllm.memory import BlockLayout, RequestRow
from sala.plugins.vllm.releases import pad_state

STATE_DTYPE = torch.float32
Angles = tuple[Tensor, Tensor]  # RoPE's cos and sin


class Mixer(nn.Module):
    """Queries, keys and values of this rank's heads, normed and rotated, and the gated output."""

    def __init__(
        self, config: SalaConfig, vllm_config: VllmConfig, prefix: str, shape: tuple[int, int, int], has_norm: bool
    ) -> None:
        """`shape` is the number of heads and of kv heads of all ranks, and the head dimension."""
        super().__init__()
        num_heads, num_kv_heads, dim = shape
        self.config = config
        self.num_ranks, self.rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        self.head_dim, self.num_heads = dim, num_heads // self.num_ranks
        hidden, quant = config.hidden_size, vllm_config.quant_config
        bias, heads = config.attention_bias, (num_heads, num_kv_heads)
        self.qkv_proj = QKVParallelLinear(
            hidden, dim, *heads, bias=bias, quant_config=quant, prefix=f"{prefix}.qkv_proj"
        )
        self.num_kv_heads = self.qkv_proj.num_kv_heads
        width = num_heads * dim
        self.o_proj = RowParallelLinear(width, hidden, bias=False, quant_config=quant, prefix=f"{prefix}.o_proj")
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if has_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if has_norm else None

    def make_gate(self, vllm_config: VllmConfig, prefix: str) -> ColumnParallelLinear:
        """Return the linear that gates the outputs of this rank's heads."""
        width = self.num_ranks * self.num_heads * self.head_dim
        return ColumnParallelLinear(
            self.config.hidden_size, width, bias=False, quant_config=vllm_config.quant_config, prefix=prefix
        )

    def project(self, x: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden] → q [T, H, D], k and v [T, G, D] of this rank's heads."""
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        parts = self.qkv_proj(x)[0].split([count * self.head_dim for count in counts], -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = apply_rope(q, *angles), apply_rope(k, *angles)
        return q, k, v

    def close(self, o: Tensor, x: Tensor, gate: nn.Module | None) -> Tensor:
        """Return the output of the layer from that of its heads, o [T, H * D], and its input x [T, hidden]."""
        if gate is not None:
            o = o * torch.sigmoid(gate(x)[0])
        return self.o_proj(o)[0]


def read_rows(metadata: CommonAttentionMetadata) -> tuple[RequestRow, ...]:
    """Return the requests that have tokens in a step. Without drafts, the host's lengths are exact."""
    edges = metadata.query_start_loc_cpu.tolist()
    ends = metadata.seq_lens_cpu_upper_bound
    ends = (metadata.seq_lens if ends is None else ends).tolist()
    lengths = [end - begin for begin, end in pairwise(edges)]
    rows = zip(range(len(lengths)), ends, lengths, strict=False)
    return tuple(RequestRow(index, end - length, length, 0) for index, end, length in rows if length > 0)


class LightningBackend(LinearAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type["LightningBuilder"]:
        return LightningBuilder


@dataclass
class LightningMetadata(LinearAttentionMetadata):
    rows: tuple[RequestRow, ...] = ()


class LightningBuilder(LinearAttentionMetadataBuilder):
    """Builds vLLM's metadata plus the rows as the host knows them, so that no layer waits for the device."""

    _cudagraph_support = AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LightningMetadata:
        usual = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return LightningMetadata(**vars(usual), rows=read_rows(common_attn_metadata))


def state_shape(config: SalaConfig, num_ranks: int) -> tuple[tuple[int, int, int], ...]:
    dim = config.lightning_head_dim
    return MambaStateShapeCalculator.linear_attention_state_shape(config.lightning_nh, num_ranks, dim)


class LightningMixer(Mixer, MambaBase):
    def __init__(self, config: SalaConfig, vllm_config: VllmConfig, prefix: str) -> None:
        heads, dim = config.lightning_nh, config.lightning_head_dim
        super().__init__(config, vllm_config, prefix, (heads, config.lightning_nkv, dim), config.qk_norm)
        self.prefix = prefix
        self.z_proj = self.make_gate(vllm_config, f"{prefix}.z_proj") if config.use_output_gate else None
        self.o_norm = RMSNorm(self.num_heads * dim, config.rms_norm_eps) if config.use_output_norm else None
        if self.o_norm is not None:
            set_weight_attrs(self.o_norm.weight, {"weight_loader": sharded_weight_loader(0)})
        slopes = decay_slopes(heads)[self.rank * self.num_heads : (self.rank + 1) * self.num_heads]
        self.slopes: Tensor
        self.register_buffer("slopes", slopes.to(vllm_config.device_config.device), persistent=False)
        self.kv_cache: tuple[Tensor, ...] = (torch.tensor([]),)
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def forward(self, x: Tensor, positions: Tensor, angles: Angles | None) -> Tensor:
        """x [T, hidden], normed → [T, hidden]."""
        q, k, v = self.project(x, angles)
        if self.num_kv_heads != self.num_heads:
            shared = self.num_heads // self.num_kv_heads
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        o = torch.empty_like(q)
        torch.ops.vllm.sala_lightning(q, k, v, o, self.prefix)
        return self.close(self.normalize(o.flatten(1)), x, self.z_proj)

    def normalize(self, o: Tensor) -> Tensor:
        """Normalize over the heads of all ranks."""
        if self.o_norm is None:
            return o
        weight, eps = self.o_norm.weight, self.o_norm.eps
        if self.num_ranks == 1:
            return rms_norm(o, weight, eps)
        return rms_norm_share(o, weight, eps, self.num_ranks, tensor_model_parallel_all_reduce)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor) -> None:
        metadata: Any = get_forward_context().attn_metadata
        metadata = metadata.get(self.prefix) if isinstance(metadata, dict) else None
        if metadata is None or not metadata.rows:  # vLLM measures the memory of a step
            output.zero_()
            return
        rows = metadata.rows
        count = sum(row.length for row in rows)
        slots = metadata.state_indices_tensor
        if len(rows) < slots.shape[0]:
            slots = slots[[row.index for row in rows]]
        q, k, v = q[:count], k[:count], v[:count]
        output[:count] = advance_states(q, k, v, self.kv_cache[0], slots.long(), rows, self.slopes, self.head_dim**-0.5)

    # vLLM's interface of layers with a state

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    def get_state_dtype(self) -> tuple[torch.dtype]:
        return (STATE_DTYPE,)

    def get_state_shape(self) -> tuple[tuple[int, int, int], ...]:
        return state_shape(self.config, self.num_ranks)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return LightningBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        groups = max(1, self.config.num_key_value_heads // self.num_ranks)
        layout = BlockLayout(self.config.sparse_config, groups, self.config.head_dim)
        token_bytes = layout.token_bytes(vllm_config.model_config.dtype.itemsize)
        spec = super().get_kv_cache_spec(vllm_config)
        return pad_state(spec, vllm_config.cache_config.block_size * token_bytes)


@eager_break_during_capture
def _mix(q: Tensor, k: Tensor, v: Tensor, output: Tensor, layer_name: str) -> None:
    get_forward_context().no_compile_layers[layer_name].mix(q, k, v, output)


def _mix_fake(q: Tensor, k: Tensor, v: Tensor, output: Tensor, layer_name: str) -> None:
    return


direct_register_custom_op(op_name="sala_lightning", op_func=_mix, mutates_args=["output"], fake_impl=_mix_fake)

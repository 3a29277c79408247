"""The sparse layer in vLLM: InfLLM-v2 as an attention backend whose pages also hold pooled keys."""

# mypy: disable-error-code="import-not-found, misc, no-any-return"

import functools
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from sala.backends.torch.ops.dense import grow_queries
from sala.config import SalaConfig, SparseConfig
from sala.plugins.vllm.dispatch import attend
from sala.plugins.vllm.lightning import Angles, Mixer, read_rows
from sala.plugins.vllm.memory import BlockLayout, Pages, StepMetadata, plan_step
from sala.plugins.vllm.regime import keep_apart
from sala.plugins.vllm.releases import LaidOutBackend, SizedAttention, name_backend, opaque_page


@dataclass(frozen=True, kw_only=True)
class SparseSpec(FullAttentionSpec):
    """Full attention as far as blocks are concerned, with more bytes per token for the pooled keys."""

    sparse: SparseConfig = field(default_factory=SparseConfig)

    @property
    def real_page_size_bytes(self) -> int:
        layout = BlockLayout(self.sparse, self.num_kv_heads, self.head_size)
        return self.block_size * layout.token_bytes(self.dtype.itemsize)

    @classmethod
    def merge(cls, specs: list["SparseSpec"]) -> "SparseSpec":
        return replace(super().merge(specs), sparse=specs[0].sparse)


class SparseManager(FullAttentionManager):
    """Allocates blocks; the scheduler creates it before the first request."""

    def __init__(self, kv_cache_spec: SparseSpec, **options: Any) -> None:
        super().__init__(kv_cache_spec, **options)
        keep_apart(kv_cache_spec.sparse)


KVCacheSpecRegistry._ensure_registered()  # otherwise our entry alone would pass for the whole table
KVCacheSpecRegistry.register(SparseSpec, SparseManager, uniform_type_base_spec=FullAttentionSpec)

BACKEND = name_backend("SALA_INFLLM_V2", f"{__name__}.SparseBackend")


class SparseBackend(LaidOutBackend):
    sparse: ClassVar[SparseConfig] = SparseConfig()
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return BACKEND

    @staticmethod
    def get_impl_cls() -> type["SparseImpl"]:
        return SparseImpl

    @staticmethod
    def get_builder_cls() -> type["SparseBuilder"]:
        return SparseBuilder

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(BlockLayout(cls.sparse, 1, 1).block_tokens)]

    @classmethod
    def elements_per_token(cls, num_kv_heads: int, head_size: int) -> int:
        return BlockLayout(cls.sparse, num_kv_heads, head_size).token_bytes(1)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> SparseSpec:
        """Return a spec whose pages are opaque to vLLM."""
        layout = BlockLayout(cls.sparse, spec.num_kv_heads, spec.head_size)
        usual = {entry.name: getattr(spec, entry.name) for entry in fields(spec) if entry.init}
        opaque = opaque_page(layout.token_bytes(spec.dtype.itemsize))
        return SparseSpec(**{**usual, **opaque, "sparse": cls.sparse})


@functools.cache
def backend_for(sparse: SparseConfig) -> type[SparseBackend]:
    """Return a class per geometry: vLLM asks classes, not objects, for the size of a page."""
    return type("SparseBackend", (SparseBackend,), {"sparse": sparse})


class SparseBuilder(AttentionMetadataBuilder[StepMetadata]):
    """Builds the metadata of a step; CUDA graphs are split here, since a batch mixes lengths and regimes."""

    def __init__(
        self, kv_cache_spec: SparseSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.sparse, self.block_tokens = kv_cache_spec.sparse, kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StepMetadata:
        rows, prompts = read_rows(common_attn_metadata), common_attn_metadata.rswa_prefix_lens
        lengths = None if prompts is None else prompts.tolist()
        rows = tuple(
            replace(row, sparse_from=self.sparse.sparse_from(row.end if lengths is None else lengths[row.index]))
            for row in rows
        )
        return plan_step(rows, common_attn_metadata.block_table_tensor, self.block_tokens, self.sparse)


class SparseImpl(AttentionImpl[StepMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        *_: Any,
        sparse: SparseConfig,
        **__: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.layout = BlockLayout(sparse, self.num_kv_heads, head_size)
        self.kv_cache_dtype = "auto"
        self.pages: Pages | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: StepMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [T, H, D], key and value [T, G, D] → output [T, H, D]; rows after the step's tokens are padding."""
        if attn_metadata is None or not attn_metadata.rows:  # vLLM measures the memory of a step
            return output.zero_()
        if self.pages is None or self.pages.tiles.data_ptr() != kv_cache.data_ptr():
            self.pages = Pages(kv_cache, self.layout, kv_cache.shape[2])
        count = attn_metadata.num_tokens
        self.pages.append(attn_metadata, key[:count], value[:count])
        output[:count] = attend(self.pages, attn_metadata, query[:count], self.scale)
        return output


class SparseMixer(Mixer):
    def __init__(self, config: SalaConfig, vllm_config: VllmConfig, prefix: str) -> None:
        heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        super().__init__(config, vllm_config, prefix, (heads, groups, dim), config.attn_qk_norm)
        self.o_gate = self.make_gate(vllm_config, f"{prefix}.o_gate") if config.attn_use_output_gate else None
        # All heads of a group select blocks together: where ranks share a group, each computes with all of its heads.
        shared = max(1, self.num_ranks // groups)
        self.group, self.own = self.rank // shared * shared, self.rank % shared
        self.num_query_heads = shared * self.num_heads
        self.attn = SizedAttention(
            self.num_query_heads,
            dim,
            dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.attn",
            attn_backend=backend_for(config.sparse_config),
            sparse=config.sparse_config,
        )

    def forward(self, x: Tensor, positions: Tensor, angles: Angles | None) -> Tensor:
        """x [T, hidden], normed → [T, hidden]."""
        q, k, v = self.project(x, angles)
        if self.config.attn_log_base is not None:
            q = grow_queries(q, positions, self.config.attn_log_base)
        if self.num_query_heads == self.num_heads:
            o = self.attn(q.flatten(1), k.flatten(1), v.flatten(1))
        else:
            heads = tensor_model_parallel_all_gather(q.contiguous(), dim=1)
            first = self.group * self.num_heads
            heads = heads[:, first : first + self.num_query_heads].contiguous()
            width = self.num_heads * self.head_dim
            o = self.attn(heads.flatten(1), k.flatten(1), v.flatten(1))[:, self.own * width : (self.own + 1) * width]
        return self.close(o, x, self.o_gate)

"""The fused decode on a CPU: a whole step of the model in one call of C++ (`kernels/decode.cpp`).

`SalaModel` is the definition and runs everything else: prompts, other devices, other precisions. `CpuDecode` is created
once for a model whose weights stay in place; it takes and returns what the model does, equal to the rounding of fp32.
In Python a breakpoint in `CpuDecode.__call__` is hit once per step; layers are loops in C++.

Two operations of other steps are in C++ as well (`kernels/attend.cpp`, `kernels/decode.cpp`): sparse attention and the
state fold. The functions named `can_…` say what the kernels can take, not whether they should run.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sala.backends.rows import TIE_ULPS, Pending
from sala.backends.torch.batch import Batch, Features, take
from sala.backends.torch.cache import HybridCache
from sala.backends.torch.gather import Gather
from sala.backends.torch.kernels import native
from sala.backends.torch.linears import DECODE_ROWS, AffineLinear, HalfLinear, native_weight
from sala.backends.torch.model import Layer as ModelLayer
from sala.backends.torch.model import LightningMixer, SalaModel, angles_of
from sala.backends.torch.ops.dense import query_growth
from sala.backends.torch.ops.lightning import decay_slopes

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of weights and pages that the kernels read
_WIDEST_HEAD = 256  # that attend.cpp takes


class CpuDecode:
    """Decode steps in C++, in fp32, for packed and plain weights and pages of 16 or 32 bits."""

    def __init__(self, model: SalaModel, kernel: native.Kernel) -> None:
        self.kernel = kernel
        self.model = model
        self.held: list[Tensor] = []  # fp32 copies of small tensors; the structs point to them
        config, sparse = model.config, model.config.sparse_config
        self.slopes = decay_slopes(config.lightning_nh)
        self.decay = torch.exp(-self.slopes)
        self.layers = (native.LayerStruct * config.num_hidden_layers)(*map(self.describe, model.model.layers))
        self.struct = native.ModelStruct(
            layers=self.layers,
            norm=self.floats(model.model.norm.weight),
            hidden=config.hidden_size,
            eps=config.rms_norm_eps,
            residual_scale=config.residual_scale,
            block_size=sparse.block_size,
            kernel_size=sparse.kernel_size,
            kernel_stride=sparse.kernel_stride,
            init_blocks=sparse.init_blocks,
            window_blocks=sparse.num_window_blocks,
            tie_ulps=TIE_ULPS,
        )
        self.caches: tuple[HybridCache, ctypes.Array[native.CacheStruct]] | None = None

    def floats(self, tensor: Tensor | None) -> int | None:
        """Return the address of an fp32 copy of a small tensor."""
        if tensor is None:
            return None
        self.held.append(tensor.detach().float().contiguous())
        return _address(self.held[-1])

    def weight(self, linear: nn.Module | None) -> native.WeightStruct:
        if linear is None:
            return native.WeightStruct()
        if isinstance(linear, AffineLinear):
            weight = native.WeightStruct.from_buffer_copy(linear.native)
        else:
            assert isinstance(linear, nn.Linear)
            weight = native_weight(linear)
        weight.addend = self.floats(linear.bias)
        return weight

    def describe(self, layer: nn.Module) -> native.LayerStruct:
        assert isinstance(layer, ModelLayer)
        mixer: Any = layer.self_attn
        mlp, is_lightning = layer.mlp, isinstance(mixer, LightningMixer)
        gate, o_norm = (mixer.z_proj, mixer.o_norm) if is_lightning else (mixer.o_gate, None)
        linears = (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.o_proj, gate)
        norms = (layer.input_layernorm, layer.post_attention_layernorm, mixer.q_norm, mixer.k_norm, o_norm)
        return native.LayerStruct(
            *map(self.weight, (*linears, mlp.gate_proj, mlp.up_proj, mlp.down_proj)),
            *(None if norm is None else self.floats(norm.weight) for norm in norms),
            decay=_address(self.decay) if is_lightning else None,
            num_heads=mixer.num_heads,
            num_kv_heads=mixer.num_kv_heads,
            head_dim=mixer.head_dim,
        )

    def can_run(self, batch: Batch) -> bool:
        return len(batch.ids) <= DECODE_ROWS

    def __call__(
        self, batch: Batch, cache: HybridCache, num_layers: int | None = None, wanted: Sequence[int] | None = None
    ) -> Tensor:
        config, sparse = self.model.config, self.model.config.sparse_config
        count = config.num_hidden_layers if num_layers is None else min(num_layers, config.num_hidden_layers)
        x = (self.model.model.embed_tokens(batch.tokens).float() * config.scale_emb).contiguous()
        step = native.StepStruct(
            spans=(native.SpanStruct * len(batch.spans))(
                *(
                    native.SpanStruct(
                        s.start,
                        s.length,
                        s.slot,
                        s.sparse_from,
                        sparse.with_topk(s.topk).num_selected,
                        s.num_drafts,
                        s.table.data_ptr(),
                    )
                    for s in batch.spans
                )
            ),
            caches=self.caches_of(cache),
            x=x.data_ptr(),
            num_spans=len(batch.spans),
            num_tokens=x.shape[0],
            num_layers=count,
            num_threads=torch.get_num_threads(),
        )
        if config.lightning_use_rope:
            cos, sin = angles_of(batch, config.lightning_head_dim, config.rope_theta)
            step.lightning_cos, step.lightning_sin = cos.data_ptr(), sin.data_ptr()
        if config.attn_use_rope:
            cos, sin = angles_of(batch, config.head_dim, config.rope_theta)
            step.sparse_cos, step.sparse_sin = cos.data_ptr(), sin.data_ptr()
        growth = None if config.attn_log_base is None else query_growth(batch.positions, config.attn_log_base)
        step.growth = _address(growth)
        kept = self.keep(batch, cache, count)
        step.kept_k, step.kept_v = (None, None) if kept is None else (_address(kept[0]), _address(kept[1]))
        gathered_rows = None if batch.gather is None else self.gather_into(step, batch.gather)
        feature_layers = None if batch.features is None else self.keep_features(step, batch.features)
        self.kernel.step(ctypes.addressof(self.struct), ctypes.addressof(step))
        del gathered_rows, feature_layers  # kept until here: the step points to them
        return x if wanted is None else take(x, wanted)

    def keep_features(self, step: native.StepStruct, features: Features) -> Tensor:
        """Let a step keep hidden states; return a tensor that must live as long as the step runs."""
        layers = torch.tensor(features.layers)
        kept = torch.empty(len(layers), step.num_tokens, self.model.config.hidden_size)
        step.feature_layers, step.features, step.num_features = layers.data_ptr(), kept.data_ptr(), len(layers)
        features.states = list(kept)
        return layers

    def gather_into(self, step: native.StepStruct, gather: Gather) -> Tensor:
        """Let a step gather sources; return a tensor that must live as long as the step runs."""
        rows = torch.full((step.num_tokens,), -1)
        rows[list(gather.asked.rows)] = torch.arange(len(gather.asked.rows))
        step.gathered_rows = rows.data_ptr()
        step.gathered_shares, step.gathered_blocks = gather.shares.data_ptr(), gather.blocks.data_ptr()
        step.num_gathered, step.num_sparse = gather.blocks.shape[3], gather.blocks.shape[1]
        return rows

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.model.lm_head
        if type(head) is nn.Linear:
            return self.model.logits(hidden.to(head.weight.dtype))
        return head.forward(hidden.float() / self.model.config.logit_divisor)  # fp32 up to the logits

    def caches_of(self, cache: HybridCache) -> "ctypes.Array[native.CacheStruct]":
        """Return the addresses of the cache; remembered, because nearly every step uses the same cache."""
        if self.caches is None or self.caches[0] is not cache:
            layers = range(self.model.config.num_hidden_layers)
            self.caches = (cache, (native.CacheStruct * len(layers))(*(_layer_cache(cache, layer) for layer in layers)))
            for pages in cache.pages.values():
                self.struct.num_pages = pages.k.shape[1]
                self.struct.page_type = native.element_type(pages.k.dtype)
        return self.caches[1]

    def keep(self, batch: Batch, cache: HybridCache, num_layers: int) -> tuple[Tensor, Tensor] | None:
        """Return buffers for k and v of spans with drafts, which the batch keeps until `Batch.fold_accepted`."""
        if not any(span.num_drafts for span in batch.spans):
            return None
        config, lengths = self.model.config, batch.lengths
        layers = [layer for layer in config.lightning_layers if layer < num_layers]
        shape = (len(layers), sum(lengths), config.lightning_nh, config.lightning_head_dim)
        kept = torch.empty(shape), torch.empty(shape)
        for layer, k, v in zip(layers, *kept, strict=True):
            rows = zip(batch.spans, k.split(lengths), v.split(lengths), strict=True)
            for index, (span, k_row, v_row) in enumerate(rows):
                if span.num_drafts:
                    batch.pending.append(Pending(index, cache.states[layer], self.slopes, k_row, v_row))
        return kept


def can_decode(model: SalaModel) -> bool:
    config = model.config
    widths = (config.hidden_size, config.intermediate_size, config.head_dim, config.lightning_head_dim)
    if any(width % native.LANES for width in widths):
        return False
    linears = [module for layer in model.model.layers for module in layer.modules() if hasattr(module, "in_features")]
    return all(_is_readable(linear) for linear in linears)


def _is_readable(linear: nn.Module) -> bool:
    if isinstance(linear, AffineLinear):
        return linear.kernel is not None and linear.order is None
    if type(linear) not in (nn.Linear, HalfLinear):
        return False
    weight = linear.weight
    return isinstance(weight, Tensor) and weight.dtype in _FLOATS and weight.is_contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _layer_cache(cache: HybridCache, layer: int) -> native.CacheStruct:
    if layer in cache.pages:
        return native.CacheStruct(None, *(pool.data_ptr() for pool in cache.pages[layer].pools))
    return native.CacheStruct(states=_address(cache.states.get(layer)))


def can_attend(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> bool:
    """Return whether the C++ kernel reads these pages; it has no backward pass."""
    block_size, dim = k_pages.shape[2:]
    is_plain = all(x.device.type == "cpu" and x.dtype in _FLOATS for x in (q, k_pages, v_pages))
    is_paged = k_pages.dtype == v_pages.dtype and k_pages.is_contiguous() and v_pages.is_contiguous()
    has_shape = dim % native.LANES == 0 and dim <= _WIDEST_HEAD and block_size % native.LANES == 0
    return is_plain and is_paged and has_shape and not torch.is_grad_enabled()


def attend(
    kernel: native.Kernel,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    selected: Tensor,
    positions: Tensor,
    scale: float,
) -> Tensor:
    """`ops.sparse.sparse_attention` in fp32, reading keys and values in place; no block may be selected twice."""
    groups, num_pages, block_size, dim = k_pages.shape
    assert not selected.numel() or int(selected.max()) < len(table), "a selected block has no page"
    table, selected, positions = (x.long().contiguous() for x in (table, selected, positions))
    queries = q.float().contiguous()
    out = torch.empty_like(queries)
    attention = native.AttentionStruct(
        *(x.data_ptr() for x in (queries, k_pages, v_pages, table, selected, positions, out)),
        num_queries=q.shape[0],
        num_heads=q.shape[1],
        num_groups=groups,
        dim=dim,
        num_pages=num_pages,
        block_size=block_size,
        num_blocks=table.shape[0],
        num_selected=selected.shape[-1],
        page_type=native.element_type(k_pages.dtype),
        num_threads=torch.get_num_threads(),
        scale=scale,
    )
    kernel.attend(ctypes.addressof(attention))
    return out.to(q.dtype)


def can_fold(k: Tensor, v: Tensor, state: Tensor) -> bool:
    """Return whether the C++ kernel takes these tensors; it has no backward pass."""
    is_plain = all(x.device.type == "cpu" and x.dtype == torch.float32 for x in (k, v, state))
    return is_plain and state.shape[-1] % native.LANES == 0 and not torch.is_grad_enabled()


def fold(kernel: native.Kernel, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor) -> Tensor:
    """`ops.lightning.lightning_fold`, token by token as the fused decode does it: bit for bit the same state."""
    k, v, decay = k.contiguous(), v.contiguous(), torch.exp(-slopes)
    state = state.clone(memory_format=torch.contiguous_format)
    kernel.fold(state.data_ptr(), k.data_ptr(), v.data_ptr(), decay.data_ptr(), *k.shape)
    return state

"""The one place that selects kernels: C++, Triton, flash-linear-attention and flex attention, or the reference.

`ops/` defines every operation and chooses nothing; `kernels/` says what it can run on (`native.load`,
`triton_kernels.why_not`). Here the two meet the option `kernels`: "auto" takes the fastest implementation that fits a
call, "off" takes the reference everywhere.

What runs, and where to set a breakpoint:

| device | prompts (prefill) | answers (decode) | `kernels="off"` |
|---|---|---|---|
| CPU | `model.SalaModel.forward`; sparse attention in C++ (`cpu_decode.attend`) | `cpu_decode.CpuDecode.__call__`: one C++ call per step (`kernels/decode.cpp`) | `model.SalaModel.forward`, `ops/` |
| CUDA, Triton | `gpu_forward.GpuForward.run_prefill`, mixers in `gpu_prefill.PrefillSpans`, short passes replayed as CUDA graphs (`gpu_prefill.PrefillGraph`) | `gpu_forward.GpuForward.run_decode`, mixers in `gpu_decode.DecodeSpans`, replayed as a CUDA graph (`gpu_decode.DecodeGraph`): Python runs at capture only | `model.SalaModel.forward`, `ops/` |
| whole sequences (training) | `model.SalaModel.forward`; on CUDA `training.py` | – | `ops/` |

`TorchExecutor.forward` calls the fused forward if it takes the batch, otherwise the model.
"""  # noqa: E501

from collections.abc import Callable, Collection, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from sala.backends.sources import HeadWeights
from sala.backends.torch.batch import Batch
from sala.backends.torch.cache import HybridCache
from sala.backends.torch.fast import cpu_decode, training
from sala.backends.torch.host_memory import HostMemory
from sala.backends.torch.kernels import native, triton_kernels
from sala.backends.torch.linears import HalfLinear, LinearKernels, can_be_half
from sala.backends.torch.loader import load_model
from sala.backends.torch.model import SalaModel
from sala.backends.torch.ops import REFERENCE, Ops, lightning, sparse
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig, SparseConfig
from sala.errors import InputError
from sala.protocol import Options, Plan, Result

_CPU = torch.device("cpu")


class FusedForward(Protocol):
    """A faster implementation of `SalaModel` for some batches."""

    def can_run(self, batch: Batch) -> bool: ...

    def __call__(
        self, batch: Batch, cache: HybridCache, num_layers: int | None = None, wanted: Sequence[int] | None = None
    ) -> Tensor:
        """Like `SalaModel.forward`: extends the cache → normed hidden states [T, hidden], or those of `wanted` rows."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Like `SalaModel.logits`."""
        ...


@runtime_checkable
class AheadForward(FusedForward, Protocol):
    """A fused forward that also samples on the device, so that a step can be launched before the last one has ended."""

    feature_layers: tuple[int, ...]  # after which hidden states are kept in `Batch.features`

    def use(self, cache: HybridCache, num_slots: int) -> None:
        """Prepare for `launch` on top of this cache."""
        ...

    def stream_from(self, cache: HybridCache, memory: HostMemory) -> None:
        """Prepare for prefill on top of this cache, whose keys and values lie in host memory."""
        ...

    def launch(self, plan: Plan) -> Callable[[], Result]:
        """Begin to run a plan without drafts and return what waits for the result."""
        ...

    def warm_up(
        self, cache: HybridCache, max_batch: int, max_count: int, on_progress: Callable[[int, int], None]
    ) -> None:
        """Compile and capture what steps of up to `max_batch` sequences with `max_count` tokens each usually need.

        Not captured are graphs that gather sources, select another number of blocks than the model does, or attend
        densely in a long context, and those of drafts in more rows than one product takes.
        """
        ...

    def weigh_heads(self, weights: HeadWeights) -> None:
        """Set the weights of heads as sources."""
        ...

    def forget(self, slot: int) -> None:
        """Forget the sequence of a slot, which another one gets."""
        ...


def select_ops(kernels: str = "auto") -> Ops:
    """Return the operations that a batch carries through the model."""
    return REFERENCE if kernels == "off" else _FAST


def cpu_kernel(device: torch.device, kernels: str = "auto") -> native.Kernel | None:
    """Return the C++ kernels, if a model on this device runs in them."""
    return native.load() if device.type == "cpu" and kernels != "off" else None


def runs_in_triton(
    device: torch.device, dims: Collection[int], sparse_config: SparseConfig | None = None, kernels: str = "auto"
) -> bool:
    """Return whether heads of these sizes, and pages of sparse layers, run in the Triton kernels of this device."""
    if kernels == "off" or triton_kernels.why_not(device) is not None or not {16, 32, 64, 128}.issuperset(dims):
        return False
    return sparse_config is None or (
        sparse_config.block_size % 16 == 0 and sparse_config.kernel_stride * 4 <= sparse_config.block_size
    )


def linear_kernels(device: torch.device, dtype: torch.dtype, kernels: str = "auto") -> LinearKernels | None:
    """Return the kernels of packed matrices for activations of this precision; None: dequantize them at load.

    Those of GPUs multiply in 16 bits.
    """
    if device.type == "cpu":
        kernel = cpu_kernel(device, kernels)
        return None if kernel is None else LinearKernels(kernel)
    has_triton = dtype.itemsize == 2 and runs_in_triton(device, (), kernels=kernels)
    return LinearKernels(has_triton=True) if has_triton else None


def describe_cpu_linears() -> str:
    """Return in words how quantized linears run on this machine's CPU."""
    if native.load() is None:
        return f"torch, dequantized at load: {native.describe()}"
    return f"native: {native.describe()}"


def put_half_linears(model: nn.Module, kernels: str = "auto") -> None:
    """Replace every 16-bit linear on a CPU by one that runs in C++, if there are such kernels."""
    halves = [(name, one) for name, one in model.named_modules() if can_be_half(one)]
    kernel = cpu_kernel(_CPU, kernels) if halves else None
    if kernel is None:
        return
    for name, linear in halves:
        model.set_submodule(name, HalfLinear(linear, kernel))


def open_model(
    checkpoint: Checkpoint, config: SalaConfig, dtype: torch.dtype, device: torch.device, options: Options
) -> SalaModel:
    """Load a model with linears that run in the kernels of this device, as far as the options allow."""
    packed = linear_kernels(device, dtype, options.kernels) if options.packed else None
    model = load_model(checkpoint, config, dtype, device, packed)
    put_half_linears(model, options.kernels)
    return model


def select_forward(model: SalaModel, device: torch.device, max_tokens: int, options: Options) -> FusedForward | None:
    """Return the fused forward of this device, or None if there is none for this model.

    `max_tokens` is the longest sequence. Raises InputError if `prefill` is "fp8" and the device cannot do that.
    """
    config = model.config
    is_gpu = runs_in_triton(device, (config.head_dim, config.lightning_head_dim), config.sparse_config, options.kernels)
    if options.prefill == "fp8":
        _check_fp8_prefill(device, is_gpu)
    if is_gpu:
        from sala.backends.torch.fast.gpu_forward import GpuForward

        return GpuForward(model, device, max_tokens, prefill=options.prefill)
    kernel = cpu_kernel(device, options.kernels)
    is_readable = options.kv == options.state == "auto"  # decode.cpp: pages of 16 and 32 bits, states of 32
    if kernel is None or not is_readable or not cpu_decode.can_decode(model):
        return None
    return cpu_decode.CpuDecode(model, kernel)


def _check_fp8_prefill(device: torch.device, has_kernels: bool) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise InputError("prefill", "is fp8, which needs a GPU of compute capability 8.9 or newer", "use auto")
    if not has_kernels:
        raise InputError("prefill", "is fp8, which needs the Triton kernels", "use auto, or --kernels auto")


# The operations with kernels; each has the signature of its reference.


def _sparse_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, selected: Tensor, positions: Tensor, scale: float
) -> Tensor:
    kernel = native.load() if cpu_decode.can_attend(q, k_pages, v_pages) else None
    if kernel is None:
        return sparse.sparse_attention(q, k_pages, v_pages, table, selected, positions, scale)
    return cpu_decode.attend(kernel, q, k_pages, v_pages, table, selected, positions, scale)


def _lightning_fold(k: Tensor, v: Tensor, state: Tensor, slopes: Tensor) -> Tensor:
    kernel = native.load() if cpu_decode.can_fold(k, v, state) else None
    if kernel is None:
        return lightning.lightning_fold(k, v, state, slopes)
    return cpu_decode.fold(kernel, k, v, state, slopes)


def _lightning_whole(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], slopes: Tensor, scale: float) -> Tensor:
    library = training.simple_gla() if q.is_cuda and not torch.compiler.is_compiling() else None
    if library is None:
        return lightning.lightning_whole(q, k, v, lengths, slopes, scale)
    return training.lightning_whole(library, q, k, v, lengths, slopes, scale)


def _whole_sparse_attention(q: Tensor, k: Tensor, v: Tensor, sparse_config: SparseConfig, scale: float) -> Tensor:
    if q.is_cuda and training.FLEX_TILE % sparse_config.block_size == 0:
        return training.whole_sparse_attention(q, k, v, sparse_config, scale, _select_whole)
    if q.device.type == "cpu" and training.can_mask(q.shape[0], sparse_config):
        return training.masked_attention(q, k, v, sparse_config, scale, _select_whole)
    return sparse.whole_sparse_attention(q, k, v, sparse_config, scale, _select_whole)


def _select_whole(q: Tensor, keys: Tensor, sparse_config: SparseConfig, scale: float) -> Tensor:
    if triton_kernels.why_not(q.device) is None:
        from sala.backends.torch.kernels import block_selection

        if block_selection.supports(sparse_config, q.shape[2], q.dtype):
            return training.select_whole(q, keys, sparse_config, scale)
    return sparse.select_whole(q, keys, sparse_config, scale)


_FAST = Ops(_sparse_attention, _lightning_fold, _lightning_whole, _whole_sparse_attention)

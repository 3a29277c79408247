"""Load weights into the model: one tensor at a time, from the mapped file, never two copies of the model."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from sala.backends import pick_dtype_name
from sala.backends.torch.linears import AffineEmbedding, AffineLinear, AffineWeight, LinearKernels
from sala.backends.torch.model import SalaModel
from sala.checkpoint.dtypes import dtypes_by_file_name, dtypes_by_name
from sala.checkpoint.matrices import Fp8Matrix, QuantizedMatrices
from sala.checkpoint.names import check_tensors
from sala.checkpoint.packing import Packed
from sala.checkpoint.random import spread
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import InputError

DTYPES = dtypes_by_name(torch)
_PIECE = 1 << 24  # elements converted at a time
_FILE_DTYPES = dtypes_by_file_name(torch)


def load_model(
    checkpoint: Checkpoint,
    config: SalaConfig,
    dtype: torch.dtype,
    device: torch.device,
    packed: LinearKernels | None = None,
) -> SalaModel:
    """Build the model without memory, then give every parameter its tensor.

    On the CPU, in the precision of the file, a parameter *is* the mapped file: loading costs nothing. With kernels for
    packed matrices (`fast.dispatch.linear_kernels`) that holds for quantized ones too; without, they are dequantized.
    """
    check_tensors(checkpoint, config)
    matrices = QuantizedMatrices(checkpoint, config)

    def read(name: str, shape: torch.Size) -> Tensor | None:
        module, _, leaf = name.rpartition(".")
        if module in matrices and leaf == "weight":
            return None
        tensor = read_tensor(checkpoint, name, dtype, device)
        assert tensor.shape == shape, name
        return tensor

    model = fill_model(config, read)
    for module in matrices:
        if module != "lm_head" or not config.tie_word_embeddings:
            put_quantized(model, module, matrices, dtype, device, packed)
    return model


def fill_model(config: SalaConfig, read: Callable[[str, torch.Size], Tensor | None]) -> SalaModel:
    """Build the model; `read` returns the tensor of a parameter by name and shape, or None if it comes later."""
    with torch.device("meta"):
        model = SalaModel(config)
    for name, parameter in list(model.named_parameters()):
        module, _, leaf = name.rpartition(".")
        tensor = read(name, parameter.shape)
        if tensor is not None:
            setattr(model.get_submodule(module), leaf, nn.Parameter(tensor, requires_grad=False))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval()


def random_model(config: SalaConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> SalaModel:
    """Return a model with weights of the same distributions as those of `sala init`, created on the device."""
    generator = torch.Generator(device).manual_seed(seed)

    def create(name: str, shape: torch.Size) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if tensor.dim() > 1:
            return tensor.normal_(std=spread(name, tuple(shape), config), generator=generator)
        return tensor.normal_(std=0.5, generator=generator) if name.endswith(".bias") else tensor.fill_(1)

    return fill_model(config, create)


def put_quantized(
    model: SalaModel,
    name: str,
    matrices: QuantizedMatrices,
    dtype: torch.dtype,
    device: torch.device,
    kernels: LinearKernels | None,
) -> None:
    """Replace a linear or the embedding (and the head that shares it) by a quantized matrix, or dequantize it.

    At most one module is in memory twice. A matrix with an order of columns stays packed on the CPU only.
    """
    is_embedding = name == "model.embed_tokens"
    is_shared = is_embedding and model.config.tie_word_embeddings
    matrix = matrices.read(name)
    if isinstance(matrix, Fp8Matrix) or kernels is None or (matrix.order is not None and device.type != "cpu"):
        parameter = nn.Parameter(_expand(matrices, name, matrix, dtype, device), requires_grad=False)
        for place in (name, "lm_head") if is_shared else (name,):
            model.get_submodule(place).weight = parameter
        return
    weight = to_affine(matrix).map(lambda part: part.to(device))
    if is_embedding:
        model.model.embed_tokens = AffineEmbedding(weight, dtype, kernels)  # type: ignore[assignment]
    if is_shared or not is_embedding:
        place = "lm_head" if is_shared else name
        bias = model.get_submodule(place).bias
        order = None if matrix.order is None else torch.from_numpy(matrix.order)
        model.set_submodule(place, AffineLinear(weight, bias if isinstance(bias, Tensor) else None, order, kernels))


def read_parameter(
    checkpoint: Checkpoint, config: SalaConfig, name: str, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a parameter of the plain model, whatever the format of its module; the tensors must have been checked."""
    module, _, leaf = name.rpartition(".")
    matrices = QuantizedMatrices(checkpoint, config)
    if leaf == "weight" and module in matrices:
        return _expand(matrices, module, matrices.read(module), dtype, device)
    return read_tensor(checkpoint, name, dtype, device)


def _expand(
    matrices: QuantizedMatrices, name: str, matrix: Packed | Fp8Matrix, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a matrix [out, in] in the precision of the model, rounded once, some rows at a time."""
    if isinstance(matrix, Fp8Matrix):
        out = torch.empty(matrix.codes.shape, dtype=dtype, device=device)
        for begin, end in matrices.fp8_pieces(name, matrix):
            rows = torch.from_numpy(matrix.codes[begin:end]).view(torch.float8_e4m3fn).float()
            out[begin:end] = rows.mul_(torch.from_numpy(matrix.factors(begin, end)))
        return out
    weight = to_affine(matrix).expand(dtype, device)
    if matrix.order is None:
        return weight
    return torch.empty_like(weight).index_copy_(1, torch.from_numpy(matrix.order).to(device), weight)


def to_affine(packed: Packed) -> AffineWeight:
    """Return a packed matrix as torch tensors in numpy's memory, without a copy."""
    scales, biases = (
        torch.from_numpy(np.ascontiguousarray(values).view(np.uint8)).view(_FILE_DTYPES[packed.dtype])
        for values in (packed.scales, packed.biases)
    )
    return AffineWeight(torch.from_numpy(packed.codes.view(np.int32)), scales, biases, packed.bits, packed.group_size)


def read_tensor(checkpoint: Checkpoint, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    raw = checkpoint.read(name)
    stored = _FILE_DTYPES[raw.dtype]
    if not raw.data.nbytes:
        return torch.empty(raw.shape, dtype=dtype, device=device)
    tensor = torch.frombuffer(raw.data, dtype=stored).view(raw.shape)
    if stored == dtype and device.type == "cpu":
        return tensor
    converted = torch.empty(raw.shape, dtype=dtype, device=device)
    source, target = tensor.view(-1), converted.view(-1)
    for begin in range(0, source.numel(), _PIECE):
        end = min(begin + _PIECE, source.numel())
        target[begin:end] = source[begin:end]  # piece by piece: pages of the file are dropped as soon as they are read
        checkpoint.forget(name, begin * stored.itemsize, end * stored.itemsize)
    return converted


def pick_device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError("device", f"is {name!r}", "use auto, cpu, cuda, cuda:N or mps") from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise InputError("device", f"is {name!r}", "use auto, cpu, cuda, cuda:N or mps")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise InputError("device", "is 'mps', which needs a Mac with Apple Silicon", "use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count() > 0:
        raise InputError("device", f"is {name!r}", f"there are {torch.cuda.device_count()} CUDA devices")
    if device.type == "cuda" and not torch.cuda.is_available():
        message = f"is {name!r}, but no CUDA device is usable"
        raise InputError("device", message, "use cpu, or install a CUDA build of torch")
    return device


def pick_dtype(name: str, config: SalaConfig) -> torch.dtype:
    return DTYPES[pick_dtype_name(name, config)]

"""Load weights into the model: one tensor at a time, from the mapped file, never two copies of the model."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from sala.backends.torch.model import SalaModel
from sala.backends.torch.permuted_linear import PermutedLinear
from sala.backends.torch.quantized_linear import AffineEmbedding, AffineLinear, AffineWeight, can_run_packed
from sala.checkpoint.dtypes import dtypes_by_file_name, dtypes_by_name
from sala.checkpoint.external_formats import read_fp8_scales, read_matrix
from sala.checkpoint.names import check_tensors, external_modules, quantized_modules
from sala.checkpoint.packing import Packed
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import CheckpointError, InputError
from sala.quantization_config import Groups, Layout

DTYPES = dtypes_by_name(torch)
_PIECE = 1 << 24  # elements converted at a time
_FEW = 1 << 20  # elements per step where several steps follow: they stay in the processor's cache
_FILE_DTYPES = dtypes_by_file_name(torch)


def load_model(
    checkpoint: Checkpoint, config: SalaConfig, dtype: torch.dtype, device: torch.device, is_expanded: bool = False
) -> SalaModel:
    """Build the model without memory, then give every parameter its tensor.

    On the CPU, in the precision of the file, a parameter *is* the mapped file: loading costs nothing. So does loading
    a quantized matrix where there is a kernel for it; elsewhere, or with `is_expanded`, it is dequantized here.
    """
    check_tensors(checkpoint, config)
    packed, external = quantized_modules(checkpoint.tensors, config), external_modules(checkpoint.tensors, config)
    with torch.device("meta"):
        model = SalaModel(config)
    for name, parameter in list(model.named_parameters()):
        module, _, leaf = name.rpartition(".")
        if (module in packed or module in external) and leaf == "weight":
            continue
        tensor = read_tensor(checkpoint, name, dtype, device)
        assert tensor.shape == parameter.shape, name
        setattr(model.get_submodule(module), leaf, nn.Parameter(tensor, requires_grad=False))
    for module, groups in packed.items():
        if module not in external and (module != "lm_head" or not config.tie_word_embeddings):
            weight = read_packed(checkpoint, module, groups)
            put_quantized(model, module, weight, dtype, device, is_expanded)
    for module, shape in external.items():
        put_external(model, checkpoint, module, shape, dtype, device, is_expanded)
    if config.tie_word_embeddings and "model.embed_tokens" not in packed:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval()


def put_quantized(
    model: SalaModel,
    name: str,
    weight: AffineWeight,
    dtype: torch.dtype,
    device: torch.device,
    is_expanded: bool,
    order: Tensor | None = None,
) -> None:
    """Replace a linear or the embedding (and the head that shares it) by a quantized matrix.

    `order` names the input of every column. A matrix with an order stays packed on the CPU only.
    """
    is_embedding = name == "model.embed_tokens"
    is_shared = is_embedding and model.config.tie_word_embeddings
    if not is_expanded and can_run_packed(device, dtype) and (order is None or device.type == "cpu"):
        weight = _to_device(weight, device)
        if is_embedding:
            model.model.embed_tokens = AffineEmbedding(weight, dtype)  # type: ignore[assignment]
        if is_shared or not is_embedding:
            place = "lm_head" if is_shared else name
            bias = model.get_submodule(place).bias
            linear = AffineLinear(weight, bias if isinstance(bias, Tensor) else None)
            model.set_submodule(place, linear if order is None else PermutedLinear(linear, order))
        return
    parameter = nn.Parameter(_expand(weight, order, dtype, device), requires_grad=False)
    for place in (name, "lm_head") if is_shared else (name,):
        model.get_submodule(place).weight = parameter


def put_external(
    model: SalaModel,
    checkpoint: Checkpoint,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    is_expanded: bool,
) -> None:
    """Replace a linear by a matrix in an external format; at most one module is in memory twice."""
    layout = model.config.layout
    assert layout is not None
    if layout.kind == "fp8":
        weight = expand_fp8(checkpoint, name, layout.block, dtype, device)
        model.get_submodule(name).weight = nn.Parameter(weight, requires_grad=False)
        return
    affine, order = read_external(checkpoint, name, shape, layout)
    put_quantized(model, name, affine, dtype, device, is_expanded, order)


def read_weight(
    checkpoint: Checkpoint, config: SalaConfig, name: str, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the matrix of a module [out, in] in any format; the tensors must have been checked."""
    layout = config.layout
    shape = external_modules(checkpoint.tensors, config).get(name)
    if layout is not None and shape is not None:
        if layout.kind == "fp8":
            return expand_fp8(checkpoint, name, layout.block, dtype, device)
        return _expand(*read_external(checkpoint, name, shape, layout), dtype, device)
    groups = quantized_modules(checkpoint.tensors, config).get(name)
    if groups is not None:
        return read_packed(checkpoint, name, groups).expand(dtype, device)
    return read_tensor(checkpoint, f"{name}.weight", dtype, device)


def read_parameter(
    checkpoint: Checkpoint, config: SalaConfig, name: str, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a parameter of the plain model, whatever the format of its module; the tensors must have been checked."""
    module, _, leaf = name.rpartition(".")
    if leaf == "weight":
        return read_weight(checkpoint, config, module, dtype, device)
    return read_tensor(checkpoint, name, dtype, device)


def read_external(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], layout: Layout
) -> tuple[AffineWeight, Tensor | None]:
    """Read a matrix in an external format → the matrix, and the input of every column if they are permuted."""
    matrix = read_matrix(checkpoint, name, shape, layout)
    return to_affine(matrix.packed), None if matrix.order is None else torch.from_numpy(matrix.order)


def _expand(weight: AffineWeight, order: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    matrix = weight.expand(dtype, device)
    return matrix if order is None else torch.empty_like(matrix).index_copy_(1, order.to(device), matrix)


def expand_fp8(
    checkpoint: Checkpoint, name: str, block: tuple[int, int] | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return an FP8 matrix [out, in] in the precision of the model, rounded once, some rows at a time."""
    raw = checkpoint.read(f"{name}.weight")
    num_out, num_in = raw.shape
    codes = torch.frombuffer(raw.data, dtype=torch.int8).view(num_out, num_in)
    scales = torch.from_numpy(read_fp8_scales(checkpoint, name))
    height, width = (num_out // len(scales), num_in) if block is None else block
    out = torch.empty(num_out, num_in, dtype=dtype, device=device)
    step = max(1, _FEW // num_in)
    for begin in range(0, num_out, step):
        end = min(begin + step, num_out)
        if (codes[begin:end] & 0x7F).max() == 0x7F:
            raise CheckpointError(
                f"{checkpoint.path}: {name}.weight has a value that is not a number", "download it again"
            )
        rows = decode_e4m3(codes[begin:end])
        own = scales[torch.arange(begin, end) // height]
        if num_in == scales.shape[1] * width:
            rows.view(-1, scales.shape[1], width).mul_(own.unsqueeze(-1))
        else:
            rows.mul_(own.repeat_interleave(width, 1)[:, :num_in])
        out[begin:end] = rows
        checkpoint.forget(f"{name}.weight", begin * num_in, end * num_in)
    return out


def decode_e4m3(codes: Tensor) -> Tensor:
    """Return the numbers of int8 codes s eeee mmm in fp32; fp16 numbers with the same bits are 2^8 times smaller."""
    half = (codes.to(torch.int16) << 7) & ~(1 << 14)  # int16 has the sign twice; keep it once
    return half.view(torch.float16).float().mul_(256)


def to_affine(packed: Packed) -> AffineWeight:
    """Return a packed matrix as torch tensors in numpy's memory, without a copy."""
    scales, biases = (
        torch.from_numpy(np.ascontiguousarray(values).view(np.uint8)).view(_FILE_DTYPES[packed.dtype])
        for values in (packed.scales, packed.biases)
    )
    return AffineWeight(torch.from_numpy(packed.codes.view(np.int32)), scales, biases, packed.bits, packed.group_size)


def _to_device(weight: AffineWeight, device: torch.device) -> AffineWeight:
    """Return the matrix on the device; on the CPU the same tensors, which are the mapped file."""
    return replace(
        weight, codes=weight.codes.to(device), scales=weight.scales.to(device), biases=weight.biases.to(device)
    )


def read_packed(checkpoint: Checkpoint, name: str, groups: Groups) -> AffineWeight:
    """Return a quantized matrix as it is in the file."""
    codes, scales, biases = (checkpoint.read(f"{name}.{part}") for part in ("weight", "scales", "biases"))
    return AffineWeight(
        torch.frombuffer(codes.data, dtype=torch.int32).view(codes.shape),
        torch.frombuffer(scales.data, dtype=_FILE_DTYPES[scales.dtype]).view(scales.shape),
        torch.frombuffer(biases.data, dtype=_FILE_DTYPES[biases.dtype]).view(biases.shape),
        groups.bits,
        groups.group_size,
    )


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
        raise InputError(
            "device",
            f"is {name!r}, but no CUDA device is usable",
            "use cpu, or install a CUDA build of torch",
        )
    return device


def pick_dtype(name: str, config: SalaConfig) -> torch.dtype:
    wanted = config.dtype if name == "auto" else name
    if wanted not in DTYPES:
        raise InputError("dtype", f"is {name!r}", "use auto, " + ", ".join(DTYPES))
    return DTYPES[wanted]

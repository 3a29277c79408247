"""Weights into the model: one tensor at a time, straight from the mapped file, never two copies of the model."""

import torch
from torch import nn

from sala.backends.torch.model import SalaModel
from sala.backends.torch.quant import AffineEmbedding, AffineLinear, AffineWeight, can_run_packed
from sala.checkpoint.names import check_tensors, quantized_modules
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import InputError
from sala.quantization import Groups

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_PIECE = 1 << 24  # elements converted at a time
_FILE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def load_model(
    checkpoint: Checkpoint, config: SalaConfig, dtype: torch.dtype, device: torch.device, is_expanded: bool = False
) -> SalaModel:
    """Build the model without memory, then give every parameter its tensor.

    On the CPU, in the precision of the file, a parameter *is* the mapped file: loading costs nothing. So is a quantized
    matrix where there is a kernel for it; elsewhere, or if `is_expanded` is asked for, it is dequantized here, once.
    """
    check_tensors(checkpoint, config)
    packed = quantized_modules(checkpoint.tensors, config)
    with torch.device("meta"):
        model = SalaModel(config)
    for name, parameter in list(model.named_parameters()):
        module, _, leaf = name.rpartition(".")
        if module in packed and leaf == "weight":
            continue
        tensor = read_tensor(checkpoint, name, dtype, device)
        assert tensor.shape == parameter.shape, name
        setattr(model.get_submodule(module), leaf, nn.Parameter(tensor, requires_grad=False))
    for module, groups in packed.items():
        if module != "lm_head" or not config.tie_word_embeddings:
            weight = read_packed(checkpoint, module, groups)
            put_quantized(model, module, weight, dtype, device, is_expanded)
    if config.tie_word_embeddings and "model.embed_tokens" not in packed:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval()


def put_quantized(
    model: SalaModel, name: str, weight: AffineWeight, dtype: torch.dtype, device: torch.device, is_expanded: bool
) -> None:
    """Put a quantized matrix in the place of a linear or of the embedding (and of the head that shares it)."""
    is_embedding = name == "model.embed_tokens"
    is_shared = is_embedding and model.config.tie_word_embeddings
    if not is_expanded and can_run_packed(device):
        if is_embedding:
            model.model.embed_tokens = AffineEmbedding(weight, dtype)  # type: ignore[assignment]
        if is_shared or not is_embedding:
            place = "lm_head" if is_shared else name
            bias = model.get_submodule(place).bias
            model.set_submodule(place, AffineLinear(weight, bias if isinstance(bias, torch.Tensor) else None))
        return
    matrix = nn.Parameter(weight.expand(dtype, device), requires_grad=False)
    for place in (name, "lm_head") if is_shared else (name,):
        model.get_submodule(place).weight = matrix


def read_packed(checkpoint: Checkpoint, name: str, groups: Groups) -> AffineWeight:
    """A quantized matrix as it lies in the file."""
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
        target[begin:end] = source[begin:end]  # not `copy_` of all: the file's pages go as soon as they are read
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

"""Weights into the model: one tensor at a time, straight from the mapped file, never two copies of the model."""

import torch
from torch import nn

from sala.backends.torch.model import SalaModel
from sala.checkpoint.names import check_tensors
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import CheckpointError, InputError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_PIECE = 1 << 24  # elements converted at a time
_FILE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def load_model(checkpoint: Checkpoint, config: SalaConfig, dtype: torch.dtype, device: torch.device) -> SalaModel:
    """Build the model without memory, then give every parameter its tensor.

    On the CPU, in the precision of the file, a parameter *is* the mapped file: loading costs nothing.
    """
    if config.quantization is not None:
        raise CheckpointError(
            f"{checkpoint.path} is quantized to {config.quantization.bits} bits",
            "load the original weights instead",
        )
    check_tensors(checkpoint, config)
    with torch.device("meta"):
        model = SalaModel(config)
    for name, parameter in list(model.named_parameters()):
        module, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        tensor = read_tensor(checkpoint, name, dtype, device)
        assert tensor.shape == parameter.shape, name
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval()


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

"""Load models for training in fp32, and write them as ordinary checkpoints."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from sala.backends.torch.batch import Features, whole
from sala.backends.torch.fast.dispatch import select_ops
from sala.backends.torch.loader import fill_model, read_parameter
from sala.backends.torch.model import SalaModel
from sala.checkpoint.names import check_tensors, expected_tensors
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import TOKENIZER_FILES, copy_companions, new_directory, write_model
from sala.config import SalaConfig


def load_for_training(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    is_wanted: Callable[[str], bool] = lambda name: True,
    kernels: str = "auto",
) -> SalaModel:
    """Return a dequantized model that owns its memory; no parameter requires gradients yet.

    Parameters whose names are not wanted stay on the meta device. Whole sequences are computed by `kernels`: auto, or
    off for the reference.
    """
    config = SalaConfig.load(directory)
    with Checkpoint(directory) as checkpoint:
        check_tensors(checkpoint, config)

        def read(name: str, shape: torch.Size) -> Tensor | None:
            if not is_wanted(name):
                return None
            tensor = read_parameter(checkpoint, config, name, dtype, device)
            return tensor.clone() if device.type == "cpu" else tensor  # its memory may be the file's

        model = fill_model(replace(config, quantization=None), read)
    model.kernels = kernels
    return model


def hidden_states(
    model: SalaModel, tokens: Tensor, lengths: Sequence[int] | None = None, features: Features | None = None
) -> Tensor:
    """Return the normed hidden states [T, hidden] of whole sequences: tokens [B, n], or [T] with their lengths."""
    hidden: Tensor = model(whole(tokens, lengths, select_ops(model.kernels), features))
    return hidden


def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter of the model by a tensor that is not trained."""
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, nn.Parameter(tensor, requires_grad=False))


def save_model(model: SalaModel, target: Path, config: SalaConfig, tokenizer_from: Path) -> None:
    """Write a complete checkpoint in fp32, with this configuration and the files of another one's tokenizer."""
    config = replace(config, dtype="float32")
    tensors = dict(model.named_parameters())
    specs = {name: ("F32", shape) for name, shape in expected_tensors(config).items()}
    with new_directory(target) as draft:
        write_model(draft, config, specs, lambda name: tensor_bytes(tensors[name]))
        copy_tokenizer(tokenizer_from, draft)


def copy_tokenizer(source: Path, target: Path) -> None:
    copy_companions(source, target, (*TOKENIZER_FILES, "generation_config.json"))


def tensor_bytes(tensor: Tensor, dtype: torch.dtype = torch.float32) -> memoryview:
    """Return the values in `dtype`, as a safetensors file stores them."""
    flat = tensor.detach().to("cpu", dtype).contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")

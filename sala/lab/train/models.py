"""Load models for training in fp32, and write them as ordinary checkpoints."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from sala.backends.torch.loader import load_model
from sala.backends.torch.model import SalaModel
from sala.checkpoint.dtypes import FILE_DTYPES, dtypes_by_name
from sala.checkpoint.names import expected_tensors
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import new_directory, write_model
from sala.config import SalaConfig


def load_for_training(directory: Path, device: torch.device) -> SalaModel:
    """Return a model in fp32 that owns its memory; no parameter requires gradients yet."""
    config = SalaConfig.load(directory)
    with Checkpoint(directory) as checkpoint:
        model = load_model(checkpoint, config, torch.float32, device, is_expanded=True)
        own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, tensor in own.items():
        set_parameter(model, name, nn.Parameter(tensor, requires_grad=False))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.config = replace(config, quantization=None)
    return model


def set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, parameter)


def save_model(
    model: SalaModel, target: Path, tokenizer_from: Path, dtype: str, copy: Callable[[Path, Path], None]
) -> None:
    """Write a complete checkpoint; `copy` adds the tokenizer's files."""
    config = replace(model.config, dtype=dtype)
    tensors = dict(model.named_parameters())
    kind = dtypes_by_name(torch)[dtype]
    specs = {name: (FILE_DTYPES[dtype], shape) for name, shape in expected_tensors(config).items()}
    with new_directory(target) as draft:
        write_model(draft, config, specs, lambda name: tensor_bytes(tensors[name], kind))
        copy(tokenizer_from, draft)


def tensor_bytes(tensor: Tensor, dtype: torch.dtype = torch.float32) -> memoryview:
    """Return the values in `dtype`, as a safetensors file stores them."""
    flat = tensor.detach().to("cpu", dtype).contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")

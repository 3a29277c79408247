"""Load checkpoints in any format that sala reads as models of transformers."""

from dataclasses import replace
from pathlib import Path

import torch

from sala.backends.torch.fast.dispatch import linear_kernels
from sala.backends.torch.loader import load_model, pick_device, pick_dtype
from sala.backends.torch.model import SalaModel
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.plugins.transformers.config import SalaHfConfig
from sala.plugins.transformers.model import SalaForCausalLM, register
from sala.plugins.transformers.packed import wrap_packed
from sala.plugins.transformers.pretrained import generation_config


def load(
    path: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    packed: bool = False,
) -> SalaForCausalLM:
    """Return the model of a directory, ready for training or generation.

    Quantized matrices are dequantized; with `packed` they stay packed and frozen, and are not parameters.
    The dtype defaults to the checkpoint's, the device to the CPU.
    """
    config = SalaConfig.load(path)
    kind = pick_dtype(str(dtype or "auto").removeprefix("torch."), config)
    place = pick_device(str(device or "cpu"))
    with Checkpoint(path) as checkpoint:
        source = load_model(checkpoint, config, kind, place, linear_kernels(place, kind) if packed else None)
    if packed:
        wrap_packed(source)
    return adopt(source, Path(path), kind, packed)


def adopt(source: SalaModel, path: Path, dtype: torch.dtype, packed: bool = False) -> SalaForCausalLM:
    """Return a model of transformers that has the modules of `source`; no weight is copied."""
    register()
    kept = source.config if packed else replace(source.config, quantization=None)
    config = SalaHfConfig.from_sala(kept, dtype=str(dtype).removeprefix("torch."))
    with torch.device("meta"):
        model = SalaForCausalLM(config)
    model.model.embed_tokens, model.model.norm = source.model.embed_tokens, source.model.norm
    for target, layer in zip(model.model.layers, source.model.layers, strict=True):
        target._modules.update(layer._modules)
    model.lm_head, model.model.kernels = source.lm_head, source.kernels
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model.config._name_or_path = str(path)
    model.generation_config = generation_config(model, path)
    return model.eval()

"""Checkpoints in any format that sala reads as models of transformers: `load`, and what `from_pretrained` needs."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from sala.backends.torch.loader import load_model, pick_device, pick_dtype
from sala.backends.torch.model import SalaModel
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig, own_file
from sala.plugins.transformers.config import IS_OLD, SalaHfConfig
from sala.plugins.transformers.model import SalaForCausalLM, register
from sala.plugins.transformers.packed import wrap_packed


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
        source = load_model(checkpoint, config, kind, place, is_expanded=not packed)
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


def generation_config(model: Any, path: Path) -> Any:
    """Return the generation settings beside a checkpoint, or those that its config.json implies."""
    if own_file(path / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(path)
    return GenerationConfig.from_model_config(model.config)


def peek(name: Any, options: dict[str, Any]) -> SalaHfConfig | None:
    """Return the configuration that `from_pretrained` would read; None if it is not a SALA model's."""
    try:
        config, _ = SalaHfConfig.from_pretrained(name, **{**options, "return_unused_kwargs": True})
    except OSError:  # transformers reports it when it loads the model
        return None
    return config


def from_quantized(make: Callable[..., Any], config: SalaHfConfig, name: Any, options: dict[str, Any]) -> Any:
    """Return what `make` builds from the dequantized weights and the options of transformers."""
    path = _directory(name, options)
    sala = replace(config.to_sala(), quantization=config.quant_config())
    wanted = options.get("dtype", options.get("torch_dtype"))
    if wanted is None and IS_OLD:
        wanted = torch.get_default_dtype()
    dtype = pick_dtype(str(wanted or "auto").removeprefix("torch."), sala)
    with Checkpoint(path) as checkpoint:
        source = load_model(checkpoint, sala, dtype, torch.device("cpu"), is_expanded=True)
    plain = copy.deepcopy(config)
    plain.quantization = None
    made = make(config=plain, state_dict=dict(source.state_dict()), **{**options, "dtype": dtype})
    model = made[0] if isinstance(made, tuple) else made
    model.config._name_or_path = str(name)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config = generation_config(model, path)
    return made


def _directory(name: Any, options: dict[str, Any]) -> Path:
    path = Path(name)
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        known = ("revision", "cache_dir", "token", "local_files_only", "force_download")
        given = {key: options[key] for key in known if options.get(key) is not None}
        path = Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors"], **given))
    return path / (options.get("subfolder") or "")

"""What `from_pretrained` needs for checkpoints that sala reads itself: their configuration, weights and settings."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from sala.backends.torch.loader import load_model, pick_dtype
from sala.checkpoint.reader import Checkpoint
from sala.config import own_file
from sala.plugins.transformers.config import IS_OLD, SalaHfConfig


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
        source = load_model(checkpoint, sala, dtype, torch.device("cpu"))
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

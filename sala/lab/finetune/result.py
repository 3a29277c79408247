"""The outputs of a run: an adapter in peft's format or a whole checkpoint, its losses and a plot of them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sala.backends.torch.loader import DTYPES, read_parameter
from sala.checkpoint.dtypes import FILE_DTYPES
from sala.checkpoint.lora import CONFIG_FILE, PREFIX, WEIGHTS_FILE
from sala.checkpoint.names import expected_tensors
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import copy_companions, new_directory, write_file, write_model, write_text
from sala.config import SalaConfig
from sala.lab.finetune.options import FinetuneOptions
from sala.lab.train.models import tensor_bytes
from sala.lab.train.plots import plot_losses
from sala.lab.train.restore import bring_back, is_qk, qk_modules, turned_change

TURNED_RANKS = 8  # the rank of a turned change is at most so many times that of the adapter
LOSSES_FILE, PLOT_FILE = "losses.json", "losses.png"


def read_metrics(entry: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an entry of the Trainer's log by our names."""
    names = {"loss": "loss", "eval_loss": "eval", "learning_rate": "rate", "grad_norm": "norm"}
    return {short: float(entry[name]) for name, short in names.items() if name in entry}


def read_log(history: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the steps with their losses from the Trainer's history."""
    rows = [{"step": entry["step"], **read_metrics(entry)} for entry in history]
    return [row for row in rows if "loss" in row or "eval" in row]


def write_result(
    tensors: Mapping[str, Tensor],
    settings: Any,
    options: FinetuneOptions,
    path: Path,
    log: list[dict[str, float]],
    facts: Mapping[str, Any],
) -> None:
    """Write the output directory atomically: an adapter if peft's `settings` are given, else a model."""
    with new_directory(options.output) as draft:
        if settings is None:
            _write_model(tensors, draft, path, options)
        else:
            _write_adapter(tensors, settings, draft, path, options)
        table = {"options": options.persistent(), **facts, "losses": log}
        write_text(draft / LOSSES_FILE, json.dumps(table, indent=1) + "\n")
        plot_losses(log, draft / PLOT_FILE, f"{path.name}, {options.method}")


def is_dropped(name: str, options: FinetuneOptions) -> bool:
    """Return whether what a run learnt for a tensor or module is not written: queries and keys from before stay."""
    return options.restore_qk and options.restore_by == "plain" and is_qk(name)


def _write_model(tensors: Mapping[str, Tensor], draft: Path, path: Path, options: FinetuneOptions) -> None:
    """Write a checkpoint in the source's dtype; queries and keys that are restored as they were are the source's."""
    source = SalaConfig.load(path)
    config = replace(source, quantization=None)
    dtype = DTYPES[config.dtype]
    specs = {name: (FILE_DTYPES[config.dtype], shape) for name, shape in expected_tensors(config).items()}
    with Checkpoint(path) as checkpoint:

        def read(name: str) -> memoryview:
            if not is_dropped(name, options):
                return tensor_bytes(tensors[name], dtype)
            return tensor_bytes(read_parameter(checkpoint, source, name, dtype, torch.device("cpu")), dtype)

        write_model(draft, config, specs, read)
    copy_companions(path, draft)


def _write_adapter(
    tensors: Mapping[str, Tensor], settings: Any, draft: Path, path: Path, options: FinetuneOptions
) -> None:
    """Write an adapter in peft's format, without its changes of queries and keys that are restored as they were."""
    kept = {name: tensor for name, tensor in tensors.items() if not is_dropped(name, options)}
    specs = {name: ("F32", tuple(tensor.shape)) for name, tensor in kept.items()}
    write_file(draft / WEIGHTS_FILE, specs, lambda name: tensor_bytes(kept[name]), {"format": "pt"})
    table = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.to_dict().items()}
    targets = [name for name in table["target_modules"] if not is_dropped(name, options)]
    is_path = Path(options.model).expanduser().exists()  # else it is the name of a model
    base = str(path.absolute()) if is_path else options.model
    table |= _patterns(kept, options)
    table |= {"target_modules": targets, "inference_mode": True, "base_model_name_or_path": base}
    write_text(draft / CONFIG_FILE, json.dumps(table, indent=2, default=str) + "\n")


@torch.no_grad()
def restore(tensors: Mapping[str, Tensor], path: Path, options: FinetuneOptions) -> dict[str, Tensor]:
    """Return the tensors of an adapter or a model with queries and keys brought back towards the source's.

    A model's are changed in place; those of an adapter may have other ranks.
    """
    config, found = SalaConfig.load(path), dict(tensors)
    with Checkpoint(path) as checkpoint:

        def read(name: str) -> Tensor:
            return read_parameter(checkpoint, config, name, torch.float32, torch.device("cpu"))

        if not options.has_adapter:
            bring_back(tensors, read, config, options.restore_by)
            return found
        for module, head_dim in qk_modules(config):
            up, down = (f"{PREFIX}{module}.lora_{side}.weight" for side in "BA")
            if up not in found:
                continue
            if options.restore_by == "plain":
                found[up] = torch.zeros_like(found[up])
                continue
            change, scale = (found[up], found[down]), options.alpha / options.rank
            found[up], found[down] = turned_change(
                change, read(f"{module}.weight"), head_dim, scale, TURNED_RANKS * options.rank
            )
    return found


def put_adapter(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Replace the weights of a peft model's adapter; their ranks may differ from before."""
    for name, tensor in tensors.items():
        module, side = name.removesuffix(".weight").rsplit(".", 1)
        linear = getattr(model.get_submodule(module), side)["default"]
        weight = linear.weight
        linear.weight = torch.nn.Parameter(tensor.to(weight.device, weight.dtype), weight.requires_grad)


def _patterns(tensors: Mapping[str, Tensor], options: FinetuneOptions) -> dict[str, Any]:
    """Return peft's patterns for modules of another rank; the scale of their change is that of all others."""
    names = {name.removesuffix(".lora_A.weight").removeprefix(PREFIX): name for name in tensors if "lora_A" in name}
    ranks = {module: len(tensors[name]) for module, name in names.items() if len(tensors[name]) != options.rank}
    alphas = {module: options.alpha / options.rank * rank for module, rank in ranks.items()}
    return {"rank_pattern": ranks, "alpha_pattern": alphas} if ranks else {}


def adapter_tensors(model: Any, whole: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the adapter as peft saves it; `whole` is the gathered state dict of a sharded model."""
    from peft import get_peft_model_state_dict

    found = get_peft_model_state_dict(model, state_dict=whole, save_embedding_layers=False)
    return {name if name.startswith(PREFIX) else PREFIX + name: tensor for name, tensor in found.items()}

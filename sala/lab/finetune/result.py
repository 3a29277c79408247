"""What a run leaves: an adapter in peft's form or a whole checkpoint, its losses and a picture of them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sala.backends.torch.loader import DTYPES, read_tensor, read_weight
from sala.checkpoint.dtypes import FILE_DTYPES
from sala.checkpoint.lora import CONFIG_FILE, PREFIX, WEIGHTS_FILE
from sala.checkpoint.names import expected_tensors
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import copy_companions, new_directory, write_file, write_text, write_weights
from sala.config import SalaConfig
from sala.lab.finetune.options import FinetuneOptions
from sala.lab.finetune.subject import QK_PARTS
from sala.lab.train.plots import plot_losses

LOSSES_FILE, PLOT_FILE = "losses.json", "losses.png"


def read_log(history: list[dict[str, float]]) -> list[dict[str, float]]:
    """Steps with their losses, from the Trainer's history."""
    names = {"loss": "loss", "eval_loss": "eval", "learning_rate": "rate", "grad_norm": "norm"}
    rows = []
    for entry in history:
        row = {short: float(entry[name]) for name, short in names.items() if name in entry}
        if "loss" in row or "eval" in row:
            rows.append({"step": entry["step"], **row})
    return rows


def write_result(
    tensors: Mapping[str, Tensor],
    settings: Any,
    options: FinetuneOptions,
    path: Path,
    log: list[dict[str, float]],
    facts: Mapping[str, Any],
) -> None:
    """Complete or not at all. `tensors` are the adapter's, with peft's `settings`, or without any the model's."""
    with new_directory(options.output) as draft:
        if settings is None:
            _write_model(tensors, draft, path, options)
        else:
            _write_adapter(tensors, settings, draft, path, options)
        table = {"options": options.lasting(), **facts, "losses": log}
        write_text(draft / LOSSES_FILE, json.dumps(table, indent=1) + "\n")
        plot_losses(log, draft / PLOT_FILE, f"{path.name}, {options.method}")


def _write_model(tensors: Mapping[str, Tensor], draft: Path, path: Path, options: FinetuneOptions) -> None:
    """In the precision of the original; with `restore_qk`, its queries and keys."""
    source = SalaConfig.load(path)
    config = replace(source, quantization=None)
    dtype = DTYPES[config.dtype]
    shapes = expected_tensors(config)
    specs = {name: (FILE_DTYPES[config.dtype], shape) for name, shape in shapes.items()}
    with Checkpoint(path) as checkpoint:

        def read(name: str) -> memoryview:
            place, _, leaf = name.rpartition(".")
            if options.restore_qk and is_qk(name):
                is_matrix = leaf == "weight" and len(shapes[name]) == 2
                cpu = torch.device("cpu")
                if is_matrix:
                    return _bytes(read_weight(checkpoint, source, place, dtype, cpu), dtype)
                return _bytes(read_tensor(checkpoint, name, dtype, cpu), dtype)
            return _bytes(tensors[name], dtype)

        write_weights(draft, specs, read)
    write_text(draft / "config.json", json.dumps(config.to_dict(), indent=2) + "\n")
    copy_companions(path, draft)


def is_qk(name: str) -> bool:
    """Whether a tensor belongs to the queries or keys of a mixer."""
    return any(part in QK_PARTS for part in name.split("."))


def _write_adapter(
    tensors: Mapping[str, Tensor], settings: Any, draft: Path, path: Path, options: FinetuneOptions
) -> None:
    """With `restore_qk`, what was learnt for queries and keys is left out."""
    kept = {name: tensor for name, tensor in tensors.items() if not (options.restore_qk and is_qk(name))}
    specs = {name: ("F32", tuple(tensor.shape)) for name, tensor in kept.items()}
    write_file(draft / WEIGHTS_FILE, specs, lambda name: _bytes(kept[name], torch.float32), {"format": "pt"})
    table = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.to_dict().items()}
    targets = [name for name in table["target_modules"] if not (options.restore_qk and name in QK_PARTS)]
    table |= {
        "target_modules": targets,
        "inference_mode": True,
        "base_model_name_or_path": _name_of(options.model, path),
    }
    write_text(draft / CONFIG_FILE, json.dumps(table, indent=2, default=str) + "\n")


def _name_of(model: str, path: Path) -> str:
    """How the base is found again: by the name it was asked for, or by its place."""
    return model if not Path(model).expanduser().exists() else str(path.absolute())


def adapter_tensors(model: Any, whole: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The adapter as peft would save it; `whole` is the state of a model that was spread over processes."""
    from peft import get_peft_model_state_dict

    found = get_peft_model_state_dict(model, state_dict=whole, save_embedding_layers=False)
    return {name if name.startswith(PREFIX) else PREFIX + name: tensor for name, tensor in found.items()}


def _bytes(tensor: Tensor, dtype: torch.dtype) -> memoryview:
    plain = tensor.detach().to("cpu", dtype).contiguous().view(-1)
    return plain.view(torch.uint8).numpy().data

"""The saved state of a training run: trained weights, optimizer state and step, written atomically without pickle."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from sala.checkpoint.reader import read_file_header, read_tensors
from sala.checkpoint.writer import write_file

_FILE = "state.safetensors"


def save_state(directory: Path, step: int, model: Any, optimizer: Any, accelerator: Any) -> None:
    """Replace the saved state atomically; every process must call this."""
    tensors = _gather(model, optimizer)  # a collective operation if the weights are sharded
    if accelerator.is_main_process:
        draft = directory / f".{_FILE}.part"
        draft.unlink(missing_ok=True)
        specs = {name: ("F32", tuple(tensor.shape)) for name, tensor in tensors.items()}
        write_file(draft, specs, lambda name: tensor_bytes(tensors[name]), {"step": json.dumps(step)})
        draft.replace(directory / _FILE)
    accelerator.wait_for_everyone()


def load_state(directory: Path, model: Any, optimizer: Any) -> int:
    """Load the saved state into model and optimizer, and return its step; 0 if there is none."""
    file = directory / _FILE
    if not file.is_file():
        return 0
    metadata, infos = read_file_header(file)
    tensors = {name: tensor_of(raw) for name, raw in read_tensors(file, infos).items()}
    _scatter(model, optimizer, tensors)
    return int(json.loads(metadata["step"]))


def _options(is_whole: bool = True) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=is_whole, cpu_offload=is_whole, ignore_frozen_params=True, strict=False)


def _gather(model: Any, optimizer: Any) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, memory = cast(Any, get_state_dict(model, _inner(optimizer), options=_options()))
    out = {f"weight.{name}": tensor for name, tensor in weights.items() if isinstance(tensor, Tensor)}
    for name, entries in memory.get("state", {}).items():  # only the main process gets the full tensors
        out |= {f"memory.{kind}.{name}": torch.as_tensor(value) for kind, value in entries.items()}
    return out


def _scatter(model: Any, optimizer: Any, tensors: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    inner = _inner(optimizer)
    _, memory = get_state_dict(model, inner, options=_options(is_whole=False))
    weights: dict[str, Any] = {
        name.removeprefix("weight."): value for name, value in tensors.items() if name.startswith("weight.")
    }
    state: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("memory."):
            kind, _, parameter = name.removeprefix("memory.").partition(".")
            state.setdefault(parameter, {})[kind] = value
    groups: dict[str, Any] = {"state": state, "param_groups": memory["param_groups"]}
    set_state_dict(model, inner, model_state_dict=weights, optim_state_dict=groups, options=_options())


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def tensor_bytes(tensor: Tensor, dtype: torch.dtype = torch.float32) -> memoryview:
    """Return the values in `dtype`, as a safetensors file stores them."""
    flat = tensor.detach().to("cpu", dtype).contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_of(raw: Any) -> Tensor:
    """Return a copy of fp32 values that were read from a file."""
    values = np.frombuffer(raw.data, np.float32).reshape(raw.shape).copy()
    return torch.from_numpy(values)

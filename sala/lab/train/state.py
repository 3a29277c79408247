"""The saved state of a training run: trained weights, optimizer state and step, written atomically without pickle."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sala.checkpoint.reader import read_file_header, read_tensors
from sala.checkpoint.writer import write_file

_FILE = "state.safetensors"


def write_state(directory: Path, learner: Any, facts: Mapping[str, float]) -> None:
    """Replace the saved state atomically; every process must call this, and wait for the others."""
    tensors = learner.tensors()  # a collective operation if the weights are sharded
    if learner.rank == 0:
        draft = directory / f".{_FILE}.part"
        draft.unlink(missing_ok=True)
        specs = {name: ("F32", tuple(tensor.shape)) for name, tensor in tensors.items()}
        texts = {name: json.dumps(value) for name, value in facts.items()}
        write_file(draft, specs, lambda name: tensor_bytes(tensors[name]), texts)
        draft.replace(directory / _FILE)


def read_state(directory: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the tensors and facts of the saved state; both are empty if there is none."""
    file = directory / _FILE
    if not file.is_file():
        return {}, {}
    facts, infos = read_file_header(file)
    tensors = {name: _tensor_of(raw) for name, raw in read_tensors(file, infos).items()}
    return tensors, {name: json.loads(facts[name]) for name in ("step", "elapsed") if name in facts}


def tensor_bytes(tensor: Tensor, dtype: torch.dtype = torch.float32) -> memoryview:
    """Return the values in `dtype`, as a safetensors file stores them."""
    flat = tensor.detach().to("cpu", dtype).contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _tensor_of(raw: Any) -> Tensor:
    """Return a copy of fp32 values that were read from a file."""
    values = np.frombuffer(raw.data, np.float32).reshape(raw.shape).copy()
    return torch.from_numpy(values)

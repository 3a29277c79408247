"""Hybrids that are trained and stored as overlays of their teacher."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sala.backends.torch.model import SalaModel
from sala.checkpoint.overlay import GATES, OverlayPacking, base_matrix, overlay_files, read_overlay
from sala.checkpoint.packing import dequantize
from sala.config import SalaConfig
from sala.errors import CheckpointError
from sala.lab.train.adapters import LowRank, add_low_rank
from sala.lab.train.latent import Storage
from sala.lab.train.models import load_for_training, set_tensor
from sala.quantization_config import MIXER_LINEARS, MLP_LINEARS


@dataclass(frozen=True, slots=True)
class TeacherBase:
    """The teacher's tensors as the base of an overlay."""

    tensors: Mapping[str, Any]

    @classmethod
    def of(cls, teacher: SalaModel) -> "TeacherBase":
        return cls({name: value.detach().float().cpu().numpy() for name, value in teacher.named_parameters()})

    def read(self, name: str) -> Any:
        return self.tensors[name]

    def read_packed(self, name: str) -> None:
        return None


def load_student(start: Path, teacher: SalaModel, base: TeacherBase, rank: int, seed: int) -> SalaModel:
    """Return a hybrid with the MLPs as changes of the teacher's, from an overlay or from an ordinary checkpoint."""
    if overlay_files(start):
        return load_overlay(start, teacher, base, rank, seed)
    model = load_for_training(start, teacher.lm_head.weight.device, kernels=teacher.kernels)
    add_low_rank(model, teacher, rank, seed)
    return model


def load_overlay(overlay: Path, teacher: SalaModel, base: TeacherBase, rank: int, seed: int) -> SalaModel:
    """Return the hybrid of an overlay on the teacher's device; its MLPs are the teacher's with low-rank changes.

    Embedding and head are the teacher's own tensors. A stored change of lower rank is extended with zero components.
    Raise CheckpointError if `overlay` is not the overlay of a whole model.
    """
    config = SalaConfig.load(overlay)
    if config.quantization is None:
        raise CheckpointError(f"{overlay} is not an overlay", "give a directory with overlay-*.safetensors")
    modules, plain = read_overlay(overlay, config.quantization)
    device = teacher.lm_head.weight.device
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = SalaModel(config)
    model.kernels = teacher.kernels
    model.model.embed_tokens, model.lm_head = teacher.model.embed_tokens, teacher.lm_head

    def put(name: str, values: Any) -> None:
        set_tensor(model, name, torch.from_numpy(values).to(device, torch.float32))

    for name in [name for name, value in model.named_parameters() if value.is_meta and value.ndim == 1]:
        put(name, plain[name].copy())
    for index, layer in enumerate(model.model.layers):
        for name in MIXER_LINEARS:
            module = f"model.layers.{index}.self_attn.{name}"
            if module in modules:
                put(f"{module}.weight", dequantize(modules[module]))
            elif f"{module}.change" in modules:
                change = dequantize(modules[f"{module}.change"])
                put(f"{module}.weight", base_matrix(config, base, module) + change)
        for name in MLP_LINEARS:
            module = f"model.layers.{index}.mlp.{name}"
            changed = LowRank(teacher.get_submodule(module), rank, generator)  # type: ignore[arg-type]
            if f"{module}.up" in modules:
                up, down = (torch.from_numpy(dequantize(modules[f"{module}.{half}"])) for half in ("up", "down"))
                changed.load_factors(up.T.to(device), down.to(device))
            setattr(layer.mlp, name, changed)
    missing = [name for name, value in model.named_parameters() if value.is_meta]
    if missing:
        raise CheckpointError(f"{overlay} has no {missing[0]}", "give the overlay of a whole model")
    return model


def overlay_storage(model: SalaModel, base: TeacherBase, packing: OverlayPacking) -> dict[str, Storage]:
    """Return how an overlay stores the mixers of a hybrid, by parameter name."""
    out = {}
    for name, value in model.named_parameters():
        module = name.removesuffix(".weight")
        if ".self_attn." not in name or value.ndim != 2:
            continue
        if module.endswith(GATES):
            out[name] = Storage(packing.gate_bits, packing.group_size)
        else:
            origin = torch.from_numpy(np.ascontiguousarray(base_matrix(model.config, base, module)))
            out[name] = Storage(packing.bits, packing.group_size, origin.to(value.device))
    return out

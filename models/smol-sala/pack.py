"""Write the overlay of smol-sala from a finished conversion: its difference from the base, in the bits it learnt with.

python models/smol-sala/pack.py FINAL_MODEL TEACHER OUT --bits 4 --gate-bits 5 --group-size 64 --rank 56
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sala.backends.torch.model import SalaModel
from sala.checkpoint.arrays import Floats, as_bytes
from sala.checkpoint.overlay import CHANGE_GROUPS, GATES, Base, OverlayPacking, base_matrix, overlay_files
from sala.checkpoint.packing import PACKED_PARTS, Packed, packed_specs, quantize
from sala.checkpoint.writer import Spec, plan_shards, write_file
from sala.config import SalaConfig
from sala.lab.train.models import load_for_training
from sala.lab.train.overlays import TeacherBase
from sala.quantization_config import Groups, QuantConfig


def pack(model: SalaModel, teacher: SalaModel, out: Path, packing: OverlayPacking) -> float:
    """Write overlay and config.json into `out` and return the overlay's size in MB."""
    tensors = TeacherBase.of(model).tensors
    modules, norms, quantization = pack_overlay(model.config, tensors, TeacherBase.of(teacher), packing)
    out.mkdir(parents=True, exist_ok=True)
    for old in overlay_files(out):
        old.unlink()
    write_overlay(out, modules, norms)
    config = replace(model.config, dtype="float32", quantization=quantization).to_dict()
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return sum(file.stat().st_size for file in out.glob("overlay-*")) / 1e6


def write_overlay(
    directory: Path, modules: Mapping[str, Packed], norms: Mapping[str, Floats], file_bytes: int = 16_000_000
) -> None:
    """Write files `overlay-N.safetensors`, none larger than `file_bytes`."""
    specs: dict[str, Spec] = {name: ("F32", norm.shape) for name, norm in norms.items()}
    arrays: dict[str, Any] = dict(norms)
    for module, packed in modules.items():
        specs |= packed_specs(module, packed)
        arrays |= {f"{module}.{part}": getattr(packed, field) for part, field in PACKED_PARTS.items()}
    for number, names in enumerate(plan_shards(specs, file_bytes), 1):
        file = directory / f"overlay-{number}.safetensors"
        write_file(file, {name: specs[name] for name in names}, lambda name: as_bytes(arrays[name]), {})


def low_rank(change: Floats, rank: int) -> tuple[Floats, Floats]:
    """Return up [out, rank] and down [rank, in], the best approximation of `change` [out, in] of that rank.

    Both halves have the same norm.
    """
    rng = np.random.default_rng(0)
    span = change @ rng.standard_normal((change.shape[1], rank + 8)).astype(np.float32)
    basis, _ = np.linalg.qr(change @ (change.T @ span))
    left, sizes, right = np.linalg.svd(basis.T @ change, full_matrices=False)
    half = np.sqrt(sizes[:rank])
    return (basis @ left[:, :rank]) * half, half[:, None] * right[:rank]


def changes(modules: Mapping[str, tuple[Floats, Floats]]) -> Iterator[tuple[str, Packed]]:
    """Yield the thin matrices of every changed module, packed along their long sides: up.T [r, out], down [r, in]."""
    for name, (up, down) in modules.items():
        for half, matrix in (("up", up.T), ("down", down)):
            matrix = np.ascontiguousarray(matrix, np.float32)
            yield f"{name}.{half}", quantize(matrix, CHANGE_GROUPS.bits, CHANGE_GROUPS.group_size, "F16")


def pack_overlay(
    config: SalaConfig, tensors: Mapping[str, Floats], base: Base, packing: OverlayPacking
) -> tuple[dict[str, Packed], dict[str, Floats], QuantConfig]:
    """Pack a hybrid's `tensors` as differences from its base.

    Return what `write_overlay` takes, and the quantization that the overlay's `config.json` must state.
    """
    modules: dict[str, Packed] = {}
    norms: dict[str, Floats] = {}
    thin: dict[str, tuple[Floats, Floats]] = {}
    gates: list[tuple[str, Groups]] = []
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if value.ndim == 1:
            norms[name] = value
        elif module.endswith(GATES):
            gates.append((module, Groups(packing.gate_bits, packing.group_size)))
            modules[module] = quantize(value, packing.gate_bits, packing.group_size, "F16")
        elif ".self_attn." in name:
            change = value - base_matrix(config, base, module)
            modules[f"{module}.change"] = quantize(change, packing.bits, packing.group_size, "F16")
        elif ".mlp." in name:
            change = value - base.read(name)
            if np.abs(change).max() > 0:
                thin[module] = low_rank(change, packing.rank)
    overrides = tuple(gates) if packing.gate_bits != packing.bits else ()
    quantization = QuantConfig(packing.bits, packing.group_size, overrides)
    return modules | dict(changes(thin)), norms, quantization


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("final", type=Path)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--gate-bits", type=int, default=5)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--rank", type=int, default=56)
    options = parser.parse_args()
    device = torch.device("cpu")
    model, teacher = load_for_training(options.final, device), load_for_training(options.teacher, device)
    packing = OverlayPacking(options.bits, options.gate_bits, options.group_size, options.rank)
    print(f"{pack(model, teacher, options.out, packing):.1f} MB in {options.out}")


if __name__ == "__main__":
    main()

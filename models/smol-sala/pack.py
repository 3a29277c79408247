"""Write the overlay of smol-sala from a finished conversion: its difference from the base, in the bits it learnt with.

python models/smol-sala/pack.py FINAL_MODEL TEACHER OUT --bits 4 --gate-bits 5 --group-size 64 --rank 56
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sala.backends.torch.model import SalaModel
from sala.checkpoint.overlay import OverlayPacking, pack_overlay, write_overlay
from sala.lab.train.models import load_for_training


@dataclass(frozen=True, slots=True)
class Teacher:
    """The teacher's tensors as the base of an overlay."""

    tensors: dict[str, Any]

    def read(self, name: str) -> Any:
        return self.tensors[name]

    def read_packed(self, name: str) -> None:
        return None


def pack(model: SalaModel, teacher: SalaModel, out: Path, packing: OverlayPacking) -> float:
    """Write overlay and config.json into `out` and return the overlay's size in MB."""
    modules, norms, quantization = pack_overlay(model.config, _arrays(model), Teacher(_arrays(teacher)), packing)
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("overlay-*.safetensors"):
        old.unlink()
    write_overlay(out, modules, norms)
    config = replace(model.config, dtype="float32", quantization=quantization).to_dict()
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return sum(file.stat().st_size for file in out.glob("overlay-*")) / 1e6


def _arrays(model: SalaModel) -> dict[str, Any]:
    return {name: value.detach().float().cpu().numpy() for name, value in model.named_parameters()}


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

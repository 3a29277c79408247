"""The overlay of smol-sala from a finished conversion: what differs from the base, in the bits it was trained for.

python models/smol-sala/pack.py FINAL_MODEL TEACHER OUT --bits 5 --group-size 64 --rank 24
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sala.checkpoint.overlay import changes, low_rank, write_overlay
from sala.checkpoint.packing import quantize
from sala.lab.train.models import load_for_training
from sala.quantization_config import QuantConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("final", type=Path)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bits", type=int, default=5)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--rank", type=int, default=24)
    options = parser.parse_args()
    device = torch.device("cpu")
    model, teacher = load_for_training(options.final, device), load_for_training(options.teacher, device)
    tensors = {name: value.detach().numpy() for name, value in model.named_parameters()}
    old = {name: value.detach().numpy() for name, value in teacher.named_parameters()}
    modules, norms, thin = {}, {}, {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if value.ndim == 1:
            norms[name] = value
        elif ".self_attn." in name:
            modules[module] = quantize(value, options.bits, options.group_size, "F16")
        elif ".mlp." in name:
            change = value - old[name]
            if np.abs(change).max() > 0:
                thin[module] = low_rank(change, options.rank)
    modules |= dict(changes(thin))
    options.out.mkdir(parents=True, exist_ok=True)
    write_overlay(options.out, modules, norms)
    groups = QuantConfig(options.bits, options.group_size)
    config = replace(model.config, dtype="float32", quantization=groups).to_dict()
    (options.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    total = sum(file.stat().st_size for file in options.out.glob("overlay-*"))
    print(f"{len(modules)} matrices, {len(norms)} norms, {total / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

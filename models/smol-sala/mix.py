"""The weighted mean of checkpoints of one shape: python mix.py OUT 0.4:FIRST 0.6:SECOND …"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from sala.lab.train.models import load_for_training, save_model


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("parts", nargs="+", help="WEIGHT:DIRECTORY; the weights should add up to 1")
    options = parser.parse_args()
    parts = [
        (float(weight), Path(directory)) for weight, _, directory in (part.partition(":") for part in options.parts)
    ]
    if abs(sum(weight for weight, _ in parts) - 1) > 1e-6:
        parser.error("the weights do not add up to 1")
    total: dict[str, Tensor] = {}
    for weight, directory in parts:
        model = load_for_training(directory, torch.device("cpu"))
        for name, parameter in model.named_parameters():
            total[name] = total.get(name, 0) + weight * parameter.detach()
    for name, parameter in model.named_parameters():
        parameter.copy_(total[name])
    save_model(model, options.output, model.config, parts[-1][1])


if __name__ == "__main__":
    main()

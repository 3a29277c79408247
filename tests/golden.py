"""The golden cases: checkpoints with random weights and the numbers that the vendor's model computes on them."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

DATA = Path(__file__).parent / "data"
DEVICE = os.environ.get("SALA_TEST_DEVICE", "cpu")  # cuda: the same tests on a GPU


@dataclass(frozen=True)
class Case:
    model: Path
    name: str

    @property
    def data(self) -> dict[str, np.ndarray]:
        return load_file(self.model / f"{self.name}.safetensors")

    def __str__(self) -> str:
        return f"{self.model.name}-{self.name}"


CASES = [
    Case(file.parent, file.stem)
    for model in ("block16", "block64")
    for file in sorted((DATA / model).glob("*.safetensors"))
    if file.stem != "model"
]

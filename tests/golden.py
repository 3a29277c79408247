"""The golden cases: checkpoints with random weights and the numbers that the vendor's model computes on them."""

import functools
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

DATA = Path(__file__).parent / "data"
DEVICE = os.environ.get("SALA_TEST_DEVICE", "cpu")  # cuda: the same tests on a GPU


@functools.cache
def checkpoint(name: str) -> Path:
    """A golden checkpoint; on a GPU with heads that its kernels take."""
    if DEVICE == "cpu":
        return DATA / name
    from tests.widening import widen

    place = Path(tempfile.mkdtemp()) / name
    widen(DATA / name, place)
    return place


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

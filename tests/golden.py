"""The golden cases: checkpoints with random weights and the numbers that the vendor's model computes on them."""

import functools
import hashlib
import lzma
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

STORED = Path(__file__).parent / "data"


def unpack(stored: Path) -> Path:
    """Return a copy of a directory in which what is compressed is unpacked; later and parallel runs share it."""
    files = sorted(file for file in stored.rglob("*") if file.is_file())
    facts = [f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    target = Path(tempfile.gettempdir()) / f"sala-tests-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"
    if target.is_dir():
        return target
    draft = Path(tempfile.mkdtemp(dir=target.parent))
    for file in files:
        copy = draft / file.relative_to(stored)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".xz":
            copy.with_suffix("").write_bytes(lzma.decompress(file.read_bytes()))
        else:
            shutil.copyfile(file, copy)
    try:
        draft.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(draft)
    return target


DATA = unpack(STORED)
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

"""The work directory of a run: one file per finished layer, and the activations that enter the next one.

A work directory belongs to one job, by its fingerprint: source, settings and calibration text. Another job starts
over. Every file is complete or absent, so that a kill at any moment loses at most one layer.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sala.checkpoint.reader import RawTensor, TensorInfo, read_file_header, read_tensors
from sala.checkpoint.writer import Read, Spec, write_file
from sala.errors import CheckpointError

_JOB = "job.json"


class WorkDirectory:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def piece(self, name: str) -> Path:
        return self.directory / f"{name}.safetensors"

    def has(self, name: str) -> bool:
        return self.piece(name).is_file()

    def save(self, name: str, specs: Mapping[str, Spec], read: Read, about: Mapping[str, str] | None = None) -> None:
        """Write a piece to a temporary file, then rename it."""
        part = self.directory / f".{name}.part"
        part.unlink(missing_ok=True)
        write_file(part, specs, read, about or {})
        part.replace(self.piece(name))

    def drop(self, name: str) -> None:
        self.piece(name).unlink(missing_ok=True)

    def tensors(self, name: str) -> dict[str, TensorInfo]:
        return read_file_header(self.piece(name))[1]

    def read(self, name: str, tensor: str, info: TensorInfo) -> RawTensor:
        return read_tensors(self.piece(name), {tensor: info})[tensor]

    def save_activations(self, index: int, x: Tensor) -> None:
        """Save x [S, n, hidden], the input of layer `index`."""
        values = x.detach().cpu().contiguous().numpy()
        self.save("activations", {"x": ("F32", values.shape)}, lambda _: _bytes(values), {"layer": str(index)})

    def load_activations(self) -> tuple[int, Tensor] | None:
        """Return the index of the next layer and its input; None at the beginning."""
        if not self.has("activations"):
            return None
        about, infos = read_file_header(self.piece("activations"))
        raw = self.read("activations", "x", infos["x"])
        values = np.frombuffer(raw.data, np.float32).reshape(raw.shape)
        return int(about["layer"]), torch.from_numpy(values.copy())

    def save_tokens(self, tokens: Tensor) -> None:
        values = tokens.cpu().contiguous().numpy().astype(np.int64)
        self.save("tokens", {"tokens": ("I64", values.shape)}, lambda _: _bytes(values))

    def load_tokens(self) -> Tensor | None:
        if not self.has("tokens"):
            return None
        raw = self.read("tokens", "tokens", self.tensors("tokens")["tokens"])
        return torch.from_numpy(np.frombuffer(raw.data, np.int64).reshape(raw.shape).copy())


@contextlib.contextmanager
def open_draft(directory: Path, fingerprint: str) -> Iterator[tuple[WorkDirectory, bool]]:
    """Open and lock the work directory of a job; yield it, and whether it continues an earlier run."""
    from filelock import FileLock, Timeout

    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise CheckpointError(f"{directory} is not a directory", "move it away")
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise CheckpointError(f"{directory} is in use by another run", "wait until that run has ended") from None
    try:
        is_old = _fingerprint(directory) == fingerprint
        if not is_old:
            _clear(directory)
            (directory / f".{_JOB}").write_text(json.dumps({"fingerprint": fingerprint}))
            (directory / f".{_JOB}").replace(directory / _JOB)
        yield WorkDirectory(directory), is_old
    finally:
        lock.release()


def _clear(directory: Path) -> None:
    """Remove the files of another job; raise if the directory holds anything else."""
    files = [file for file in directory.iterdir() if file.name != ".lock"]
    if files and not any(file.name in (_JOB, f".{_JOB}") for file in files):
        raise CheckpointError(f"{directory} holds something else", "move it away")
    for file in sorted(
        files, key=lambda file: file.name == _JOB
    ):  # the file that identifies a work directory goes last
        file.unlink()


def remove_draft(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


def _fingerprint(directory: Path) -> str | None:
    try:
        found = json.loads((directory / _JOB).read_text())["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _bytes(values: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data

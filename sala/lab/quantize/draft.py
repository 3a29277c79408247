"""The work directory of a run: one file per finished layer, and the activations that enter the next one.

A work directory belongs to one job, by its fingerprint: source, settings and calibration text. Another job starts
over. Every file is complete or absent, so that a kill at any moment loses at most one layer.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sala.checkpoint.arrays import as_array, as_bytes
from sala.checkpoint.reader import RawTensor, TensorInfo, read_file_header, read_tensors
from sala.checkpoint.writer import Spec, replacing, write_atomically, write_file
from sala.errors import CheckpointError

_JOB, _PUBLISHED, _LOCK = "job.json", "published", ".lock"
Arrays = dict[str, tuple[Spec, Any]]  # tensor → dtype and shape, and its bytes


@dataclass(frozen=True, slots=True)
class WorkDirectory:
    directory: Path

    def expect_publication(self) -> None:
        """Note that the model is complete but for its name, so that nothing here is needed once it has its name."""
        (self.directory / _PUBLISHED).touch()

    def piece(self, name: str) -> Path:
        return self.directory / f"{name}.safetensors"

    def has(self, name: str) -> bool:
        return self.piece(name).is_file()

    def save(self, name: str, arrays: Arrays, about: Mapping[str, str] | None = None) -> None:
        specs = {tensor: spec for tensor, (spec, _) in arrays.items()}
        with replacing(self.piece(name)) as part:
            write_file(part, specs, lambda tensor: arrays[tensor][1], about or {})

    def tensors(self, name: str) -> dict[str, TensorInfo]:
        return read_file_header(self.piece(name))[1]

    def read(self, name: str, tensor: str, info: TensorInfo) -> RawTensor:
        return read_tensors(self.piece(name), {tensor: info})[tensor]

    def save_tensor(self, name: str, values: Tensor, dtype: str, about: Mapping[str, str] | None = None) -> None:
        """Save a piece that is a single tensor."""
        array = values.detach().cpu().numpy()
        self.save(name, {name: ((dtype, array.shape), as_bytes(array))}, about)

    def load_tensor(self, name: str) -> tuple[Tensor, Mapping[str, str]] | None:
        """Return the tensor of such a piece and what was said about it; None if it was not saved yet."""
        if not self.has(name):
            return None
        about, infos = read_file_header(self.piece(name))
        return torch.from_numpy(as_array(self.read(name, name, infos[name])).copy()), about


@contextlib.contextmanager
def open_draft(directory: Path, fingerprint: str) -> Iterator[tuple[WorkDirectory, bool]]:
    """Open and lock the work directory of a job; yield it, and whether it continues an earlier run."""
    from filelock import FileLock, Timeout

    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise CheckpointError(f"{directory} is not a directory", "move it away")
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / _LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise CheckpointError(f"{directory} is in use by another run", "wait until that run has ended") from None
    try:
        is_old = _fingerprint(directory) == fingerprint
        if not is_old:
            _clear(directory)
            write_atomically(directory / _JOB, json.dumps({"fingerprint": fingerprint}))
        (directory / _PUBLISHED).unlink(missing_ok=True)
        yield WorkDirectory(directory), is_old
    finally:
        lock.release()


def remove_published(directory: Path) -> None:
    """Remove the work directory of a run that was killed after its model had been published."""
    if directory.is_symlink() or not directory.is_dir():
        return
    if (directory / _PUBLISHED).is_file() or all(file.name == _LOCK for file in directory.iterdir()):
        remove(directory)


def remove(directory: Path) -> None:
    """Remove a work directory; what says that it may be removed goes last, so that a kill leaves nothing for ever."""
    for file in sorted(directory.iterdir(), key=lambda file: (_PUBLISHED, _LOCK).count(file.name)):
        with contextlib.suppress(OSError):
            file.unlink()
    shutil.rmtree(directory, ignore_errors=True)


def _clear(directory: Path) -> None:
    """Remove the files of another job; raise if the directory holds anything else."""
    files = [file for file in directory.iterdir() if file.name != _LOCK]
    if files and not any(file.name == _JOB or file.name.startswith(f".{_JOB}.") for file in files):
        raise CheckpointError(f"{directory} holds something else", "move it away")
    for file in sorted(files, key=lambda file: file.name == _JOB):  # what identifies a work directory goes last
        file.unlink()


def _fingerprint(directory: Path) -> str | None:
    try:
        found = json.loads((directory / _JOB).read_text())["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None

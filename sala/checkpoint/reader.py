"""Read safetensors checkpoints of one or several files, memory-mapped.

Opening parses only the headers and checks them against the files: lengths, offsets, shapes, names. A tensor is a view
of the mapped file, which the operating system reads when it is accessed.
"""

import json
import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from sala.checkpoint.dtypes import ITEM_SIZES
from sala.checkpoint.fingerprint import fingerprint
from sala.config import own_file
from sala.errors import CheckpointError, ModelNotFound
from sala.protocol import Blob

MAX_HEADER_BYTES = 100 << 20
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_DIMS = 8
_DAMAGED = "the file is damaged: download it again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The location of a tensor: bytes start…end of a file."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


RawTensor = Blob  # the bytes of a tensor, in C order and little-endian, with precision and shape


class Checkpoint:
    """The tensors of a model directory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._maps: dict[Path, mmap.mmap] = {}
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(_scan(self.path))

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def read(self, name: str) -> RawTensor:
        """Return a view of the mapped file without copying. Writing to it changes only this process's memory."""
        info = self.tensors[name]
        data = memoryview(self._map(info.file))[info.start : info.end]
        return RawTensor(info.dtype, info.shape, data)

    def forget(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Let the operating system drop bytes of a tensor from memory; they are read again when accessed."""
        info = self.tensors[name]
        stop = info.end if end is None else info.start + end
        first = -(-(info.start + begin) // mmap.PAGESIZE) * mmap.PAGESIZE
        length = stop // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._map(info.file).madvise(mmap.MADV_DONTNEED, first, length)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as handle:
                # copy-on-write: frameworks want writable buffers, and the file must not change
                self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]

    def fingerprint(self) -> str:
        """Return a hash of names, shapes and all bytes of the tensors, remembered while the files do not change."""
        return fingerprint(self.tensors)

    def close(self) -> None:
        """Close the files; a view that is still in use keeps its file mapped."""
        self._maps = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _scan(directory: Path) -> dict[str, TensorInfo]:
    if not directory.is_dir():
        raise ModelNotFound(f"{directory} is not a directory", "give a directory that holds a checkpoint")
    if (directory / INDEX_FILE).is_file():
        return _scan_shards(directory)
    if (directory / SINGLE_FILE).is_file():
        return read_file_header(_inside(directory, SINGLE_FILE))[1]
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")) or any(directory.glob("*.pth")):
        message = f"{directory} has pickled weights, which can run code"
        raise CheckpointError(message, "get the safetensors files of the model")
    message = f"{directory} has no {SINGLE_FILE} and no {INDEX_FILE}"
    raise ModelNotFound(message, "download the model's safetensors files")


def _scan_shards(directory: Path) -> dict[str, TensorInfo]:
    weight_map = read_index(directory / INDEX_FILE)
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values())):
        for name, info in read_file_header(_inside(directory, shard))[1].items():
            if weight_map.get(name) != shard:
                message = f"{directory / shard} holds {name}, which the index does not place there"
                raise CheckpointError(message, _DAMAGED)
            tensors[name] = info
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{directory / shard} lacks {name}, which the index places there", _DAMAGED)
    return tensors


def read_index(file: Path) -> dict[str, str]:
    """Return the file of every tensor, by name."""
    try:
        if file.stat().st_size > MAX_HEADER_BYTES:
            raise CheckpointError(f"{file} is larger than {MAX_HEADER_BYTES >> 20} MiB", _DAMAGED)
        weight_map = json.loads(own_file(file).read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{file} has no weight_map", _DAMAGED) from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{file} has no weight_map from names to files", _DAMAGED)
    return weight_map


def _inside(directory: Path, name: str) -> Path:
    """Return the file of that plain name."""
    if not name or name in (".", "..") or Path(name).name != name or "\\" in name or "\0" in name:
        message = f"{directory}: the index names {name!r}, which leads out of the directory"
        raise CheckpointError(message, "do not use this model")
    file = directory / name
    if not file.exists():
        raise CheckpointError(f"{file} is missing", "download the rest of the model")
    if not own_file(file).is_file():
        raise CheckpointError(f"{file} is not a file", _DAMAGED)
    return file


def read_tensors(file: Path, infos: Mapping[str, TensorInfo]) -> dict[str, RawTensor]:
    """Read tensors of one file into memory."""
    out = {}
    with file.open("rb") as handle:
        for name, info in infos.items():
            handle.seek(info.start)
            out[name] = RawTensor(info.dtype, info.shape, memoryview(handle.read(info.nbytes)))
            if out[name].data.nbytes != info.nbytes:
                raise CheckpointError(f"{file} is truncated", _DAMAGED)
    return out


def read_file_header(file: Path) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    """Return metadata and tensors of one safetensors file, checked against the file's size."""
    try:
        with file.open("rb") as handle:
            file_size = handle.seek(0, 2)
            handle.seek(0)
            header_size = int.from_bytes(handle.read(8), "little")
            if file_size < 8 or header_size > file_size - 8:
                raise CheckpointError(f"{file} is truncated: its header does not fit in {file_size:,} bytes", _DAMAGED)
            if header_size > MAX_HEADER_BYTES:
                raise CheckpointError(f"{file} has a header of {header_size:,} bytes", "this is not a safetensors file")
            header = handle.read(header_size)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    entries = _parse_header(file, header)
    metadata = entries.pop("__metadata__", None) or {}
    tensors = {name: _tensor_info(file, name, entry, 8 + header_size) for name, entry in entries.items()}
    _check_layout(file, tensors, 8 + header_size, file_size)
    return {str(key): str(value) for key, value in dict(metadata).items()}, tensors


def _parse_header(file: Path, header: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise CheckpointError(f"{file} names a tensor twice", _DAMAGED)
        return out

    try:
        entries = json.loads(header, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file} has a header that is not JSON", "this is not a safetensors file") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file} has a header that is not a JSON object", "this is not a safetensors file")
    if not isinstance(entries.get("__metadata__", {}), dict):
        raise CheckpointError(f"{file} has metadata that is not a JSON object", "this is not a safetensors file")
    return entries


def _tensor_info(file: Path, name: str, entry: Any, base: int) -> TensorInfo:
    def is_count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{file}: the entry of {name} is malformed", _DAMAGED)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        message = f"{file}: {name} has the unknown precision {str(dtype)[:20]!r}"
        raise CheckpointError(message, "known: " + ", ".join(ITEM_SIZES))
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(map(is_count, shape)):
        raise CheckpointError(f"{file}: {name} has the impossible shape {str(shape)[:80]}", _DAMAGED)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)):
        raise CheckpointError(f"{file}: {name} has the impossible offsets {str(offsets)[:80]}", _DAMAGED)
    if offsets[1] - offsets[0] != math.prod(shape) * ITEM_SIZES[dtype]:
        message = f"{file}: {name} {shape} {dtype} does not fill its {offsets[1] - offsets[0]} bytes"
        raise CheckpointError(message, _DAMAGED)
    return TensorInfo(dtype, tuple(shape), file, base + offsets[0], base + offsets[1])


def _check_layout(file: Path, tensors: Mapping[str, TensorInfo], base: int, file_size: int) -> None:
    """Raise CheckpointError unless tensors fill the file without gap or overlap."""
    at = base
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start < at:
            raise CheckpointError(f"{file}: {name} overlaps another tensor", _DAMAGED)
        if info.start > at:
            raise CheckpointError(f"{file}: {info.start - at} bytes before {name} belong to no tensor", _DAMAGED)
        at = info.end
    if at > file_size:
        raise CheckpointError(f"{file} is truncated: {at - file_size:,} bytes are missing", "download it again")
    if at < file_size:
        raise CheckpointError(f"{file} has {file_size - at:,} bytes after the last tensor", _DAMAGED)

"""The header of a GGUF file: its metadata and where its tensors lie, checked against the file before they are used.

Counts, lengths and offsets of a file may be anything. Nothing is read beyond its end, and what is kept of a header
is bounded.
"""

import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from sala.checkpoint.arrays import Array
from sala.errors import CheckpointError

MAX_ENTRIES = 1 << 16  # of the metadata, and tensors
MAX_VALUES = 1 << 22  # in arrays of the metadata; the largest vocabularies and their merges have a quarter
MAX_HEADER_BYTES = 100 << 20
MAX_ALIGNMENT = 1 << 16
_MAX_DIMS = 4
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class GGUFTensor(NamedTuple):
    """A tensor as it lies in the file: `data` has its bytes, a row of the matrix in each row; `shape` is that of C."""

    tensor_type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: Array


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Return the metadata and the tensors of a file, mapped. Raises CheckpointError."""
    try:
        with file.open("rb") as handle:
            data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        return _Header(data).read()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, struct.error) as error:  # an empty file cannot be mapped
        raise CheckpointError(f"{file} is not a GGUF file: {error}"[:300], "download it again") from None


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._num_values = data, 0, 0
        self._end = min(len(data), MAX_HEADER_BYTES)

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, num_tensors, num_fields = self._unpack("I"), self._unpack("Q"), self._unpack("Q")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not known")
        if max(num_tensors, num_fields) > MAX_ENTRIES:
            raise ValueError(f"{num_tensors:,} tensors and {num_fields:,} fields are too many")
        metadata = {}
        for _ in range(num_fields):
            name = self._string()
            if name in metadata:
                raise ValueError(f"{name[:80]!r} occurs twice")
            metadata[name] = self._value(self._unpack("I"))
        places = [self._place() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment.bit_count() != 1 or not 1 <= alignment <= MAX_ALIGNMENT:
            raise ValueError(f"the alignment is {str(alignment)[:80]}")
        start = -(-self._at // alignment) * alignment
        return metadata, self._tensors(places, start, alignment)

    def _tensors(
        self, places: list[tuple[str, GGMLQuantizationType, tuple[int, ...], int]], start: int, alignment: int
    ) -> dict[str, GGUFTensor]:
        tensors: dict[str, GGUFTensor] = {}
        end = 0
        for name, kind, shape, offset in sorted(places, key=lambda place: place[3]):
            block, block_bytes = GGML_QUANT_SIZES[kind]
            row_bytes, size = shape[-1] // block * block_bytes, prod(shape) // block * block_bytes
            if name in tensors:
                raise ValueError(f"{name[:80]!r} occurs twice")
            if shape[-1] % block:
                raise ValueError(f"rows of {name[:80]!r} are not made of blocks of {block}")
            if offset < end or offset % alignment:
                raise ValueError(f"{name[:80]!r} overlaps another tensor, or is not aligned")
            end = offset + size
            if start + end > len(self._data):
                raise ValueError(f"{name[:80]!r} ends beyond the end of the file")
            data = np.frombuffer(self._data, np.uint8, size, start + offset).reshape(*shape[:-1], row_bytes)
            tensors[name] = GGUFTensor(kind, shape, data)
        return {name: tensors[name] for name, *_ in places}

    def _place(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        """Return name, format, shape and offset of a tensor."""
        name, num_dims = self._string(), self._unpack("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(f"{name[:80]!r} has {num_dims:,} dimensions")
        shape = tuple(self._unpack("Q") for _ in range(num_dims))[::-1]
        if not all(shape):
            raise ValueError(f"{name[:80]!r} is empty")
        return name, GGMLQuantizationType(self._unpack("I")), shape, self._unpack("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"a field is of the unknown type {kind}")
        kind, count = self._unpack("I"), self._unpack("Q")
        self._num_values += count
        if self._num_values > MAX_VALUES:
            raise ValueError(f"an array of {count:,} values is too long")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError("an array is not of numbers or strings")
        layout = f"<{count}{_SCALARS[kind]}"
        return list(struct.unpack(layout, self._take(struct.calcsize(layout))))

    def _string(self) -> str:
        return self._take(self._unpack("Q")).decode()

    def _unpack(self, layout: str) -> Any:
        return struct.unpack(f"<{layout}", self._take(struct.calcsize(f"<{layout}")))[0]

    def _take(self, count: int) -> bytes:
        begin, self._at = self._at, self._at + count
        if self._at > self._end:
            raise ValueError("its header is cut off, or too large")
        return self._data[begin : self._at]

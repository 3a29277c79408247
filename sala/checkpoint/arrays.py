"""Tensors of a file as numpy arrays, and fp32 to and from the precisions of files."""

from typing import Any

import numpy as np

from sala.checkpoint.dtypes import FLOAT_DTYPES, NUMPY_DTYPES
from sala.checkpoint.reader import RawTensor
from sala.errors import CheckpointError

Array = np.ndarray[Any, np.dtype[Any]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


def as_array(raw: RawTensor) -> Array:
    """Return a view of the tensor's bytes; bfloat16 and float8 as unsigned integers."""
    return np.frombuffer(raw.data, NUMPY_DTYPES[raw.dtype]).reshape(raw.shape)


def as_bytes(array: Array) -> memoryview:
    """Return the array's bytes in C order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def encode(values: Floats, dtype: str) -> Array:
    """Round fp32 to nearest even into what a file of that precision holds."""
    _check_dtype(dtype)
    if dtype != "BF16":
        return values.astype(NUMPY_DTYPES[dtype])
    raw = np.array(values, np.float32, order="C").view(np.uint32)  # a copy: it is rounded in place
    raw += 0x7FFF + ((raw >> 16) & 1)
    return (raw >> 16).astype(np.uint16)


def decode(values: Array, dtype: str) -> Floats:
    """Return fp32 values of what a file of that precision holds."""
    _check_dtype(dtype)
    if values.dtype != NUMPY_DTYPES[dtype]:
        raise CheckpointError(f"{dtype} is not kept as {values.dtype}", "read it again")
    if dtype == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def _check_dtype(dtype: str) -> None:
    if dtype not in FLOAT_DTYPES:
        raise CheckpointError(f"values are stored as {dtype}", "they must be " + ", ".join(FLOAT_DTYPES))

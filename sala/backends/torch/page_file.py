"""Keys and values in a memory-mapped file: for contexts that are longer than the memory of a CPU holds.

The system keeps in memory what was used last and writes the rest to disk. The file has no name, so nothing stays behind
however the process ends; only its owner can read it.
"""

import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sala.errors import InputError, check_space, writing

_ALIGNMENT = mmap.PAGESIZE
_ZEROS = 8 << 20  # bytes written at a time where a file system cannot reserve space


class PageFile:
    """Hands out tensors in one file, whose space on the disk is reserved: without it a write ends the process."""

    def __init__(self, directory: Path, num_bytes: int, num_tensors: int) -> None:
        """Create the file with room for tensors of `num_bytes` in all. Raises DiskFull, NotWritable, InputError."""
        num_bytes += num_tensors * _ALIGNMENT
        try:
            with writing(directory / "pages", num_bytes):
                directory.mkdir(parents=True, exist_ok=True)
                check_space(directory, num_bytes, "the KV cache")
                with tempfile.TemporaryFile(dir=directory, prefix="pages-") as file:  # without a name from the start on
                    _reserve(file.fileno(), num_bytes)
                    self._map = mmap.mmap(file.fileno(), num_bytes)  # holds the file open
        except OSError as error:
            size = f"{num_bytes / 2**30:,.2f} GiB"
            problem = f"is disk, but no file of {size} can be mapped in {directory}: {error.strerror}"
            raise InputError("kv_home", problem, "use another directory (cache_dir), or lower kv_home_size") from None
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._end = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor in the file; its first numbers are zeros."""
        start, size = self._end, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._end = start + -(-size // _ALIGNMENT) * _ALIGNMENT
        assert self._end <= len(self._bytes)
        return torch.from_numpy(self._bytes[start : start + size]).view(dtype).view(shape)


def _reserve(file: int, num_bytes: int) -> None:
    """Take space on the disk: a sparse file would end the process by a signal once the disk is full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
        return
    block = bytes(_ZEROS)
    for start in range(0, num_bytes, _ZEROS):
        os.write(file, block[: num_bytes - start])

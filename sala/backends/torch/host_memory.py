"""Host memory that a GPU reads and writes by itself, over the bus: a home for keys and values.

Tensors in it count as tensors of the GPU, so that all kernels take them; `at_host` is the same memory for bulk copies.
It is pinned as a whole and exactly as large as asked for: pinned memory from torch is rounded up to a power of two.
"""

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sala.errors import InputError

_ALIGNMENT = 4096  # bytes, of tensors
_REMEDY = "lower kv_home_size or ctx, or leave kv_home out"


class HostMemory:
    """Hands out tensors in pinned memory. On a CPU, for tests, it is memory like any other."""

    def __init__(self, device: torch.device, num_bytes: int, num_tensors: int) -> None:
        """Take memory for so many tensors of `num_bytes` in all. Raises InputError."""
        self.device = device
        num_bytes += (num_tensors + 1) * _ALIGNMENT
        try:
            self._bytes = np.empty(num_bytes, np.uint8)
        except MemoryError:
            raise _refused(num_bytes, "cannot be allocated") from None
        self._end = -self._bytes.ctypes.data % _ALIGNMENT
        if device.type == "cuda":
            self._pin()

    def _pin(self) -> None:
        runtime: Any = torch.cuda.cudart()
        address, size = self._bytes.ctypes.data, len(self._bytes)
        with torch.cuda.device(self.device):
            if int(runtime.cudaHostRegister(address, size, 0)):
                raise _refused(size, "cannot be pinned")
        ending = weakref.finalize(self, _unpin, self._bytes)
        ending.atexit = False  # the process gives everything back by itself
        first = self._view(self._end, _ALIGNMENT)
        first.fill_(1)
        torch.cuda.synchronize(self.device)
        if not (self._bytes[self._end : self._end + _ALIGNMENT] == 1).all():
            raise InputError("kv_home", "is host, whose memory this GPU cannot write by itself", "leave it out")

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor whose numbers are not set."""
        start, size = self._end, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._end = start + -(-size // _ALIGNMENT) * _ALIGNMENT
        assert self._end <= len(self._bytes)
        return self._view(start, size).view(dtype).view(shape)

    def _view(self, start: int, size: int) -> Tensor:
        if self.device.type != "cuda":
            return torch.from_numpy(self._bytes[start : start + size])
        return torch.as_tensor(_Region(self, self._bytes.ctypes.data + start, size), device=self.device)

    def at_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor of this memory as one of the host, which shares its numbers."""
        if self.device.type != "cuda":
            return tensor
        start, size = tensor.data_ptr() - self._bytes.ctypes.data, tensor.numel() * tensor.element_size()
        return torch.from_numpy(self._bytes[start : start + size]).view(tensor.dtype).view(tensor.shape)


class _Region:
    """A part of the memory as torch takes it for a tensor of a GPU; it keeps the memory alive."""

    def __init__(self, memory: HostMemory, address: int, size: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _unpin(memory: "np.ndarray[Any, Any]") -> None:
    runtime: Any = torch.cuda.cudart()
    torch.cuda.synchronize()
    runtime.cudaHostUnregister(memory.ctypes.data)


def _refused(num_bytes: int, what: str) -> InputError:
    return InputError("kv_home", f"is host, and {num_bytes / 2**30:,.1f} GiB of its memory {what}", _REMEDY)

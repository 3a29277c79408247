"""The quantized matrices of a checkpoint, in whatever format it stores them: sala's own or an external one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from sala.checkpoint.arrays import Floats, as_array, decode
from sala.checkpoint.external_formats import Bytes, parts_of, read_fp8_scales, read_matrix
from sala.checkpoint.names import external_modules, quantized_modules
from sala.checkpoint.packing import PACKED_PARTS, Packed, read_packed
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import CheckpointError

_PIECE = 1 << 20  # codes of FP8 decoded at a time: they stay in the processor's cache


def _e4m3_values() -> Floats:
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, codes & 7
    size = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10.0), fraction * 2.0**-9)
    size[(codes & 127) == 127] = np.nan
    signed: Floats = np.where(codes & 128, -size, size).astype(np.float32)
    return signed


E4M3 = _e4m3_values()  # the value of every code s eeee mmm; two codes are NaN


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix [out, in] of e4m3 codes, and the fp32 scales [out blocks, in blocks] of blocks of this size."""

    codes: Bytes
    scales: Floats
    block: tuple[int, int]

    def factors(self, begin: int, end: int) -> Floats:
        """Return the scales of rows begin…end: [n, in], or [n, 1] where a row has only one."""
        own = self.scales[np.arange(begin, end) // self.block[0]]
        return own if own.shape[1] == 1 else np.repeat(own, self.block[1], 1)[:, : self.codes.shape[1]]

    def rows(self, begin: int, end: int) -> Floats:
        """Return rows begin…end in fp32."""
        values: Floats = E4M3[self.codes[begin:end]] * self.factors(begin, end)
        return values


class QuantizedMatrices:
    """The modules of a checkpoint whose matrices are quantized; `in` and iteration take their names."""

    def __init__(self, checkpoint: Checkpoint, config: SalaConfig) -> None:
        self.checkpoint = checkpoint
        self.layout = config.layout
        self.external = external_modules(checkpoint.tensors, config)
        self.groups = {} if self.layout is not None else quantized_modules(checkpoint.tensors, config)

    def __contains__(self, module: str) -> bool:
        return module in self.external or module in self.groups

    def __iter__(self) -> Iterator[str]:
        yield from (*self.groups, *self.external)

    def parts(self, module: str) -> list[str]:
        """Return the tensors of the file that make up the matrix of a module."""
        if self.layout is not None and module in self.external:
            tensors = self.checkpoint.tensors
            return [name for name in parts_of(module, self.external[module], self.layout, tensors) if name in tensors]
        return [f"{module}.{part}" for part in (PACKED_PARTS if module in self.groups else ("weight",))]

    def read(self, module: str) -> Packed | Fp8Matrix:
        """Return the matrix of a quantized module; its codes are views of the file where the format allows it."""
        if self.layout is None:
            return read_packed(self.checkpoint.read, module, self.groups[module])
        if self.layout.kind != "fp8":
            return read_matrix(self.checkpoint, module, self.external[module], self.layout)
        factors = read_fp8_scales(self.checkpoint, module)
        num_out, num_in = self.external[module]
        block = self.layout.block or (num_out // len(factors), num_in)
        return Fp8Matrix(as_array(self.checkpoint.read(f"{module}.weight")), factors, block)

    def rows(self, module: str) -> Callable[[int, int], Floats]:
        """Return a function that computes rows begin…end of a matrix in fp32, quantized or not."""
        if module in self:
            return self.read(module).rows
        raw = self.checkpoint.read(f"{module}.weight")
        values = as_array(raw)
        return lambda begin, end: decode(values[begin:end], raw.dtype)

    def fp8_pieces(self, module: str, matrix: Fp8Matrix) -> Iterator[tuple[int, int]]:
        """Yield begin and end of some rows at a time, and forget their pages afterwards; raise if one has a NaN."""
        name, (num_out, num_in) = f"{module}.weight", matrix.codes.shape
        step = max(1, _PIECE // num_in)
        for begin in range(0, num_out, step):
            end = min(begin + step, num_out)
            if (matrix.codes[begin:end] & 0x7F).max() == 0x7F:
                message = f"{self.checkpoint.path}: {name} has a value that is not a number"
                raise CheckpointError(message, "download it again")
            yield begin, end
            self.checkpoint.forget(name, begin * num_in, end * num_in)

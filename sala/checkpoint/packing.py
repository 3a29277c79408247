"""Packed weights of 2 to 8 bits in the layout of MLX: groups along the input dimension with a scale and a bias each.

w = code * scale + bias. Codes form a little-endian stream of bits, which is cut into words of 32 bits: 32 codes always
fill `bits` words, so a row never ends inside a word. Scales keep the precision of the file; bfloat16, which numpy does
not have, is kept as its 16 bits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sala.checkpoint.arrays import Array, Floats, as_array, decode, encode
from sala.checkpoint.reader import RawTensor
from sala.errors import CheckpointError
from sala.quantization_config import BITS, GROUP_SIZES, Groups

Words = np.ndarray[Any, np.dtype[np.uint32]]
Order = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix [out, in]: codes [out, in * bits / 32] as words; scales and biases [out, in / group_size].

    `order` is the input of each column; None if columns are in the order of the inputs.
    """

    codes: Words
    scales: Array
    biases: Array
    bits: int
    group_size: int
    dtype: str = "F32"  # precision of scales and biases: F32, F16, or BF16 as raw bits
    order: Order | None = None

    def rows(self, begin: int, end: int) -> Floats:
        """Return rows begin…end in fp32."""
        return dequantize(replace(self, **{field: getattr(self, field)[begin:end] for field in PACKED_PARTS.values()}))

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 32 // self.bits


PACKED_PARTS = {"weight": "codes", "scales": "scales", "biases": "biases"}  # tensor of a module → field of Packed


def read_packed(read: Callable[[str], RawTensor], module: str, groups: Groups) -> Packed:
    """Return the matrix of a quantized module; `read` returns a tensor by name."""
    codes, scales, biases = (read(f"{module}.{part}") for part in PACKED_PARTS)
    return Packed(as_array(codes), as_array(scales), as_array(biases), groups.bits, groups.group_size, scales.dtype)


def packed_specs(module: str, packed: Packed) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return precision and shape of the three tensors of a quantized module by name."""
    return {
        f"{module}.weight": ("U32", packed.codes.shape),
        f"{module}.scales": (packed.dtype, packed.scales.shape),
        f"{module}.biases": (packed.dtype, packed.biases.shape),
    }


def quantize(weight: Floats, bits: int, group_size: int, dtype: str = "F32") -> Packed:
    """Quantize weight [out, in] to the nearest codes, bit for bit as MLX does.

    Zero and the end of the range that is farther from zero are represented exactly. Codes are computed with the fp32
    scale, which is rounded to `dtype` afterwards.
    """
    if bits not in BITS:
        raise CheckpointError(f"{bits} bits per weight are not supported", "use " + ", ".join(map(str, BITS)))
    if group_size not in GROUP_SIZES:
        raise CheckpointError(f"groups of {group_size} are not supported", "use " + ", ".join(map(str, GROUP_SIZES)))
    if weight.ndim != 2 or weight.shape[1] % group_size:
        raise CheckpointError(f"a matrix {list(weight.shape)} has no groups of {group_size}", "use smaller groups")
    if not np.isfinite(weight).all():
        raise CheckpointError("a weight is not finite", "the original model is damaged")
    num_out, num_in = weight.shape
    groups = np.ascontiguousarray(weight, np.float32).reshape(num_out, num_in // group_size, group_size)
    low, high = groups.min(-1), groups.max(-1)
    most = np.float32((1 << bits) - 1)
    is_low = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / most, np.float32(1e-7))
    scale = np.where(is_low, scale, -scale)
    edge = np.where(is_low, low, high)
    zero = np.rint(edge / scale)
    has_zero = zero != 0
    scale = np.where(has_zero, edge / np.where(has_zero, zero, np.float32(1)), scale)
    bias = np.where(has_zero, edge, np.float32(0))
    codes = np.rint((groups - bias[..., None]) / scale[..., None]).clip(0, most).astype(np.uint32)
    words = pack(codes.reshape(weight.shape), bits)
    return Packed(words, encode(scale, dtype), encode(bias, dtype), bits, group_size, dtype)


def dequantize(packed: Packed) -> Floats:
    """Return the weights in fp32, [out, in], in the order of the inputs."""
    num_out, num_in = packed.shape
    codes = unpack(packed.codes, packed.bits, num_in).reshape(num_out, num_in // packed.group_size, packed.group_size)
    scales, biases = decode(packed.scales, packed.dtype), decode(packed.biases, packed.dtype)
    weight: Floats = (codes.astype(np.float32) * scales[..., None] + biases[..., None]).reshape(num_out, num_in)
    if packed.order is not None:
        columns, weight = weight, np.empty_like(weight)
        weight[:, packed.order] = columns
    return weight


def pack(codes: Array, bits: int) -> Words:
    """codes [..., in], each below 2^bits → words [..., in * bits / 32]; `in` is a multiple of 32."""
    if bits not in BITS or codes.shape[-1] % 32:
        raise CheckpointError(f"{codes.shape[-1]} codes of {bits} bits do not fill whole words", "pack 32 at a time")
    if codes.size and int(codes.max()) >> bits:
        raise CheckpointError(f"code {int(codes.max())} does not fit in {bits} bits", "quantize it again")
    stream = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1, count=bits, bitorder="little")
    stream = stream.reshape(*codes.shape[:-1], codes.shape[-1] * bits)
    return np.packbits(stream, axis=-1, bitorder="little").view(np.uint32)


def unpack(words: Words, bits: int, num_in: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """words [..., in * bits / 32] → codes [..., in]."""
    if bits not in BITS or num_in % 32 or words.shape[-1] * 32 != num_in * bits:
        raise CheckpointError(f"{words.shape[-1]} words do not hold {num_in} codes of {bits} bits", "check the bits")
    groups = words.reshape(*words.shape[:-1], num_in // 32, bits)
    codes = np.empty((*groups.shape[:-1], 32), np.uint8)
    for index in range(32):
        word, offset = divmod(index * bits, 32)
        code = groups[..., word] >> np.uint32(offset)
        if offset + bits > 32:
            code = code | (groups[..., word + 1] << np.uint32(32 - offset))
        codes[..., index] = code & np.uint32((1 << bits) - 1)
    return codes.reshape(*words.shape[:-1], num_in)

"""Matrices of 4 or 8 bits per weight in the order in which the kernels of `packed.py` read them.

A block is 32 words of every row; 32 neighbours along K are a plane, and the planes of a block share its words, so that
a shift and a mask extract part of a plane from adjacent words. With 8 bits, word j has the codes j of four planes. With
4 bits, words 2j and 2j + 1 have the codes 2j and 2j + 1 of four planes each, the even ones in the lower half: that is
where tensor cores want two neighbours, and they take the unpacked planes from registers.

A group has a scale and an offset, both in the precision of the activations and side by side in one word:
w = (code - middle) * scale + offset, rounded once. So decode rows, which are multiplied with the codes, and prefill
rows, which are multiplied with what `packed.expand` writes, see the same matrix.

With 4 bits in bf16 a weight is one multiply-add. A bf16 whose exponent is 0 or 1 is linear in its lowest 8 bits: a code
among them is a number as it stands, code * 2^-133 or, in the upper four, code * 2^-129, and its scale is larger by as
much. To avoid overflow, weights stay 2^-24 of themselves until they are summed, which changes no bit of a sum. The
offset is the weight of code 0, as in files, which hold it exactly in bf16; others are rounded, by 2^-8 of some 8 steps
at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

WORDS = 32  # words of a row in a block: one 128-byte line of memory
MIDDLE = {4: 8, 8: 127.5}  # middle of the codes
POWER = 24  # 4-bit weights in bf16 are 2^-24 of themselves in registers
LARGEST = 2.0 ** (POWER - 5)  # scales must be smaller than this
_PIECE = 1 << 24  # weights that `pack` handles at a time, to bound its memory


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix [n, k]: codes [blocks, n, 32] as int32, groups [blocks, n, groups of a block] as int32 or int64.

    Unpacked, a weight is 2^-power of itself; a power of 0 means that codes count from their middle.
    """

    codes: Tensor
    groups: Tensor
    bits: int
    group_size: int
    num_in: int
    dtype: torch.dtype
    power: int

    @property
    def num_out(self) -> int:
        return self.codes.shape[1]

    @property
    def format(self) -> tuple[object, ...]:
        """What matrices must have in common to be one."""
        return self.bits, self.group_size, self.num_in, self.dtype, self.power

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.groups.nbytes

    def rows(self, begin: int, end: int) -> "PackedWeight":
        """Return some rows, in the same memory."""
        return replace(self, codes=self.codes[:, begin:end], groups=self.groups[:, begin:end])


def pack(words: Tensor, scales: Tensor, biases: Tensor, bits: int, group_size: int, dtype: torch.dtype) -> PackedWeight:
    """Pack words [n, k * bits / 32] as in files, scales and biases [n, k / group_size], for activations of `dtype`."""
    num_out, num_in = words.shape[0], words.shape[1] * 32 // bits
    block = block_size(bits)
    assert bits in (4, 8)
    assert block % group_size == 0
    blocks = -(-num_in // block)
    codes = torch.zeros(blocks, num_out, WORDS, dtype=torch.int32, device=words.device)
    step = max(1, _PIECE // num_in)
    for begin in range(0, num_out, step):
        codes[:, begin : begin + step] = _ordered(words[begin : begin + step], bits, blocks)
    # scales are small if bf16 holds them 2^(133 - POWER) times as large
    are_small = bits == 4 and dtype == torch.bfloat16 and bool((scales.to(torch.bfloat16).abs() < LARGEST).all())
    power = POWER if are_small else 0
    if power:
        scales, offsets = _from_zero(scales, biases, group_size)
    else:
        offsets = biases.float() + MIDDLE[bits] * scales.float()
    pairs = torch.stack((scales.to(dtype), offsets.to(dtype)), -1)
    raw = pairs.view(torch.int64 if dtype.itemsize == 4 else torch.int32)[..., 0]
    raw = F.pad(raw, (0, blocks * (block // group_size) - raw.shape[1]))
    halves = raw.view(num_out, blocks, min(2, block // group_size), -1)  # of a block: the kernel splits them first
    groups = halves.permute(1, 0, 3, 2).flatten(2).contiguous()
    return PackedWeight(codes, groups, bits, group_size, num_in, dtype, power)


def _ordered(words: Tensor, bits: int, blocks: int) -> Tensor:
    """Reorder words: [n, k * bits / 32] → [blocks, n, 32], padded with zeros."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)
    if bits == 8:  # as sign and distance from the middle
        codes = torch.where(codes > 127, codes - 128, 255 - codes)
    codes = F.pad(codes, (0, blocks * block_size(bits) - codes.shape[1]))
    if bits == 4:  # half of a block, plane, pair of words, half of a word
        planes = codes.view(words.shape[0], blocks, 2, 4, WORDS // 2, 2)
        places = torch.tensor(
            [[bit_offset(plane) + half for half in (0, 16)] for plane in range(4)], device=words.device
        )
        found = (planes << places.int().unsqueeze(1)).sum((3, 5), dtype=torch.int32).transpose(2, 3).flatten(2)
    else:
        found = (codes.view(words.shape[0], blocks, 4, WORDS) << shifts[:, None]).sum(2, dtype=torch.int32)
    return found.transpose(0, 1)  # no bit is set in two of the summands


def _from_zero(scales: Tensor, biases: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return scale and offset for codes as they stand in a bf16, see `packed_unpack._nibbles`; by the group's plane."""
    rounded = scales.to(torch.bfloat16).float()
    plane = torch.arange(scales.shape[1], device=scales.device) * group_size // WORDS % 4
    offset = biases.float() + MIDDLE[4] * (scales.float() - rounded)  # rounding the scale must not move the middle
    return rounded * torch.where(plane < 2, 2.0 ** (133 - POWER), 2.0 ** (129 - POWER)), offset * 2.0**-POWER


def concatenate(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Return one matrix of all rows; the matrices must be alike."""
    assert are_alike(weights)
    codes, groups = (torch.cat([getattr(one, part) for one in weights], 1) for part in ("codes", "groups"))
    return replace(weights[0], codes=codes, groups=groups)


def are_alike(weights: Sequence[object]) -> bool:
    """Return whether the matrices can be one: all packed, in the same format."""
    formats = {weight.format if isinstance(weight, PackedWeight) else None for weight in weights}
    return len(formats) == 1 and None not in formats


def adjoin(weights: Sequence[PackedWeight]) -> PackedWeight | None:
    """Return one matrix of all rows in the same memory, or None unless they lie there one after another."""
    first, num_out = weights[0], 0
    for one in weights:
        for part, base in ((one.codes, first.codes), (one.groups, first.groups)):
            is_next = part.storage_offset() == base.storage_offset() + num_out * base.stride(1)
            is_same = part.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
            if not (is_next and is_same and part.stride() == base.stride() and one.format == first.format):
                return None
        num_out += one.num_out
    parts = (
        part.as_strided((len(part), num_out, part.shape[2]), part.stride()) for part in (first.codes, first.groups)
    )
    codes, groups = parts
    return replace(first, codes=codes, groups=groups)


def block_size(bits: int) -> int:
    """Return the codes of a row in a block."""
    return WORDS * 32 // bits


def bit_offset(plane: int) -> int:
    """Return where a plane's 4-bit codes are in each half of a word: the first two planes in the low half of a byte."""
    return plane % 2 * 8 + plane % 4 // 2 * 4

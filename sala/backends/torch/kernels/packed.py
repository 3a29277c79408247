# mypy: disable-error-code="import-untyped, no-redef, no-untyped-def, untyped-decorator"
"""Products of rows with matrices of 4 or 8 bits per weight: the codes are read once and unpacked in registers.

`PackedWeight` holds a matrix in the order in which the kernels read it. A block is 32 words of every row; 32 neighbours
along K are a plane, and the planes of a block share its words, so that a shift and a mask give a part of a plane from
words that lie side by side. With 8 bits, word j has the codes j of four planes. With 4 bits, words 2j and 2j + 1 have
the codes 2j and 2j + 1 of four planes each, the even ones in the lower half: that is where tensor cores want two
neighbours, and they take the unpacked planes from registers.

A group has a scale and an offset, both in the precision of the rows and side by side in one word:
w = (code - middle) * scale + offset, rounded once. So the matrix that few rows are multiplied with and the one that
`expand` writes for many are the same.

With 4 bits in bf16 a weight is one multiply-add. A bf16 whose exponent is 0 or 1 is linear in its lowest 8 bits: a code
among them is a number as it stands, code * 2^-133 or, in the upper four, code * 2^-129, and its scale so much larger.
Lest it overflow, weights are 2^-24 of themselves until they are summed up, which no bit of a sum shows. The offset is
the weight of code 0, as in files, which for bf16 hold it exactly; others are rounded, by 2^-8 of some 8 steps at most.

As in `linear.py`, K is cut by the shape alone, and a row's bits are its own. In fp32, which tensor cores do not know,
the matrix is always expanded.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sala.backends.torch.kernels import linear as dense
from sala.backends.torch.kernels.attention import shared_memory
from sala.backends.torch.kernels.linear import MAX_ROWS, _silu_mul
from sala.backends.torch.kernels.pdl import can_use_pdl, fetch

WORDS = 32  # of a row, in a block
MIN_TILE, MAX_TILE = 16, 64  # rows of a program
PROGRAMS = 512  # several for every multiprocessor of a large GPU: one unpacks while others wait
MIN_PART = 512  # of K
MAX_SPLITS = 8  # the pass behind reads them all
PROCESSORS = 132  # of a large GPU
MAX_STAGES = 8
MAX_PREFETCHED = 2  # blocks that a program asks for before the kernel ahead has ended
MAX_EXPANDED = 1 << 26  # weights that `product` expands at a time
MIDDLE = {4: 8, 8: 127.5}  # of the codes
POWER = 24  # 4-bit weights in bf16 are 2^-24 of themselves in registers
LARGEST = 2.0 ** (POWER - 5)  # scales have to be smaller for that
_PIECE = 1 << 24  # weights that `pack` has in its hands at a time


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix [n, k]: codes [blocks, n, 32] as int32, groups [blocks, n, groups of a block] as int32 or int64.

    Unpacked, a weight is 2^-power of itself; 0 says that codes count from their middle.
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
    def nbytes(self) -> int:
        return self.codes.nbytes + self.groups.nbytes

    def rows(self, begin: int, end: int) -> "PackedWeight":
        """Some rows, in the same memory."""
        return replace(self, codes=self.codes[:, begin:end], groups=self.groups[:, begin:end])


class Config(NamedTuple):
    """A program makes `columns` outputs of one of `splits` parts of K. Early: as in `linear.Config`."""

    columns: int
    splits: int
    num_warps: int
    num_stages: int
    uses_pdl: bool = False


def pack(words: Tensor, scales: Tensor, biases: Tensor, bits: int, group_size: int, dtype: torch.dtype) -> PackedWeight:
    """From words [n, k * bits / 32] as usual, scales and biases [n, k / group_size], for rows of `dtype`."""
    num_out, num_in = words.shape[0], words.shape[1] * 32 // bits
    block = block_size(bits)
    assert bits in (4, 8)
    assert block % group_size == 0
    blocks = triton.cdiv(num_in, block)
    codes = torch.zeros(blocks, num_out, WORDS, dtype=torch.int32, device=words.device)
    step = max(1, _PIECE // num_in)
    for begin in range(0, num_out, step):
        codes[:, begin : begin + step] = _ordered(words[begin : begin + step], bits, blocks)
    power = POWER if bits == 4 and dtype == torch.bfloat16 and _are_small(scales) else 0
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
    """[n, k * bits / 32] → [blocks, n, 32]; what is past the end is zero."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)
    if bits == 8:  # as sign and distance from the middle
        codes = torch.where(codes > 127, codes - 128, 255 - codes)
    codes = F.pad(codes, (0, blocks * block_size(bits) - codes.shape[1]))
    if bits == 4:  # half of a block, plane, pair of words, half of a word
        planes = codes.view(words.shape[0], blocks, 2, 4, WORDS // 2, 2)
        places = torch.tensor([[_place(plane) + half for half in (0, 16)] for plane in range(4)], device=words.device)
        found = (planes << places.int().unsqueeze(1)).sum((3, 5), dtype=torch.int32).transpose(2, 3).flatten(2)
    else:
        found = (codes.view(words.shape[0], blocks, 4, WORDS) << shifts[:, None]).sum(2, dtype=torch.int32)
    return found.transpose(0, 1)  # no bit was in two of the summands


def _are_small(scales: Tensor) -> bool:
    """Whether bf16 holds them 2^(133 - POWER) times as large."""
    return bool((scales.to(torch.bfloat16).abs() < LARGEST).all())


def _from_zero(scales: Tensor, biases: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Scale and offset for codes as they stand in a bf16, see `_nibbles`; a group begins in one of four planes."""
    rounded = scales.to(torch.bfloat16).float()
    plane = torch.arange(scales.shape[1], device=scales.device) * group_size // WORDS % 4
    offset = biases.float() + MIDDLE[4] * (scales.float() - rounded)  # rounding the scale moves no middle
    return rounded * torch.where(plane < 2, 2.0 ** (133 - POWER), 2.0 ** (129 - POWER)), offset * 2.0**-POWER


def concatenate(weights: Sequence[PackedWeight]) -> PackedWeight:
    """One matrix of all rows; they must be alike."""
    assert are_alike(weights)
    codes, groups = (torch.cat([getattr(one, part) for one in weights], 1) for part in ("codes", "groups"))
    return replace(weights[0], codes=codes, groups=groups)


def are_alike(weights: Sequence[object]) -> bool:
    """Whether they can be one matrix."""
    kinds = {
        (w.bits, w.group_size, w.num_in, w.dtype, w.power) if isinstance(w, PackedWeight) else None for w in weights
    }
    return len(kinds) == 1 and None not in kinds


def block_size(bits: int) -> int:
    """Codes of a row in a block."""
    return WORDS * 32 // bits


@triton.constexpr_function
def _place(plane):
    """Where the codes of a plane are in each half of their words: the first two planes are the lower half of a byte."""
    return plane % 2 * 8 + plane % 4 // 2 * 4


@triton.constexpr_function
def _nibbles(plane, is_bfloat, power, is_shared):
    """PTX: of a word $2 and the word of its group $3, two weights of a plane in $0 and $1.

    A code in the lower or upper half of a byte is 2^-133 or 2^-129 of itself; the scale is made for where the group
    begins. Without a power, a number with a code in its lowest bits is the code and a power of two: nothing need be
    converted. Halves of words are named, not permuted: a multiply-add can take one half twice.
    """
    kind, place = "bf16x2" if is_bfloat else "f16x2", _place(plane)
    text = "mov.b32 {l, h}, $3; mov.b32 s, {l, l}; mov.b32 b, {h, h};"
    if power:
        text += f"shr.u32 c, $2, {place & 8}; and.b32 c, c, {0x00F000F0 if place & 4 else 0x000F000F};"
        if is_shared and place & 4:  # times 2^-4
            text += f"mov.b32 t, {0x3D803D80}; mov.b32 m, {0x80008000}; fma.rn.{kind} s, s, t, m;"
    else:
        one, base, minus = (0x3F80, 0x4300, 0xC308) if is_bfloat else (0x3C00, 0x6400, 0xE408)  # 128 + 8, or 1024 + 8
        text += f"shr.u32 c, $2, {place}; lop3.b32 c, c, {0x000F000F}, {base * 0x10001}, 0xea;"
        text += f"mov.b32 t, {one * 0x10001}; mov.b32 m, {minus * 0x10001}; fma.rn.{kind} c, c, t, m;"
    text += f"fma.rn.{kind} c, c, s, b; mov.b32 {{$0, $1}}, c;"
    return "{ .reg .b16 l, h; .reg .b32 c, s, b, t, m; " + text + " }"


@triton.constexpr_function
def _bytes(plane, is_bfloat):
    """PTX: of two words $1, $2 and the words of their groups $3, $4, two weights of a plane in $0.

    A byte is too long for the 7 bits of bf16: it is a sign and how far the code is from the middle, which lies between
    two codes. As above, those 7 bits and a power of two are a number.
    """
    kind, one, base, minus = ("bf16x2", 0x3F80, 0x4300, 0xC2FF) if is_bfloat else ("f16x2", 0x3C00, 0x6400, 0xE3FF)
    text = f"prmt.b32 t, $1, $2, {0x4400 + 0x1111 * plane}; lop3.b32 c, t, {0x007F007F}, {base * 0x10001}, 0xea;"
    text += f"mov.b32 s, {one * 0x10001}; mov.b32 b, {minus * 0x10001}; fma.rn.{kind} c, c, s, b;"  # 127.5, or 1023.5
    text += f"lop3.b32 c, c, t, {0x80008000}, 0x78;"
    text += f"prmt.b32 s, $3, $4, {0x5410}; prmt.b32 b, $3, $4, {0x7632}; fma.rn.{kind} $0, c, s, b;"
    return "{ .reg .b32 t, c, s, b; " + text + " }"


@triton.jit
def _scale_and_offset(group, dtype: tl.constexpr):
    """Of the words of groups, in fp32."""
    WIDTH: tl.constexpr = dtype.primitive_bitwidth
    BASE: tl.constexpr = tl.int32 if WIDTH == 32 else tl.int16
    scale = group.to(BASE).to(dtype, bitcast=True).to(tl.float32)
    offset = (group >> WIDTH).to(BASE).to(dtype, bitcast=True).to(tl.float32)
    return scale, offset


@triton.jit
def _plane_of_nibbles(words, group, PLANE: tl.constexpr, IS_SHARED: tl.constexpr, POWER: tl.constexpr,
                      dtype: tl.constexpr, HAS_ASM: tl.constexpr):  # fmt: skip
    """words [COLUMNS, 16], group [COLUMNS, 1] → the plane's weights [COLUMNS, 32].

    Shared: the group has all four planes of the words. That both codes come from one word leaves no doubt which they
    are; of two, the compiler chooses which are together.
    """
    SHAPE: tl.constexpr = (words.shape[0], 32)
    if HAS_ASM:
        code: tl.constexpr = _nibbles(PLANE, dtype == tl.bfloat16, POWER, IS_SHARED)
        even, odd = tl.inline_asm_elementwise(code, "=h,=h,r,r", [words, group], (tl.int16, tl.int16), True, 1)
        weights = tl.reshape(tl.join(even, odd), SHAPE).to(dtype, bitcast=True)
    else:
        PLACE: tl.constexpr = _place(PLANE)
        codes = tl.reshape(tl.join(words >> PLACE & 15, words >> PLACE + 16 & 15), SHAPE).to(tl.float32)
        scale, offset = _scale_and_offset(group, dtype)
        if POWER == 0:
            codes -= 8.0
        else:
            MADE_FOR: tl.constexpr = 129 if PLANE % 4 >= 2 and not IS_SHARED else 133
            scale = scale * 2.0 ** (POWER - MADE_FOR) * 2.0**-POWER  # at once it would be too small for fp32
        weights = (codes * scale + offset).to(dtype)
    return weights


@triton.jit
def _plane_of_bytes(words, group, PLANE: tl.constexpr, dtype: tl.constexpr, HAS_ASM: tl.constexpr):
    """words [COLUMNS, 32], group [COLUMNS, 1] → the plane's weights [COLUMNS, 32]."""
    if HAS_ASM and dtype == tl.bfloat16:  # the call wants a type itself, not a constant that holds one
        code: tl.constexpr = _bytes(PLANE, True)
        weights = tl.inline_asm_elementwise(code, "=r,r,r,r,r", [words, group], tl.bfloat16, True, 2)
    elif HAS_ASM:
        code: tl.constexpr = _bytes(PLANE, False)
        weights = tl.inline_asm_elementwise(code, "=r,r,r,r,r", [words, group], tl.float16, True, 2)
    else:
        codes = words >> (PLANE * 8) & 255
        codes = ((codes & 127).to(tl.float32) + 0.5) * (1.0 - (codes >> 7).to(tl.float32) * 2.0)
        scale, offset = _scale_and_offset(group, dtype)
        weights = (codes * scale + offset).to(dtype)
    return weights


@triton.jit
def _half(
    words,
    groups,
    FIRST: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    POWER: tl.constexpr,
    dtype: tl.constexpr,
    HAS_ASM: tl.constexpr,
):
    """words [COLUMNS, 16 or 32], groups [COLUMNS, NUM_GROUPS] → weights of half a block, [COLUMNS, 4096 / BITS / 8].

    Planes are joined in the order of K; in registers nothing moves.
    """
    if NUM_GROUPS == 1:
        g0, g1, g2, g3 = groups, groups, groups, groups
    elif NUM_GROUPS == 2:
        low, high = tl.split(groups)
        g0, g1, g2, g3 = low[:, None], low[:, None], high[:, None], high[:, None]
    else:
        even, odd = tl.split(tl.reshape(groups, (COLUMNS, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        g0, g1, g2, g3 = first[:, None], second[:, None], third[:, None], fourth[:, None]
    if BITS == 4:
        IS_SHARED: tl.constexpr = NUM_GROUPS == 1
        w0 = _plane_of_nibbles(words, g0, FIRST, IS_SHARED, POWER, dtype, HAS_ASM)
        w1 = _plane_of_nibbles(words, g1, FIRST + 1, IS_SHARED, POWER, dtype, HAS_ASM)
        w2 = _plane_of_nibbles(words, g2, FIRST + 2, IS_SHARED, POWER, dtype, HAS_ASM)
        w3 = _plane_of_nibbles(words, g3, FIRST + 3, IS_SHARED, POWER, dtype, HAS_ASM)
        both = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        half = tl.reshape(tl.permute(both, (0, 2, 3, 1)), (COLUMNS, 128))
    else:
        w0 = _plane_of_bytes(words, g0, FIRST, dtype, HAS_ASM)
        w1 = _plane_of_bytes(words, g2, FIRST + 1, dtype, HAS_ASM)
        half = tl.reshape(tl.permute(tl.join(w0, w1), (0, 2, 1)), (COLUMNS, 64))
    return half


@triton.jit
def _halves(words, groups, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, POWER: tl.constexpr,
            dtype: tl.constexpr, HAS_ASM: tl.constexpr):  # fmt: skip
    """words [COLUMNS, 32], groups [COLUMNS, GROUPS] → the two halves of a block, times 2^-POWER."""
    PLANES: tl.constexpr = 16 // BITS
    if GROUPS == 1:
        low_groups, high_groups = groups, groups
        NUM: tl.constexpr = 1
    else:
        NUM: tl.constexpr = GROUPS // 2
        low_groups, high_groups = tl.split(tl.reshape(groups, (COLUMNS, NUM, 2)))
    low_words, high_words = words, words
    if BITS == 4:
        low_words, high_words = tl.split(tl.reshape(words, (COLUMNS, 16, 2)))
    low = _half(low_words, low_groups, 0, NUM, COLUMNS, BITS, POWER, dtype, HAS_ASM)
    high = _half(high_words, high_groups, PLANES, NUM, COLUMNS, BITS, POWER, dtype, HAS_ASM)
    return low, high


@triton.jit
def _settled(acc):
    """The same numbers, looked at: so the compiler waits for the products before the next step.

    Tensor cores read the weights from registers while they multiply, and the compiler lets the next step unpack into
    the same ones: on an H200 long rows came out otherwise without this.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _packed_kernel(
    x_ptr,
    codes_ptr,
    groups_ptr,
    out_ptr,
    x_row,
    out_row,
    N: tl.constexpr,
    K: tl.constexpr,
    PITCH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    POWER: tl.constexpr,
    PREFETCH_STEPS: tl.constexpr,
    IS_PAIR: tl.constexpr,
    HAS_ASM: tl.constexpr,
):
    """COLUMNS of one split: out [SPLITS, ROWS, N]. The matrix has PITCH rows, of which these are some.

    A pair: half of the columns are of the gate, half of its factor, N rows further, and out is their SiLU.
    """
    BLOCK: tl.constexpr = 1024 // BITS
    HALF: tl.constexpr = BLOCK // 2
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    STEPS: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    split = tl.program_id(2)
    first = split * STEPS
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    word, inner = tl.arange(0, 32), tl.arange(0, HALF)
    OUTPUTS: tl.constexpr = COLUMNS // 2 if IS_PAIR else COLUMNS
    lane = tl.arange(0, COLUMNS)
    # What is past the last column repeats it: no mask, and nobody reads the result.
    real = tl.minimum(tl.program_id(1) * OUTPUTS + lane % OUTPUTS, N - 1) + lane // OUTPUTS * N
    is_row = (row < ROWS)[:, None]
    begin = first.to(tl.int64) * PITCH
    code_rows, group_rows = codes_ptr + (begin + real) * 32, groups_ptr + (begin + real) * GROUPS
    if PREFETCH_STEPS > 0:
        tl.extra.cuda.gdc_launch_dependents()
        for step in tl.static_range(PREFETCH_STEPS):
            ahead = tl.minimum(step, BLOCKS - 1 - first)
            fetch(code_rows + ahead * (PITCH * 32))
            fetch(group_rows + ahead * (PITCH * GROUPS))
        tl.extra.cuda.gdc_wait()
    x_tile = tl.multiple_of(x_ptr + row.to(tl.int64) * x_row, 16)[:, None] + (first * BLOCK + inner)[None, :]
    code_tile = code_rows[:, None] + word[None, :]
    group_tile = group_rows[:, None] + tl.arange(0, GROUPS)[None, :]
    acc = tl.zeros([COLUMNS, TILE_ROWS], tl.float32)
    steps = STEPS
    if BLOCKS % SPLITS != 0:
        steps = tl.maximum(0, tl.minimum(STEPS, BLOCKS - first))
    for step in range(steps):
        words = tl.load(code_tile + step * (PITCH * 32))
        groups = tl.load(group_tile + step * (PITCH * GROUPS))
        if K % BLOCK == 0:
            x_low = tl.load(x_tile + step * BLOCK, mask=is_row, other=0.0)
            x_high = tl.load(x_tile + step * BLOCK + HALF, mask=is_row, other=0.0)
        else:
            rest = K - (first + step) * BLOCK
            x_low = tl.load(x_tile + step * BLOCK, mask=is_row & (inner < rest)[None, :], other=0.0)
            x_high = tl.load(x_tile + step * BLOCK + HALF, mask=is_row & (inner < rest - HALF)[None, :], other=0.0)
        low, high = _halves(words, groups, COLUMNS, GROUPS, BITS, POWER, dtype, HAS_ASM)
        acc = tl.dot(low, tl.trans(x_low), acc)
        acc = tl.dot(high, tl.trans(x_high), acc)
        if HAS_ASM:
            acc = _settled(acc)
    out_dtype: tl.constexpr = out_ptr.dtype.element_ty
    out = (acc * 2.0**POWER).to(out_dtype)
    if IS_PAIR:
        gate, up = tl.split(tl.permute(tl.reshape(out, (2, OUTPUTS, TILE_ROWS)), (1, 2, 0)))
        out = _silu_mul(gate, up, out_dtype)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    target = out_ptr + (split * ROWS + row).to(tl.int64)[:, None] * out_row + column[None, :]
    tl.store(target, tl.trans(out), mask=is_row & (column < N)[None, :])


@triton.jit
def _expand_kernel(
    codes_ptr,
    groups_ptr,
    index_ptr,
    out_ptr,
    num_rows,
    K: tl.constexpr,
    PITCH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    POWER: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_ASM: tl.constexpr,
):
    """A block of COLUMNS rows of the matrix, all in turn or those of the index: out [num_rows, K]."""
    BLOCK: tl.constexpr = 1024 // BITS
    HALF: tl.constexpr = BLOCK // 2
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    block = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = (row < num_rows)[:, None]
    source = tl.minimum(row, num_rows - 1).to(tl.int64)
    if HAS_INDEX:
        source = tl.load(index_ptr + source).to(tl.int64)
    place = block * PITCH + source
    words = tl.load(codes_ptr + place[:, None] * 32 + tl.arange(0, 32)[None, :])
    groups = tl.load(groups_ptr + place[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :])
    low, high = _halves(words, groups, COLUMNS, GROUPS, BITS, POWER, dtype, HAS_ASM)
    inner = block * BLOCK + tl.arange(0, HALF)[None, :]
    target = out_ptr + row.to(tl.int64)[:, None] * K + inner
    low, high = low.to(tl.float32) * 2.0**POWER, high.to(tl.float32) * 2.0**POWER
    tl.store(target, low.to(dtype), mask=is_row & (inner < K))
    tl.store(target + HALF, high.to(dtype), mask=is_row & (inner + HALF < K))


def linear(x: Tensor, weight: PackedWeight, config: Config | None = None) -> Tensor:
    """x [T, K] → [T, N] in x's dtype; at most 128 rows."""
    if weight.dtype.itemsize > 2:
        return dense.linear(x, expand(weight))
    out = torch.empty(x.shape[0], weight.num_out, dtype=x.dtype, device=x.device)
    _launch(x, weight, out, config or _config_of(weight, x.shape[0], max_splits=1))
    return out


def linears(x: Tensor, weights: Sequence[PackedWeight]) -> Tensor:
    """As `linear` by each of the matrices, which may differ in bits, side by side: [T, N + …]; at most 128 rows."""
    ends = [0, *accumulate(weight.num_out for weight in weights)]
    out = torch.empty(x.shape[0], ends[-1], dtype=x.dtype, device=x.device)
    for weight, begin, end in zip(weights, ends, ends[1:], strict=False):
        if weight.dtype.itemsize > 2:
            out[:, begin:end] = dense.linear(x, expand(weight))
        else:
            _launch(x, weight, out[:, begin:end], _config_of(weight, x.shape[0], max_splits=1))
    return out


def split_linear(x: Tensor, weight: PackedWeight, config: Config | None = None) -> Tensor:
    """x [T, K] → partials [S, T, N] in fp32, whose sum is the product; at most 128 rows."""
    if weight.dtype.itemsize > 2:
        return dense.split_linear(x, expand(weight))
    config = config or _config_of(weight, x.shape[0])
    partials = torch.empty(config.splits, x.shape[0], weight.num_out, dtype=torch.float32, device=x.device)
    _launch(x, weight, partials, config)
    return partials


def linear_silu_mul(x: Tensor, weight: PackedWeight, config: Config | None = None) -> Tensor:
    """x [T, K], weight [2 * m, K], the gate's rows first → silu(gate) * up [T, m]; at most 128 rows."""
    if weight.dtype.itemsize > 2:
        return dense.linear_silu_mul(x, expand(weight))
    config = config or _config_of(weight, x.shape[0], max_splits=1, is_pair=True)
    out = torch.empty(x.shape[0], weight.num_out // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, out, config, is_pair=True)
    return out


def product(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [T, K] → [T, N], any number of rows: many of them by an expanded copy of the matrix, a piece at a time."""
    if can_take(x.shape[0], weight):
        return linear(x, weight)
    step = max(1, MAX_EXPANDED // weight.num_in)
    if step >= weight.num_out:
        return F.linear(x, expand(weight))
    out = torch.empty(x.shape[0], weight.num_out, dtype=x.dtype, device=x.device)
    for begin in range(0, weight.num_out, step):
        end = min(begin + step, weight.num_out)
        torch.mm(x, expand(weight.rows(begin, end)).T, out=out[:, begin:end])
    return out


def expand(weight: PackedWeight, index: Tensor | None = None) -> Tensor:
    """The matrix [n, k] in the precision of its rows, or those of its rows that are named by index [t]."""
    num_rows = weight.num_out if index is None else index.shape[0]
    out = torch.empty(num_rows, weight.num_in, dtype=weight.dtype, device=weight.codes.device)
    if num_rows == 0:
        return out
    columns = 16 if num_rows <= 64 else 32
    _expand_kernel[(weight.codes.shape[0], triton.cdiv(num_rows, columns))](
        weight.codes,
        weight.groups,
        weight.codes if index is None else index.contiguous(),
        out,
        num_rows,
        K=weight.num_in,
        PITCH=_pitch(weight),
        COLUMNS=columns,
        BITS=weight.bits,
        GROUPS=weight.groups.shape[2],
        POWER=weight.power,
        HAS_INDEX=index is not None,
        HAS_ASM=_has_asm(weight),
        num_warps=4,
    )
    return out


def _launch(x: Tensor, weight: PackedWeight, out: Tensor, config: Config, is_pair: bool = False) -> None:
    """out [T, N], whose rows may lie apart, or [S, T, N]."""
    rows = x.shape[0]
    if rows == 0:
        return
    assert rows <= MAX_ROWS
    assert out.dim() == 3 or config.splits == 1
    assert out.is_contiguous() or (out.dim() == 2 and out.stride(1) == 1)
    assert x.shape[1] == weight.num_in
    assert x.dtype == weight.dtype
    assert weight.codes.stride()[1:] == (WORDS, 1)
    is_aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    if x.stride(1) != 1 or not is_aligned:
        x = x.clone(memory_format=torch.contiguous_format)
    n = weight.num_out // 2 if is_pair else weight.num_out
    tiles = triton.cdiv(rows, tile_rows(rows))  # side by side: the codes come from the L2 cache
    outputs = config.columns // 2 if is_pair else config.columns
    _packed_kernel[(tiles, triton.cdiv(n, outputs), config.splits)](
        x,
        weight.codes,
        weight.groups,
        out,
        x.stride(0),
        out.stride(-2),
        **constants(rows, n, weight.num_in, weight.bits, weight.group_size, config, is_pair),
        PITCH=_pitch(weight),
        POWER=weight.power,
        HAS_ASM=_has_asm(weight),
        **options(config),
    )


def constants(
    rows: int, n: int, k: int, bits: int, group_size: int, config: Config, is_pair: bool = False
) -> dict[str, Any]:
    """What the kernel is compiled for, but for where it runs."""
    part = triton.cdiv(triton.cdiv(k, block_size(bits)), config.splits)
    return {
        "N": n,
        "K": k,
        "ROWS": rows,
        "TILE_ROWS": tile_rows(rows),
        "COLUMNS": config.columns,
        "SPLITS": config.splits,
        "BITS": bits,
        "GROUPS": block_size(bits) // group_size,
        "PREFETCH_STEPS": min(part, MAX_PREFETCHED) if config.uses_pdl else 0,
        "IS_PAIR": is_pair,
    }


def options(config: Config) -> dict[str, Any]:
    early = {"launch_pdl": True} if config.uses_pdl else {}
    return {"num_warps": config.num_warps, "num_stages": config.num_stages} | early


def max_rows(weight: PackedWeight) -> int:
    """So many are few."""
    return MAX_ROWS if weight.dtype.itemsize <= 2 else dense.MIN_ROWS


def can_take(rows: int, weight: PackedWeight) -> bool:
    """Whether the products here are made for so many rows."""
    return rows <= max_rows(weight)


def tile_rows(rows: int) -> int:
    """Its height changes the work of a program, not the order in which a row is summed up."""
    return min(MAX_TILE, max(MIN_TILE, triton.next_power_of_2(rows)))


def _pitch(weight: PackedWeight) -> int:
    """Rows of the matrix that this one is a part of."""
    groups = weight.groups
    assert groups.stride()[1:] == (groups.shape[2], 1)
    pitch = weight.codes.stride(0) // WORDS
    assert weight.codes.shape[0] == 1 or groups.stride(0) == pitch * groups.shape[2]
    return pitch


def _has_asm(weight: PackedWeight) -> bool:
    """The interpreter and fp32 do without."""
    return weight.codes.is_cuda and weight.dtype.itemsize == 2


def _config_of(weight: PackedWeight, rows: int, max_splits: int = MAX_SPLITS, is_pair: bool = False) -> Config:
    device = weight.codes.device
    limit = shared_memory(device)
    config = _config(weight.num_out, weight.num_in, weight.bits, limit, rows, max_splits, is_pair)
    return config._replace(uses_pdl=can_use_pdl(device))


@functools.cache
def _config(
    n: int, k: int, bits: int, limit: int, rows: int, max_splits: int = MAX_SPLITS, is_pair: bool = False
) -> Config:
    """By shape, rows and the shared memory of the device; the splits are by shape alone.

    As measured on an H200: pipelines as deep as lets the programs of a processor run side by side.
    """
    splits = _splits(n, k, max_splits)
    columns = 128 if (is_pair or max_splits > 1) and n >= 128 else 64
    stage = columns * (WORDS + 4) * 4 + tile_rows(rows) * block_size(bits) * 2
    per_processor = min(4, max(1, round(triton.cdiv(n, columns) * splits / PROCESSORS)))
    stages = max(3, min(MAX_STAGES, limit // (per_processor * stage)))
    return Config(columns, splits, 4, max(2, min(stages, limit // stage)))


def _splits(n: int, k: int, most: int) -> int:
    """A power of two, so that there are some programs for every multiprocessor of a large GPU, or as many as K has."""
    wanted = min(most, k // MIN_PART, PROGRAMS // triton.cdiv(n, 64))
    return 1 << max(wanted, 1).bit_length() - 1

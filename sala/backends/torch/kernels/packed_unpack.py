# mypy: disable-error-code="import-untyped, no-redef, no-untyped-def, untyped-decorator"
"""Unpacking of 4- and 8-bit codes into weights in registers, for the kernels of `packed.py`.

On a GPU it is written in PTX; HAS_ASM false selects the same arithmetic in Triton, for the interpreter and for fp32.
"""

import triton
import triton.language as tl

from sala.backends.torch.kernels.packed_weight import bit_offset

_place = triton.constexpr_function(bit_offset)


@triton.constexpr_function
def _nibbles(plane, is_bfloat, power, is_shared):
    """Return PTX that unpacks a word $2, with the word of its group $3, into two weights of a plane, $0 and $1.

    A code in the lower or upper half of a byte is 2^-133 or 2^-129 of itself; the scale is made for where the group
    begins. Without a power, a float with a code in its lowest bits is the code plus a power of two: no conversion is
    needed. Halves of words are named, not permuted: a multiply-add can take one half twice.
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
    """Return PTX that unpacks two words $1, $2, with their groups $3, $4, into two weights of a plane in $0.

    A byte is too long for the 7 bits of bf16: it holds a sign and the distance of the code from the middle, which lies
    between two codes. As above, those 7 bits plus a power of two are a float.
    """
    kind, one, base, minus = ("bf16x2", 0x3F80, 0x4300, 0xC2FF) if is_bfloat else ("f16x2", 0x3C00, 0x6400, 0xE3FF)
    text = f"prmt.b32 t, $1, $2, {0x4400 + 0x1111 * plane}; lop3.b32 c, t, {0x007F007F}, {base * 0x10001}, 0xea;"
    text += f"mov.b32 s, {one * 0x10001}; mov.b32 b, {minus * 0x10001}; fma.rn.{kind} c, c, s, b;"  # 127.5, or 1023.5
    text += f"lop3.b32 c, c, t, {0x80008000}, 0x78;"
    text += f"prmt.b32 s, $3, $4, {0x5410}; prmt.b32 b, $3, $4, {0x7632}; fma.rn.{kind} $0, c, s, b;"
    return "{ .reg .b32 t, c, s, b; " + text + " }"


@triton.jit
def _scale_and_offset(group, dtype: tl.constexpr):
    """Return scale and offset from the words of groups, in fp32."""
    WIDTH: tl.constexpr = dtype.primitive_bitwidth
    BASE: tl.constexpr = tl.int32 if WIDTH == 32 else tl.int16
    scale = group.to(BASE).to(dtype, bitcast=True).to(tl.float32)
    offset = (group >> WIDTH).to(BASE).to(dtype, bitcast=True).to(tl.float32)
    return scale, offset


@triton.jit
def _plane_of_nibbles(words, group, PLANE: tl.constexpr, IS_SHARED: tl.constexpr, POWER: tl.constexpr,
                      dtype: tl.constexpr, HAS_ASM: tl.constexpr):  # fmt: skip
    """words [COLUMNS, 16], group [COLUMNS, 1] → the plane's weights [COLUMNS, 32].

    With IS_SHARED the group covers all four planes of the words. Both codes of a pair come from one word: if they came
    from two, the compiler could choose the pairs.
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
            scale = scale * 2.0 ** (POWER - MADE_FOR) * 2.0**-POWER  # in one step it would underflow fp32
        weights = (codes * scale + offset).to(dtype)
    return weights


@triton.jit
def _plane_of_bytes(words, group, PLANE: tl.constexpr, dtype: tl.constexpr, HAS_ASM: tl.constexpr):
    """words [COLUMNS, 32], group [COLUMNS, 1] → the plane's weights [COLUMNS, 32]."""
    if HAS_ASM and dtype == tl.bfloat16:  # the call takes a type, not a constexpr that holds one
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
    words, groups,
    FIRST: tl.constexpr, NUM_GROUPS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr, POWER: tl.constexpr,
    dtype: tl.constexpr, HAS_ASM: tl.constexpr,
):  # fmt: skip
    """words [COLUMNS, 16 or 32], groups [COLUMNS, NUM_GROUPS] → weights of half a block, [COLUMNS, 4096 / BITS / 8].

    Planes are joined in the order of K, without moving data between registers.
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

# mypy: disable-error-code="import-untyped, no-redef, no-untyped-def, untyped-decorator"
"""Products of rows with matrices of 4 or 8 bits per weight: the codes are read once and unpacked in registers.

`packed_weight.py` describes the format, `packed_unpack.py` unpacks it. As in `linear.py`, K is cut by the shape alone:
products of decode rows are batch-invariant. In fp32, which tensor cores do not have, the matrix is always expanded.

A layer's projections may have 4 and 8 bits. One launch multiplies with both formats: small separate launches would each
leave most of a GPU idle at their end.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sala.backends.torch.kernels.fused import rounded_silu_mul
from sala.backends.torch.kernels.launch import Config, largest_power_of_2, shared_memory
from sala.backends.torch.kernels.packed_unpack import _halves
from sala.backends.torch.kernels.packed_weight import WORDS, PackedWeight, adjoin, block_size
from sala.backends.torch.kernels.pdl import can_use_pdl, prefetch

MIN_TILE, MAX_TILE = 16, 64  # rows of a program; tensor cores need 16
PROGRAMS = 512  # about four for every multiprocessor of a large GPU: one unpacks while the others wait for memory
MIN_PART = 512  # least length of a part of K
MAX_SPLITS = 8  # the kernel that adds up the parts reads them all
PROCESSORS = 132  # multiprocessors of an H200, on which the depth of pipelines was measured
MAX_STAGES = 8  # stages of the pipeline
MIXED_STAGES = 5  # stages with two formats: the fastest on an H200
MAX_PREFETCHED = 2  # blocks that a program prefetches before the kernel ahead of it has ended
MAX_EXPANDED = 1 << 26  # weights that `product` expands at a time
SMALL_SHARED = 128 << 10  # bytes: consumer GPUs have less than this much shared memory per program


@triton.jit
def _settled(acc):
    """Return acc unchanged, through an instruction: so the compiler waits for the products before the next step.

    Tensor cores read the weights from registers while they multiply, and the compiler would let the next step unpack
    into the same registers: without this, long rows were wrong on an H200.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _packed_tile(
    x_ptr, codes_ptr, groups_ptr, x_row, num_rows, tile, split,
    N: tl.constexpr, K: tl.constexpr, PITCH: tl.constexpr, TILE_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, POWER: tl.constexpr,
    PREFETCH_STEPS: tl.constexpr, IS_PAIR: tl.constexpr, HAS_ASM: tl.constexpr,
):  # fmt: skip
    """Return a tile's columns of one split, [COLUMNS, TILE_ROWS] in fp32. The matrix has PITCH rows, N of them used.

    With IS_PAIR, the second half of the columns lies N rows behind the first.
    """
    BLOCK: tl.constexpr = 1024 // BITS
    HALF: tl.constexpr = BLOCK // 2
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    STEPS: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    first = split * STEPS
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    word, inner = tl.arange(0, 32), tl.arange(0, HALF)
    OUTPUTS: tl.constexpr = COLUMNS // 2 if IS_PAIR else COLUMNS
    lane = tl.arange(0, COLUMNS)
    # Columns past the last one repeat it: no mask is needed and the result is never read.
    real = tl.minimum(tile * OUTPUTS + lane % OUTPUTS, N - 1) + lane // OUTPUTS * N
    is_row = (row < num_rows)[:, None]
    begin = first.to(tl.int64) * PITCH
    code_rows, group_rows = codes_ptr + (begin + real) * 32, groups_ptr + (begin + real) * GROUPS
    if PREFETCH_STEPS > 0:
        tl.extra.cuda.gdc_launch_dependents()
        for step in tl.static_range(PREFETCH_STEPS):
            ahead = tl.minimum(step, BLOCKS - 1 - first)
            prefetch(code_rows + ahead * (PITCH * 32))
            prefetch(group_rows + ahead * (PITCH * GROUPS))
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
    return acc * 2.0**POWER


@triton.jit(do_not_specialize=["num_rows"])
def _packed_kernel(
    x_ptr, codes_ptr, groups_ptr, out_ptr,
    x_row, out_row, num_rows,
    N: tl.constexpr, K: tl.constexpr, PITCH: tl.constexpr, TILE_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, POWER: tl.constexpr,
    PREFETCH_STEPS: tl.constexpr, IS_PAIR: tl.constexpr, HAS_ASM: tl.constexpr,
):  # fmt: skip
    """COLUMNS of one split: out [SPLITS, num_rows, N].

    With IS_PAIR, half of the columns are the gate, half the up projection N rows further, and out is silu(gate) * up.
    """
    tile, split = tl.program_id(1), tl.program_id(2)
    out = _packed_tile(
        x_ptr, codes_ptr, groups_ptr, x_row, num_rows, tile, split, N, K, PITCH, TILE_ROWS, COLUMNS,
        SPLITS, BITS, GROUPS, POWER, PREFETCH_STEPS, IS_PAIR, HAS_ASM,
    ).to(out_ptr.dtype.element_ty)  # fmt: skip
    OUTPUTS: tl.constexpr = COLUMNS // 2 if IS_PAIR else COLUMNS
    if IS_PAIR:
        gate, up = tl.split(tl.permute(tl.reshape(out, (2, OUTPUTS, TILE_ROWS)), (1, 2, 0)))
        out = rounded_silu_mul(gate, up, out_ptr.dtype.element_ty)
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    target = out_ptr + (split * num_rows + row).to(tl.int64)[:, None] * out_row + column[None, :]
    tl.store(target, tl.trans(out), mask=(row < num_rows)[:, None] & (column < N)[None, :])


@triton.jit
def _store_tile(
    x_ptr, codes_ptr, groups_ptr, out_ptr, x_row, out_row, num_rows, tile,
    N: tl.constexpr, PITCH: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, POWER: tl.constexpr,
    PREFETCH_STEPS: tl.constexpr, BEGINS: tl.constexpr, SHIFTS: tl.constexpr,
    K: tl.constexpr, TILE_ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_ASM: tl.constexpr,
):  # fmt: skip
    """Store COLUMNS of a matrix; outputs from BEGINS[i] on lie SHIFTS[i] further than those before."""
    out = _packed_tile(
        x_ptr, codes_ptr, groups_ptr, x_row, num_rows, tile, tl.program_id(2), N, K, PITCH, TILE_ROWS, COLUMNS,
        1, BITS, GROUPS, POWER, PREFETCH_STEPS, False, HAS_ASM,
    ).to(out_ptr.dtype.element_ty)  # fmt: skip
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    place = column
    for i in tl.static_range(len(BEGINS)):
        place += tl.where(column >= BEGINS[i], SHIFTS[i], 0)
    target = out_ptr + row.to(tl.int64)[:, None] * out_row + place[None, :]
    tl.store(target, tl.trans(out), mask=(row < num_rows)[:, None] & (column < N)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _mixed_kernel(
    x_ptr, codes_ptr, groups_ptr, codes2_ptr, groups2_ptr, out_ptr, x_row, out_row, num_rows,
    N: tl.constexpr, PITCH: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, POWER: tl.constexpr,
    PREFETCH_STEPS: tl.constexpr, BEGINS: tl.constexpr, SHIFTS: tl.constexpr,
    N2: tl.constexpr, PITCH2: tl.constexpr, BITS2: tl.constexpr, GROUPS2: tl.constexpr, POWER2: tl.constexpr,
    PREFETCH_STEPS2: tl.constexpr, BEGINS2: tl.constexpr, SHIFTS2: tl.constexpr,
    K: tl.constexpr, TILE_ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_ASM: tl.constexpr,
):  # fmt: skip
    """COLUMNS of one of two matrices, whose outputs are interleaved: out [num_rows, N + N2]."""
    TILES: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(1)
    if tile < TILES:
        _store_tile(
            x_ptr, codes_ptr, groups_ptr, out_ptr, x_row, out_row, num_rows, tile,
            N, PITCH, BITS, GROUPS, POWER, PREFETCH_STEPS, BEGINS, SHIFTS, K, TILE_ROWS, COLUMNS, HAS_ASM,
        )  # fmt: skip
    else:
        _store_tile(
            x_ptr, codes2_ptr, groups2_ptr, out_ptr, x_row, out_row, num_rows, tile - TILES,
            N2, PITCH2, BITS2, GROUPS2, POWER2, PREFETCH_STEPS2, BEGINS2, SHIFTS2, K, TILE_ROWS, COLUMNS, HAS_ASM,
        )  # fmt: skip


@triton.jit
def _expand_kernel(
    codes_ptr, groups_ptr, index_ptr, out_ptr,
    num_rows,
    K: tl.constexpr, PITCH: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    POWER: tl.constexpr, HAS_INDEX: tl.constexpr, HAS_ASM: tl.constexpr,
):  # fmt: skip
    """Expand a block of COLUMNS rows of the matrix, in order or as the index names them: out [num_rows, K]."""
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


def expanded_product(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [T, K] → [T, N], any number of rows, by an expanded copy of the matrix, a piece at a time."""
    step = max(1, MAX_EXPANDED // weight.num_in)
    if step >= weight.num_out:
        return F.linear(x, expand(weight))
    out = torch.empty(x.shape[0], weight.num_out, dtype=x.dtype, device=x.device)
    for begin in range(0, weight.num_out, step):
        end = min(begin + step, weight.num_out)
        torch.mm(x, expand(weight.rows(begin, end)).T, out=out[:, begin:end])
    return out


def expand(weight: PackedWeight, index: Tensor | None = None) -> Tensor:
    """Return the matrix [n, k] in the precision of the activations, or the rows that index [t] names."""
    num_rows = weight.num_out if index is None else index.shape[0]
    out = torch.empty(num_rows, weight.num_in, dtype=weight.dtype, device=weight.codes.device)
    if num_rows == 0:
        return out
    columns = 16 if num_rows <= 64 else 32
    tensors = (weight.codes, weight.groups, weight.codes if index is None else index.contiguous(), out)
    grid = (weight.codes.shape[0], triton.cdiv(num_rows, columns))
    constants = {"K": weight.num_in, "COLUMNS": columns, "HAS_INDEX": index is not None, **format_constants(weight)}
    _expand_kernel[grid](*tensors, num_rows, **constants, num_warps=4)
    return out


def launch(x: Tensor, weight: PackedWeight, out: Tensor, config: Config, is_pair: bool) -> None:
    """Multiply aligned rows x [T, K] into out [T, N], whose rows may lie apart, or [S, T, N]."""
    rows, n = x.shape[0], out.shape[-1]
    assert out.is_contiguous() or (out.dim() == 2 and out.stride(1) == 1)
    assert x.shape[1] == weight.num_in
    assert weight.codes.stride()[1:] == (WORDS, 1)
    tiles = triton.cdiv(rows, tile_rows(rows))  # adjacent programs: the second reads the codes from the L2 cache
    outputs = config.tile["COLUMNS"] // 2 if is_pair else config.tile["COLUMNS"]
    constants = packed_constants(rows, n, weight.num_in, weight.bits, config, is_pair) | format_constants(weight)
    _packed_kernel[(tiles, triton.cdiv(n, outputs), config.tile["SPLITS"])](
        x, weight.codes, weight.groups, out, x.stride(0), out.stride(-2), rows, **constants, **config.options
    )


class Interleaved(NamedTuple):
    """A matrix whose outputs from row begins[i] on lie shifts[i] further than those of the rows before."""

    weight: PackedWeight
    begins: tuple[int, ...]
    shifts: tuple[int, ...]


def interleave(weights: Sequence[PackedWeight]) -> list[Interleaved]:
    """Return a matrix per format of the weights, whose outputs are side by side; the one with the most bits first.

    The list is empty unless the weights of a format lie one after another in memory, see `packed_weight.adjoin`.
    """
    starts = [0, *itertools.accumulate(weight.num_out for weight in weights)]
    found = []
    for kind in dict.fromkeys(weight.format for weight in weights):
        alike = [(weight, start) for weight, start in zip(weights, starts, strict=False) if weight.format == kind]
        matrix = adjoin([weight for weight, _ in alike])
        if matrix is None:
            return []
        begins = (0, *itertools.accumulate(weight.num_out for weight, _ in alike[:-1]))
        offsets = [0, *(start - begin for (_, start), begin in zip(alike, begins, strict=True))]
        found.append(Interleaved(matrix, begins, tuple(b - a for a, b in itertools.pairwise(offsets))))
    return sorted(found, key=lambda one: -one.weight.bits)  # programs that read the most first


def launch_mixed(x: Tensor, matrices: Sequence[Interleaved], out: Tensor) -> None:
    """Multiply aligned rows x [T, K] with two matrices of any formats into out [T, N + N2]."""
    rows, limit = x.shape[0], shared_memory(x.device)
    (first, second), outputs = matrices, [one.weight.num_out for one in matrices]
    assert x.shape[1] == first.weight.num_in == second.weight.num_in
    assert out.is_contiguous()
    config = _mixed_config(sum(outputs), min(one.weight.bits for one in matrices), limit, rows)
    config = config._replace(uses_pdl=can_use_pdl(x.device))
    constants = mixed_constants(rows, matrices, config)
    tiles = sum(triton.cdiv(n, config.tile["COLUMNS"]) for n in outputs)
    tensors = (x, first.weight.codes, first.weight.groups, second.weight.codes, second.weight.groups, out)
    grid = (triton.cdiv(rows, tile_rows(rows)), tiles)
    _mixed_kernel[grid](*tensors, x.stride(0), out.stride(0), rows, **constants, **config.options)


def mixed_constants(rows: int, matrices: Sequence[Interleaved], config: Config) -> dict[str, Any]:
    """Return the compile-time constants of the kernel; those of the second matrix end with 2."""
    constants = {"K": matrices[0].weight.num_in, "TILE_ROWS": tile_rows(rows), **config.tile}
    for suffix, (weight, begins, shifts) in zip(("", "2"), matrices, strict=True):
        own = format_constants(weight)
        constants["HAS_ASM"] = own.pop("HAS_ASM")
        own["PREFETCH_STEPS"] = min(len(weight.codes), MAX_PREFETCHED) if config.uses_pdl else 0
        own |= {"N": weight.num_out, "BEGINS": begins, "SHIFTS": shifts}
        constants |= {name + suffix: value for name, value in own.items()}
    return constants


def packed_constants(rows: int, n: int, k: int, bits: int, config: Config, is_pair: bool = False) -> dict[str, Any]:
    """Return the compile-time constants of the kernel that do not depend on the matrix's memory."""
    part = triton.cdiv(triton.cdiv(k, block_size(bits)), config.tile["SPLITS"])
    return {
        "N": n,
        "K": k,
        "TILE_ROWS": tile_rows(rows),
        "PREFETCH_STEPS": min(part, MAX_PREFETCHED) if config.uses_pdl else 0,
        "IS_PAIR": is_pair,
        **config.tile,
    }


def tile_rows(rows: int) -> int:
    """Return the height of a tile; it does not change the order in which a row is summed."""
    return min(MAX_TILE, max(MIN_TILE, triton.next_power_of_2(rows)))


def format_constants(weight: PackedWeight) -> dict[str, Any]:
    """Return the compile-time constants of a matrix: PITCH rows has the matrix that this one is a part of.

    Codes are unpacked by PTX (HAS_ASM), but not in the interpreter, nor in fp32.
    """
    groups = weight.groups
    assert groups.stride()[1:] == (groups.shape[2], 1)
    pitch = weight.codes.stride(0) // WORDS
    assert weight.codes.shape[0] == 1 or groups.stride(0) == pitch * groups.shape[2]
    has_asm = weight.codes.is_cuda and weight.dtype.itemsize == 2
    constants = {"BITS": weight.bits, "GROUPS": groups.shape[2], "POWER": weight.power}
    return constants | {"PITCH": pitch, "HAS_ASM": has_asm}


def config_of(weight: PackedWeight, rows: int, max_splits: int, is_pair: bool = False) -> Config:
    device = weight.codes.device
    limit = shared_memory(device)
    config = _config(weight.num_out, weight.num_in, weight.bits, limit, rows, max_splits, is_pair)
    return config._replace(uses_pdl=can_use_pdl(device))


@functools.cache
def _config(
    n: int, k: int, bits: int, limit: int, rows: int, max_splits: int = MAX_SPLITS, is_pair: bool = False
) -> Config:
    """Choose by shape, rows and shared memory (`limit`); the splits depend on the shape alone.

    Measured on an H200: best are the deepest pipelines with which the programs of a multiprocessor still fit together.
    """
    splits = largest_power_of_2(min(max_splits, k // MIN_PART, PROGRAMS // triton.cdiv(n, 64)))
    # Without wgmma a tile of 128 columns is at the limit of registers: ptxas spills for sm_120 with Triton 3.7.
    is_wide = (is_pair or max_splits > 1) and n >= 128 and limit > SMALL_SHARED
    columns = 128 if is_wide else 64
    stage = _stage_bytes(columns, bits, rows)
    per_processor = min(4, max(1, round(triton.cdiv(n, columns) * splits / PROCESSORS)))
    stages = max(3, min(MAX_STAGES, limit // (per_processor * stage)))
    return Config({"COLUMNS": columns, "SPLITS": splits}, 4, max(2, min(stages, limit // stage)))


@functools.cache
def _mixed_config(n: int, bits: int, limit: int, rows: int) -> Config:
    """`_config` for n outputs in two formats, the smaller of which has `bits`; all programs should run at once."""
    columns = 64
    stage = _stage_bytes(columns, bits, rows)
    per_processor = min(4, triton.cdiv(triton.cdiv(n, columns), PROCESSORS))
    stages = max(3, min(MIXED_STAGES, limit // (per_processor * stage)))
    return Config({"COLUMNS": columns}, 4, max(2, min(stages, limit // stage)))


def _stage_bytes(columns: int, bits: int, rows: int) -> int:
    """Return the shared memory of a stage: words, groups and rows of a block."""
    return columns * (WORDS + 4) * 4 + tile_rows(rows) * block_size(bits) * 2

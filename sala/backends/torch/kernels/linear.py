# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Products of decode rows with a large weight: bound by reading the weight and by nothing else.

K is cut into a fixed number of parts, each computed by its own program, so that every multiprocessor keeps reading even
where the output is small (split-K). The partial sums stay apart in fp32 and are added, in order, by the norm that comes
next anyway: no extra kernel. Neither the cut nor the order depends on the rows: the products are batch-invariant.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sala.backends.torch.kernels.attention import shared_memory
from sala.backends.torch.kernels.pdl import can_use_pdl, pdl_launch_dependents, pdl_wait, prefetch

MIN_ROWS, MAX_ROWS = 32, 128  # of a tile: with more, reading the weight is no longer the limit
PROGRAMS = 128  # about as many as a large GPU has multiprocessors
MIN_PART = 256  # of K, at least
MAX_SPLITS = 8  # the norm that adds up the parts reads them all
MAX_PREFETCHED = 1  # tiles that a program prefetches before the kernel ahead of it has ended


class Config(NamedTuple):
    """A tile of the weight is `columns` x `depth`; K is cut into `splits` parts, on which the order of sums depends.

    With `is_swapped`, the weight's tile is the left operand: Hopper's tensor cores want 64 rows there, and decode
    batches have fewer. With `uses_pdl` (see `pdl.py`), programs start while the kernel ahead still runs, prefetch their
    first weights into the L2 cache and then wait for its end.
    """

    columns: int
    depth: int
    splits: int
    num_warps: int
    num_stages: int
    is_swapped: bool = True
    uses_pdl: bool = False


@triton.jit
def _silu_mul(gate, up, dtype: tl.constexpr):
    """Return silu(gate) * up, rounded to dtype where `fused.silu_mul` rounds."""
    gate = gate.to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (active * up.to(tl.float32)).to(dtype)


@triton.jit
def _product(x, weight, acc, IS_SWAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """Add the product of x [ROWS, DEPTH] and weight [COLUMNS, DEPTH] to acc [ROWS, COLUMNS], or to its transpose."""
    if IS_SWAPPED:
        acc = tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(x, tl.trans(weight), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _prefetch_weight(weight_rows, begin, K: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr):
    """Prefetch the first tiles of the weight into the L2 cache."""
    LINE: tl.constexpr = 1024 // weight_rows.dtype.element_ty.primitive_bitwidth
    line = tl.arange(0, (DEPTH + LINE - 1) // LINE) * LINE
    for step in tl.static_range(STEPS):
        prefetch(weight_rows[:, None] + tl.minimum(begin + step * DEPTH + line, K - 1)[None, :])


@triton.jit
def _linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_row,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    PREFETCH_STEPS: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """COLUMNS of one split: out [SPLITS, ROWS, N]."""
    STEPS: tl.constexpr = (K + DEPTH * SPLITS - 1) // (DEPTH * SPLITS)
    IS_WHOLE: tl.constexpr = K == STEPS * DEPTH * SPLITS
    split = tl.program_id(1)
    begin = split * (STEPS * DEPTH)
    row, inner = tl.arange(0, TILE_ROWS), tl.arange(0, DEPTH)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Columns past the last one repeat it: no mask is needed and the result is never read. Rows are masked: if all rows
    # of a tile repeated one, every program would ask for the same few lines of the L2 cache 32 times.
    is_row = (row < ROWS)[:, None]
    x_rows = tl.multiple_of(x_ptr + row * x_row, 16)
    weight_rows = tl.multiple_of(weight_ptr + tl.minimum(column, N - 1).to(tl.int64) * K, 16)
    if PREFETCH_STEPS > 0:
        tl.extra.cuda.gdc_launch_dependents()
        _prefetch_weight(weight_rows, begin, K, DEPTH, PREFETCH_STEPS)
        tl.extra.cuda.gdc_wait()
    x_tile = x_rows[:, None] + (begin + inner)[None, :]
    weight_tile = weight_rows[:, None] + (begin + inner)[None, :]
    acc = tl.zeros([COLUMNS, TILE_ROWS] if IS_SWAPPED else [TILE_ROWS, COLUMNS], tl.float32)
    steps = STEPS
    if not IS_WHOLE:
        steps = tl.maximum(0, tl.minimum(STEPS, (K - begin + DEPTH - 1) // DEPTH))
    for step in range(steps):
        if IS_WHOLE:
            weight = tl.load(weight_tile + step * DEPTH)
            x = tl.load(x_tile + step * DEPTH, mask=is_row, other=0.0)
        else:
            is_here = (begin + step * DEPTH + inner < K)[None, :]
            weight = tl.load(weight_tile + step * DEPTH, mask=is_here, other=0.0)
            x = tl.load(x_tile + step * DEPTH, mask=is_row & is_here, other=0.0)
        acc = _product(x, weight, acc, IS_SWAPPED, PRECISION)
    if IS_SWAPPED:
        acc = tl.trans(acc)
    target = out_ptr + (split * ROWS + row).to(tl.int64)[:, None] * N + column[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=is_row & (column < N)[None, :])


@triton.jit
def _gate_up_kernel(
    x_ptr, weight_ptr, out_ptr, x_row,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, PREFETCH_STEPS: tl.constexpr, IS_SWAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the gate and of the up projection, whose weights lie N rows further: out [ROWS, N]."""
    STEPS: tl.constexpr = (K + DEPTH - 1) // DEPTH
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row, inner = tl.arange(0, TILE_ROWS), tl.arange(0, DEPTH)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = (row < ROWS)[:, None]
    x_rows = tl.multiple_of(x_ptr + row * x_row, 16)
    weight_rows = tl.multiple_of(weight_ptr + tl.minimum(column, N - 1).to(tl.int64) * K, 16)
    if PREFETCH_STEPS > 0:
        tl.extra.cuda.gdc_launch_dependents()
        _prefetch_weight(weight_rows, 0, K, DEPTH, PREFETCH_STEPS)
        _prefetch_weight(weight_rows + N * K, 0, K, DEPTH, PREFETCH_STEPS)
        tl.extra.cuda.gdc_wait()
    x_tile = x_rows[:, None] + inner[None, :]
    gate_tile = weight_rows[:, None] + inner[None, :]
    up_tile = gate_tile + N * K
    gate = tl.zeros([COLUMNS, TILE_ROWS] if IS_SWAPPED else [TILE_ROWS, COLUMNS], tl.float32)
    up = tl.zeros([COLUMNS, TILE_ROWS] if IS_SWAPPED else [TILE_ROWS, COLUMNS], tl.float32)
    for step in range(STEPS):
        if K % DEPTH == 0:
            gate_weight, up_weight = tl.load(gate_tile + step * DEPTH), tl.load(up_tile + step * DEPTH)
            x = tl.load(x_tile + step * DEPTH, mask=is_row, other=0.0)
        else:
            is_here = (step * DEPTH + inner < K)[None, :]
            gate_weight = tl.load(gate_tile + step * DEPTH, mask=is_here, other=0.0)
            up_weight = tl.load(up_tile + step * DEPTH, mask=is_here, other=0.0)
            x = tl.load(x_tile + step * DEPTH, mask=is_row & is_here, other=0.0)
        gate = _product(x, gate_weight, gate, IS_SWAPPED, PRECISION)
        up = _product(x, up_weight, up, IS_SWAPPED, PRECISION)
    out = _silu_mul(gate.to(dtype), up.to(dtype), dtype)
    if IS_SWAPPED:
        out = tl.trans(out)
    target = out_ptr + row[:, None] * N + column[None, :]
    tl.store(target, out, mask=is_row & (column < N)[None, :])


def linear(x: Tensor, weight: Tensor, config: Config | None = None) -> Tensor:
    """x [T, K], weight [N, K] → [T, N] in x's dtype; at most 128 rows, as in all functions here."""
    config = config or _config_of(weight, x.shape[0], max_splits=1)
    assert config.splits == 1
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _launch(x, weight, out, config)
    return out


def split_linear(x: Tensor, weight: Tensor, config: Config | None = None) -> Tensor:
    """x [T, K], weight [N, K] → partials [S, T, N] in fp32, whose sum is the product."""
    config = config or _config_of(weight, x.shape[0])
    partials = torch.empty(config.splits, x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    _launch(x, weight, partials, config)
    return partials


def linear_silu_mul(x: Tensor, weight: Tensor, config: Config | None = None) -> Tensor:
    """x [T, K], weight [2 * m, K], the gate's rows first → silu(gate) * up [T, m] of their product.

    A program computes gate and up projection of its columns, so that SiLU is computed once.
    """
    rows, width, k = x.shape[0], weight.shape[0] // 2, weight.shape[1]
    if config is None:
        config = _pair_config(rows, x.element_size(), shared_memory(x.device))
        config = config._replace(uses_pdl=can_use_pdl(x.device))
    assert config.splits == 1
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    x = _checked(x, weight)
    _gate_up_kernel[(triton.cdiv(width, config.columns),)](
        x, weight, out, x.stride(0), **constants(rows, width, k, x.dtype, config), **options(config)
    )
    return out


def _launch(x: Tensor, weight: Tensor, out: Tensor, config: Config) -> None:
    """out [T, N] or [S, T, N]."""
    rows, (n, k) = x.shape[0], weight.shape
    if rows == 0:
        return
    x = _checked(x, weight)
    _linear_kernel[(triton.cdiv(n, config.columns), config.splits)](
        x,
        weight,
        out,
        x.stride(0),
        **constants(rows, n, k, x.dtype, config),
        SPLITS=config.splits,
        **options(config),
    )


def _checked(x: Tensor, weight: Tensor) -> Tensor:
    """Return x if its rows are aligned to 16 bytes (they may lie apart), else a copy of it."""
    assert x.shape[0] <= MAX_ROWS
    assert x.shape[1] == weight.shape[1]
    assert x.dtype == weight.dtype
    assert weight.is_contiguous()
    assert weight.shape[1] * weight.element_size() % 16 == weight.data_ptr() % 16 == 0
    is_aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    return x if x.stride(1) == 1 and is_aligned else x.clone(memory_format=torch.contiguous_format)


def constants(rows: int, n: int, k: int, dtype: torch.dtype, config: Config) -> dict[str, Any]:
    """Return the compile-time constants of both kernels."""
    part = triton.cdiv(k, config.depth * config.splits)
    return {
        "N": n,
        "K": k,
        "ROWS": rows,
        "TILE_ROWS": _tile_rows(rows),
        "COLUMNS": config.columns,
        "DEPTH": config.depth,
        "PREFETCH_STEPS": min(part, MAX_PREFETCHED) if config.uses_pdl else 0,
        "IS_SWAPPED": config.is_swapped,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }


def options(config: Config) -> dict[str, Any]:
    early = {"launch_pdl": True} if config.uses_pdl else {}
    return {"num_warps": config.num_warps, "num_stages": config.num_stages} | early


def _tile_rows(rows: int) -> int:
    """Return the height of the tile that holds all rows; it does not change the order in which a row is summed."""
    return max(MIN_ROWS, triton.next_power_of_2(rows))


def _config_of(weight: Tensor, rows: int, max_splits: int = MAX_SPLITS) -> Config:
    n, k = weight.shape
    config = _config(n, k, weight.element_size(), shared_memory(weight.device), max_splits, rows)
    return config._replace(uses_pdl=can_use_pdl(weight.device))


def max_rows(weight: Tensor) -> int:
    """Return the most rows that these products take: in fp32, without tensor cores, only a few are memory-bound."""
    return MAX_ROWS if weight.element_size() <= 2 else MIN_ROWS


def can_take(rows: int, weight: Tensor) -> bool:
    """Return whether these products take so many rows of this weight."""
    return rows <= max_rows(weight) and weight.shape[1] * weight.element_size() % 16 == 0 and weight.is_contiguous()


def _config(
    n: int,
    k: int,
    element_size: int,
    limit: int,
    max_splits: int = MAX_SPLITS,
    rows: int = MIN_ROWS,
) -> Config:
    """Choose by shape, bytes per element and shared memory (`limit`); the splits depend on the shape alone.

    Measured on an H200 (benchmarks/gpu_linear.py): with a program per multiprocessor a deep pipeline pays, with many
    of them a shallow one, since several programs then share a multiprocessor.
    """
    if element_size > 2:  # no tensor cores: registers are the limit
        return Config(64, 32, _splits(n, k, 64, max_splits), 4, 3, is_swapped=False)
    columns, depth = 64, 128 if limit > 200 << 10 else 64
    splits = _splits(n, k, columns, max_splits)
    wanted = 3 if splits == 1 else 4 if k <= 8192 else 6
    num_stages = min(wanted, _stages(columns + _tile_rows(rows), depth, limit))
    return Config(columns, depth, splits, columns // 16, num_stages)


def _pair_config(rows: int, element_size: int, limit: int) -> Config:
    """`_config` of the gate-up kernel, which reads two tiles of the weight at a time and has many outputs."""
    if element_size > 2:
        return Config(64, 32, 1, 4, 3, is_swapped=False)
    depth = 128 if limit > 200 << 10 else 64
    return Config(64, depth, 1, 4, _stages(2 * 64 + _tile_rows(rows), depth, limit))


def _stages(num_rows: int, depth: int, limit: int) -> int:
    """Return the depth of a pipeline of rows of 16-bit numbers that fits into shared memory."""
    return min(6, limit // (num_rows * depth * 2))


def _splits(n: int, k: int, columns: int, most: int) -> int:
    """Return a power of two that gives every multiprocessor of a large GPU a program, as far as K is long enough."""
    wanted = min(most, k // MIN_PART, PROGRAMS // triton.cdiv(n, columns))
    return 1 << max(wanted, 1).bit_length() - 1


@triton.jit
def _add_norm_kernel(
    x_ptr,
    partials_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    x_row,
    split_stride,
    scale,
    eps,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_here = column < WIDTH
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column, mask=is_here, other=0.0).to(
        tl.float32
    )  # first: it comes from memory, the rest from the L2 cache
    pdl_wait(PDL)
    x = tl.load(x_ptr + row * x_row + column, mask=is_here, other=0.0).to(tl.float32)
    part = partials_ptr + row * WIDTH + column
    delta = tl.load(part, mask=is_here, other=0.0)
    for split in tl.static_range(1, SPLITS):
        delta += tl.load(part + split * split_stride, mask=is_here, other=0.0)
    delta = delta.to(dtype).to(tl.float32)  # what a linear would have returned
    x = (x + (delta * scale).to(dtype).to(tl.float32)).to(dtype)
    tl.store(sum_ptr + row * WIDTH + column, x, mask=is_here)
    x = x.to(tl.float32)
    mean = tl.sum(x * x, axis=0) / WIDTH
    pdl_launch_dependents(PDL)
    out = (x * tl.rsqrt(mean + eps)).to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + row * WIDTH + column, out.to(dtype), mask=is_here)


def add_partials_rms_norm(
    x: Tensor,
    partials: Tensor,
    scale: float,
    weight: Tensor,
    eps: float,
    uses_pdl: bool | None = None,
    dependents_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """`fused.add_rms_norm` of x [T, h] and the sum of partials [S, T, h], added in order and rounded to x's dtype.

    For `dependents_first` see `pdl.pdl_options`.
    """
    splits, rows, width = partials.shape
    assert x.shape == (rows, width)
    assert x.stride(1) == 1
    assert partials.is_contiguous()
    uses_pdl = can_use_pdl(x.device) if uses_pdl is None else uses_pdl
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if rows == 0:
        return total, out
    block = triton.next_power_of_2(width)
    _add_norm_kernel[(rows,)](
        x,
        partials,
        weight,
        total,
        out,
        x.stride(0),
        partials.stride(0),
        scale,
        eps,
        SPLITS=splits,
        WIDTH=width,
        BLOCK=block,
        PDL=(1 if dependents_first else 2) if uses_pdl else 0,
        num_warps=max(1, min(32, block // 128)),  # few numbers per thread: all reads are in flight at once
        enable_fp_fusion=False,  # the model rounds a product before it adds
        **({"launch_pdl": True} if uses_pdl else {}),
    )
    return total, out

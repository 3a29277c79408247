# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Products of decode rows with a large weight: bound by reading the weight and by nothing else.

K is cut into a fixed number of parts, each computed by its own program, so that every multiprocessor keeps reading even
where the output is small (split-K). The partial sums stay apart in fp32 and are added, in order, by the norm that comes
next anyway: no extra kernel. Neither the cut nor the order depends on the rows: the products are batch-invariant.
Matrices are tensors or packed (`packed.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sala.backends.torch.kernels import packed
from sala.backends.torch.kernels.fused import rounded_silu_mul
from sala.backends.torch.kernels.launch import Config, aligned_rows, largest_power_of_2, shared_memory
from sala.backends.torch.kernels.packed_weight import PackedWeight
from sala.backends.torch.kernels.pdl import can_use_pdl, pdl_launch_dependents, pdl_wait, prefetch

MIN_ROWS, MAX_ROWS = 32, 128  # rows of a tile; with more, reading the weight is no longer the limit
PROGRAMS = 128  # about as many as a large GPU has multiprocessors
MIN_PART = 256  # least length of a part of K
MAX_SPLITS = 8  # the norm that adds up the parts reads them all
MAX_PREFETCHED = 1  # tiles that a program prefetches before the kernel ahead of it has ended

Weight = Tensor | PackedWeight


@triton.jit
def _load(pointers, mask):
    """Load a tile; zeros outside of the mask, if there is one."""
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)


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


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr, weight_ptr, out_ptr,
    x_row, num_rows,
    N: tl.constexpr, K: tl.constexpr, TILE_ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    SPLITS: tl.constexpr, PREFETCH_STEPS: tl.constexpr, IS_PAIR: tl.constexpr, IS_SWAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """COLUMNS of one split: out [SPLITS, num_rows, N]; one build serves every number of rows that fits the tile.

    With IS_PAIR there is one split, the weights of the up projection lie N rows behind those of the gate, and out is
    silu(gate) * up. With IS_SWAPPED the weight's tile is the left operand: Hopper's tensor cores want 64 rows there,
    and decode batches have fewer. With PDL, programs prefetch their first weights and then wait for the kernel ahead.
    """
    STEPS: tl.constexpr = (K + DEPTH * SPLITS - 1) // (DEPTH * SPLITS)
    IS_WHOLE: tl.constexpr = K == STEPS * DEPTH * SPLITS
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    split = 0 if IS_PAIR else tl.program_id(1)
    begin = split * (STEPS * DEPTH)
    row, inner = tl.arange(0, TILE_ROWS), tl.arange(0, DEPTH)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Columns past the last one repeat it: no mask is needed and the result is never read. Rows of the smallest tile are
    # masked: if they all repeated one, every program would ask for the same few lines of the L2 cache 32 times. Larger
    # tiles are more than half full, so the rows past the last one repeat the first ones, which saves registers.
    IS_MASKED: tl.constexpr = TILE_ROWS <= 32
    is_row = (row < num_rows)[:, None]
    source = row if IS_MASKED else tl.where(row < num_rows, row, row - num_rows)
    x_rows = tl.multiple_of(x_ptr + source * x_row, 16)
    weight_rows = tl.multiple_of(weight_ptr + tl.minimum(column, N - 1).to(tl.int64) * K, 16)
    if PREFETCH_STEPS > 0:
        tl.extra.cuda.gdc_launch_dependents()
        _prefetch_weight(weight_rows, begin, K, DEPTH, PREFETCH_STEPS)
        if IS_PAIR:
            _prefetch_weight(weight_rows + N * K, begin, K, DEPTH, PREFETCH_STEPS)
        tl.extra.cuda.gdc_wait()
    x_tile = x_rows[:, None] + (begin + inner)[None, :]
    weight_tile = weight_rows[:, None] + (begin + inner)[None, :]
    up_tile = weight_tile + N * K
    acc = tl.zeros([COLUMNS, TILE_ROWS] if IS_SWAPPED else [TILE_ROWS, COLUMNS], tl.float32)
    up = acc
    steps = STEPS
    if not (IS_WHOLE or IS_PAIR):
        steps = tl.maximum(0, tl.minimum(STEPS, (K - begin + DEPTH - 1) // DEPTH))
    for step in range(steps):
        mask, x_mask = None, is_row if IS_MASKED else None
        if not IS_WHOLE:
            mask = (begin + step * DEPTH + inner < K)[None, :]
            x_mask = is_row & mask if IS_MASKED else mask
        weight = _load(weight_tile + step * DEPTH, mask)
        if IS_PAIR:
            up_weight = _load(up_tile + step * DEPTH, mask)
        x = _load(x_tile + step * DEPTH, x_mask)
        acc = _product(x, weight, acc, IS_SWAPPED, PRECISION)
        if IS_PAIR:
            up = _product(x, up_weight, up, IS_SWAPPED, PRECISION)
    if IS_PAIR:
        acc = rounded_silu_mul(acc.to(dtype), up.to(dtype), dtype)
    if IS_SWAPPED:
        acc = tl.trans(acc)
    target = out_ptr + (split * num_rows + row).to(tl.int64)[:, None] * N + column[None, :]
    tl.store(target, acc.to(dtype), mask=is_row & (column < N)[None, :])


def linear(x: Tensor, weight: Weight, config: Config | None = None) -> Tensor:
    """x [T, K], weight [N, K] → [T, N] in x's dtype; at most 128 rows, as in all functions here but `product`."""
    return _multiply(x, weight, config)


def split_linear(x: Tensor, weight: Weight, config: Config | None = None) -> Tensor:
    """x [T, K], weight [N, K] → partials [S, T, N] in fp32, whose sum is the product."""
    return _multiply(x, weight, config, is_split=True)


def linear_silu_mul(x: Tensor, weight: Weight, config: Config | None = None) -> Tensor:
    """x [T, K], weight [2 * m, K], the gate's rows first → silu(gate) * up [T, m] of their product.

    A program computes gate and up projection of its columns, so that SiLU is computed once.
    """
    return _multiply(x, weight, config, is_pair=True)


def linears(x: Tensor, weights: Sequence[PackedWeight]) -> Tensor:
    """`linear` with several matrices, which may differ in bits; results side by side: [T, N + …].

    Two formats are one launch where each is one matrix in memory; the sums are those of separate launches.
    """
    sizes = [weight.num_out for weight in weights]
    out = torch.empty(x.shape[0], sum(sizes), dtype=x.dtype, device=x.device)
    matrices = packed.interleave(weights)
    if len(matrices) == 2 and x.dtype.itemsize == 2 and x.shape[0]:
        assert all(x.dtype == weight.dtype for weight in weights)
        assert x.shape[0] <= MAX_ROWS
        packed.launch_mixed(aligned_rows(x), matrices, out)
        return out
    for weight, part in zip(weights, out.split(sizes, 1), strict=True):
        if weight.dtype.itemsize > 2:
            part.copy_(linear(x, weight))
        else:
            _multiply(x, weight, out=part)
    return out


def product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K] → [T, N], any number of rows: prefill rows by the library; batch-invariant for others."""
    if can_take(x.shape[0], weight):
        out = linear(x, weight)
    elif isinstance(weight, PackedWeight):
        out = packed.expanded_product(x, weight)
    else:
        return F.linear(x, weight, bias)
    return out if bias is None else out + bias


def max_rows(weight: Weight) -> int:
    """Return the most rows that these products take: in fp32, without tensor cores, only a few are memory-bound."""
    return MAX_ROWS if weight.dtype.itemsize <= 2 else MIN_ROWS


def can_take(rows: int, weight: Weight) -> bool:
    """Return whether these products take so many rows of this weight."""
    is_readable = isinstance(weight, PackedWeight) or (
        weight.shape[1] * weight.element_size() % 16 == 0 and weight.is_contiguous()
    )
    return rows <= max_rows(weight) and is_readable


def _multiply(
    x: Tensor, weight: Weight, config: Config | None = None, is_split: bool = False, is_pair: bool = False,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the product, by the kernel that reads this weight; packed ones are expanded in fp32, see `packed.py`."""
    if isinstance(weight, PackedWeight) and weight.dtype.itemsize > 2:
        weight = packed.expand(weight)
    rows, max_splits = x.shape[0], MAX_SPLITS if is_split else 1
    if isinstance(weight, PackedWeight):
        num_out, config = weight.num_out, config or packed.config_of(weight, rows, max_splits, is_pair)
    else:
        num_out, config = weight.shape[0], config or _config_of(weight, rows, max_splits, is_pair)
    n, splits = num_out // 2 if is_pair else num_out, config.tile["SPLITS"]
    assert rows <= MAX_ROWS
    assert is_split or splits == 1
    if out is None:
        shape, dtype = ((splits, rows, n), torch.float32) if is_split else ((rows, n), x.dtype)
        out = torch.empty(shape, dtype=dtype, device=x.device)
    if rows == 0:
        return out
    assert x.dtype == weight.dtype
    if isinstance(weight, PackedWeight):
        packed.launch(aligned_rows(x), weight, out, config, is_pair)
    else:
        _launch(aligned_rows(x), weight, out, config, is_pair)
    return out


def _launch(x: Tensor, weight: Tensor, out: Tensor, config: Config, is_pair: bool) -> None:
    n, k = out.shape[-1], weight.shape[1]
    assert x.shape[1] == k
    assert weight.is_contiguous()
    assert k * weight.element_size() % 16 == weight.data_ptr() % 16 == 0
    grid = (triton.cdiv(n, config.tile["COLUMNS"]), config.tile["SPLITS"])
    constants = linear_constants(x.shape[0], n, k, x.dtype, config, is_pair)
    _linear_kernel[grid](x, weight, out, x.stride(0), x.shape[0], **constants, **config.options)


def linear_constants(
    rows: int, n: int, k: int, dtype: torch.dtype, config: Config, is_pair: bool = False
) -> dict[str, Any]:
    """Return the compile-time constants of the kernel."""
    part = triton.cdiv(k, config.tile["DEPTH"] * config.tile["SPLITS"])
    return {
        "N": n,
        "K": k,
        "TILE_ROWS": _tile_rows(rows),
        "PREFETCH_STEPS": min(part, MAX_PREFETCHED) if config.uses_pdl else 0,
        "IS_PAIR": is_pair,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        **config.tile,
    }


def _tile_rows(rows: int) -> int:
    """Return the height of the tile that holds all rows; it does not change the order in which a row is summed."""
    return max(MIN_ROWS, triton.next_power_of_2(rows))


def _config_of(weight: Tensor, rows: int, max_splits: int = MAX_SPLITS, is_pair: bool = False) -> Config:
    (n, k), limit = weight.shape, shared_memory(weight.device)
    config = _config(n, k, weight.element_size(), limit, rows, max_splits, is_pair)
    return config._replace(uses_pdl=can_use_pdl(weight.device))


def _config(
    n: int, k: int, element_size: int, limit: int, rows: int = MIN_ROWS, max_splits: int = MAX_SPLITS,
    is_pair: bool = False,
) -> Config:  # fmt: skip
    """Choose by shape, bytes per element and shared memory (`limit`); the splits depend on the shape alone.

    Measured on an H200 (benchmarks/gpu_linear.py): with a program per multiprocessor a deep pipeline pays, with many
    of them a shallow one, since several programs then share a multiprocessor. A pair reads two tiles at a time.
    """
    columns, tiles = 64, 2 if is_pair else 1
    splits = largest_power_of_2(min(max_splits, k // MIN_PART, PROGRAMS // triton.cdiv(n, columns)))
    if element_size > 2:  # no tensor cores: registers are the limit
        return Config({"COLUMNS": columns, "DEPTH": 32, "SPLITS": splits, "IS_SWAPPED": False}, 4, 3)
    depth = 128 if limit > 200 << 10 else 64
    wanted = 6 if is_pair else 3 if splits == 1 else 4 if k <= 8192 else 6
    num_stages = min(wanted, limit // ((tiles * columns + _tile_rows(rows)) * depth * 2))
    config = Config({"COLUMNS": columns, "DEPTH": depth, "SPLITS": splits, "IS_SWAPPED": True}, 4, num_stages)
    # left to itself, ptxas takes 96 registers for sm_120 and spills
    return config._replace(max_registers=128) if depth == 64 and _tile_rows(rows) == 64 else config


@triton.jit
def _add_norm_kernel(
    x_ptr, partials_ptr, weight_ptr, sum_ptr, out_ptr,
    x_row, split_stride, scale, eps,
    SPLITS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_here = column < WIDTH
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    # The weight first: it comes from memory, the rest from the L2 cache.
    weight = tl.load(weight_ptr + column, mask=is_here, other=0.0).to(tl.float32)
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
    tensors, numbers = (x, partials, weight, total, out), (x.stride(0), partials.stride(0), scale, eps)
    constants = {"SPLITS": splits, "WIDTH": width, "BLOCK": block, "PDL": (1 if dependents_first else 2) * uses_pdl}
    options: dict[str, Any] = {"launch_pdl": True} if uses_pdl else {}
    options["num_warps"] = max(1, min(32, block // 128))  # few numbers per thread: all reads are in flight at once
    # The model rounds a product before it adds: no fused multiply-adds.
    _add_norm_kernel[(rows,)](*tensors, *numbers, **constants, **options, enable_fp_fusion=False)
    return total, out

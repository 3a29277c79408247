"""Write keys and values into their pages and pool the windows that they complete: one launch for any batch."""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sala.backends.torch.hot_pages import HotPages
from sala.backends.torch.kernels.attention import exponent_pairs, power_of_two
from sala.backends.torch.kernels.hot_pages import hot_arguments
from sala.backends.torch.kernels.launch import aligned_rows
from sala.backends.torch.kernels.pdl import pdl_options, pdl_wait
from sala.config import SparseConfig


@triton.jit
def _exponents(x):
    """Return the biased exponents of rows x [n, D], as `cache.to_fp8` does: [n, 1]."""
    bits = tl.minimum(x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800000)
    exponents = ((tl.max(bits, 1, keep_dims=True) + 0x1FFFFF) >> 23) - 8
    return tl.minimum(tl.maximum(exponents, 63), 246)


@triton.jit
def _codes(x, exponents):
    """Return x / 2^exponent as FP8 holds it, but in fp32, so that later steps do not round again.

    Rounds to a significand of four bits, ties to even, and near zero to the nearest multiple of 1/512.
    """
    wide = x.to(tl.float32) * power_of_two(254 - exponents)
    near = tl.minimum(tl.maximum(wide, -448.0), 448.0)
    bits = near.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = (near + 24576.0) - 24576.0  # a number whose unit in the last place is 1/512
    near = tl.where(tl.abs(near) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return tl.where(wide == wide, near, wide)


@triton.jit
def _pool(
    k_new, k_pages, exponents_ptr, pooled, table, token, position, start, group, num_pages, stride_t, stride_g,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Return the mean of the KERNEL keys up to `position`; keys of this call come from k_new, not from the pages."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    at = position + 1 - KERNEL + row
    is_new = (at >= start) & (row < KERNEL)
    is_old = (at < start) & (row < KERNEL)
    page = tl.load(table + at // BLOCK, mask=is_old, other=0).to(tl.int64)
    old_row = (group * num_pages + page) * BLOCK + at % BLOCK
    new_at = (token + 1 - KERNEL + row).to(tl.int64) * stride_t + group * stride_g
    has_dim = dim[None, :] < D
    old_rows, new_rows = tl.multiple_of(k_pages + old_row * D, 16), tl.multiple_of(k_new + new_at, 16)
    old = tl.load(old_rows[:, None] + dim[None, :], mask=is_old[:, None] & has_dim, other=0.0)
    new = tl.load(new_rows[:, None] + dim[None, :], mask=is_new[:, None] & has_dim, other=0.0)
    if exponents_ptr is not None:
        exponents = _exponents(new)
        new = _codes(new, exponents) * power_of_two(exponents)
        old_exponents = tl.load(exponents_ptr + old_row, mask=is_old, other=0)
        old = old.to(tl.float32) * power_of_two(old_exponents & 255)[:, None]
    else:
        new = new.to(old.dtype)
    keys = tl.where(is_new[:, None], new, old).to(tl.float32)
    mean = tl.sum(keys, 0) / KERNEL
    PER_PAGE: tl.constexpr = BLOCK // STRIDE
    window = (position + 1) // STRIDE - 1
    home = tl.load(table + window // PER_PAGE).to(tl.int64)
    target = ((group * num_pages + home) * PER_PAGE + window % PER_PAGE) * D
    tl.store(pooled + target + dim, mean.to(pooled.dtype.element_ty), mask=dim < D)


@triton.jit
def _write(
    k, v, exponents, k_pages, v_pages, exponents_ptr, place, position, is_rest, line,
    BLOCK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Write a token's key and value to row `place` of a pool; with `is_rest`, zero what follows it in its page."""
    if exponents_ptr is not None:
        tl.store(exponents_ptr + place + exponents * 0, exponents.to(tl.int16))
    tl.store(k_pages + place * D + line, k.to(k_pages.dtype.element_ty), mask=line < D)
    tl.store(v_pages + place * D + line, v.to(v_pages.dtype.element_ty), mask=line < D)
    if is_rest:
        rows = 1 + tl.arange(0, PAGE)
        spare = position % BLOCK + rows
        rest = (place + rows)[:, None] * D + line
        nothing = tl.zeros([PAGE, DIM], tl.float32).to(k_pages.dtype.element_ty)
        is_spare = (spare < BLOCK)[:, None] & (line < D)
        tl.store(k_pages + rest, nothing, mask=is_spare)
        tl.store(v_pages + rest, nothing, mask=is_spare)
        if exponents_ptr is not None:
            tl.store(exponents_ptr + place + rows, (rows * 0).to(tl.int16), mask=spare < BLOCK)


@triton.jit(do_not_specialize=["num_frames", "num_tokens", "num_pages", "stride_table"])
def _append_kernel(
    k_new, v_new, k_pages, v_pages, k1_pages, k2_pages, exponents_ptr, frames_ptr, hot_k, hot_v, hot_exponents_ptr,
    num_frames, tables, starts, row_of, positions,
    num_tokens, num_pages, stride_kt, stride_kg, stride_vt, stride_vg, stride_table,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, ROWS2: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    token = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    position = tl.load(positions + token).to(tl.int32)
    if position < 0:
        return
    row = tl.load(row_of + token)
    start = tl.load(starts + row).to(tl.int32)
    table = tables + row.to(tl.int64) * stride_table
    dim = tl.arange(0, DIM)
    page = tl.load(table + position // BLOCK).to(tl.int64)
    place = (group * num_pages + page) * BLOCK + position % BLOCK
    wide = token.to(tl.int64)
    line = dim[None, :]
    k = tl.load(k_new + wide * stride_kt + group * stride_kg + line, mask=line < D, other=0.0)
    v = tl.load(v_new + wide * stride_vt + group * stride_vg + line, mask=line < D, other=0.0)
    exponents = None
    if exponents_ptr is not None:
        k_exponent, v_exponent = _exponents(k), _exponents(v)
        k, v = _codes(k, k_exponent), _codes(v, v_exponent)
        exponents = k_exponent | v_exponent << 8
    # The last token of a row zeroes the rest of its page if the row began that page in this call.
    is_last = token + 1 == num_tokens
    if not is_last:
        after = tl.load(positions + token + 1).to(tl.int32)
        is_last = (tl.load(row_of + token + 1) != row) | (after < 0)
    is_rest = is_last & (position // BLOCK * BLOCK >= start)
    _write(k, v, exponents, k_pages, v_pages, exponents_ptr, place, position, is_rest, line, BLOCK, D, PAGE, DIM)
    if frames_ptr is not None:
        frame = tl.load(frames_ptr + group * num_pages + page)
        if frame >= 0:
            copy = (group * num_frames + frame) * BLOCK + position % BLOCK
            _write(k, v, exponents, hot_k, hot_v, hot_exponents_ptr, copy, position, is_rest, line, BLOCK, D, PAGE, DIM)

    if ((position + 1) % STRIDE == 0) & (position + 1 >= KERNEL):
        _pool(
            k_new, k_pages, exponents_ptr, k1_pages, table, token, position, start, group, num_pages,
            stride_kt, stride_kg, KERNEL, STRIDE, BLOCK, D, ROWS, DIM,
        )  # fmt: skip
    if ((position + 1) % (4 * STRIDE) == 0) & (position + 1 >= 4 * KERNEL):
        _pool(
            k_new, k_pages, exponents_ptr, k2_pages, table, token, position, start, group, num_pages,
            stride_kt, stride_kg, 4 * KERNEL, 4 * STRIDE, BLOCK, D, ROWS2, DIM,
        )  # fmt: skip


def append(
    k_new: Tensor, v_new: Tensor, pages_k: Tensor, pages_v: Tensor, pages_k1: Tensor, pages_k2: Tensor,
    tables: Tensor, starts: Tensor, row_of: Tensor, positions: Tensor, sparse: SparseConfig,
    exponents: Tensor | None = None, hot: HotPages | None = None,
) -> None:  # fmt: skip
    """Write k_new, v_new [T, G, D] into pages [G, P, rows, D] and pool the windows that they complete.

    tables [S, N]; starts [S]: the first position of each row in this call; row_of, positions [T]: a row's tokens
    are adjacent in T; a position of -1 is padding. The rest of a new page after the last token becomes 0. FP8 pages
    have exponents [G, P, rows, 2], see `cache.to_fp8`. What has a frame in `hot` is written there too.
    """
    num_tokens, groups, dim = k_new.shape
    if not num_tokens:
        return
    assert all(pool.is_contiguous() for pool in (pages_k, pages_v, pages_k1, pages_k2))
    assert tables.stride(1) == 1
    k_new, v_new = aligned_rows(k_new), aligned_rows(v_new)
    assert pages_k.shape[2:] == (sparse.block_size, dim)
    assert dim * k_new.element_size() % 16 == 0
    _append_kernel[(num_tokens, groups)](
        k_new, v_new, pages_k, pages_v, pages_k1, pages_k2, exponent_pairs(pages_k, exponents),
        *hot_arguments(hot), tables, starts, row_of, positions,
        num_tokens, pages_k.shape[1], *k_new.stride()[:2], *v_new.stride()[:2], tables.stride(0),
        **append_constants(sparse, dim), **pdl_options(k_new.device, num_tokens, dependents_first=True),
        num_warps=4,  # fixed: the order of a mean's sum depends on it
    )  # fmt: skip


def append_constants(sparse: SparseConfig, dim: int) -> dict[str, Any]:
    return {
        "KERNEL": sparse.kernel_size,
        "STRIDE": sparse.kernel_stride,
        "BLOCK": sparse.block_size,
        "D": dim,
        "ROWS": triton.next_power_of_2(sparse.kernel_size),
        "ROWS2": triton.next_power_of_2(4 * sparse.kernel_size),
        "PAGE": triton.next_power_of_2(sparse.block_size),
        "DIM": triton.next_power_of_2(dim),
    }

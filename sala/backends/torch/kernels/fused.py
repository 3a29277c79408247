# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""The operations between matrix products on NVIDIA GPUs, each in one pass over memory.

Arithmetic is in fp32; values are rounded to the model's precision wherever `ops/dense.py` and `model.py`
round them, so that a model with these kernels and one without differ by the order of sums only.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sala.backends.torch.kernels.pdl import pdl_launch_dependents, pdl_options, pdl_wait

HEADS: tl.constexpr = tl.constexpr(8)  # per program
COLUMNS = 2048


class Heads(NamedTuple):
    """Norms [D] and rotations cos, sin [T, D] in fp32 of the heads of q and k, where the model has them."""

    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0
    cos: Tensor | None = None
    sin: Tensor | None = None


@triton.jit
def _normed(x, weight_ptr, column, is_here, width, eps, dtype: tl.constexpr):
    """Return the RMS norm of x [BLOCK] (fp32, zeros past the width), rounded to dtype twice, as the model does."""
    mean = tl.sum(x * x, axis=0) / width
    x = (x * tl.rsqrt(mean + eps)).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=is_here, other=0.0).to(tl.float32)
    return (x * weight).to(dtype).to(tl.float32)


@triton.jit
def rounded_silu_mul(gate, up, dtype: tl.constexpr):
    """Return silu(gate) * up, rounded to dtype twice, as the model does."""
    gate = gate.to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (active * up.to(tl.float32)).to(dtype)


@triton.jit
def store_fp8(x, codes_ptr, scales_ptr, row, column, is_here, WIDTH: tl.constexpr):
    """Store x [BLOCK] (fp32, zeros past the width) in e4m3 with its scale."""
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12) / 448.0
    codes = (x / scale).to(codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + row * WIDTH + column, codes, mask=is_here)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _rms_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, out_ptr, scales_ptr,
    x_row, delta_row, scale, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr,
):  # fmt: skip
    """With `scales_ptr`, the result is in FP8."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_here = column < WIDTH
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_row + column, mask=is_here, other=0.0).to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * delta_row + column, mask=is_here, other=0.0).to(tl.float32)
        x = (x + (delta * scale).to(dtype).to(tl.float32)).to(dtype)
        tl.store(sum_ptr + row * WIDTH + column, x, mask=is_here)
        x = x.to(tl.float32)
    out = _normed(x, weight_ptr, column, is_here, WIDTH, eps, dtype)
    if scales_ptr is None:
        tl.store(out_ptr + row * WIDTH + column, out.to(dtype), mask=is_here)
    else:
        store_fp8(out, out_ptr, scales_ptr, row, column, is_here, WIDTH)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, h], weight [h] → [T, h] in x's dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_norm(x, None, 1.0, weight, eps, out, out)
    return out


def add_rms_norm(x: Tensor, delta: Tensor, scale: float, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, delta [T, h] → x + scale * delta [T, h], and its norm [T, h], both in x's dtype."""
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    launch_norm(x, delta, scale, weight, eps, total, out)
    return total, out


def launch_norm(
    x: Tensor, delta: Tensor | None, scale: float, weight: Tensor, eps: float, total: Tensor, out: Tensor,
    scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the sum of x and delta, if there is one, and its norm; `out` is in FP8 if it has scales [T, 1]."""
    rows, width = x.shape
    assert x.stride(1) == 1
    assert delta is None or delta.stride(1) == 1
    if rows == 0:
        return
    other = x if delta is None else delta
    tensors, numbers = (x, other, weight, total, out, scales), (x.stride(0), other.stride(0), scale, eps)
    constants = {"WIDTH": width, "BLOCK": triton.next_power_of_2(width), "HAS_DELTA": delta is not None}
    num_warps = warps(width, 16 if scales is None else 32)
    # The model rounds a product before it adds: no fused multiply-adds.
    _rms_norm_kernel[(rows,)](*tensors, *numbers, **constants, num_warps=num_warps, enable_fp_fusion=False)


@triton.jit
def _norm_gate_kernel(
    o_ptr, weight_ptr, z_ptr, out_ptr,
    o_row, z_row, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, HAS_GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_here = column < WIDTH
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    o = tl.load(o_ptr + row * o_row + column, mask=is_here, other=0.0).to(tl.float32)
    if HAS_GATE:  # before the sum, so that both loads are in flight
        z = tl.load(z_ptr + row * z_row + column, mask=is_here, other=0.0).to(tl.float32)
    if HAS_NORM:
        o = _normed(o, weight_ptr, column, is_here, WIDTH, eps, dtype)
    pdl_launch_dependents(PDL)
    if HAS_GATE:
        o = o * (1.0 / (1.0 + tl.exp(-z))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, o.to(dtype), mask=is_here)


def norm_gate(
    o: Tensor, norm_weight: Tensor | None, z: Tensor | None, eps: float, dependents_first: bool = False
) -> Tensor:
    """o [T, w], normed if there is a weight [w], times sigmoid(z [T, w]) if there is a gate → [T, w] in o's dtype.

    For `dependents_first` see `pdl.pdl_options`.
    """
    rows, width = o.shape
    assert o.stride(1) == 1
    assert z is None or z.stride(1) == 1
    out = torch.empty(o.shape, dtype=o.dtype, device=o.device)
    if rows == 0:
        return out
    norm_weight_, z_ = o if norm_weight is None else norm_weight, o if z is None else z  # not read where None
    constants = {"WIDTH": width, "BLOCK": triton.next_power_of_2(width)}
    constants |= {"HAS_NORM": norm_weight is not None, "HAS_GATE": z is not None}
    options = pdl_options(o.device, rows, dependents_first) | {"num_warps": warps(width)}
    _norm_gate_kernel[(rows,)](o, norm_weight_, z_, out, o.stride(0), z_.stride(0), eps, **constants, **options)
    return out


@triton.jit
def _qk_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, growth_ptr, q_out_ptr, k_out_ptr,
    q_row, q_head, k_row, k_head, q_out_row, q_out_head, k_out_row, k_out_head, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr,
    HAS_GROWTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    factors = (cos_ptr + token * D, sin_ptr + token * D, growth_ptr + token)
    if block < BLOCKS:
        q, q_out = q_ptr + token * q_row, q_out_ptr + token * q_out_row
        _qk_block(q, q_out, q_weight_ptr, factors, q_head, q_out_head, block, eps, H, D, HAS_NORM, HAS_ROPE, HAS_GROWTH)
    else:
        k, k_out = k_ptr + token * k_row, k_out_ptr + token * k_out_row
        _qk_block(
            k, k_out, k_weight_ptr, factors, k_head, k_out_head, block - BLOCKS, eps, G, D, HAS_NORM, HAS_ROPE, False
        )


@triton.jit
def _qk_block(
    x_ptr, out_ptr, weight_ptr,
    factors, x_head, out_head, block, eps,
    NUM: tl.constexpr, D: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr, HAS_GROWTH: tl.constexpr,
):  # fmt: skip
    """One block of HEADS heads of one token, as two halves [HEADS, D / 2]."""
    cos_ptr, sin_ptr, growth_ptr = factors
    HALF: tl.constexpr = triton.next_power_of_2(D // 2)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    MIDDLE: tl.constexpr = D // 2
    head = block * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, HALF)
    has_dim = dim < MIDDLE
    is_here = (head < NUM) & has_dim[None, :]
    tile = x_ptr + head * x_head + dim[None, :]
    low = tl.load(tile, mask=is_here, other=0.0).to(tl.float32)
    high = tl.load(tile + MIDDLE, mask=is_here, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean = tl.sum(low * low + high * high, axis=1) / D
        factor = tl.rsqrt(mean + eps)[:, None]
        low_weight = tl.load(weight_ptr + dim, mask=has_dim, other=0.0).to(tl.float32)[None, :]
        high_weight = tl.load(weight_ptr + MIDDLE + dim, mask=has_dim, other=0.0).to(tl.float32)[None, :]
        low = ((low * factor).to(dtype).to(tl.float32) * low_weight).to(dtype).to(tl.float32)
        high = ((high * factor).to(dtype).to(tl.float32) * high_weight).to(dtype).to(tl.float32)
    if HAS_ROPE:
        low_cos = tl.load(cos_ptr + dim, mask=has_dim, other=0.0)[None, :]
        low_sin = tl.load(sin_ptr + dim, mask=has_dim, other=0.0)[None, :]
        high_cos = tl.load(cos_ptr + MIDDLE + dim, mask=has_dim, other=0.0)[None, :]
        high_sin = tl.load(sin_ptr + MIDDLE + dim, mask=has_dim, other=0.0)[None, :]
        rotated = (low * low_cos - high * low_sin).to(dtype).to(tl.float32)
        high = (high * high_cos + low * high_sin).to(dtype).to(tl.float32)
        low = rotated
    if HAS_GROWTH:
        growth = tl.load(growth_ptr)
        low = low * growth
        high = high * growth
    target = out_ptr + head * out_head + dim[None, :]
    tl.store(target, low.to(dtype), mask=is_here)
    tl.store(target + MIDDLE, high.to(dtype), mask=is_here)


def qk_norm_rope(q: Tensor, k: Tensor, heads: Heads, growth: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k [T, G, D] → the same shapes, normed and rotated; q times growth [T] in fp32 if there is any."""
    (rows, num_heads, dim), groups = q.shape, k.shape[1]
    assert q.stride(2) == k.stride(2) == 1
    assert (heads.q_weight is None) == (heads.k_weight is None)
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if rows == 0:
        return q_out, k_out
    optional = (heads.q_weight, heads.k_weight, heads.cos, heads.sin, growth)
    tensors = (q, k, *(q if x is None else x.contiguous() for x in optional), q_out, k_out)
    strides = (x.stride(axis) for x in (q, k, q_out, k_out) for axis in (0, 1))
    flags = {"HAS_NORM": heads.q_weight is not None, "HAS_ROPE": heads.cos is not None}
    constants = {"H": num_heads, "G": groups, "D": dim, "HAS_GROWTH": growth is not None, **flags}
    grid = (rows, triton.cdiv(num_heads, HEADS.value) + triton.cdiv(groups, HEADS.value))
    _qk_kernel[grid](*tensors, *strides, heads.eps, **constants, num_warps=2, enable_fp_fusion=False)
    return q_out, k_out


@triton.jit
def _silu_mul_kernel(gate_ptr, up_ptr, out_ptr, gate_row, up_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_here = column < WIDTH
    gate = tl.load(gate_ptr + row * gate_row + column, mask=is_here, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + column, mask=is_here, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + row * WIDTH + column, rounded_silu_mul(gate, up, dtype), mask=is_here)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * m], the gate first → silu(gate) * up [T, m]."""
    gate, up = gate_up.chunk(2, dim=1)
    rows, width = gate.shape
    assert gate.stride(1) == up.stride(1) == 1
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if rows == 0:
        return out
    block = min(triton.next_power_of_2(width), COLUMNS)
    _silu_mul_kernel[(rows, -(-width // block))](
        gate, up, out, gate.stride(0), up.stride(0), WIDTH=width, BLOCK=block, num_warps=4
    )
    return out


def warps(width: int, most: int = 16) -> int:
    """Return the warps that give a thread about 16 numbers of a row."""
    return max(1, min(most, triton.next_power_of_2(width) // 512))

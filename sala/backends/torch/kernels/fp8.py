# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Prefill in FP8 (e4m3) on request: twice as fast as bf16 on tensor cores that support it, from Ada on.

Every row of the activations has its own scale, computed by the kernel that writes the row, and so has every row of a
matrix. Results have the precision of 8 bits: an answer may differ from that of bf16. Decoding never uses FP8.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sala.backends.torch.kernels.fused import _normed

MOST = 448.0  # the largest number of e4m3
LEAST_SCALE = 1e-12  # of rows of zeros
_PIECE = 1 << 24  # weights rounded at a time, to bound memory


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows [T, K] in e4m3, each with its scale [T, 1] in fp32; as weights, [N, K] and [N, 1]."""

    codes: Tensor
    scales: Tensor

    def rows(self, begin: int, end: int) -> "Rows":
        """Return some of the rows, in the same memory."""
        return Rows(self.codes[begin:end], self.scales[begin:end])


@functools.cache
def can_run(device: torch.device) -> bool:
    """Return whether the device has tensor cores for FP8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def from_weight(weight: Tensor) -> Rows:
    """Round a matrix [N, K] to FP8, each row with the scale that makes its largest number 448."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(weight.shape[0], 1, device=weight.device)
    step = max(1, _PIECE // weight.shape[1])
    for begin in range(0, weight.shape[0], step):
        some = weight[begin : begin + step].float()
        scale = some.abs().amax(1, keepdim=True).clamp(min=LEAST_SCALE) / MOST
        codes[begin : begin + step] = (some / scale).clamp(-MOST, MOST).to(torch.float8_e4m3fn)
        scales[begin : begin + step] = scale
    return Rows(codes, scales)


def product(x: Rows, weight: Rows, dtype: torch.dtype) -> Tensor:
    """x [T, K], weight [N, K] → [T, N]; K and N are multiples of 16."""
    if not x.codes.is_cuda:  # the definition, for tests without a GPU
        return ((x.codes.float() * x.scales) @ (weight.codes.float() * weight.scales).T).to(dtype)
    scales = {"scale_a": x.scales, "scale_b": weight.scales.T}
    out = torch._scaled_mm(x.codes, weight.codes.T, **scales, out_dtype=torch.bfloat16, use_fast_accum=True)
    return out.to(dtype)


@triton.jit
def _store_row(x, codes_ptr, scales_ptr, row, column, is_here, WIDTH: tl.constexpr):
    """Store x [BLOCK] (fp32, zeros past the width) in e4m3 with its scale."""
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12) / 448.0
    codes = (x / scale).to(codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + row * WIDTH + column, codes, mask=is_here)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _norm_kernel(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, codes_ptr, scales_ptr, x_row, delta_row, scale, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr,
):  # fmt: skip
    """`fused._rms_norm_kernel` with results in FP8."""
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
    _store_row(out, codes_ptr, scales_ptr, row, column, is_here, WIDTH)


@triton.jit
def _silu_mul_kernel(
    x_ptr, codes_ptr, scales_ptr, x_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_SILU: tl.constexpr
):
    """x [T, 2 * WIDTH] → silu(gate) * up; without SiLU, x [T, WIDTH] itself."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_here = column < WIDTH
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_row + column, mask=is_here, other=0.0).to(tl.float32)
    if HAS_SILU:
        up = tl.load(x_ptr + row * x_row + WIDTH + column, mask=is_here, other=0.0).to(tl.float32)
        x = ((x / (1.0 + tl.exp(-x))).to(dtype).to(tl.float32) * up).to(dtype).to(tl.float32)
    _store_row(x, codes_ptr, scales_ptr, row, column, is_here, WIDTH)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Rows:
    """`fused.rms_norm` of x [T, h], in e4m3."""
    return _norm(x, None, 1.0, weight, eps, x)


def add_rms_norm(x: Tensor, delta: Tensor, scale: float, weight: Tensor, eps: float) -> tuple[Tensor, Rows]:
    """`fused.add_rms_norm` of x, delta [T, h]; its second result is in e4m3."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return total, _norm(x, delta, scale, weight, eps, total)


def _norm(x: Tensor, delta: Tensor | None, scale: float, weight: Tensor, eps: float, total: Tensor) -> Rows:
    count, width = x.shape
    assert x.stride(1) == 1
    assert delta is None or delta.stride(1) == 1
    out = _empty(count, width, x.device)
    if count:
        _norm_kernel[(count,)](
            x,
            x if delta is None else delta,
            weight,
            total,
            out.codes,
            out.scales,
            x.stride(0),
            x.stride(0) if delta is None else delta.stride(0),
            scale,
            eps,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            HAS_DELTA=delta is not None,
            num_warps=_warps(width),
            enable_fp_fusion=False,  # the model rounds a product before it adds
        )
    return out


def silu_mul(gate_up: Tensor) -> Rows:
    """`fused.silu_mul` of gate_up [T, 2 * m], in e4m3."""
    return _quantize(gate_up, gate_up.shape[1] // 2, has_silu=True)


def quantize(x: Tensor) -> Rows:
    """x [T, K] in e4m3."""
    return _quantize(x, x.shape[1], has_silu=False)


def _quantize(x: Tensor, width: int, has_silu: bool) -> Rows:
    assert x.stride(1) == 1
    out = _empty(x.shape[0], width, x.device)
    if x.shape[0]:
        _silu_mul_kernel[(x.shape[0],)](
            x,
            out.codes,
            out.scales,
            x.stride(0),
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            HAS_SILU=has_silu,
            num_warps=_warps(width),
        )
    return out


def _empty(count: int, width: int, device: torch.device) -> Rows:
    codes = torch.empty(count, width, dtype=torch.float8_e4m3fn, device=device)
    return Rows(codes, torch.empty(count, 1, device=device))


def _warps(width: int) -> int:
    return max(1, min(32, triton.next_power_of_2(width) // 512))

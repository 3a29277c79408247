# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Prefill in FP8 (e4m3) on request: twice as fast as bf16 on tensor cores that support it, from Ada on.

Every row of the activations has its own scale, computed by the kernel that writes the row, and so has every row of a
matrix. Results have the precision of 8 bits: an answer may differ from that of bf16. Decoding never uses FP8.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sala.backends.torch.kernels.fused import launch_norm, rounded_silu_mul, store_fp8, warps
from sala.backends.torch.kernels.launch import capability

MOST = 448.0  # the largest number of e4m3
LEAST_SCALE = 1e-12  # of rows of zeros
_PIECE = 1 << 24  # weights rounded at a time, to bound memory


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows [T, K] in e4m3, each with its scale [T, 1] in fp32; as weights, [N, K] and [N, 1]."""

    codes: Tensor
    scales: Tensor


def can_run(device: torch.device) -> bool:
    """Return whether the device has tensor cores for FP8."""
    return capability(device) >= 89


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
        x = rounded_silu_mul(x, up, dtype).to(tl.float32)
    store_fp8(x, codes_ptr, scales_ptr, row, column, is_here, WIDTH)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Rows:
    """`fused.rms_norm` of x [T, h], in e4m3."""
    out = _empty(x.shape[0], x.shape[1], x.device)
    launch_norm(x, None, 1.0, weight, eps, x, out.codes, out.scales)
    return out


def add_rms_norm(x: Tensor, delta: Tensor, scale: float, weight: Tensor, eps: float) -> tuple[Tensor, Rows]:
    """`fused.add_rms_norm` of x, delta [T, h]; its second result is in e4m3."""
    total, out = torch.empty(x.shape, dtype=x.dtype, device=x.device), _empty(x.shape[0], x.shape[1], x.device)
    launch_norm(x, delta, scale, weight, eps, total, out.codes, out.scales)
    return total, out


def silu_mul(gate_up: Tensor) -> Rows:
    """`fused.silu_mul` of gate_up [T, 2 * m], in e4m3."""
    return quantize(gate_up, has_silu=True)


def quantize(x: Tensor, has_silu: bool = False) -> Rows:
    """x [T, K] in e4m3; with `has_silu`, `silu_mul` of it."""
    assert x.stride(1) == 1
    width = x.shape[1] // 2 if has_silu else x.shape[1]
    out = _empty(x.shape[0], width, x.device)
    if x.shape[0]:
        constants = {"WIDTH": width, "BLOCK": triton.next_power_of_2(width), "HAS_SILU": has_silu}
        _silu_mul_kernel[(x.shape[0],)](x, out.codes, out.scales, x.stride(0), **constants, num_warps=warps(width, 32))
    return out


def _empty(count: int, width: int, device: torch.device) -> Rows:
    codes = torch.empty(count, width, dtype=torch.float8_e4m3fn, device=device)
    return Rows(codes, torch.empty(count, 1, device=device))

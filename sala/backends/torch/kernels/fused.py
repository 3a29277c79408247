# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""The operations between matrix products on NVIDIA GPUs, each in one pass over memory.

Arithmetic is in fp32; values are rounded to the model's precision wherever `ops/dense.py` and `model.py`
round them, so that a model with these kernels and one without differ by the order of sums only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sala.backends.torch.kernels.pdl import pdl_launch_dependents, pdl_options, pdl_wait

HEADS = 8  # per program
COLUMNS = 2048


@triton.jit
def _normed(x, weight_ptr, column, is_here, width, eps, dtype: tl.constexpr):
    """Return the RMS norm of x [BLOCK] (fp32, zeros past the width), rounded to dtype twice, as the model does."""
    mean = tl.sum(x * x, axis=0) / width
    x = (x * tl.rsqrt(mean + eps)).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=is_here, other=0.0).to(tl.float32)
    return (x * weight).to(dtype).to(tl.float32)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    x_row,
    delta_row,
    scale,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_here = column < WIDTH
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_row + column, mask=is_here, other=0.0).to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * delta_row + column, mask=is_here, other=0.0).to(tl.float32)
        x = (x + (delta * scale).to(dtype).to(tl.float32)).to(dtype)
        tl.store(sum_ptr + row * WIDTH + column, x, mask=is_here)
        x = x.to(tl.float32)
    out = _normed(x, weight_ptr, column, is_here, WIDTH, eps, dtype)
    tl.store(out_ptr + row * WIDTH + column, out.to(dtype), mask=is_here)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, h], weight [h] → [T, h] in x's dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, None, 1.0, weight, eps, out, out)
    return out


def add_rms_norm(x: Tensor, delta: Tensor, scale: float, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, delta [T, h] → x + scale * delta [T, h], and its norm [T, h], both in x's dtype."""
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _norm(x, delta, scale, weight, eps, total, out)
    return total, out


def _norm(
    x: Tensor, delta: Tensor | None, scale: float, weight: Tensor, eps: float, total: Tensor, out: Tensor
) -> None:
    rows, width = x.shape
    assert x.stride(1) == 1
    assert delta is None or delta.stride(1) == 1
    if rows == 0:
        return
    _rms_norm_kernel[(rows,)](
        x,
        x if delta is None else delta,
        weight,
        total,
        out,
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


@triton.jit
def _norm_gate_kernel(
    o_ptr,
    weight_ptr,
    z_ptr,
    out_ptr,
    o_row,
    z_row,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_GATE: tl.constexpr,
    PDL: tl.constexpr,
):
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
    _norm_gate_kernel[(rows,)](
        o,
        o if norm_weight is None else norm_weight,
        o if z is None else z,
        out,
        o.stride(0),
        o.stride(0) if z is None else z.stride(0),
        eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        HAS_NORM=norm_weight is not None,
        HAS_GATE=z is not None,
        **pdl_options(o.device, rows, dependents_first),
        num_warps=_warps(width),
    )
    return out


@triton.jit
def _qk_kernel(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    growth_ptr,
    q_out_ptr,
    k_out_ptr,
    q_row,
    q_head,
    k_row,
    k_head,
    q_out_row,
    q_out_head,
    k_out_row,
    k_out_head,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HAS_GROWTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    if block < BLOCKS:
        _qk_block(
            q_ptr + token * q_row,
            q_out_ptr + token * q_out_row,
            q_weight_ptr,
            cos_ptr + token * D,
            sin_ptr + token * D,
            growth_ptr + token,
            q_head,
            q_out_head,
            block * HEADS,
            eps,
            H,
            D,
            HALF,
            HEADS,
            HAS_NORM,
            HAS_ROPE,
            HAS_GROWTH,
        )
    else:
        _qk_block(
            k_ptr + token * k_row,
            k_out_ptr + token * k_out_row,
            k_weight_ptr,
            cos_ptr + token * D,
            sin_ptr + token * D,
            growth_ptr + token,
            k_head,
            k_out_head,
            (block - BLOCKS) * HEADS,
            eps,
            G,
            D,
            HALF,
            HEADS,
            HAS_NORM,
            HAS_ROPE,
            False,
        )


@triton.jit
def _qk_block(
    x_ptr,
    out_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    growth_ptr,
    x_head,
    out_head,
    first,
    eps,
    NUM: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HAS_GROWTH: tl.constexpr,
):
    """Heads first … first + HEADS of one token, as two halves [HEADS, D / 2]."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    MIDDLE: tl.constexpr = D // 2
    head = first + tl.arange(0, HEADS)[:, None]
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


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    growth: Tensor | None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k [T, G, D] → the same shapes: each head normed if there are weights [D], rotated if there are cos
    and sin [T, D] in fp32, q multiplied by growth [T] in fp32 if there is any. `out` may be (q, k) themselves.
    """
    rows, heads, dim = q.shape
    groups = k.shape[1]
    assert q.stride(2) == k.stride(2) == 1
    assert (q_weight is None) == (k_weight is None)
    q_out, k_out = out or tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if rows == 0:
        return q_out, k_out
    cos, sin = (None if x is None else x.contiguous() for x in (cos, sin))
    strides = [x.stride(axis) for x in (q, k, q_out, k_out) for axis in (0, 1)]
    _qk_kernel[(rows, -(-heads // HEADS) - (-groups // HEADS))](
        q,
        k,
        q if q_weight is None else q_weight,
        k if k_weight is None else k_weight,
        q if cos is None else cos,
        q if sin is None else sin,
        q if growth is None else growth,
        q_out,
        k_out,
        *strides,
        eps,
        H=heads,
        G=groups,
        D=dim,
        HALF=triton.next_power_of_2(dim // 2),
        HEADS=HEADS,
        HAS_NORM=q_weight is not None,
        HAS_ROPE=cos is not None,
        HAS_GROWTH=growth is not None,
        num_warps=2,
        enable_fp_fusion=False,
    )
    return q_out, k_out


@triton.jit
def _silu_mul_kernel(gate_ptr, up_ptr, out_ptr, gate_row, up_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_here = column < WIDTH
    gate = tl.load(gate_ptr + row * gate_row + column, mask=is_here, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + column, mask=is_here, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, (active * up).to(dtype), mask=is_here)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * m], the gate first → silu(gate) * up [T, m]."""
    gate, up = gate_up.chunk(2, dim=1)
    return silu_mul_pair(gate, up)


def silu_mul_pair(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [T, m] → silu(gate) * up [T, m]."""
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


def _warps(width: int) -> int:
    """Return the warps that give a thread about 16 numbers of a row."""
    return max(1, min(16, triton.next_power_of_2(width) // 512))

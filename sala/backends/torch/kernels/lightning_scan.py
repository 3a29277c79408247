# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Lightning attention over whole sequences with gradients, for training on NVIDIA GPUs.

`lightning_whole` in `ops/lightning.py` is the definition. Here one program takes one head of one sequence and walks
through its chunks with the state in registers, in fp32. The gradients are scans of the same form:

    o  = scan(q, k, v)            dq = scan(do, v, k)
    dk = scan(v, do, q) and dv = scan(k, q, do), both from the last token to the first

so one kernel with a direction computes all four.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64
COLUMNS = 32  # of a state per program: with more of them registers spill


@triton.jit
def _scan_kernel(
    q, k, v, out, slopes, length, scale,
    H: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out = scale * (decayed causal q k^T) v of one sequence and head; tensors are [rows * length, H, D]."""
    PARTS: tl.constexpr = D // COLUMNS
    pid = tl.program_id(0)
    head = pid // PARTS % H
    sequence = pid // (PARTS * H)
    first = tl.cast(sequence, tl.int64) * length
    slope = tl.load(slopes + head)
    step = tl.arange(0, CHUNK)
    dim = tl.arange(0, D)
    column = pid % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    rise = tl.exp(slope * (step + 1).to(tl.float32))  # slopes are below 1: e^CHUNK fits fp32
    since_start = tl.exp(-slope * (step + 1).to(tl.float32))
    until_end = tl.exp(-slope * (CHUNK - 1 - step).to(tl.float32))
    over_chunk = tl.exp(-slope * CHUNK)
    state = tl.zeros([D, COLUMNS], tl.float32)
    for start in range(0, length, CHUNK):
        at = start + step
        is_real = (at < length)[:, None]
        row = tl.where(REVERSE, length - 1 - at, at)
        base = ((first + row) * H + head)[:, None] * D
        q_chunk = tl.load(q + base + dim[None, :], mask=is_real, other=0.0)
        k_chunk = tl.load(k + base + dim[None, :], mask=is_real, other=0.0)
        v_chunk = tl.load(v + base + column[None, :], mask=is_real, other=0.0)
        score = tl.dot(q_chunk, tl.trans(k_chunk), input_precision=PRECISION)
        score = tl.where(step[:, None] >= step[None, :], score * since_start[:, None] * rise[None, :], 0.0)
        result = tl.dot(q_chunk, state.to(q_chunk.dtype), input_precision=PRECISION) * since_start[:, None]
        result = tl.dot(score.to(v_chunk.dtype), v_chunk, acc=result, input_precision=PRECISION) * scale
        tl.store(out + base + column[None, :], result.to(out.dtype.element_ty), mask=is_real)
        faded = (v_chunk.to(tl.float32) * until_end[:, None]).to(v_chunk.dtype)
        # past the end of the last chunk there are only zeros, and its state is not used
        state = tl.dot(tl.trans(k_chunk), faded, acc=state * over_chunk, input_precision=PRECISION)


def scan(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, length: int, scale: float, is_reversed: bool) -> Tensor:
    """q, k, v [rows * length, H, D], contiguous → the scan of each row, in the dtype of v."""
    tokens, heads, dim = q.shape
    out = torch.empty_like(v)
    columns = min(dim, COLUMNS)
    grid = (tokens // length * heads * (dim // columns),)
    tile = {"COLUMNS": columns, "CHUNK": CHUNK, "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32"}
    options = {"num_warps": 4, "num_stages": 2}
    _scan_kernel[grid](q, k, v, out, slopes, length, scale, H=heads, D=dim, REVERSE=is_reversed, **tile, **options)
    return out


@torch.library.custom_op("sala::lightning_scan", mutates_args=())
def lightning_scan(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, length: int, scale: float) -> Tensor:
    """Lightning attention of rows of `length` tokens from empty states: q, k, v [rows * length, H, D] → the same."""
    return scan(q, k, v, slopes, length, scale, False)


@torch.library.custom_op("sala::lightning_scan_backward", mutates_args=())
def _scan_backward(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, slopes: Tensor, length: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        scan(grad, v, k, slopes, length, scale, False),
        scan(v, grad, q, slopes, length, scale, True),
        scan(k, q, grad, slopes, length, scale, True),
    )


@lightning_scan.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, length: int, scale: float) -> Tensor:
    return torch.empty_like(v)


@_scan_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, slopes: Tensor, length: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup(ctx, inputs, output) -> None:
    q, k, v, slopes, length, scale = inputs
    ctx.save_for_backward(q, k, v, slopes)
    ctx.length, ctx.scale = length, scale


def _backward(ctx, grad: Tensor):
    q, k, v, slopes = ctx.saved_tensors
    dq, dk, dv = _scan_backward(q, k, v, grad.to(v.dtype).contiguous(), slopes, ctx.length, ctx.scale)
    return dq, dk, dv, None, None, None


lightning_scan.register_autograd(_backward, setup_context=_setup)

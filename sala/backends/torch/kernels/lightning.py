# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Lightning attention on NVIDIA GPUs; `ops/lightning.py` is the definition.

A prompt is cut into segments that run in parallel. Because of the decay, a token `HORIZON / slope` positions back has a
weight below e^-20, so each segment computes its initial state from the tokens just before it; no segment waits for
another. A decode step keeps a slice of a state in registers and takes one token after another, always in the same
order: verifying drafts and then folding the accepted ones gives the same bits as decoding.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sala.backends.torch.kernels.pdl import pdl_launch_dependents, pdl_options, prefetch

HORIZON = 20.0
LONGEST_SEGMENT = 8192
STEP_COLUMNS = 32  # of a state per program; the same for all batches, because it decides the order of sums
STEP_WARPS = 4


class PrefillConfig(NamedTuple):
    chunk: int
    columns: int  # of the state per program
    num_warps: int
    num_stages: int
    has_tma: bool


class Heads(NamedTuple):
    """Norms [D] and rotations cos, sin [tokens, D] that a step applies to q and k first, as `fused.qk_norm_rope`."""

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    cos: Tensor | None
    sin: Tensor | None


@triton.jit
def _read_chunk(state, q, k, v, slope, scale, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Output [COLUMNS, CHUNK] of a chunk: q, k [CHUNK, D], v [CHUNK, COLUMNS], state [COLUMNS, D] before it."""
    step = tl.arange(0, CHUNK)
    # The decay between two rows is computed as a product: slopes are below 1, so e^CHUNK does not overflow fp32. It
    # would overflow fp16, so the factors are applied in fp32.
    rise = tl.exp(slope * (step + 1))[:, None]
    fall = tl.exp(-slope * (step + 1))[None, :]
    score = tl.dot(k, tl.trans(q), input_precision=PRECISION) * rise  # [key, query]
    score = tl.where(step[:, None] <= step[None, :], score, 0.0)
    if q.dtype == tl.float16:
        out = tl.dot(state.to(q.dtype), tl.trans(q)) * fall
        out = tl.dot(tl.trans(v), (score * fall).to(v.dtype), acc=out)
    else:
        out = tl.dot(tl.trans(v), score.to(v.dtype), input_precision=PRECISION)
        out = tl.dot(state.to(q.dtype), tl.trans(q), acc=out, input_precision=PRECISION) * fall
    return out * scale


@triton.jit
def _add_chunk(state, k, v, slope, size, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return the state after `size` rows; rows past them must be zeros."""
    left = tl.maximum(size - 1 - tl.arange(0, CHUNK), 0)
    v = (v.to(tl.float32) * tl.exp(-slope * left)[:, None]).to(k.dtype)
    return tl.dot(tl.trans(v), k, acc=state * tl.exp(-slope * size), input_precision=PRECISION)


@triton.jit
def _load_rows(x, start, end, column, ROW: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr):
    """x[start : start + CHUNK, column : column + WIDTH] of a matrix whose rows are ROW apart; zeros from `end` on."""
    if TMA:
        rows = x.load([start, column])
    else:
        step = tl.arange(0, CHUNK)[:, None]
        base = tl.multiple_of(x + tl.cast(start, tl.int64) * ROW + column, 16)
        rows = tl.load(base + step * ROW + tl.arange(0, WIDTH)[None, :], mask=step < end - start, other=0.0)
    return rows


@triton.jit(do_not_specialize=["num_tokens", "segment"])
def _prefill_kernel(
    q,
    k,
    v,
    state_ptr,
    slopes_ptr,
    out,
    next_ptr,
    num_tokens,
    segment,
    scale,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    HORIZON: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
):
    PARTS: tl.constexpr = D // COLUMNS
    pid = tl.program_id(0)
    head = H - 1 - (pid // PARTS) % H  # heads with the longest horizon are the last ones: start them first
    begin = pid // (PARTS * H) * segment
    end = tl.minimum(begin + segment, num_tokens)
    key = head * D
    value = key + pid % PARTS * COLUMNS

    slope = tl.load(slopes_ptr + head)
    window = tl.minimum(HORIZON / slope, num_tokens.to(tl.float32)).to(tl.int32) + 1
    first = tl.maximum(begin - tl.cdiv(window, CHUNK) * CHUNK, 0)

    # The state is transposed, [value, key]: so it is the left operand of a dot without moving between registers.
    row = tl.arange(0, D)[None, :]
    tile = row * D + tl.arange(0, COLUMNS)[:, None]
    corner = key * D + value - key
    state = tl.load(tl.multiple_of(state_ptr + corner, 16) + tile, mask=(row >= 0) & (first == 0), other=0.0)
    for start in tl.range(first, begin, CHUNK, num_stages=STAGES):
        k_chunk = _load_rows(k, start, begin, key, K_ROW, CHUNK, D, TMA)
        v_chunk = _load_rows(v, start, begin, value, V_ROW, CHUNK, COLUMNS, TMA)
        state = _add_chunk(state, k_chunk, v_chunk, slope, CHUNK, CHUNK, PRECISION)

    for start in tl.range(begin, end, CHUNK, num_stages=STAGES):
        q_chunk = _load_rows(q, start, end, key, Q_ROW, CHUNK, D, TMA)
        k_chunk = _load_rows(k, start, end, key, K_ROW, CHUNK, D, TMA)
        v_chunk = _load_rows(v, start, end, value, V_ROW, CHUNK, COLUMNS, TMA)
        result = tl.trans(_read_chunk(state, q_chunk, k_chunk, v_chunk, slope, scale, CHUNK, PRECISION)).to(
            v_chunk.dtype
        )
        if TMA:
            out.store([start, value], result)
        else:
            step = tl.arange(0, CHUNK)[:, None]
            target = tl.multiple_of(out + tl.cast(start, tl.int64) * (H * D) + value, 16)
            tl.store(target + step * (H * D) + tl.arange(0, COLUMNS)[None, :], result, mask=step < end - start)
        size = tl.minimum(end - start, CHUNK)
        state = _add_chunk(state, k_chunk, v_chunk, slope, size, CHUNK, PRECISION)

    if end == num_tokens:
        tl.store(tl.multiple_of(next_ptr + corner, 16) + tile, state)


def lightning_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    slopes: Tensor,
    scale: float,
    config: PrefillConfig | None = None,
    segment: int | None = None,
) -> tuple[Tensor, Tensor]:
    """n tokens of one sequence: q, k, v [n, H, D], state [H, D, D] fp32 → output [n, H, D] in q's dtype, next state."""
    n, heads, dim = q.shape
    q, k, v = _compact(q), _compact(k), _compact(v)
    state = state.contiguous()
    config = config or _config(dim, q.dtype, _capability(q.device))
    segment = segment or _segment(n, heads, config.chunk, _num_processors(q.device))
    assert segment % config.chunk == 0
    output = torch.empty((n, heads, dim), dtype=q.dtype, device=q.device)
    after = torch.empty_like(state)
    tiles = ((q, dim), (k, dim), (v, config.columns), (output, config.columns))
    q_, k_, v_, out_ = (_described(x, config.chunk, width) if config.has_tma else x for x, width in tiles)
    grid = (-(-n // segment) * heads * (dim // config.columns),)
    _prefill_kernel[grid](
        q_,
        k_,
        v_,
        state,
        slopes,
        out_,
        after,
        n,
        segment,
        scale,
        Q_ROW=q.stride(0),
        K_ROW=k.stride(0),
        V_ROW=v.stride(0),
        H=heads,
        D=dim,
        COLUMNS=config.columns,
        CHUNK=config.chunk,
        HORIZON=HORIZON,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        STAGES=config.num_stages,
        TMA=config.has_tma,
        num_warps=config.num_warps,
    )
    return output, after


def _config(dim: int, dtype: torch.dtype, capability: int) -> PrefillConfig:
    """Choose tiles by the kind of GPU; fp32 runs without tensor cores, in small tiles."""
    if dtype == torch.float32:
        return PrefillConfig(chunk=16, columns=min(dim, 32), num_warps=4, num_stages=1, has_tma=False)
    if capability // 10 == 9:
        return PrefillConfig(chunk=64, columns=min(dim, 128), num_warps=8, num_stages=3, has_tma=True)
    return PrefillConfig(chunk=64, columns=min(dim // 2, 64), num_warps=8, num_stages=2, has_tma=False)


def _segment(num_tokens: int, heads: int, chunk: int, num_processors: int) -> int:
    """Return the tokens of a segment: long, because each first computes its state, but two programs per processor."""
    count = max(1, 2 * num_processors // heads)
    return min(max(-(-num_tokens // (count * chunk)), 2) * chunk, LONGEST_SEGMENT)


@triton.jit
def _rotated(x, other, weight, other_weight, cos, sin, dim, eps, D: tl.constexpr, HAS_NORM: tl.constexpr,
            HAS_ROPE: tl.constexpr):  # fmt: skip
    """Return a head x [D] normed and rotated, in fp32; `other` is the head with its halves swapped."""
    dtype: tl.constexpr = x.dtype
    x, other = x.to(tl.float32), other.to(tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
        x = ((x * factor).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
        other = ((other * factor).to(dtype).to(tl.float32) * other_weight).to(dtype).to(tl.float32)
    if HAS_ROPE:
        x = (x * cos + tl.where(dim < D // 2, -other, other) * sin).to(dtype).to(tl.float32)
    return x


@triton.jit
def _step_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    states_ptr,
    slots_ptr,
    counts_ptr,
    slopes_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_slots,
    scale,
    eps,
    q_sequence,
    q_token,
    q_head,
    k_sequence,
    k_token,
    k_head,
    v_sequence,
    v_token,
    v_head,
    N: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_OUTPUT: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    KEEPS_STATE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    PDL: tl.constexpr,
):
    PARTS: tl.constexpr = D // COLUMNS
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS
    sequence = tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, D)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        likely = tl.load(slots_ptr + sequence).to(
            tl.int64
        )  # before the wait: it may still be written, so it is only a guess for the prefetch
        likely = tl.maximum(tl.minimum(likely, num_slots - 1), 0)
        prefetch(states_ptr + (likely * H + head) * (D * D) + dim * D + part * COLUMNS)
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    count = N
    if HAS_COUNTS:
        count = tl.load(counts_ptr + sequence).to(tl.int32)
    if slot < 0:
        if HAS_OUTPUT:
            for token in range(N):
                out = out_ptr + ((sequence * N + token) * H + head) * D + column
                tl.store(out, tl.zeros([COLUMNS], dtype=out_ptr.dtype.element_ty))
    else:
        decay = tl.exp(-tl.load(slopes_ptr + head))
        tile = tl.multiple_of(states_ptr + (slot * H + head) * (D * D), 16) + dim[:, None] * D + column[None, :]
        state = tl.load(tile)
        other = (dim + D // 2) % D
        q_base = q_ptr + sequence * q_sequence + head * q_head
        k_base = k_ptr + sequence * k_sequence + head * k_head
        v_base = v_ptr + sequence * v_sequence + head * v_head + column
        angle = sequence * N * D + dim
        q_next, k_next, v_next = tl.load(q_base + dim), tl.load(k_base + dim), tl.load(v_base)
        q_other, k_other, cos, sin = q_next, k_next, 0.0, 0.0
        q_weight, k_weight, q_other_weight, k_other_weight = 0.0, 0.0, 0.0, 0.0
        if HAS_NORM:
            q_weight, k_weight = tl.load(q_weight_ptr + dim).to(tl.float32), tl.load(k_weight_ptr + dim).to(tl.float32)
        if HAS_ROPE:
            cos, sin = tl.load(cos_ptr + angle), tl.load(sin_ptr + angle)
            q_other, k_other = tl.load(q_base + other), tl.load(k_base + other)
            if HAS_NORM:
                q_other_weight = tl.load(q_weight_ptr + other).to(tl.float32)
                k_other_weight = tl.load(k_weight_ptr + other).to(tl.float32)
        for token in range(count):
            q = _rotated(q_next, q_other, q_weight, q_other_weight, cos, sin, dim, eps, D, HAS_NORM, HAS_ROPE)
            k = _rotated(k_next, k_other, k_weight, k_other_weight, cos, sin, dim, eps, D, HAS_NORM, HAS_ROPE)
            v = v_next.to(tl.float32)
            following = (token + 1) % N  # loaded while this one is computed; after the last token the load is unused
            q_next = tl.load(q_base + following * q_token + dim)
            k_next = tl.load(k_base + following * k_token + dim)
            v_next = tl.load(v_base + following * v_token)
            if HAS_ROPE:
                q_other = tl.load(q_base + following * q_token + other)
                k_other = tl.load(k_base + following * k_token + other)
                cos, sin = tl.load(cos_ptr + angle + following * D), tl.load(sin_ptr + angle + following * D)
            else:
                q_other, k_other = q_next, k_next
            state = tl.fma(k[:, None], v[None, :], state * decay)
            pdl_launch_dependents(PDL)
            if HAS_OUTPUT:
                total = tl.sum((q * scale)[:, None] * state, axis=0)
                out = out_ptr + ((sequence * N + token) * H + head) * D + column
                tl.store(out, total.to(out_ptr.dtype.element_ty))
        if not KEEPS_STATE:
            tl.store(tile, state)


def lightning_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    slots: Tensor,
    slopes: Tensor,
    scale: float,
    output: Tensor | None = None,
    heads: Heads | None = None,
    dependents_first: bool = False,
) -> Tensor:
    """A token each: q, k, v [S, H, D], states [P, H, D, D] fp32 advanced at slots [S] (-1: none) → [S, H, D]."""
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device) if output is None else output
    q, k, v = (x[:, None] for x in (q, k, v))
    _step(q, k, v, states, slots, None, slopes, scale, output, heads, False, dependents_first)
    return output


def lightning_verify(
    q: Tensor, k: Tensor, v: Tensor, states: Tensor, slots: Tensor, slopes: Tensor, scale: float,
    output: Tensor | None = None, heads: Heads | None = None, dependents_first: bool = False,
) -> Tensor:  # fmt: skip
    """n tokens each: q, k, v [S, n, H, D] → output [S, n, H, D], as decoding would return; states stay unchanged."""
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device) if output is None else output
    _step(
        q, k, v, states, slots, None, slopes, scale, output, heads, keeps_state=True, dependents_first=dependents_first
    )
    return output


def lightning_fold(
    k: Tensor,
    v: Tensor,
    states: Tensor,
    slots: Tensor,
    counts: Tensor,
    slopes: Tensor,
    heads: Heads | None = None,
) -> None:
    """Advance the states at slots [S] by the first counts [S] of k, v [S, n, H, D], as decoding would have."""
    _step(k, k, v, states, slots, counts, slopes, 1.0, None, heads, keeps_state=False)


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    slots: Tensor,
    counts: Tensor | None,
    slopes: Tensor,
    scale: float,
    output: Tensor | None,
    heads: Heads | None,
    keeps_state: bool,
    dependents_first: bool = False,
) -> None:
    sequences, num_tokens, num_heads, dim = q.shape
    first = heads or Heads(None, None, 0.0, None, None)
    assert first.cos is None or (first.cos.is_contiguous() and len(first.cos) >= sequences * num_tokens)
    assert states.is_contiguous()
    assert output is None or output.is_contiguous()
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    if sequences == 0:
        return
    columns = min(dim, STEP_COLUMNS)
    _step_kernel[(num_heads * (dim // columns), sequences)](
        q,
        k,
        v,
        states,
        slots,
        slots if counts is None else counts,
        slopes,
        k if first.q_weight is None else first.q_weight,
        k if first.k_weight is None else first.k_weight,
        slopes if first.cos is None else first.cos,
        slopes if first.sin is None else first.sin,
        k if output is None else output,
        states.shape[0],
        scale,
        first.eps,
        *(x.stride(axis) for x in (q, k, v) for axis in range(3)),
        N=num_tokens,
        H=num_heads,
        D=dim,
        COLUMNS=columns,
        HAS_OUTPUT=output is not None,
        HAS_COUNTS=counts is not None,
        KEEPS_STATE=keeps_state,
        HAS_NORM=first.q_weight is not None,
        HAS_ROPE=first.cos is not None,
        **pdl_options(q.device, sequences * num_tokens, dependents_first),
        num_warps=STEP_WARPS,
        enable_fp_fusion=False,  # fused multiply-adds in one variant only would change bits
    )


def _compact(x: Tensor) -> Tensor:
    """Return x [n, H, D] if the heads of a row are contiguous and aligned to 16 bytes, else a copy."""
    is_aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    is_compact = x.stride(1) == x.shape[2] and x.stride(2) == 1
    return x if is_aligned and is_compact else x.clone(memory_format=torch.contiguous_format)


def _described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    n, heads, dim = x.shape
    return TensorDescriptor(x, [n, heads * dim], [x.stride(0), 1], [rows, columns])


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _capability(device: torch.device) -> int:
    """Return the compute capability, 90 on Hopper, or 0 without a GPU."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return 10 * major + minor

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Lightning attention on NVIDIA GPUs; `ops/lightning.py` is the definition.

A prompt is cut into segments that run in parallel. Because of the decay, a token `HORIZON / slope` positions back has a
weight below e^-20, so each segment computes its initial state from the tokens just before it; no segment waits for
another. A decode step keeps a slice of a state in registers and takes one token after another, always in the same
order: verifying drafts and then folding the accepted ones gives the same bits as decoding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sala.backends.torch.kernels.fused import Heads
from sala.backends.torch.kernels.launch import Config, aligned_rows, capability, num_processors
from sala.backends.torch.kernels.pdl import pdl_launch_dependents, pdl_options, prefetch

HORIZON = 20.0
LONGEST_SEGMENT = 8192
STEP_COLUMNS = 32  # of a state per program; the same for all batches, because it decides the order of sums
STEP_WARPS = 4
PLAIN = Heads()


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
    q, k, v,
    state_ptr, slopes_ptr,
    out,
    next_ptr,
    num_tokens, segment, scale,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, HORIZON: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
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
    config: Config | None = None,
    segment: int | None = None,
) -> tuple[Tensor, Tensor]:
    """n tokens of one sequence: q, k, v [n, H, D], state [H, D, D] fp32 → output [n, H, D] in q's dtype, next state."""
    n, heads, dim = q.shape
    q, k, v, state = aligned_rows(q), aligned_rows(k), aligned_rows(v), state.contiguous()
    config = config or _config(dim, q.dtype, capability(q.device))
    chunk, columns = config.tile["CHUNK"], config.tile["COLUMNS"]
    segment = segment or _segment(n, heads, chunk, num_processors(q.device))
    assert segment % chunk == 0
    output = torch.empty((n, heads, dim), dtype=q.dtype, device=q.device)
    after = torch.empty_like(state)
    tiles = ((q, dim), (k, dim), (v, columns), (output, columns))
    q_, k_, v_, out_ = (_described(x, chunk, width) if config.tile["TMA"] else x for x, width in tiles)
    tensors = (q_, k_, v_, state, slopes, out_, after)
    strides = {"Q_ROW": q.stride(0), "K_ROW": k.stride(0), "V_ROW": v.stride(0)}
    constants = {"H": heads, "D": dim, "HORIZON": HORIZON, "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32"}
    grid = (-(-n // segment) * heads * (dim // columns),)
    _prefill_kernel[grid](*tensors, n, segment, scale, **strides, **constants, **config.tile, **config.options)
    return output, after


def _config(dim: int, dtype: torch.dtype, compute_capability: int) -> Config:
    """Choose chunk and columns of the state per program by the kind of GPU; fp32 runs without tensor cores."""
    if dtype == torch.float32:
        return Config({"CHUNK": 16, "COLUMNS": min(dim, 32), "STAGES": 1, "TMA": False}, 4)
    if compute_capability // 10 == 9:
        return Config({"CHUNK": 64, "COLUMNS": min(dim, 128), "STAGES": 3, "TMA": True}, 8)
    return Config({"CHUNK": 64, "COLUMNS": min(dim // 2, 64), "STAGES": 2, "TMA": False}, 8)


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
    q_ptr, k_ptr, v_ptr, states_ptr, slots_ptr, counts_ptr, slopes_ptr, q_weight_ptr, k_weight_ptr, cos_ptr,
    sin_ptr, out_ptr,
    num_slots, scale, eps, q_sequence, q_token, q_head, k_sequence, k_token, k_head, v_sequence, v_token, v_head,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, HAS_OUTPUT: tl.constexpr,
    HAS_COUNTS: tl.constexpr, KEEPS_STATE: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = D // COLUMNS
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS
    sequence = tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, D)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        # Before the wait the slot may still be written, so it is only a guess for the prefetch.
        likely = tl.load(slots_ptr + sequence).to(tl.int64)
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
    heads: Heads = PLAIN,
    dependents_first: bool = False,
    keeps_states: bool = False,
) -> Tensor:
    """n tokens each: q, k, v [S, n, H, D], or one each [S, H, D] → output of the same shape.

    states [P, H, D, D] in fp32 advance at slots [S] (-1: none), or stay unchanged, as when drafts are verified.
    """
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device) if output is None else output
    if q.dim() == 3:
        q, k, v = (x[:, None] for x in (q, k, v))
    _step(q, k, v, states, slots, slopes, scale, output, None, heads, keeps_states, dependents_first)
    return output


def lightning_fold(
    k: Tensor, v: Tensor, states: Tensor, slots: Tensor, counts: Tensor, slopes: Tensor, heads: Heads = PLAIN
) -> None:
    """Advance the states at slots [S] by the first counts [S] of k, v [S, n, H, D], as decoding would have."""
    _step(k, k, v, states, slots, slopes, 1.0, None, counts, heads)


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    slots: Tensor,
    slopes: Tensor,
    scale: float,
    output: Tensor | None,
    counts: Tensor | None,
    heads: Heads,
    keeps_states: bool = False,
    dependents_first: bool = False,
) -> None:
    sequences, num_tokens, num_heads, dim = q.shape
    cos = heads.cos
    assert cos is None or (cos.is_contiguous() and len(cos) >= sequences * num_tokens)
    assert states.is_contiguous()
    assert output is None or output.is_contiguous()
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    if sequences == 0:
        return
    columns = min(dim, STEP_COLUMNS)
    optional = ((heads.q_weight, k), (heads.k_weight, k), (cos, slopes), (heads.sin, slopes), (output, k))
    optional_tensors = (unread if x is None else x for x, unread in optional)
    tensors = (q, k, v, states, slots, slots if counts is None else counts, slopes, *optional_tensors)
    strides = (x.stride(axis) for x in (q, k, v) for axis in range(3))
    constants = {"N": num_tokens, "H": num_heads, "D": dim, "COLUMNS": columns, "KEEPS_STATE": keeps_states}
    constants |= {"HAS_OUTPUT": output is not None, "HAS_COUNTS": counts is not None}
    constants |= {"HAS_NORM": heads.q_weight is not None, "HAS_ROPE": cos is not None}
    _step_kernel[(num_heads * (dim // columns), sequences)](
        *tensors,
        states.shape[0],
        scale,
        heads.eps,
        *strides,
        **constants,
        **pdl_options(q.device, sequences * num_tokens, dependents_first),
        num_warps=STEP_WARPS,
        enable_fp_fusion=False,  # fused multiply-adds in one variant only would change bits
    )


def _described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    n, heads, dim = x.shape
    return TensorDescriptor(x, [n, heads * dim], [x.stride(0), 1], [rows, columns])

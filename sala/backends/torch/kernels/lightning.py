# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Lightning attention on NVIDIA GPUs; `ops/lightning.py` is the definition.

Prefill walks every span from chunk to chunk, with a part of the state in registers. Chunks end at absolute positions
(multiples of CHUNK, snapshots and the ends of spans), so that a prompt cut at one of them gives the same bits as one
that is not cut. A decode step keeps a slice of a state in registers and takes one token after another, always in the
same order: verifying drafts and then folding the accepted ones gives the same bits as decoding.

States are fp32 or have 16 bits. The latter are rounded after every chunk of prefill and every token of a step, in
registers too, so that these equalities hold for them as well.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sala.backends.torch.kernels import spans as span_table
from sala.backends.torch.kernels.fused import Heads
from sala.backends.torch.kernels.launch import Config, aligned_rows, capability
from sala.backends.torch.kernels.pdl import pdl_launch_dependents, pdl_options, prefetch
from sala.backends.torch.kernels.spans import COUNT, FIRST, MAX_SNAPSHOTS, SLOT, SNAPSHOT_SLOTS, SNAPSHOTS, START

STEP_COLUMNS = 32  # of a state per program; the same for all batches, because it decides the order of sums
STEP_WARPS = 4
PLAIN = Heads()


@triton.jit
def _decays(slope, scale, CHUNK: tl.constexpr, SWAPPED: tl.constexpr):
    """Return factors of the scores [query, key] of a chunk, zero where the key comes later, and of the rows of output.

    The decay between two rows is their product: slopes are below 1, so e^CHUNK does not overflow fp32. With SWAPPED
    they are transposed.
    """
    step = tl.arange(0, CHUNK)
    rise, fall = tl.exp(slope * (step + 1)), tl.exp(-slope * (step + 1)) * scale
    if SWAPPED:
        rise, fall = tl.where(step[:, None] <= step[None, :], rise[:, None], 0.0), fall[None, :]
    else:
        rise, fall = tl.where(step[:, None] >= step[None, :], rise[None, :], 0.0), fall[:, None]
    return rise, fall


@triton.jit
def _chunk(
    state, q, k, v, rise, fall, slope, size,
    CHUNK: tl.constexpr, SWAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output of q, k [CHUNK, D], v [CHUNK, COLUMNS] and the state [D, COLUMNS] before them; the state after them.

    Rows from `size` on must be zeros. With SWAPPED, state and output are transposed.
    """
    before = state.to(q.dtype)
    if SWAPPED:
        score = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        out = tl.dot(before, tl.trans(q), input_precision=PRECISION)
    else:
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        out = tl.dot(q, before, input_precision=PRECISION)
    score *= rise
    if q.dtype == tl.float16:  # in which the factors would overflow
        score, out = score * fall, out * fall
    score = score.to(v.dtype)
    left = tl.maximum(size - 1 - tl.arange(0, CHUNK), 0)
    faded = (v.to(tl.float32) * tl.exp(-slope * left)[:, None]).to(k.dtype)
    state *= tl.exp(-slope * size)
    if SWAPPED:
        out = tl.dot(tl.trans(v), score, acc=out, input_precision=PRECISION)
        state = tl.dot(tl.trans(faded), k, acc=state, input_precision=PRECISION)
    else:
        out = tl.dot(score, v, acc=out, input_precision=PRECISION)
        state = tl.dot(tl.trans(k), faded, acc=state, input_precision=PRECISION)
    if q.dtype != tl.float16:
        out *= fall
    return out, state


@triton.jit
def _rounded(state, states_ptr):
    """Return the fp32 state as it is after a store to memory and a load."""
    return state.to(states_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _load_rows(x, row, size, column, ROW: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """x[row : row + CHUNK, column : column + WIDTH] of a matrix whose rows are ROW apart; zeros from `size` rows on."""
    step = tl.arange(0, CHUNK)
    rows = tl.multiple_of(x + (row + step).to(tl.int64) * ROW + column, 16)
    return tl.load(rows[:, None] + tl.arange(0, WIDTH)[None, :], mask=(step < size)[:, None], other=0.0)


@triton.jit
def _store_rows(out, rows, row, size, column, ROW: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    step = tl.arange(0, CHUNK)
    target = tl.multiple_of(out + (row + step).to(tl.int64) * ROW + column, 16)[:, None] + tl.arange(0, WIDTH)[None, :]
    tl.store(target, rows.to(out.dtype.element_ty), mask=(step < size)[:, None])


@triton.jit(do_not_specialize=["num_spans"])
def _prefill_kernel(
    q, k, v, states_ptr, spans_ptr, slopes_ptr, out,
    num_spans, scale,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, SWAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the state of one head, for one span after another."""
    PARTS: tl.constexpr = D // COLUMNS
    head = tl.program_id(0) // PARTS
    key = head * D
    value = key + tl.program_id(0) % PARTS * COLUMNS
    slope = tl.load(slopes_ptr + head)
    rise, fall = _decays(slope, scale, CHUNK, SWAPPED)
    inner, column = tl.arange(0, D) * D, tl.arange(0, COLUMNS)
    tile = inner[None, :] + column[:, None] if SWAPPED else inner[:, None] + column[None, :]
    corner = tl.multiple_of(states_ptr + key * D + (value - key), 16)
    for span in range(tl.program_id(1), num_spans, tl.num_programs(1)):
        count = tl.load(spans_ptr + COUNT * num_spans + span)
        if count > 0:
            position = tl.load(spans_ptr + START * num_spans + span)
            offset = tl.load(spans_ptr + FIRST * num_spans + span) - position  # the row of position 0
            home = corner + tl.load(spans_ptr + SLOT * num_spans + span).to(tl.int64) * (H * D * D)
            end = position + count
            snapshots_ptr = spans_ptr + SNAPSHOTS * num_spans + span
            snapshots = tl.load(snapshots_ptr + tl.arange(0, MAX_SNAPSHOTS) * num_spans)
            state = tl.load(home + tile).to(tl.float32)
            while position < end:
                edge = tl.min(tl.where((snapshots > position) & (snapshots < end), snapshots, end), 0)
                chunk = position // CHUNK
                for i in tl.range(0, (edge + CHUNK - 1) // CHUNK - chunk, num_stages=STAGES):
                    begin = tl.maximum(position, (chunk + i) * CHUNK)
                    size = tl.minimum(edge, (chunk + i + 1) * CHUNK) - begin
                    row = begin + offset
                    q_chunk = _load_rows(q, row, size, key, Q_ROW, CHUNK, D)
                    k_chunk = _load_rows(k, row, size, key, K_ROW, CHUNK, D)
                    v_chunk = _load_rows(v, row, size, value, V_ROW, CHUNK, COLUMNS)
                    found, state = _chunk(
                        state, q_chunk, k_chunk, v_chunk, rise, fall, slope, size, CHUNK, SWAPPED, PRECISION
                    )
                    state = _rounded(state, states_ptr)
                    if SWAPPED:
                        found = tl.trans(found)
                    _store_rows(out, found, row, size, value, H * D, CHUNK, COLUMNS)
                position = edge
                for i in range(MAX_SNAPSHOTS):
                    if tl.load(snapshots_ptr + i * num_spans) == position:
                        slot = tl.load(spans_ptr + (SNAPSHOT_SLOTS + i) * num_spans + span)
                        tl.store(corner + slot.to(tl.int64) * (H * D * D) + tile, state.to(states_ptr.dtype.element_ty))
            tl.store(home + tile, state.to(states_ptr.dtype.element_ty))


def lightning_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    spans: Tensor,
    slopes: Tensor,
    scale: float,
    config: Config | None = None,
    num_parallel: int | None = None,
) -> Tensor:
    """Packed spans: q, k, v [T, H, D] → output [T, H, D] in q's dtype; rows of no span stay uninitialised.

    states [P, H, D, D] advance in place and are copied at snapshots, as `spans` says (see `spans.py`), of which
    `num_parallel` run at a time, or all.
    """
    num_rows, heads, dim = q.shape
    q, k, v = aligned_rows(q), aligned_rows(k), aligned_rows(v)
    assert states.is_contiguous()
    assert spans.is_contiguous()
    assert spans.shape[0] == span_table.NUM_FIELDS
    config = config or _config(dim, q.dtype, capability(q.device))
    assert config.tile["STAGES"] > 1 or config.tile["CHUNK"] < 64  # wgmma in one stage is wrong (Triton 3.6, H200)
    columns, num_spans = config.tile["COLUMNS"], spans.shape[1]
    output = torch.empty((num_rows, heads, dim), dtype=q.dtype, device=q.device)
    constants = {"H": heads, "D": dim, "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32", **config.tile}
    strides = {"Q_ROW": q.stride(0), "K_ROW": k.stride(0), "V_ROW": v.stride(0)}
    grid = (heads * (dim // columns), min(num_spans, num_parallel or num_spans))
    tensors = (q, k, v, states, spans, slopes, output)
    _prefill_kernel[grid](*tensors, num_spans, scale, **strides, **constants, **config.options)
    return output


def _config(dim: int, dtype: torch.dtype, compute_capability: int) -> Config:
    """Choose chunk and columns of the state per program by the kind of GPU; fp32 runs without tensor cores.

    The tensor cores of Hopper and Blackwell want 64 rows on the left: those of the chunk. Elsewhere products whose left
    operand has the columns of the state (SWAPPED) need fewer registers.
    """
    tile = {"COLUMNS": min(dim, 32), "SWAPPED": True}
    if dtype == torch.float32:
        return Config({**tile, "CHUNK": 16, "STAGES": 1}, 4, max_registers=160)
    if compute_capability // 10 in (9, 10):
        return Config({**tile, "CHUNK": 64, "STAGES": 3, "SWAPPED": False}, 4)
    return Config({**tile, "CHUNK": 64, "STAGES": 2 if compute_capability == 80 else 3}, 8)


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
        state = tl.load(tile).to(tl.float32)
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
            state = _rounded(state, states_ptr)
        if not KEEPS_STATE:
            tl.store(tile, state.to(states_ptr.dtype.element_ty))


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

    states [P, H, D, D] advance at slots [S] (-1: none), or stay unchanged, as when drafts are verified.
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

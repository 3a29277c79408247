"""Block scores on a GPU: the numbers of `ops/sparse.py` without ever storing a score per window.

Two steps: the log-sum-exp over the coarse windows (k2) of every query and head; then the scores of the fine windows
(k1), summed over the heads of a kv group and pooled to blocks. Prefill does both in one kernel over tiles of queries.
A decode step cuts the context into many programs and does them in two kernels.

Two things make scoring cheap. Blocks that are forced on every query of a tile (the initial and the recent ones) are not
scored, so nearly nothing is masked. And a tile's columns are ordered head by head with its tokens inside, so that a
thread of the tensor cores' layout owns whole heads of its tokens: the sum over heads needs no exchange.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sala.backends.torch.kernels.attention import LOG2_E
from sala.backends.torch.kernels.launch import num_processors
from sala.backends.torch.kernels.pdl import pdl_options, pdl_wait
from sala.config import SparseConfig

SCORE_BYTES = 256 << 20  # of the fp32 scores that a chunk of queries keeps at a time
SPLIT = 128  # k2 windows per program of a decode step; fixed, because the order of sums depends on it
JOIN = 64  # splits joined at a time; fixed for the same reason
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)  # of fp32: an infinite score could not be ordered


class ScoreConfig(NamedTuple):
    """Tile of the prompt's scoring: windows, columns (tokens x heads of a group), k2 windows, and launch options."""

    rows: int
    columns: int
    rows2: int
    num_warps: int
    num_stages: int
    per_sm: int  # programs that one multiprocessor holds


def supports(sparse: SparseConfig, dim: int, dtype: torch.dtype) -> bool:
    """Return whether the kernels take this geometry: windows reach at most one block further, rows are aligned."""
    if dim * dtype.itemsize % 16:
        return False
    ratio, before = sparse.block_size // sparse.kernel_stride, sparse.kernel_size // sparse.kernel_stride - 1
    return before <= ratio and ratio & (ratio - 1) == 0


@triton.jit
def _fold(q, keys, seen, peak, total, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Add a tile of k2 to the running maximum and sum of exponentials, in base 2, of every row of q."""
    s = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(peak, tl.max(s, 1) * scale)
    shift = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
    total = total * tl.exp2(peak - shift) + tl.sum(tl.exp2(tl.fma(s, scale, -shift[:, None])), 1)
    return new, total


@triton.jit(do_not_specialize=["start", "num_queries", "num_rows", "num_rows2", "width"])
def _score_kernel(
    q, k1, k2, scores, start, num_queries, num_rows, num_rows2, width, stride_n, stride_h, scale,
    HEADS: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, ROWS2: tl.constexpr, STRIDE: tl.constexpr, RATIO: tl.constexpr, BEFORE: tl.constexpr,
    WINDOW: tl.constexpr, SELECTED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Block scores [num_queries, G, width] of TOKENS queries and one group; SLOTS is HEADS padded to a power of two."""
    BLOCK: tl.constexpr = STRIDE * RATIO
    BLOCKS: tl.constexpr = ROWS // RATIO
    COLUMNS: tl.constexpr = SLOTS * TOKENS
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS  # start the longest rows first
    group = tl.program_id(1)
    last = start + tl.minimum(first + TOKENS, num_queries) - 1
    if last // BLOCK < SELECTED:
        return  # every block is selected
    column = tl.arange(0, COLUMNS)
    head, token = column // TOKENS, first + column % TOKENS
    dim = tl.arange(0, DIM)
    q_at = token.to(tl.int64) * stride_n + (group * HEADS + head) * stride_h
    is_real = (token < num_queries) & (head < HEADS)
    q_rows = tl.multiple_of(q + q_at, 16)
    q_tile = tl.load(q_rows[:, None] + dim[None, :], mask=is_real[:, None] & (dim < D)[None, :], other=0.0)

    position = tl.minimum(start + token, last)
    seen2 = (position + 1) // (4 * STRIDE) - BEFORE
    every2 = tl.maximum((start + first + 1) // (4 * STRIDE) - BEFORE, 0) // ROWS2 * ROWS2
    any2 = (last + 1) // (4 * STRIDE) - BEFORE
    row2 = tl.arange(0, ROWS2)
    at2 = tl.multiple_of(k2 + (group.to(tl.int64) * num_rows2 + BEFORE + row2) * D, 16)[:, None] + dim[None, :]
    peak = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for begin in range(0, every2, ROWS2):
        keys = tl.load(at2 + begin * D) if DIM == D else tl.load(at2 + begin * D, mask=(dim < D)[None, :], other=0.0)
        peak, total = _fold(q_tile, keys, True, peak, total, scale, False, PRECISION)
    for begin in range(every2, any2, ROWS2):
        has = (begin + row2 < any2)[:, None] & (dim < D)[None, :]
        keys = tl.load(at2 + begin * D, mask=has, other=0.0)
        seen = (begin + row2)[None, :] < seen2[:, None]
        peak, total = _fold(q_tile, keys, seen, peak, total, scale, True, PRECISION)
    # An infinite norm makes every score 0: padded heads, and queries before the first k2 window.
    norm = tl.where((head < HEADS) & (seen2 > 0), peak + tl.log2(total), float("inf"))

    high = last // BLOCK - WINDOW  # blocks from here on are forced on every query of the tile
    row = tl.arange(0, ROWS)
    block = tl.arange(0, BLOCKS)
    query = tl.arange(0, TOKENS)
    is_last = (block == BLOCKS - 1)[:, None]
    upper = tl.where(is_last, 0, (block + 1)[:, None]) + tl.zeros([BLOCKS, TOKENS], tl.int32)
    at1 = tl.multiple_of(k1 + (group.to(tl.int64) * num_rows + row) * D, 16)[:, None] + dim[None, :]
    out = scores + ((first + query).to(tl.int64) * tl.num_programs(1) + group) * width
    is_query = first + query < num_queries
    above = tl.zeros([BLOCKS, TOKENS], tl.float32)  # its last row: the first block of the next tile
    num_tiles = high // BLOCKS + 1
    for i in range(num_tiles):
        tile = num_tiles - 1 - i
        if (DIM == D) & (WINDOW + 1 >= BLOCKS):  # forced blocks follow the tile, so reading past it is safe
            keys = tl.load(at1 + tile * (ROWS * D))
        else:
            has = (tile * ROWS + row < num_rows)[:, None] & (dim < D)[None, :]
            keys = tl.load(at1 + tile * (ROWS * D), mask=has, other=0.0)
        s = tl.dot(keys, tl.trans(q_tile), input_precision=PRECISION)
        weights = tl.exp2(tl.fma(s, scale, -norm[None, :]))
        windows = tl.minimum(tl.sum(tl.reshape(weights, [ROWS, SLOTS, TOKENS]), 1), LARGEST)
        if MASKED:
            end = (tl.minimum(start + first + query, last) + 1) // STRIDE
            window = tile * ROWS + row
            windows = tl.where((window >= BEFORE)[:, None] & (window[:, None] < end[None, :]), windows, 0.0)
        paged = tl.reshape(windows, [BLOCKS, RATIO, TOKENS])
        best = tl.max(paged, 1)
        reach = tl.max(tl.where((tl.arange(0, RATIO) < BEFORE)[None, :, None], paged, 0.0), 1)
        rolled = tl.gather(reach, upper, 0)
        after = tl.where(is_last, above, rolled)
        above = rolled
        place = tile * BLOCKS + block
        is_wanted = (place < high)[:, None] & is_query[None, :]
        tl.store(out[None, :] + place[:, None], tl.maximum(best, after), mask=is_wanted)


@triton.jit
def _row_of_decode(lengths, is_sparse, sequence, BLOCK: tl.constexpr, SELECTED: tl.constexpr):
    """Return the length of a sequence, its query's block, and whether blocks must be selected."""
    length = tl.load(lengths + sequence).to(tl.int32)
    own = tl.maximum(length - 1, 0) // BLOCK
    return length, own, (own >= SELECTED) & (tl.load(is_sparse + sequence) != 0)


@triton.jit
def _decode_query(
    q, sequence, group, stride_n, stride_h,
    HEADS: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    head, dim = tl.arange(0, SLOTS), tl.arange(0, DIM)
    at = sequence.to(tl.int64) * stride_n + (group * HEADS + head) * stride_h
    rows = tl.multiple_of(q + at, 16)
    return tl.load(rows[:, None] + dim[None, :], mask=(head < HEADS)[:, None] & (dim < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_pages", "stride_table", "num_splits"])
def _decode_norm_kernel(
    q, k2_pages, tables, lengths, is_sparse, partial, num_pages, stride_table, num_splits, stride_n, stride_h, scale,
    HEADS: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    STRIDE: tl.constexpr, RATIO: tl.constexpr, BEFORE: tl.constexpr, SELECTED: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write maximum and sum of exponentials over ROWS windows of k2, into partial [S, G, splits, 2, SLOTS]."""
    PER_PAGE: tl.constexpr = RATIO // 4
    pdl_wait(PDL)
    sequence, group, split = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    length, _, is_selected = _row_of_decode(lengths, is_sparse, sequence, STRIDE * RATIO, SELECTED)
    end = length // (4 * STRIDE)
    begin = BEFORE + split * ROWS
    if (not is_selected) | (begin >= end):
        return
    dim = tl.arange(0, DIM)
    window = begin + tl.arange(0, ROWS)
    is_seen = window < end
    table = tables + sequence.to(tl.int64) * stride_table
    page = tl.load(table + window // PER_PAGE, mask=is_seen, other=0).to(tl.int64)
    at = ((group * num_pages + page) * PER_PAGE + window % PER_PAGE) * D
    rows = tl.multiple_of(k2_pages + at, 16)
    keys = tl.load(rows[:, None] + dim[None, :], mask=is_seen[:, None] & (dim < D)[None, :], other=0.0)
    query = _decode_query(q, sequence, group, stride_n, stride_h, HEADS, D, SLOTS, DIM)
    s = tl.dot(keys, tl.trans(query), input_precision=PRECISION)
    s = tl.where(is_seen[:, None], s, float("-inf"))
    peak = tl.max(s, 0) * scale
    total = tl.sum(tl.exp2(tl.fma(s, scale, -peak[None, :])), 0)
    out = partial + ((sequence * tl.num_programs(1) + group).to(tl.int64) * num_splits + split) * (2 * SLOTS)
    tl.store(out + tl.arange(0, SLOTS), peak)
    tl.store(out + SLOTS + tl.arange(0, SLOTS), total)


@triton.jit
def _join(partial, num_used, SLOTS: tl.constexpr, JOIN: tl.constexpr):
    """Return the norm of every head from the splits, in an order that does not depend on the table's width."""
    head = tl.arange(0, SLOTS)
    peak = tl.full([SLOTS], float("-inf"), tl.float32)
    total = tl.zeros([SLOTS], tl.float32)
    for begin in range(0, num_used, JOIN):
        split = begin + tl.arange(0, JOIN)
        at = partial + split[:, None] * (2 * SLOTS) + head[None, :]
        is_used = (split < num_used)[:, None] & (head >= 0)[None, :]
        peaks = tl.load(at, mask=is_used, other=float("-inf"))
        totals = tl.load(at + SLOTS, mask=is_used, other=0.0)
        new = tl.maximum(peak, tl.max(peaks, 0))
        total = total * tl.exp2(peak - new) + tl.sum(totals * tl.exp2(peaks - new[None, :]), 0)
        peak = new
    return peak + tl.log2(total)


@triton.jit(do_not_specialize=["num_pages", "stride_table", "num_splits", "width"])
def _decode_score_kernel(
    q, k1_pages, tables, lengths, is_sparse, partial, scores,
    num_pages, stride_table, num_splits, width, stride_n, stride_h, scale,
    HEADS: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, JOIN: tl.constexpr, STRIDE: tl.constexpr, RATIO: tl.constexpr, BEFORE: tl.constexpr,
    WINDOW: tl.constexpr, SELECTED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores [S, G, width] of the blocks of ROWS windows except the last, whose windows touch the one before it."""
    BLOCKS: tl.constexpr = ROWS // RATIO
    pdl_wait(PDL)
    sequence, group = tl.program_id(2), tl.program_id(1)
    length, own, is_selected = _row_of_decode(lengths, is_sparse, sequence, STRIDE * RATIO, SELECTED)
    first = tl.program_id(0) * (BLOCKS - 1)
    high = own - WINDOW
    if (not is_selected) | (first >= high):
        return
    dim = tl.arange(0, DIM)
    window = first * RATIO + tl.arange(0, ROWS)
    is_there = window < tl.minimum((high + 1) * RATIO, length // STRIDE)
    table = tables + sequence.to(tl.int64) * stride_table
    page = tl.load(table + window // RATIO, mask=is_there, other=0).to(tl.int64)
    at = ((group * num_pages + page) * RATIO + window % RATIO) * D
    rows = tl.multiple_of(k1_pages + at, 16)
    keys = tl.load(rows[:, None] + dim[None, :], mask=is_there[:, None] & (dim < D)[None, :], other=0.0)
    query = _decode_query(q, sequence, group, stride_n, stride_h, HEADS, D, SLOTS, DIM)
    row = (sequence * tl.num_programs(1) + group).to(tl.int64)
    num_seen = length // (4 * STRIDE) - BEFORE
    norm = _join(partial + row * num_splits * (2 * SLOTS), (num_seen + SPLIT - 1) // SPLIT, SLOTS, JOIN)
    norm = tl.where((tl.arange(0, SLOTS) < HEADS) & (num_seen > 0), norm, float("inf"))

    s = tl.dot(keys, tl.trans(query), input_precision=PRECISION)
    windows = tl.minimum(tl.sum(tl.exp2(tl.fma(s, scale, -norm[None, :])), 1), LARGEST)
    if MASKED:
        windows = tl.where((window >= BEFORE) & is_there, windows, 0.0)
    paged = tl.reshape(windows, [BLOCKS, RATIO])
    best = tl.max(paged, 1)
    reach = tl.max(tl.where((tl.arange(0, RATIO) < BEFORE)[None, :], paged, 0.0), 1)
    block = tl.arange(0, BLOCKS)
    score = tl.maximum(best, tl.gather(reach, tl.minimum(block + 1, BLOCKS - 1), 0))
    place = first + block
    tl.store(scores + row * width + place, score, mask=(block < BLOCKS - 1) & (place < high))


def launch_scores(
    q: Tensor, k1: Tensor, k2: Tensor, scores: Tensor, start: int, sparse: SparseConfig, scale: float,
    config: ScoreConfig,
) -> None:  # fmt: skip
    """q [n, H, D]; k1, k2 [G, rows, D], one sequence's rows in order → scores [>= n, G, width]."""
    (n, heads, dim), groups = q.shape, k1.shape[0]
    constants = score_constants(sparse, heads // groups, dim, q.dtype, config)
    _score_kernel[(-(-n // constants["TOKENS"]), groups)](
        q, k1, k2, scores, start, n, k1.shape[1], k2.shape[1], scores.shape[2], q.stride(0), q.stride(1),
        scale * LOG2_E, **constants, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def decode_scores(
    q: Tensor, pages_k1: Tensor, pages_k2: Tensor, tables: Tensor, lengths: Tensor, flags: Tensor | None,
    sparse: SparseConfig, scale: float, max_blocks: int,
) -> Tensor:  # fmt: skip
    """Block scores [S, G, max_blocks] of a decode step; rows whose flag is 0 are not computed."""
    (num_rows, _, dim), groups = q.shape, pages_k1.shape[0]
    assert tables.stride(1) == 1
    assert pages_k1.is_contiguous() and pages_k2.is_contiguous()  # noqa: PT018
    row_bytes = dim * q.element_size()
    rows = max(128 if row_bytes <= 256 else 64, 2 * sparse.block_size // sparse.kernel_stride)  # k1 windows per program
    num_splits = -(-max_blocks * (sparse.block_size // (4 * sparse.kernel_stride)) // SPLIT)
    shared = decode_constants(sparse, q.shape[1] // groups, dim, q.dtype)
    scores = torch.empty(num_rows, groups, max_blocks, dtype=torch.float32, device=q.device)
    partial = torch.empty(num_rows, groups, num_splits, 2, shared["SLOTS"], dtype=torch.float32, device=q.device)
    active = lengths if flags is None else flags  # a row of length 0 selects nothing anyway
    num_pages, factor, early = pages_k1.shape[1], scale * LOG2_E, pdl_options(q.device, num_rows, dependents_first=True)
    _decode_norm_kernel[(num_splits, groups, num_rows)](
        q, pages_k2, tables, lengths, active, partial,
        num_pages, tables.stride(0), num_splits, q.stride(0), q.stride(1), factor, ROWS=SPLIT, **shared, **early,
        num_warps=4 if row_bytes <= 256 else 8,
    )  # fmt: skip
    per_program = rows * sparse.kernel_stride // sparse.block_size - 1
    _decode_score_kernel[(-(-max_blocks // per_program), groups, num_rows)](
        q, pages_k1, tables, lengths, active, partial, scores,
        num_pages, tables.stride(0), num_splits, max_blocks, q.stride(0), q.stride(1), factor,
        ROWS=rows, SPLIT=SPLIT, JOIN=JOIN, WINDOW=sparse.num_window_blocks, MASKED=needs_mask(sparse, 1),
        **shared, **early, num_warps=4,
    )  # fmt: skip
    return scores


def needs_mask(sparse: SparseConfig, num_tokens: int) -> bool:
    """Return whether a tile of so many queries can score a block with a window that some queries do not see."""
    ratio, before = sparse.block_size // sparse.kernel_stride, sparse.kernel_size // sparse.kernel_stride - 1
    sees_windows = sparse.init_blocks >= 1 and ratio * (sparse.num_window_blocks - 1) >= before
    has_norm = sparse.num_selected * sparse.block_size - num_tokens >= 4 * sparse.kernel_size
    return not (sees_windows and has_norm)


def _geometry(sparse: SparseConfig, heads: int, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    assert supports(sparse, dim, dtype)
    return {
        "HEADS": heads,
        "D": dim,
        "DIM": max(16, triton.next_power_of_2(dim)),
        "STRIDE": sparse.kernel_stride,
        "RATIO": sparse.block_size // sparse.kernel_stride,
        "BEFORE": sparse.kernel_size // sparse.kernel_stride - 1,
        "SELECTED": sparse.num_selected,
        # fp32 as three tf32 products, exact to 1e-6: plain fp32 dots of this size spill registers
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
    }


def score_constants(
    sparse: SparseConfig, heads: int, dim: int, dtype: torch.dtype, config: ScoreConfig
) -> dict[str, Any]:
    slots = triton.next_power_of_2(heads)
    ratio = sparse.block_size // sparse.kernel_stride
    num_tokens = min(max(1, config.columns // slots, 16 // slots), 1 << (sparse.block_size.bit_length() - 1))
    return _geometry(sparse, heads, dim, dtype) | {
        "SLOTS": max(slots, 16 // num_tokens),
        "TOKENS": num_tokens,
        "ROWS": max(config.rows, 2 * ratio),
        "ROWS2": config.rows2,
        "WINDOW": sparse.num_window_blocks,
        "MASKED": needs_mask(sparse, num_tokens),
    }


def decode_constants(sparse: SparseConfig, heads: int, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    return _geometry(sparse, heads, dim, dtype) | {"SLOTS": max(16, triton.next_power_of_2(heads))}


def queries_at_once(q: Tensor, groups: int, width: int, sparse: SparseConfig, config: ScoreConfig) -> int:
    """Return how many queries are scored at a time: as many as fit, in whole waves of programs if one wave fits."""
    num_tokens = score_constants(sparse, q.shape[1] // groups, q.shape[2], q.dtype, config)["TOKENS"]
    limit = max(SCORE_BYTES // (4 * groups * width), num_tokens)
    wave = max(1, num_processors(q.device) * config.per_sm // groups) * num_tokens
    return limit // wave * wave if limit >= wave else limit // num_tokens * num_tokens


def score_config(element_size: int, dim: int, shared_memory: int) -> ScoreConfig:
    if element_size == 4 or dim > 128:
        columns = 64 if dim <= 64 else 32
        return ScoreConfig(rows=32, columns=columns, rows2=32, num_warps=4, num_stages=2, per_sm=2)
    if shared_memory < 200 << 10:  # no wgmma (before Hopper, consumer GPUs): two warps share the columns
        return ScoreConfig(rows=64, columns=128, rows2=64, num_warps=8, num_stages=2, per_sm=1)
    # measured on an H200: two programs with three stages stay fast up to a million tokens, three with two do not
    return ScoreConfig(rows=64, columns=128, rows2=64, num_warps=4, num_stages=3, per_sm=2)

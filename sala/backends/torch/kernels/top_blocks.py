"""The best blocks of every query on a GPU, from their scores; ties go to the lowest id, as in `ops/sparse.py`.

Scores are never negative, so their bits as integers are in the same order: a threshold is found bit by bit. Rows that
fit are held in registers. Longer rows are first cut down to a few candidates by the maxima of segments.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sala.backends.torch.kernels.launch import Config
from sala.backends.torch.kernels.pdl import pdl_options, pdl_wait
from sala.config import SparseConfig

CANDIDATES = 512  # blocks that may remain after the coarse cut of a long row; more are picked from the whole row


@triton.jit
def _bits(row, base, low, high, SIZE: tl.constexpr):
    """Scores of blocks base … as integers of the same order; -1 outside of low … high."""
    block = base + tl.arange(0, SIZE)
    is_free = (block >= low) & (block < high)
    value = tl.load(row + block, mask=is_free, other=0.0)
    return tl.where(is_free, value.to(tl.int32, bitcast=True), -1)


@triton.jit
def _count(held, row, threshold, low, high, SIZE: tl.constexpr, HELD: tl.constexpr):
    if HELD:
        return tl.sum((held >= threshold).to(tl.int32))
    count = 0
    for base in range(0, high, SIZE):
        count += tl.sum((_bits(row, base, low, high, SIZE) >= threshold).to(tl.int32))
    return count


@triton.jit
def _pick(
    held, ids, row, out, floor, top, low, high,
    PICK: tl.constexpr, SIZE: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Write the ids of the PICK largest, ascending; among equals the lowest ids. All lie in floor … top - 1."""
    while top - floor > 1:
        middle = floor + (top - floor) // 2
        count = _count(held, row, middle, low, high, SIZE, HELD)
        floor = tl.where(count >= PICK, middle, floor)
        top = tl.where(count > PICK, top, tl.where(count == PICK, middle + 1, middle))
    num_equal = PICK - _count(held, row, top, low, high, SIZE, HELD)  # how many of those at the floor are taken
    num_written, num_met = 0, 0
    for base in range(0, SIZE if HELD else high, SIZE):
        bits = held if HELD else _bits(row, base, low, high, SIZE)
        is_equal = (bits >= floor) & (bits < top)
        rank = num_met + tl.cumsum(is_equal.to(tl.int32), 0)
        is_taken = (bits >= top) | (is_equal & (rank <= num_equal))
        place = num_written + tl.cumsum(is_taken.to(tl.int32), 0) - 1
        tl.store(out + place, base + ids, mask=is_taken)
        num_met += tl.sum(is_equal.to(tl.int32))
        num_written += tl.sum(is_taken.to(tl.int32))


@triton.jit(do_not_specialize=["width"])
def _top_kernel(
    scores, positions, is_sparse, scratch, selected, width,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, INIT: tl.constexpr, WINDOW: tl.constexpr, SELECTED: tl.constexpr,
    PADDED: tl.constexpr, OFFSET: tl.constexpr, HAS_FLAGS: tl.constexpr,
    SIZE: tl.constexpr, SEGMENTS: tl.constexpr, CANDIDATES: tl.constexpr, HELD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of scores → its selected blocks, ascending. Scores of forced blocks are not read."""
    PICK: tl.constexpr = SELECTED - INIT - WINDOW - 1
    pdl_wait(PDL)
    number = tl.program_id(0)
    token = number // GROUPS
    position = tl.load(positions + token).to(tl.int32) - OFFSET
    is_active = position >= 0
    if HAS_FLAGS:
        is_active = is_active & (tl.load(is_sparse + token) != 0)
    own = tl.where(is_active, position // BLOCK, -1)
    out = selected + number.to(tl.int64) * SELECTED
    slot = tl.arange(0, PADDED)
    if own < SELECTED:
        tl.store(out + slot, tl.where(slot <= own, slot, -1), mask=slot < SELECTED)
        return
    recent = slot - (SELECTED - 1) + own
    is_forced = (slot < INIT) | (recent >= own - WINDOW)
    tl.store(out + slot, tl.where(slot < INIT, slot, recent), mask=is_forced & (slot < SELECTED))
    if PICK > 0:
        row = scores + number.to(tl.int64) * width
        high = own - WINDOW
        out += INIT
        held = _bits(row, 0, INIT, high, SIZE)
        ids = tl.arange(0, SIZE)
        if SEGMENTS == 0:
            top = tl.max(held, 0) + 1
            _pick(held, ids, row, out, top * 0, top, INIT, high, PICK, SIZE, True)
        else:
            # The PICK-th best of the segments' maxima, to 16 bits, is a lower bound of what can be selected.
            peaks = tl.max(tl.reshape(held, [SIZE // SEGMENTS, SEGMENTS]), 0)
            if not HELD:
                for base in range(SIZE, high, SIZE):
                    more = _bits(row, base, INIT, high, SIZE)
                    peaks = tl.maximum(peaks, tl.max(tl.reshape(more, [SIZE // SEGMENTS, SEGMENTS]), 0))
            top = tl.max(peaks, 0) + 1
            floor = 0
            for i in range(16):
                higher = floor | (1 << (30 - i))
                floor = tl.where(tl.sum((peaks >= higher).to(tl.int32)) >= PICK, higher, floor)
            count = 0
            spare = scratch + number.to(tl.int64) * CANDIDATES
            for base in range(0, SIZE if HELD else high, SIZE):
                bits = held if HELD else _bits(row, base, INIT, high, SIZE)
                remains = bits >= floor
                place = count + tl.cumsum(remains.to(tl.int32), 0) - 1
                tl.store(spare + place, base + ids, mask=remains & (place < CANDIDATES))
                count += tl.sum(remains.to(tl.int32))
            if count <= CANDIDATES:
                tl.debug_barrier()
                slot2 = tl.arange(0, CANDIDATES)
                candidate = tl.load(spare + slot2, mask=slot2 < count, other=0)
                value = tl.load(row + candidate, mask=slot2 < count, other=0.0)
                value = tl.where(slot2 < count, value.to(tl.int32, bitcast=True), -1)
                _pick(value, candidate, row, out, floor, top, INIT, high, PICK, CANDIDATES, True)
            else:
                _pick(held, ids, row, out, floor, top, INIT, high, PICK, SIZE, HELD)


def top_blocks(scores: Tensor, positions: Tensor, sparse: SparseConfig) -> Tensor:
    """scores [n, G, N] in fp32, none negative; positions [n] → selected [n, G, C] int32, ascending, -1 behind them.

    Scores of forced and of future blocks are not read.
    """
    n, groups, num_blocks = scores.shape
    if num_blocks <= sparse.num_selected:
        return every_block(positions, groups, num_blocks, sparse)
    selected = torch.empty(n, groups, sparse.num_selected, dtype=torch.int32, device=scores.device)
    launch_top(scores.contiguous(), selected, positions, None, 0, sparse)
    return selected


def every_block(positions: Tensor, groups: int, count: int, sparse: SparseConfig) -> Tensor:
    """Return all blocks up to the query's own, [n, G, count], where no more exist than may be selected."""
    own = (positions // sparse.block_size)[:, None, None]  # -1 for padding: integer division rounds down
    block = torch.arange(count, dtype=torch.int32, device=positions.device)
    return torch.where(block <= own, block, -1).int().expand(-1, groups, -1).contiguous()


def launch_top(
    scores: Tensor, selected: Tensor, positions: Tensor, flags: Tensor | None, offset: int, sparse: SparseConfig,
    config: Config | None = None,
) -> None:  # fmt: skip
    n, groups, count = selected.shape
    if not n:
        return
    width = scores.shape[2]
    config = config or top_config(width, n * groups)
    constants = top_constants(sparse, groups, count, width, config)
    scratch = selected
    if constants["SEGMENTS"]:
        scratch = torch.empty(n * groups, CANDIDATES, dtype=torch.int32, device=selected.device)
    _top_kernel[(n * groups,)](
        scores, positions, positions if flags is None else flags, scratch, selected, width,
        **constants, OFFSET=offset, HAS_FLAGS=flags is not None, **pdl_options(selected.device, n, True),
        **config.options,
    )  # fmt: skip


def top_constants(sparse: SparseConfig, groups: int, count: int, width: int, config: Config) -> dict[str, Any]:
    return {
        "GROUPS": groups,
        "BLOCK": sparse.block_size,
        "INIT": sparse.init_blocks,
        "WINDOW": sparse.num_window_blocks,
        "SELECTED": count,
        "PADDED": triton.next_power_of_2(count),
        "CANDIDATES": CANDIDATES,
        "HELD": width <= config.tile["SIZE"],
        **config.tile,
    }


def top_config(width: int, num_rows: int) -> Config:
    """Choose the blocks of a row loaded at a time and the segments of the coarse cut (0: the row is held whole).

    Short rows are held in registers, long ones streamed; a few rows get more warps, for latency.
    """
    size = max(triton.next_power_of_2(width), 256)
    if size <= 2048:
        return Config({"SIZE": size, "SEGMENTS": 0}, max(1, size // 512))
    if num_rows <= 256:
        return Config({"SIZE": 4096, "SEGMENTS": 1024}, 8)
    return Config({"SIZE": 2048, "SEGMENTS": 1024}, 4)

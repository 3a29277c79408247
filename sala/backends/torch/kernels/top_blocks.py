"""The best blocks of every query on a GPU, from their scores; ties go to the lowest id, as in `ops/sparse.py`.

Scores are never negative, so their bits as integers are in the same order: a threshold is found bit by bit. Rows that
fit are held in registers. Longer rows are first cut down to a few candidates: by the maxima of segments where there are
enough rows to fill a GPU, else by a kernel of its own, in which every program finds the best of a slice of a row. Both
keep the order of ids. Where more blocks are tied than the candidates show, they are taken from the whole row.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sala.backends.rows import TIE_ULPS
from sala.backends.torch.kernels.launch import Config
from sala.backends.torch.kernels.pdl import MAX_ROWS, pdl_options, pdl_wait
from sala.config import SparseConfig

MIN_SIZE = 256  # scores loaded at a time
MIN_SLICED = 4096  # blocks of a row; longer rows are cut into slices, unless there are many of them
MIN_SLICE = 512  # blocks of a slice
MAX_SLICED_ROWS = 256
LARGEST = tl.constexpr((1 << 31) - 1)
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
def _last_score(held, row, floor, top, low, high, PICK: tl.constexpr, SIZE: tl.constexpr, HELD: tl.constexpr):
    """Return the PICK-th largest, or the smallest if fewer exist. All lie in floor … top - 1."""
    while top - floor > 1:
        middle = floor + (top - floor) // 2
        count = _count(held, row, middle, low, high, SIZE, HELD)
        floor = tl.where(count >= PICK, middle, floor)
        top = tl.where(count > PICK, top, tl.where(count == PICK, middle + 1, middle))
    if HELD:
        return tl.min(tl.where(held >= floor, held, LARGEST), 0)
    least = floor * 0 + LARGEST
    for base in range(0, high, SIZE):
        bits = _bits(row, base, low, high, SIZE)
        least = tl.minimum(least, tl.min(tl.where(bits >= floor, bits, LARGEST), 0))
    return least


@triton.jit
def _write(
    held, ids, row, out, last, low, high,
    PICK: tl.constexpr, TIE: tl.constexpr, SIZE: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Write the ids of the PICK largest, ascending; of those within TIE of `last`, the PICK-th, the lowest ids.

    Return how many were written: all that exist, if there are fewer than PICK.
    """
    floor, top = tl.maximum(last - TIE, 0), last + (TIE + 1)
    num_tied = PICK - _count(held, row, top, low, high, SIZE, HELD)  # how many of the tied are taken
    num_written, num_met = 0, 0
    for base in range(0, SIZE if HELD else high, SIZE):
        bits = held if HELD else _bits(row, base, low, high, SIZE)
        is_tied = (bits >= floor) & (bits < top)
        rank = num_met + tl.cumsum(is_tied.to(tl.int32), 0)
        is_taken = (bits >= top) | (is_tied & (rank <= num_tied))
        place = num_written + tl.cumsum(is_taken.to(tl.int32), 0) - 1
        tl.store(out + place, base + ids, mask=is_taken)
        num_met += tl.sum(is_tied.to(tl.int32))
        num_written += tl.sum(is_taken.to(tl.int32))
    return num_written


@triton.jit
def _own_block(
    positions, is_sparse, token, BLOCK: tl.constexpr, OFFSET: tl.constexpr, HAS_FLAGS: tl.constexpr
):  # fmt: skip
    """Return the block of a query, -1 for padding and for rows whose flag is 0."""
    position = tl.load(positions + token).to(tl.int32) - OFFSET
    is_active = position >= 0
    if HAS_FLAGS:
        is_active = is_active & (tl.load(is_sparse + token) != 0)
    return tl.where(is_active, position // BLOCK, -1)


@triton.jit(do_not_specialize=["width"])
def _slice_kernel(
    scores, positions, is_sparse, candidates, width,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, INIT: tl.constexpr, WINDOW: tl.constexpr, SELECTED: tl.constexpr,
    OFFSET: tl.constexpr, HAS_FLAGS: tl.constexpr, SLICE: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find the best blocks of a slice of a row: candidates [rows, slices, SLOTS], ascending, -1 behind them.

    They are as many as may be selected in all; what is tied is left to `_top_kernel`. Slices in which no block is free
    are not written.
    """
    PICK: tl.constexpr = SELECTED - INIT - WINDOW - 1
    pdl_wait(PDL)
    number = tl.program_id(1)
    own = _own_block(positions, is_sparse, number // GROUPS, BLOCK, OFFSET, HAS_FLAGS)
    high = own - WINDOW
    first = tl.program_id(0) * SLICE
    if (own < SELECTED) | (first >= high):
        return
    row = scores + number.to(tl.int64) * width
    out = candidates + (number.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * SLOTS
    held = _bits(row, first, INIT, high, SLICE)
    top = tl.max(held, 0) + 1
    last = _last_score(held, row, top * 0, top, INIT, high, PICK, SLICE, True)
    count = _write(held, first + tl.arange(0, SLICE), row, out, last, INIT, high, PICK, 0, SLICE, True)
    slot = tl.arange(0, SLOTS)
    tl.store(out + slot, slot * 0 - 1, mask=slot >= count)


@triton.jit(do_not_specialize=["width"])
def _top_kernel(
    scores, positions, is_sparse, scratch, selected, width,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, INIT: tl.constexpr, WINDOW: tl.constexpr, SELECTED: tl.constexpr,
    PADDED: tl.constexpr, OFFSET: tl.constexpr, HAS_FLAGS: tl.constexpr,
    SIZE: tl.constexpr, SEGMENTS: tl.constexpr, CANDIDATES: tl.constexpr, HELD: tl.constexpr, SLICE: tl.constexpr,
    SLOTS: tl.constexpr, TIE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of scores → its selected blocks, ascending. Scores of forced blocks are not read.

    If rows are cut into slices, the candidates of `_slice_kernel` are in scratch, and SIZE holds all of them.
    """
    PICK: tl.constexpr = SELECTED - INIT - WINDOW - 1
    pdl_wait(PDL)
    number = tl.program_id(0)
    own = _own_block(positions, is_sparse, number // GROUPS, BLOCK, OFFSET, HAS_FLAGS)
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
        ids = tl.arange(0, SIZE)
        if SLICE > 0:
            spare = scratch + number.to(tl.int64) * ((width + SLICE - 1) // SLICE * SLOTS)
            candidate = tl.load(spare + ids, mask=ids < (high + SLICE - 1) // SLICE * SLOTS, other=-1)
            value = tl.load(row + candidate, mask=candidate >= 0, other=0.0).to(tl.int32, bitcast=True)
            value = tl.where(candidate >= 0, value, -1)
            top = tl.max(value, 0) + 1
            last = _last_score(value, row, top * 0, top, INIT, high, PICK, SIZE, True)
            is_wanted = (value >= tl.maximum(last - TIE, 0)).to(tl.int32)
            # A slice all of whose candidates are wanted may hold more that are tied, with lower ids than another's.
            if tl.max(tl.sum(tl.reshape(is_wanted, [SIZE // SLOTS, SLOTS]), 1), 0) < PICK:
                _write(value, candidate, row, out, last, INIT, high, PICK, TIE, SIZE, True)
            else:
                _write(value, ids, row, out, last, INIT, high, PICK, TIE, SIZE, False)
        elif SEGMENTS == 0:
            held = _bits(row, 0, INIT, high, SIZE)
            top = tl.max(held, 0) + 1
            last = _last_score(held, row, top * 0, top, INIT, high, PICK, SIZE, True)
            _write(held, ids, row, out, last, INIT, high, PICK, TIE, SIZE, True)
        else:
            held = _bits(row, 0, INIT, high, SIZE)
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
            least = tl.maximum(floor - TIE, 0)
            count = 0
            spare = scratch + number.to(tl.int64) * CANDIDATES
            for base in range(0, SIZE if HELD else high, SIZE):
                bits = held if HELD else _bits(row, base, INIT, high, SIZE)
                remains = bits >= least
                place = count + tl.cumsum(remains.to(tl.int32), 0) - 1
                tl.store(spare + place, base + ids, mask=remains & (place < CANDIDATES))
                count += tl.sum(remains.to(tl.int32))
            if count <= CANDIDATES:
                tl.debug_barrier()
                slot2 = tl.arange(0, CANDIDATES)
                candidate = tl.load(spare + slot2, mask=slot2 < count, other=0)
                value = tl.load(row + candidate, mask=slot2 < count, other=0.0)
                value = tl.where(slot2 < count, value.to(tl.int32, bitcast=True), -1)
                last = _last_score(value, row, floor, top, INIT, high, PICK, CANDIDATES, True)
                _write(value, candidate, row, out, last, INIT, high, PICK, TIE, CANDIDATES, True)
            else:
                last = _last_score(held, row, floor, top, INIT, high, PICK, SIZE, HELD)
                _write(held, ids, row, out, last, INIT, high, PICK, TIE, SIZE, HELD)


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
    """Select from scores [n, G, width], see `top_blocks`; rows whose flag is 0 select nothing, flags may be None.

    The query of a row stands at positions - offset.
    """
    n, groups, count = selected.shape
    if not n:
        return
    width, num_rows = scores.shape[2], n * groups
    config = config or top_config(width, num_rows, sparse)
    constants = top_constants(sparse, groups, count, width, config)
    shared = {"OFFSET": offset, "HAS_FLAGS": flags is not None, **pdl_options(selected.device, n, True)}
    tensors = (scores, positions, positions if flags is None else flags)
    scratch, size = selected, constants["SLICE"]
    if size:
        slices = triton.cdiv(width, size)
        scratch = torch.empty(num_rows, slices, constants["SLOTS"], dtype=torch.int32, device=selected.device)
        own = {name: constants[name] for name in _slice_kernel.arg_names if name in constants}
        _slice_kernel[slices, num_rows](*tensors, scratch, width, **own, **shared, num_warps=_num_warps(size))
    elif constants["SEGMENTS"]:
        scratch = torch.empty(num_rows, CANDIDATES, dtype=torch.int32, device=selected.device)
    _top_kernel[(num_rows,)](*tensors, scratch, selected, width, **constants, **shared, **config.options)


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
        "SLICE": 0,
        "SLOTS": _num_slots(sparse),
        "TIE": TIE_ULPS,
        **config.tile,
    }


def top_config(width: int, num_rows: int, sparse: SparseConfig) -> Config:
    """Choose the blocks of a row loaded at a time and the segments of the coarse cut (0: the row is held whole).

    Short rows are held in registers, long ones streamed, or cut into slices if there are few: then more programs than
    rows run at once. Slices grow with the width, so that the best of all of them are about as many as a slice has.
    """
    size = max(triton.next_power_of_2(width), MIN_SIZE)
    if size <= 2048:
        return Config({"SIZE": size, "SEGMENTS": 0}, _num_warps(size))
    if num_rows > MAX_SLICED_ROWS:
        return Config({"SIZE": 2048, "SEGMENTS": 1024}, 4)
    if size <= MIN_SLICED:
        return Config({"SIZE": size, "SEGMENTS": 1024}, 8)
    part = MIN_SLICE
    while (size := triton.next_power_of_2(triton.cdiv(width, part) * _num_slots(sparse))) > 2 * part:
        part *= 2
    return Config({"SIZE": size, "SEGMENTS": 0, "SLICE": part}, _num_warps(size))


def distinct_sizes(sparse: SparseConfig, groups: int, max_blocks: int) -> list[tuple[int, int]]:
    """Return numbers of queries and widths, up to `max_blocks`, that launch every variant of the kernels there is.

    What `top_config` chooses, and how a kernel is launched, changes at multiples of MIN_SIZE blocks only, and where
    there are more than a few queries.
    """
    found: dict[str, tuple[int, int]] = {}
    for n in (1, MAX_SLICED_ROWS // groups + 1, MAX_ROWS + 1):
        for width in range(MIN_SIZE, max_blocks + MIN_SIZE, MIN_SIZE):
            config = top_config(width, n * groups, sparse)
            constants = top_constants(sparse, groups, sparse.num_selected, width, config)
            found.setdefault(str((n <= MAX_ROWS, constants, config)), (n, width))
    return list(found.values())


def _num_slots(sparse: SparseConfig) -> int:
    """Return the candidates of a slice: as many as are selected, padded to a power of two."""
    num_free = sparse.num_selected - sparse.init_blocks - sparse.num_window_blocks - 1
    return triton.next_power_of_2(max(num_free, 1))


def _num_warps(size: int) -> int:
    return max(1, size // 512)

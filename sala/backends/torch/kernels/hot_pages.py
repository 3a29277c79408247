# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Bring the blocks that a decode step attends to from host memory into the hot pool, without the host.

Two launches: `_place_kernel` gives frames to blocks by the rule of `ops/hot_pages.py`, a program per set, so that
programs share nothing; `_fetch_kernel` copies what has a new frame, a program per block, so that enough reads are in
flight on the bus. `_stage_kernel` copies the blocks of whole sequences, for prefill.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sala.backends.torch.hot_pages import HotPages
from sala.backends.torch.kernels.attention import exponent_pairs
from sala.backends.torch.kernels.pdl import pdl_options, pdl_wait
from sala.backends.torch.kernels.spans import COUNT, START

CHUNK = 1024  # blocks looked at together
PIECE = 2048  # words of 4 bytes copied together
UNCLAIMED: tl.constexpr = tl.constexpr((1 << 31) - 1)
OLDEST: tl.constexpr = tl.constexpr((1 << 31) - 1)  # the age of a frame without a page
WHOLE, PAST, OWN = 0, 1, 2  # parts of a sequence: all of it; before this pass; what this pass writes


@triton.jit
def _wanted_page(
    index, total, group, tables_ptr, row_of_ptr, lengths_ptr, is_sparse_ptr, selected_ptr,
    table_size, num_selected, max_dense, width, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the pages that rows attend to as their blocks number `index`, -1 for none."""
    is_in = index < total
    row, at = index // width, index % width
    length = tl.load(lengths_ptr + row, mask=is_in, other=0).to(tl.int32)
    is_sparse = tl.load(is_sparse_ptr + row, mask=is_in, other=0) != 0
    chosen = selected_ptr + (row.to(tl.int64) * GROUPS + group) * num_selected + at
    selected = tl.load(chosen, mask=is_in & is_sparse & (at < num_selected), other=-1)
    block = tl.where(is_sparse, selected, tl.where(at < max_dense, at, -1))
    is_wanted = is_in & (block >= 0) & (block * BLOCK < length)
    table_row = row
    if row_of_ptr is not None:
        table_row = tl.load(row_of_ptr + row, mask=is_in, other=0)
    page = tl.load(tables_ptr + table_row.to(tl.int64) * table_size + block, mask=is_wanted, other=0).to(tl.int32)
    return tl.where(is_wanted, page, -1)


@triton.jit(do_not_specialize=["num_rows", "num_pages", "table_size", "num_selected", "max_dense", "width", "num_sets"])
def _place_kernel(
    tables_ptr, row_of_ptr, lengths_ptr, is_sparse_ptr, selected_ptr,
    frames_ptr, pages_ptr, stamps_ptr, claims_ptr, clock_ptr, order_ptr, fetched_ptr,
    num_rows, num_pages, table_size, num_selected, max_dense, width, num_sets,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One set of one group: mark the frames in use, then give frames to the blocks that have none.

    `fetched` [G, rows * width] gets the new frame of a block, -1 if nothing is to be copied. Of rows that attend to the
    same block, the first one claims it.
    """
    pdl_wait(PDL)
    own, group = tl.program_id(0), tl.program_id(1)
    total = num_rows * width
    now = tl.load(clock_ptr)
    frames, claims = frames_ptr + group.to(tl.int64) * num_pages, claims_ptr + group.to(tl.int64) * num_pages
    first = own * WAYS
    held = (group * num_sets + own) * WAYS  # of this set, in what has an entry per frame
    pages, stamps, order = pages_ptr + held, stamps_ptr + held, order_ptr + held
    fetched = fetched_ptr + group.to(tl.int64) * total
    num_missing = 0
    for begin in range(0, total, CHUNK):
        index = begin + tl.arange(0, CHUNK)
        page = _wanted_page(
            index, total, group, tables_ptr, row_of_ptr, lengths_ptr, is_sparse_ptr, selected_ptr,
            table_size, num_selected, max_dense, width, GROUPS, BLOCK,
        )  # fmt: skip
        is_own = tl.where(page < 0, own == 0, page % num_sets == own)
        tl.store(fetched + index, index * 0 - 1, mask=is_own & (index < total))
        is_own &= page >= 0
        frame = tl.load(frames + page, mask=is_own, other=-1)
        tl.store(stamps + frame - first, index * 0 + now, mask=is_own & (frame >= 0))
        is_missing = is_own & (frame < 0)
        tl.atomic_min(claims + page, index, mask=is_missing)
        num_missing += tl.sum(is_missing.to(tl.int32))
    if num_missing > 0:
        tl.debug_barrier()
        way = tl.arange(0, WAYS)
        age = tl.where(tl.load(pages + way) < 0, OLDEST, now - tl.load(stamps + way))
        is_before = (age[None, :] > age[:, None]) | ((age[None, :] == age[:, None]) & (way[None, :] < way[:, None]))
        num_free = tl.sum((age != 0).to(tl.int32))
        tl.store(order + tl.sum(is_before.to(tl.int32), 1), way)
        tl.debug_barrier()
        num_taken = 0
        for begin in range(0, total, CHUNK):
            index = begin + tl.arange(0, CHUNK)
            page = _wanted_page(
                index, total, group, tables_ptr, row_of_ptr, lengths_ptr, is_sparse_ptr, selected_ptr,
                table_size, num_selected, max_dense, width, GROUPS, BLOCK,
            )  # fmt: skip
            is_own = (page >= 0) & (page % num_sets == own)
            is_missing = is_own & (tl.load(frames + page, mask=is_own, other=0) < 0)
            is_first = is_missing & (tl.load(claims + page, mask=is_missing, other=-1) == index)
            rank = num_taken + tl.cumsum(is_first.to(tl.int32), 0) - 1
            gets = is_first & (rank < num_free)
            new = tl.load(order + rank, mask=gets, other=0)
            before = tl.load(pages + new, mask=gets, other=-1)
            tl.debug_barrier()  # all have read what is written now
            tl.store(claims + page, index * 0 + UNCLAIMED, mask=is_first)
            tl.store(frames + before, index * 0 - 1, mask=gets & (before >= 0))
            tl.store(frames + page, first + new, mask=gets)
            tl.store(pages + new, page, mask=gets)
            tl.store(stamps + new, index * 0 + now, mask=gets)
            tl.store(fetched + index, first + new, mask=gets)
            num_taken += tl.sum(is_first.to(tl.int32))
            tl.debug_barrier()  # later rows may attend to the same blocks


@triton.jit
def _copy_block(
    source, target, exponents_source, exponents_target, WORDS: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy a block of WORDS words of 4 bytes, PIECE at a time, and its exponents if there are any."""
    source_k, source_v = source
    target_k, target_v = target
    word = tl.arange(0, PIECE)
    for begin in tl.static_range(0, WORDS, PIECE):
        k, v = tl.load(source_k + begin + word), tl.load(source_v + begin + word)
        tl.store(target_k + begin + word, k)
        tl.store(target_v + begin + word, v)
    if exponents_source is not None:
        row = tl.arange(0, BLOCK)
        tl.store(exponents_target + row, tl.load(exponents_source + row))


@triton.jit(do_not_specialize=["num_pages", "num_frames", "total"])
def _fetch_kernel(
    k_ptr, v_ptr, exponents_ptr, hot_k_ptr, hot_v_ptr, hot_exponents_ptr, pages_ptr, fetched_ptr,
    num_pages, num_frames, total, WORDS: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy one block into its new frame, if it has one."""
    pdl_wait(PDL)
    group = tl.program_id(1).to(tl.int64)
    frame = tl.load(fetched_ptr + group * total + tl.program_id(0))
    if frame < 0:
        return
    target = group * num_frames + frame
    source = group * num_pages + tl.load(pages_ptr + target)
    from_exponents, to_exponents = None, None
    if exponents_ptr is not None:
        from_exponents, to_exponents = exponents_ptr + source * BLOCK, hot_exponents_ptr + target * BLOCK
    _copy_block(
        (k_ptr + source * WORDS, v_ptr + source * WORDS), (hot_k_ptr + target * WORDS, hot_v_ptr + target * WORDS),
        from_exponents, to_exponents, WORDS, PIECE, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pages", "num_frames", "num_spans", "table_size"])
def _stage_kernel(
    k_ptr, v_ptr, exponents_ptr, to_k_ptr, to_v_ptr, to_exponents_ptr, tables_ptr, spans_ptr, first_frames_ptr,
    num_pages, num_frames, num_spans, table_size,
    WORDS: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
    START: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Copy one block of one span to its frame: those before its first row, those with its rows, or all."""
    block, span, group = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start, count = tl.load(spans_ptr + START * num_spans + span), tl.load(spans_ptr + COUNT * num_spans + span)
    is_here = (count > 0) & (block * BLOCK < start + count)
    if PART == 1:
        is_here &= block * BLOCK < start
    if PART == 2:
        is_here &= block >= start // BLOCK
    if is_here:
        source = group * num_pages + tl.load(tables_ptr + span.to(tl.int64) * table_size + block)
        target = group * num_frames + tl.load(first_frames_ptr + span) + block
        from_exponents, to_exponents = None, None
        if exponents_ptr is not None:
            from_exponents, to_exponents = exponents_ptr + source * BLOCK, to_exponents_ptr + target * BLOCK
        _copy_block(
            (k_ptr + source * WORDS, v_ptr + source * WORDS), (to_k_ptr + target * WORDS, to_v_ptr + target * WORDS),
            from_exponents, to_exponents, WORDS, PIECE, BLOCK,
        )  # fmt: skip


def fetch(
    hot: HotPages, k: Tensor, v: Tensor, exponents: Tensor | None, tables: Tensor, lengths: Tensor, is_sparse: Tensor,
    selected: Tensor, max_dense: int, row_of: Tensor | None = None,
) -> None:  # fmt: skip
    """As `ops.hot_pages.fetch`. Nothing is fetched if a row may attend to more blocks than there are frames."""
    num_rows, groups, num_selected = selected.shape
    width, (_, num_pages, block, _) = max(num_selected, max_dense), k.shape
    if width > hot.num_frames or not num_rows:
        return
    assert tables.stride(1) == 1
    lengths, is_sparse, selected = lengths.contiguous(), is_sparse.contiguous(), selected.contiguous()
    total = num_rows * width
    fetched = torch.empty(groups, total, dtype=torch.int32, device=selected.device)
    pdl = pdl_options(selected.device, num_rows, dependents_first=True)
    _place_kernel[(hot.num_sets, groups)](
        tables, row_of, lengths, is_sparse, selected, hot.frames, hot.pages, hot.stamps, hot.claims, hot.clock,
        hot.order, fetched, num_rows, num_pages, tables.stride(0), num_selected, max_dense, width, hot.num_sets,
        GROUPS=groups, BLOCK=block, WAYS=hot.ways, CHUNK=CHUNK, **pdl, num_warps=4,
    )  # fmt: skip
    _fetch_kernel[(total, groups)](
        *_words(k, v, exponents), *_words(hot.k, hot.v, hot.exponents), hot.pages, fetched,
        num_pages, hot.num_frames, total, **copy_constants(k), **pdl, num_warps=4,
    )  # fmt: skip


def stage(
    k: Tensor, v: Tensor, exponents: Tensor | None, to_k: Tensor, to_v: Tensor, to_exponents: Tensor | None,
    tables: Tensor, spans: Tensor, first_frames: Tensor, part: int = WHOLE,
) -> None:  # fmt: skip
    """Copy a part of the pages of `spans` (see `spans.py`) to frames: block b of span s to first_frames[s] + b.

    k, v [G, P, B, D], exponents [G, P, B, 2] of FP8 pages; to_k, to_v, to_exponents the same with F frames for P;
    tables [S, N] int32; first_frames [S] int32.
    """
    groups, num_pages = k.shape[:2]
    assert tables.stride(1) == 1
    _stage_kernel[(tables.shape[1], spans.shape[1], groups)](
        *_words(k, v, exponents), *_words(to_k, to_v, to_exponents), tables, spans, first_frames,
        num_pages, to_k.shape[1], spans.shape[1], tables.stride(0),
        **copy_constants(k), PART=part, START=START.value, COUNT=COUNT.value, num_warps=4,
    )  # fmt: skip


def hot_arguments(hot: HotPages | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, int]:
    """Return what kernels know of the hot pool: frames of pages, keys, values and exponents of frames, their number."""
    if hot is None:
        return None, None, None, None, 0
    return hot.frames, hot.k, hot.v, exponent_pairs(hot.k, hot.exponents), hot.num_frames


def copy_constants(k: Tensor) -> dict[str, int]:
    """Return the constants of kernels that copy blocks of pages like k."""
    words = k.shape[2] * k.shape[3] * k.element_size() // 4
    return {"WORDS": words, "PIECE": min(words, PIECE), "BLOCK": k.shape[2]}


def _words(k: Tensor, v: Tensor, exponents: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    return k.view(torch.int32), v.view(torch.int32), exponent_pairs(k, exponents)

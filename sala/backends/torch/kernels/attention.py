# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Prefill attention over paged keys and values: over selected blocks, or over all blocks.

A tile is a few neighbouring tokens times the heads of a group, so that a block is read once for all of them and the
products are tall enough for the tensor cores. Neighbours select much the same blocks: a tile walks the union of its
tokens' blocks, with one bit per token for the tokens that selected a block. Blocks that a token did not select add
exactly zero to it, so its result does not depend on its neighbours. Dense attention takes the rows of many spans in one
launch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sala.backends.torch.kernels.launch import Config, aligned_rows, shared_memory
from sala.backends.torch.kernels.spans import DENSE, FIRST, MAX_SPANS, START

LOG2_E = 1.4426950408889634
UNION_BYTES = 256 << 20  # for the lists of blocks; longer inputs are split into several launches
UNION_PROGRAMS = 1024
UNION_CHUNK = 1024
UNION_SELECTED = 128  # ids loaded at a time, at least: one kernel also where few blocks exist yet


@triton.jit(do_not_specialize=["num_tokens", "num_selected", "start", "num_tiles", "max_entries", "row_size"])
def union_kernel(
    selected_ptr, table_ptr, entries_ptr, counts_ptr, seen_ptr,
    num_tokens, num_selected, start, num_tiles, max_entries, row_size,
    GROUPS: tl.constexpr, SELECTED: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the blocks of each tile, ascending, as page * 256 + a bit per token; the own blocks of the tile come last.

    `seen` is a row of zeros per program, a byte per block; the kernel leaves it zero.
    """
    program, step = tl.program_id(0), tl.num_programs(0)
    seen = seen_ptr + program.to(tl.int64) * row_size
    column = tl.arange(0, SELECTED)
    for turn in range(tl.cdiv(num_tiles * GROUPS - program, step)):
        work = program + turn * step
        tile, group = work // GROUPS, work % GROUPS
        for t in tl.static_range(TOKENS):
            index = tile * TOKENS + t
            place = (index.to(tl.int64) * GROUPS + group) * num_selected
            ids = tl.load(selected_ptr + place + column, mask=(column < num_selected) & (index < num_tokens), other=-1)
            is_valid = (ids >= 0) & (ids <= (start + index) // BLOCK)
            bits = tl.load(seen + ids, mask=is_valid, other=0).to(tl.int32) | (1 << t)
            tl.store(seen + ids, bits.to(tl.uint8), mask=is_valid)
            tl.debug_barrier()  # the next token may write the same bytes
        first = start + tile * TOKENS
        last = tl.minimum(first + TOKENS, start + num_tokens) - 1
        num_full, num_blocks = first // BLOCK, last // BLOCK + 1
        entries = entries_ptr + work.to(tl.int64) * max_entries
        count = 0
        for begin in range(0, num_blocks, CHUNK):
            block = begin + tl.arange(0, CHUNK)
            mask = tl.load(seen + block, mask=block < num_blocks, other=0).to(tl.int32)
            tl.store(seen + block, tl.zeros([CHUNK], tl.uint8), mask=block < num_blocks)
            is_in = ((mask != 0) | (block >= num_full)) & (block < num_blocks)
            rank = tl.cumsum(is_in.to(tl.int32), 0)
            page = tl.load(table_ptr + block, mask=is_in, other=0).to(tl.int32)
            tl.store(entries + count + rank - 1, page * 256 + mask, mask=is_in)
            count += tl.sum(is_in.to(tl.int32), 0)
        tl.store(counts_ptr + work, count - (num_blocks - num_full))
        tl.debug_barrier()


@triton.jit
def power_of_two(exponents):
    """Return 2^(exponent - 127) in fp32, 0 for an exponent of 0; int32 exponents."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def from_page(x, dtype: tl.constexpr):
    """Convert keys or values of a page to the dtype of the queries; exact. FP8 goes through fp32, as Ada demands."""
    return x.to(dtype) if x.dtype.primitive_bitwidth > 8 else x.to(tl.float32).to(dtype)


@triton.jit
def absorb(q, k, v, exponents, is_seen, is_on, acc, top, total, scale, PRECISION: tl.constexpr):
    """Online softmax in base 2: add keys k and values v [B, D] of a page to acc [M, D], top [M] and total [M].

    Keys that are not seen (is_seen [M, B] or None) do not count. Rows that are off stay unchanged bit for bit: their
    weights are exp2(-inf). Exponents [B] of FP8 pages, or None, multiply scores and weights instead of keys and values,
    which are many more numbers; that is exact. Weights in fp16 would underflow: there values are 2^-7 of themselves.
    """
    SHIFT: tl.constexpr = 7 if exponents is not None and q.dtype == tl.float16 else 0
    k, v = from_page(k, q.dtype), from_page(v, q.dtype)
    if SHIFT > 0:
        v *= 2.0**-SHIFT
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if exponents is not None:
        scores *= power_of_two(exponents & 255)[None, :]
    if is_seen is not None:
        scores = tl.where(is_seen, scores, float("-inf"))
    new_top = tl.where(is_on, tl.maximum(top, tl.max(scores, 1) * scale), top)
    weights = tl.exp2(scores * scale - tl.where(is_on, new_top, float("inf"))[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    if exponents is not None:
        weights *= power_of_two((exponents >> 8 & 255) + SHIFT)[None, :]
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def _find_tile(spans_ptr, num_spans, tile, TOKENS: tl.constexpr, SPANS: tl.constexpr):
    """Return the span of a tile, if the dense rows of every span are cut into tiles, and the tile's number in it.

    Past the last tile, the span is `num_spans`.
    """
    span = tl.arange(0, SPANS)
    counts = tl.load(spans_ptr + DENSE * num_spans + span, mask=span < num_spans, other=0)
    ends = tl.cumsum((counts + TOKENS - 1) // TOKENS, 0)
    is_before = (ends <= tile) & (span < num_spans)
    return tl.sum(is_before.to(tl.int32), 0), tile - tl.max(tl.where(is_before, ends, 0), 0)


@triton.jit(do_not_specialize=["num_tokens", "start", "num_spans", "num_pages", "max_entries", "q_stride"])
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, exponents_ptr, entries_ptr, counts_ptr, spans_ptr, out_ptr,
    num_tokens, start, num_spans, num_pages, max_entries, q_stride, scale,
    GROUPS: tl.constexpr, SHARED: tl.constexpr, SHARED_PADDED: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, DIM: tl.constexpr, IS_SPARSE: tl.constexpr, SPANS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of TOKENS x SHARED heads. Blocks before its own are whole; its own ones are masked and come last.

    The entries are those of the union; in dense attention they are the table itself. With SPANS there are several
    spans, each with a table of `max_entries`, and `spans_ptr` instead of `num_tokens` and `start`.
    """
    tile, group = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # the longest first
    entries = entries_ptr
    if SPANS:
        span, tile = _find_tile(spans_ptr, num_spans, tile, TOKENS, SPANS)
        if span == num_spans:
            return
        num_tokens = tl.load(spans_ptr + DENSE * num_spans + span)
        start = tl.load(spans_ptr + START * num_spans + span)
        row_0 = tl.load(spans_ptr + FIRST * num_spans + span).to(tl.int64)
        q_ptr += row_0 * q_stride
        out_ptr += row_0 * (GROUPS * SHARED * DIM)
        entries += span.to(tl.int64) * max_entries
    row = tl.arange(0, TOKENS * SHARED_PADDED)
    token, head = row // SHARED_PADDED, row % SHARED_PADDED
    index, column, offset = tile * TOKENS + token, tl.arange(0, DIM), tl.arange(0, BLOCK)
    is_row = (index < num_tokens) & (head < SHARED)
    head += group * SHARED
    q_rows = tl.multiple_of(q_ptr + index.to(tl.int64) * q_stride + head * DIM, 16)
    q = tl.load(q_rows[:, None] + column[None], mask=is_row[:, None], other=0.0)
    first = start + tile * TOKENS
    last = tl.minimum(first + TOKENS, start + num_tokens) - 1
    own, end = first // BLOCK, last // BLOCK + 1

    num_full = own
    if IS_SPARSE:
        work = tile * GROUPS + group
        entries += work.to(tl.int64) * max_entries
        num_full = tl.load(counts_ptr + work)
    first_page = group.to(tl.int64) * num_pages
    acc = tl.zeros([TOKENS * SHARED_PADDED, DIM], tl.float32)
    top = tl.full([TOKENS * SHARED_PADDED], -1e30, tl.float32)  # finite: the first block of a row may come late
    total = tl.zeros([TOKENS * SHARED_PADDED], tl.float32)

    # The list is read one step ahead; the own blocks follow in it, so it never ends too early.
    entry = tl.load(entries)
    for i in range(1, num_full + 1):
        page, is_on = entry, is_row
        if IS_SPARSE:
            page, is_on = entry >> 8, (((entry & 255) >> token) & 1) != 0
        place = (first_page + page) * (BLOCK * DIM) + offset * DIM
        entry = tl.load(entries + i)
        exponents = None
        if exponents_ptr is not None:
            exponents = tl.load(exponents_ptr + (first_page + page) * BLOCK + offset)
        k = tl.load(tl.multiple_of(k_ptr + place, 16)[:, None] + column[None])
        v = tl.load(tl.multiple_of(v_ptr + place, 16)[:, None] + column[None])
        acc, top, total = absorb(q, k, v, exponents, None, is_on, acc, top, total, scale, PRECISION)

    for block in tl.range(own, end, num_stages=1):
        entry = tl.load(entries + num_full + block - own)
        page, is_on = entry, is_row
        if IS_SPARSE:
            page, is_on = entry >> 8, (((entry & 255) >> token) & 1) != 0
        key = block * BLOCK + offset
        is_on &= start + index >= block * BLOCK
        place = (first_page + page) * (BLOCK * DIM) + offset * DIM
        exponents = None
        if exponents_ptr is not None:
            exponents = tl.load(exponents_ptr + (first_page + page) * BLOCK + offset, mask=key <= last, other=0)
        is_written = (key <= last)[:, None]  # memory behind the last token may hold anything, even NaN
        k = tl.load(tl.multiple_of(k_ptr + place, 16)[:, None] + column[None], mask=is_written, other=0.0)
        v = tl.load(tl.multiple_of(v_ptr + place, 16)[:, None] + column[None], mask=is_written, other=0.0)
        is_seen = key[None] <= (start + index)[:, None]
        acc, top, total = absorb(q, k, v, exponents, is_seen, is_on, acc, top, total, scale, PRECISION)

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_rows = tl.multiple_of(out_ptr + index.to(tl.int64) * (GROUPS * SHARED * DIM) + head * DIM, 16)
    tl.store(out_rows[:, None] + column[None], acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None])


def prefill(
    q: Tensor,
    pages_k: Tensor,
    pages_v: Tensor,
    table: Tensor,
    selected: Tensor | None,
    start: int,
    scale: float,
    config: Config | None = None,
    output: Tensor | None = None,
    exponents: Tensor | None = None,
) -> Tensor:
    """Attend with queries from position `start` on over selected blocks up to each or, without `selected`, all tokens.

    q [n, H, D], pages [G, P, B, D], table [N] block to page, selected [n, G, C] int32 with -1 for none → [n, H, D].
    FP8 pages have exponents [G, P, B, 2], see `cache.to_fp8`.
    """
    num_tokens, (groups, _, block, _) = q.shape[0], pages_k.shape
    config, pages = config or _config_of(q, pages_k, selected is not None), (pages_k, pages_v, exponents)
    tokens, step, max_entries = config.tile["TOKENS"], max(num_tokens, 1), len(table)
    if selected is not None:
        max_entries = min(tokens * selected.shape[2] + 2, triton.cdiv(start + num_tokens, block))
        step = max(1, UNION_BYTES // (4 * groups * max_entries)) * tokens
    q, out = aligned_rows(q), q.new_empty(q.shape) if output is None else output
    for begin in range(0, num_tokens, step):
        rows, first = slice(begin, begin + step), start + begin
        entries = counts = table  # the counts are unused in dense attention
        if selected is not None:
            entries, counts = block_union(selected[rows], table, first, block, tokens, max_entries)
        count = min(step, num_tokens - begin)
        lists, sizes = (entries, counts, None), (count, first, 0)
        _launch(q[rows], pages, lists, out[rows], sizes, max_entries, scale, config, selected is not None)
    return out


def dense_prefill(
    q: Tensor,
    pages_k: Tensor,
    pages_v: Tensor,
    tables: Tensor,
    spans: Tensor,
    scale: float,
    output: Tensor,
    config: Config | None = None,
    exponents: Tensor | None = None,
) -> None:
    """Attend with the dense rows of all `spans` (see `spans.py`) over all tokens up to themselves.

    q [T, H, D], pages [G, P, B, D], tables [S, N] block to page → the dense rows of output [T, H, D].
    FP8 pages have exponents as in `prefill`.
    """
    config = config or _config_of(q, pages_k, is_sparse=False)
    assert tables.stride(1) == 1
    assert spans.is_contiguous()
    assert spans.shape[1] <= MAX_SPANS
    q, lists, sizes, width = aligned_rows(q), (tables, tables, spans), (q.shape[0], 0, spans.shape[1]), tables.stride(0)
    _launch(q, (pages_k, pages_v, exponents), lists, output, sizes, width, scale, config, is_sparse=False)


def _launch(
    q: Tensor, pages: tuple[Tensor, Tensor, Tensor | None], lists: tuple[Tensor, Tensor, Tensor | None], out: Tensor,
    sizes: tuple[int, int, int], max_entries: int, scale: float, config: Config, is_sparse: bool,
) -> None:  # fmt: skip
    """Launch the kernel; pages are keys, values and exponents, sizes are rows, first position and number of spans."""
    (k, v, exponents), (_, heads, dim) = pages, q.shape
    groups, num_pages, block, _ = k.shape
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert out.is_contiguous()
    constants = prefill_constants(groups, heads // groups, block, dim, is_sparse, config, sizes[2] > 0)
    num_tiles = triton.cdiv(sizes[0], config.tile["TOKENS"]) + sizes[2]  # every span may have a partial tile
    tensors = (q, k, v, exponent_pairs(k, exponents), *lists, out)
    rest = (num_pages, max_entries, q.stride(0), scale * LOG2_E)
    prefill_kernel[(num_tiles, groups)](*tensors, *sizes, *rest, **constants, **config.options)


def exponent_pairs(pages_k: Tensor, exponents: Tensor | None) -> Tensor | None:
    """Return exponents [G, P, B, 2] as kernels read them: those of a key and of its value in one int16."""
    assert (exponents is not None) == (pages_k.dtype.itemsize == 1)
    if exponents is None:
        return None
    assert exponents.shape == (*pages_k.shape[:3], 2)
    assert exponents.is_contiguous()
    return exponents.view(torch.int16)


def block_union(
    selected: Tensor, table: Tensor, start: int, block: int, tokens: int, max_entries: int
) -> tuple[Tensor, Tensor]:
    """selected [n, G, C] → per tile of `tokens` queries: entries [tiles, G, max_entries] and how many, [tiles, G].

    The count leaves out the tile's own blocks, which always follow.
    """
    num_tokens, groups, num_selected = selected.shape
    num_tiles, num_blocks = triton.cdiv(num_tokens, tokens), triton.cdiv(start + num_tokens, block)
    entries = torch.empty(num_tiles, groups, max_entries, dtype=torch.int32, device=selected.device)
    counts = torch.empty(num_tiles, groups, dtype=torch.int32, device=selected.device)
    programs = min(UNION_PROGRAMS, num_tiles * groups)
    seen = torch.zeros(programs, triton.cdiv(num_blocks, 128) * 128, dtype=torch.uint8, device=selected.device)
    tensors = (selected.contiguous(), table, entries, counts, seen)
    sizes = (num_tokens, num_selected, start, num_tiles, max_entries, seen.shape[1])
    width = max(triton.next_power_of_2(num_selected), UNION_SELECTED)
    tile = {"SELECTED": width, "TOKENS": tokens, "CHUNK": UNION_CHUNK}
    union_kernel[(programs,)](*tensors, *sizes, GROUPS=groups, BLOCK=block, **tile, num_warps=4, num_stages=1)
    return entries, counts


def prefill_constants(
    groups: int, shared: int, block: int, dim: int, is_sparse: bool, config: Config, has_spans: bool = False
) -> dict[str, Any]:
    """Return the compile-time constants of `prefill_kernel`.

    The heads of a group are padded so that a tile has enough rows for a product and a power of two of them.
    """
    return {
        "GROUPS": groups,
        "SHARED": shared,
        "SHARED_PADDED": max(triton.next_power_of_2(shared), 16 // config.tile["TOKENS"]),
        "BLOCK": block,
        "DIM": dim,
        "IS_SPARSE": is_sparse,
        "SPANS": MAX_SPANS if has_spans else 0,
        "PRECISION": "ieee",
        **config.tile,
    }


def _config_of(q: Tensor, pages: Tensor, is_sparse: bool) -> Config:
    (_, heads, dim), (groups, _, block, _) = q.shape, pages.shape
    return _config(heads // groups, block, dim, q.element_size(), shared_memory(q.device), is_sparse)


def _config(shared: int, block: int, dim: int, element_size: int, limit: int, is_sparse: bool) -> Config:
    """Choose by heads per group, block size, dimension, bytes per element and the shared memory of the device.

    Four tokens x 16 heads are the shortest tile that the tensor cores of Hopper take whole. Twice as many would read
    each block half as often, but where neighbours share few blocks the union grows nearly as fast as the tile.
    """
    shared = triton.next_power_of_2(shared)
    if element_size > 2:  # no tensor cores: registers are the limit
        return Config({"TOKENS": max(1, min(8, 32 // shared))}, 8, 1)
    num_rows = 128 if limit > 160 << 10 and not is_sparse else 64
    tokens = max(1, num_rows // shared)
    num_stages = 3 if limit >= (6 * block + num_rows) * dim * element_size else 2
    return Config({"TOKENS": min(tokens, 8) if is_sparse else tokens}, num_rows // 16, num_stages)

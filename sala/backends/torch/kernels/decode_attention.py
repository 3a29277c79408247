# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Decode attention: one new token per row over paged keys and values.

A row's blocks are cut into splits, each computed by one program; a second kernel joins the splits. A split has a fixed
number of blocks, or a multiple of it where a row has more than MOST_SPLITS such splits. Neither the cut nor the order
of sums depends on the other rows: the result is batch-invariant. Whether a row attends to selected blocks or to all of
them is read on the device, as are lengths and tables, so one captured graph serves every step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sala.backends.torch.hot_pages import HotPages
from sala.backends.torch.kernels.attention import LOG2_E, absorb, exponent_pairs
from sala.backends.torch.kernels.hot_pages import hot_arguments
from sala.backends.torch.kernels.launch import Config, aligned_rows, shared_memory
from sala.backends.torch.kernels.pdl import pdl_launch_dependents, pdl_options, pdl_wait

SIZES = ("num_splits", "num_selected", "max_dense")
JOIN_CHUNK = 64  # splits joined at a time; fixed, so that the order of sums does not depend on how many there are
MOST_SPLITS = 64  # of a row; those of a row with more blocks are longer, which depends on its own length only


@triton.jit
def num_steps(lengths_ptr, is_sparse_ptr, row, num_selected, max_dense, BLOCK: tl.constexpr):
    """Return a row's length (0 for padding), whether it is sparse, and how many blocks it walks."""
    length = tl.load(lengths_ptr + row).to(tl.int32)
    length = tl.where(length > 0, length, 0)
    is_sparse = tl.load(is_sparse_ptr + row) != 0
    steps = tl.where(is_sparse, num_selected, tl.minimum((length + BLOCK - 1) // BLOCK, max_dense))
    return length, is_sparse, tl.where(length > 0, steps, 0)


@triton.jit
def split_size(steps, num_splits, SPLIT_BLOCKS: tl.constexpr, LONG: tl.constexpr):
    """Return the blocks of a split; without LONG, no row has more than fit into splits of the smallest size."""
    size = SPLIT_BLOCKS
    if LONG:
        room = num_splits * SPLIT_BLOCKS
        size = SPLIT_BLOCKS * tl.maximum((steps + room - 1) // room, 1)
    return size


@triton.jit
def walk_blocks(
    q, is_head, acc, top, total, k_ptr, v_ptr, exponents_ptr, hot, ids, table, first_page,
    begin, steps, length, is_sparse, num_selected, scale, block_stats, SHARED: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Absorb up to SPLIT_BLOCKS blocks, from the one numbered `begin` on.

    Blocks and pages of all steps are loaded first, into registers: the loads of the loop then do not wait for them.
    Block stats of the row and group, if given, take the largest score and the sum of every block. `hot` are the frames
    of pages, the pools of the frames, and the first frame of the group; blocks that have a frame are read there.
    """
    frames_ptr, hot_k_ptr, hot_v_ptr, hot_exponents_ptr, first_frame = hot
    column, offset, turn = tl.arange(0, DIM), tl.arange(0, BLOCK), tl.arange(0, SPLIT_BLOCKS)
    blocks = tl.where(is_sparse, tl.load(ids + tl.minimum(begin + turn, num_selected - 1)), begin + turn)
    blocks = tl.where((begin + turn < steps) & (blocks * BLOCK < length), blocks, -1)
    pages = tl.load(table + blocks, mask=blocks >= 0, other=0).to(tl.int64) + first_page
    if frames_ptr is not None:
        frames = tl.load(frames_ptr + pages, mask=blocks >= 0, other=-1)
    for i in range(tl.minimum(SPLIT_BLOCKS, steps - begin)):
        block = tl.sum(tl.where(turn == i, blocks, 0), 0)
        page = tl.sum(tl.where(turn == i, pages, 0), 0)
        from_k, from_v, from_exponents = k_ptr, v_ptr, exponents_ptr
        if frames_ptr is not None:
            frame = tl.sum(tl.where(turn == i, frames, 0), 0)
            is_hot = frame >= 0
            page = tl.where(is_hot, first_frame + frame, page)
            from_k, from_v = tl.where(is_hot, hot_k_ptr, k_ptr), tl.where(is_hot, hot_v_ptr, v_ptr)
            if exponents_ptr is not None:
                from_exponents = tl.where(is_hot, hot_exponents_ptr, exponents_ptr)
        place = page * (BLOCK * DIM) + offset * DIM
        is_seen = (block >= 0) & (block * BLOCK + offset < length)  # other memory may hold anything, even NaN
        exponents = None
        if exponents_ptr is not None:
            exponents = tl.load(from_exponents + page * BLOCK + offset, mask=is_seen, other=0)
        k = tl.load(tl.multiple_of(from_k + place, 16)[:, None] + column[None], mask=is_seen[:, None], other=0.0)
        v = tl.load(tl.multiple_of(from_v + place, 16)[:, None] + column[None], mask=is_seen[:, None], other=0.0)
        is_on = is_head & (block >= 0)
        before_top, before_total = top, total
        acc, top, total = absorb(q, k, v, exponents, is_seen[None], is_on, acc, top, total, scale, PRECISION)
        if block_stats is not None:
            head = tl.arange(0, q.shape[0])
            stats = block_stats + (begin + i) * (2 * SHARED) + head
            tl.store(stats, top, mask=is_head)
            tl.store(stats + SHARED, total - before_total * tl.exp2(before_top - top), mask=is_head)
    return acc, top, total


@triton.jit(do_not_specialize=["num_frames", "num_pages", "table_size", *SIZES, "q_stride"])
def split_kernel(
    q_ptr, k_ptr, v_ptr, exponents_ptr, frames_ptr, hot_k_ptr, hot_v_ptr, hot_exponents_ptr, num_frames,
    tables_ptr, row_of_ptr, lengths_ptr, is_sparse_ptr, selected_ptr,
    acc_ptr, stats_ptr, block_stats_ptr,
    num_pages, table_size, num_splits, num_selected, max_dense, q_stride, scale,
    GROUPS: tl.constexpr, SHARED: tl.constexpr, SHARED_PADDED: tl.constexpr, SPLIT_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of one group of one row: acc [rows, G, splits, SHARED, D], stats [rows, G, splits, 2, SHARED].

    Stats are largest score and sum. With block_stats [rows, G, blocks, 2, SHARED], also those of every block.
    """
    pdl_wait(PDL)
    split, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, is_sparse, steps = num_steps(lengths_ptr, is_sparse_ptr, row, num_selected, max_dense, BLOCK)
    size = split_size(steps, num_splits, SPLIT_BLOCKS, LONG)
    begin = split * size
    if begin >= steps:
        return
    table_row = row
    if row_of_ptr is not None:
        table_row = tl.load(row_of_ptr + row)
    head, column = tl.arange(0, SHARED_PADDED), tl.arange(0, DIM)
    is_head = head < SHARED
    q_rows = tl.multiple_of(q_ptr + row.to(tl.int64) * q_stride + (group * SHARED + head) * DIM, 16)
    q = tl.load(q_rows[:, None] + column[None], mask=is_head[:, None], other=0.0)

    ids = selected_ptr + (row.to(tl.int64) * GROUPS + group) * num_selected
    table = tables_ptr + table_row.to(tl.int64) * table_size
    first_page = group.to(tl.int64) * num_pages
    hot = (frames_ptr, hot_k_ptr, hot_v_ptr, hot_exponents_ptr, group.to(tl.int64) * num_frames)
    block_stats = block_stats_ptr
    if block_stats_ptr is not None:
        width = tl.maximum(num_selected, max_dense)
        block_stats += (row.to(tl.int64) * GROUPS + group) * width * (2 * SHARED)
    acc = tl.zeros([SHARED_PADDED, DIM], tl.float32)
    top = tl.full([SHARED_PADDED], -1e30, tl.float32)  # finite, in case a row has nothing
    total = tl.zeros([SHARED_PADDED], tl.float32)
    if LONG:
        for at in range(begin, tl.minimum(begin + size, steps), SPLIT_BLOCKS):
            acc, top, total = walk_blocks(
                q, is_head, acc, top, total, k_ptr, v_ptr, exponents_ptr, hot, ids, table, first_page,
                at, steps, length, is_sparse, num_selected, scale, block_stats, SHARED,
                SPLIT_BLOCKS, BLOCK, DIM, PRECISION,
            )  # fmt: skip
    else:
        acc, top, total = walk_blocks(
            q, is_head, acc, top, total, k_ptr, v_ptr, exponents_ptr, hot, ids, table, first_page,
            begin, steps, length, is_sparse, num_selected, scale, block_stats, SHARED,
            SPLIT_BLOCKS, BLOCK, DIM, PRECISION,
        )  # fmt: skip
    part = (row.to(tl.int64) * GROUPS + group) * num_splits + split
    acc_rows = tl.multiple_of(acc_ptr + (part * SHARED + head) * DIM, 16)
    tl.store(acc_rows[:, None] + column[None], acc, mask=is_head[:, None])
    tl.store(stats_ptr + part * (2 * SHARED) + head, top, mask=is_head)
    tl.store(stats_ptr + part * (2 * SHARED) + SHARED + head, total, mask=is_head)


@triton.jit(do_not_specialize=[*SIZES, "gate_stride"])
def join_kernel(
    acc_ptr, stats_ptr, gate_ptr, lengths_ptr, is_sparse_ptr, out_ptr,
    num_splits, num_selected, max_dense, gate_stride,
    SHARED: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    CHUNK: tl.constexpr, LONG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Join the splits of one head of one row by their log-sums, in order; then apply the gate."""
    pdl_wait(PDL)
    head, row, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    length, _, steps = num_steps(lengths_ptr, is_sparse_ptr, row, num_selected, max_dense, BLOCK)
    size = split_size(steps, num_splits, SPLIT_BLOCKS, LONG)
    count = (steps + size - 1) // size
    part = (row.to(tl.int64) * (heads // SHARED) + head // SHARED) * num_splits
    stats = stats_ptr + part * (2 * SHARED) + head % SHARED
    accs = tl.multiple_of(acc_ptr + (part * SHARED + head % SHARED) * DIM, 16)
    column = tl.arange(0, DIM)
    acc = tl.zeros([DIM], tl.float32)
    top, total = -1e30, 0.0
    for begin in tl.static_range(0, SPLITS, CHUNK):
        split = begin + tl.arange(0, CHUNK)
        is_split = split < count
        part_top = tl.load(stats + split * (2 * SHARED), mask=is_split, other=-1e30)
        part_total = tl.load(stats + split * (2 * SHARED) + SHARED, mask=is_split, other=0.0)
        part_acc = tl.load(accs + split[:, None] * (SHARED * DIM) + column[None], mask=is_split[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(part_top, 0))
        share, shrink = tl.exp2(part_top - new_top), tl.exp2(top - new_top)
        total = total * shrink + tl.sum(part_total * share, 0)
        acc = acc * shrink + tl.sum(part_acc * share[:, None], 0)
        top = new_top
    out = (acc / tl.where(total > 0, total, 1.0)).to(out_ptr.dtype.element_ty)
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + row.to(tl.int64) * gate_stride + head * DIM + column)
        factor = (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(out.dtype)
        out = (out.to(tl.float32) * factor.to(tl.float32)).to(out.dtype)
    pdl_launch_dependents(PDL)
    out = tl.where(length > 0, out, 0.0)
    tl.store(out_ptr + (row.to(tl.int64) * heads + head) * DIM + column, out.to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["num_selected", "max_dense", "width", "shares_stride", "blocks_stride"])
def share_kernel(
    block_stats_ptr, lengths_ptr, is_sparse_ptr, selected_ptr, shares_ptr, blocks_ptr,
    num_selected, max_dense, width, shares_stride, blocks_stride,
    SHARED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Turn the stats of blocks into shares of a head's attention [H, width]; with them the blocks [G, width]."""
    head, row, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    length, is_sparse, steps = num_steps(lengths_ptr, is_sparse_ptr, row, num_selected, max_dense, BLOCK)
    group = row.to(tl.int64) * (heads // SHARED) + head // SHARED
    stats = block_stats_ptr + group * width * (2 * SHARED) + head % SHARED
    top, total = -1e30, 0.0
    for begin in range(0, steps, CHUNK):
        index = begin + tl.arange(0, CHUNK)
        part_top = tl.load(stats + index * (2 * SHARED), mask=index < steps, other=-1e30)
        part_total = tl.load(stats + index * (2 * SHARED) + SHARED, mask=index < steps, other=0.0)
        new_top = tl.maximum(top, tl.max(part_top, 0))
        total = total * tl.exp2(top - new_top) + tl.sum(part_total * tl.exp2(part_top - new_top), 0)
        top = new_top
    for begin in range(0, width, CHUNK):
        index = begin + tl.arange(0, CHUNK)
        part_top = tl.load(stats + index * (2 * SHARED), mask=index < steps, other=-1e30)
        part_total = tl.load(stats + index * (2 * SHARED) + SHARED, mask=index < steps, other=0.0)
        share = part_total * tl.exp2(part_top - top) / tl.where(total > 0, total, 1.0)
        tl.store(shares_ptr + row.to(tl.int64) * shares_stride + head * width + index, share, mask=index < width)
        if head % SHARED == 0:
            is_chosen = is_sparse & (index < num_selected)
            chosen = tl.load(selected_ptr + group * num_selected + index, mask=is_chosen, other=0)
            block = tl.where(is_sparse, chosen, index)
            block = tl.where((index < steps) & (block * BLOCK < length), block, -1)
            out = blocks_ptr + row.to(tl.int64) * blocks_stride + head // SHARED * width + index
            tl.store(out, block, mask=index < width)


def decode_attention(
    q: Tensor,
    pages_k: Tensor,
    pages_v: Tensor,
    tables: Tensor,
    lengths: Tensor,
    is_sparse: Tensor,
    selected: Tensor,
    scale: float,
    max_dense_blocks: int,
    gate: Tensor | None = None,
    row_of: Tensor | None = None,
    config: Config | None = None,
    output: Tensor | None = None,
    dependents_first: bool = False,
    exponents: Tensor | None = None,
    gathered: tuple[Tensor, Tensor] | None = None,
    hot: HotPages | None = None,
) -> Tensor:
    """Attend with the newest token of each row, at lengths[s] - 1, over its selected blocks or over all → [S, H, D].

    q [S, H, D]; pages [G, P, B, D]; tables [S, N] block to page; lengths [S], 0 or less for padding, which gives 0;
    is_sparse [S] bool; selected [S, G, C] int32, -1 for none, not read where dense. Rows that are not sparse
    have at most `max_dense_blocks` blocks. A gate [S, H * D] multiplies by its sigmoid. With row_of [S], row s
    has table row_of[s]. For `dependents_first` see `pdl.pdl_options`. FP8 pages have exponents [G, P, B, 2], see
    `cache.to_fp8`. `gathered` are blocks [S, G, W] int32 and shares [S, H, W], filled with the blocks attended to, -1
    for none, and the share of each head's attention that they get. Blocks that have a frame in `hot` are read there.
    """
    (num_rows, heads, dim), (groups, num_pages, block, _) = q.shape, pages_k.shape
    assert pages_k.is_contiguous()
    assert pages_v.is_contiguous()
    q, shared, num_selected = aligned_rows(q), heads // groups, selected.shape[2]
    lengths, is_sparse, selected = lengths.contiguous(), is_sparse.contiguous(), selected.contiguous()
    config = config or _config(block * dim * q.element_size(), shared_memory(q.device))
    wanted = triton.cdiv(max(num_selected, max_dense_blocks), config.tile["SPLIT_BLOCKS"])
    splits, is_long = min(wanted, MOST_SPLITS), wanted > MOST_SPLITS
    acc = torch.empty(num_rows, groups, splits, shared, dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(num_rows, groups, splits, 2, shared, dtype=torch.float32, device=q.device)
    out = q.new_empty(q.shape) if output is None else output
    assert out.is_contiguous()
    geometry = {"SHARED": shared, "BLOCK": block, "DIM": dim, "LONG": is_long, **config.tile}
    sizes = (splits, num_selected, max_dense_blocks)
    block_stats = None
    if gathered is not None:
        block_stats = acc.new_empty(num_rows, groups, max(num_selected, max_dense_blocks), 2, shared)
    pdl = pdl_options(q.device, num_rows, dependents_first)
    split_kernel[(splits, groups, num_rows)](
        q, pages_k, pages_v, exponent_pairs(pages_k, exponents), *hot_arguments(hot),
        tables, row_of, lengths, is_sparse, selected,
        acc, stats, block_stats, num_pages, tables.stride(0), *sizes, q.stride(0), scale * LOG2_E,
        **geometry, GROUPS=groups, SHARED_PADDED=max(16, triton.next_power_of_2(shared)), PRECISION="ieee", **pdl,
        **config.options,
    )  # fmt: skip
    join_kernel[(heads, num_rows)](
        acc, stats, gate, lengths, is_sparse, out, *sizes, 0 if gate is None else gate.stride(0),
        **geometry, SPLITS=triton.cdiv(splits, JOIN_CHUNK) * JOIN_CHUNK, CHUNK=JOIN_CHUNK, **pdl, num_warps=4,
    )  # fmt: skip
    if gathered is not None:
        blocks, shares = gathered
        assert blocks.shape[2] == shares.shape[2] == max(num_selected, max_dense_blocks)
        assert blocks.stride()[1:] == shares.stride()[1:] == (shares.shape[2], 1)
        share_kernel[(heads, num_rows)](
            block_stats, lengths, is_sparse, selected, shares, blocks,
            num_selected, max_dense_blocks, shares.shape[2], shares.stride(0), blocks.stride(0),
            SHARED=shared, BLOCK=block, CHUNK=JOIN_CHUNK, num_warps=1,
        )  # fmt: skip
    return out


def _config(block_bytes: int, limit: int) -> Config:
    """Choose by the bytes of a block of keys and shared memory: small splits fill the GPU even with one row.

    The blocks of a split are a power of two; the order of sums depends on them.
    """
    return Config({"SPLIT_BLOCKS": 2}, 4, 3 if 5 * block_bytes <= limit else 1)

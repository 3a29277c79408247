"""The layers by sala's Triton kernels: prefill rows one at a time, decode rows all together."""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Sequence

import torch
from torch import Tensor

from sala.backends.torch.kernels import attention, block_selection, decode_attention, lightning
from sala.plugins.vllm.memory import Pages, RequestRow, StepMetadata


def advance(
    q: Tensor, k: Tensor, v: Tensor, states: Tensor, lengths: Sequence[int], slopes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """q, k, v [T, H, D] and contiguous states [S, H, D, D], which are overwritten → [T, H, D], the states."""
    output = q.new_empty(q.shape)
    short = [index for index, length in enumerate(lengths) if length == 1]
    if len(short) == len(lengths):
        slots = torch.arange(len(lengths), device=q.device)
        lightning.lightning_decode(q, k, v, states, slots, slopes, scale, output)
        return output, states
    pieces = [x.split(list(lengths)) for x in (q, k, v, output)]
    for index, (q_, k_, v_, o_) in enumerate(zip(*pieces, strict=True)):
        if lengths[index] > 1:
            found, after = lightning.lightning_prefill(q_, k_, v_, states[index], slopes, scale)
            o_.copy_(found)
            states[index] = after
    if short:
        rows = _rows_at(short, lengths, q.device)
        output[rows], states[short] = advance(q[rows], k[rows], v[rows], states[short], [1] * len(short), slopes, scale)
    return output, states


def attend(pages: Pages, step: StepMetadata, q: Tensor, scale: float) -> Tensor:
    """Return the same as `Pages.attend`."""
    lengths = [row.length for row in step.rows]
    short = [index for index, length in enumerate(lengths) if length == 1]
    if len(short) == len(lengths):
        return _attend_short(pages, step, step.rows, q, scale)
    output = q.new_empty(q.shape)
    for row, piece, target in zip(step.rows, q.split(lengths), output.split(lengths), strict=True):
        if row.length > 1:
            target.copy_(_attend_long(pages, step, row, piece, scale))
    if short:
        at = _rows_at(short, lengths, q.device)
        output[at] = _attend_short(pages, step, [step.rows[index] for index in short], q[at], scale)
    return output


def _rows_at(short: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the indices of the only tokens of these rows among all tokens."""
    begins = torch.tensor([0, *lengths]).cumsum(0)[list(short)]
    return begins.to(device, non_blocking=True)


def _attend_long(pages: Pages, step: StepMetadata, row: RequestRow, q: Tensor, scale: float) -> Tensor:
    keys, values = pages.keys_and_values
    blocks = pages.blocks_of(step, row)
    table = pages.tile_table(blocks)
    num_dense = min(max(row.sparse_from - row.start, 0), row.length)
    outputs = []
    if num_dense:
        outputs.append(attention.dense_prefill(q[:num_dense], keys, values, table, row.start, scale))
    if num_dense < row.length:
        rest, start = q[num_dense:], row.start + num_dense
        k1, k2 = pages.pooled(blocks)
        own = torch.arange(k1.shape[1], device=q.device)
        selected = block_selection.select_prefill(rest, k1, k2, own, start, pages.layout.sparse, scale)
        outputs.append(attention.sparse_prefill(rest, keys, values, table, selected, start, scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_short(pages: Pages, step: StepMetadata, rows: Sequence[RequestRow], q: Tensor, scale: float) -> Tensor:
    """One token of each row: q [S, H, D] → [S, H, D]."""
    sparse, groups = pages.layout.sparse, pages.layout.num_groups
    keys, values = pages.keys_and_values
    num_blocks = max(-(-row.end // pages.block_tokens) for row in rows)
    inputs = zip(*((row.index, row.end, row.start >= row.sparse_from) for row in rows), strict=True)
    index, ends, is_sparse = torch.tensor(list(inputs), dtype=torch.int32).to(q.device, non_blocking=True)
    blocks = step.tables[index.long(), :num_blocks].long()
    tables = pages.tile_table(blocks).int()
    dense = [-(-row.end // sparse.block_size) for row in rows if row.start < row.sparse_from]
    if len(dense) == len(rows):
        selected = torch.full((len(rows), groups, 1), -1, dtype=torch.int32, device=q.device)
    else:
        k1, k2 = pages.pooled(blocks.flatten())
        own = torch.arange(k1.shape[1], dtype=torch.int32, device=q.device).view(len(rows), -1)
        selected = block_selection.select_decode(q, k1, k2, own, ends, sparse, scale, own.shape[1], is_sparse.bool())
    return decode_attention.decode_attention(
        q, keys, values, tables, ends, is_sparse.bool(), selected, scale, max(dense, default=1)
    )

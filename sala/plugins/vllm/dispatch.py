"""Attention and states by sala's Triton kernels or, where they cannot run, by the reference.

The kernels take prefill rows one at a time and decode rows, which have one token, all together.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"

import functools
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from sala.backends.torch.fast.dispatch import runs_in_triton
from sala.backends.torch.ops.lightning import lightning_ragged
from sala.config import SparseConfig
from sala.options import Options
from sala.options.sources import build, from_environment
from sala.plugins.vllm.memory import Pages, RequestRow, StepMetadata


def attend(pages: Pages, step: StepMetadata, q: Tensor, scale: float, has_kernels: bool | None = None) -> Tensor:
    """Return the attention of q [T, H, D], whose keys and values are appended: [T, H, D]."""
    if has_kernels is None:
        has_kernels = can_use_kernels(q, pages.layout.sparse)
    lengths = [row.length for row in step.rows]
    decode = [index for index, length in enumerate(lengths) if has_kernels and length == 1]
    if len(decode) == len(lengths):
        return _attend_decode(pages, step, step.rows, q, scale)
    output = q.new_empty(q.shape)
    for row, piece, target in zip(step.rows, q.split(lengths), output.split(lengths), strict=True):
        if not has_kernels or row.length > 1:
            target.copy_(_attend_row(pages, step, row, piece, scale, has_kernels))
    if decode:
        at = _tokens_of(decode, lengths, q.device)
        output[at] = _attend_decode(pages, step, [step.rows[index] for index in decode], q[at], scale)
    return output


def _attend_row(
    pages: Pages, step: StepMetadata, row: RequestRow, q: Tensor, scale: float, has_kernels: bool
) -> Tensor:
    """Attend one row; its regime may change inside it."""
    blocks = step.tables[row.index, : -(-row.end // pages.block_tokens)].long()
    num_dense = min(max(row.sparse_from - row.start, 0), row.length)
    outputs = []
    for begin, end, is_sparse in ((0, num_dense, False), (num_dense, row.length, True)):
        if begin < end:
            rows = (q[begin:end], row.start + begin, blocks, scale)
            reference = pages.attend_sparse if is_sparse else pages.attend_dense
            outputs.append(_prefill(pages, *rows, is_sparse) if has_kernels else reference(*rows))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _prefill(pages: Pages, q: Tensor, start: int, blocks: Tensor, scale: float, is_sparse: bool) -> Tensor:
    from sala.backends.torch.kernels import attention, block_selection

    selected = None
    if is_sparse:
        k1, k2 = pages.pooled(blocks)
        own = torch.arange(k1.shape[1], device=q.device)
        selected = block_selection.select_prefill(q, k1, k2, own, start, pages.layout.sparse, scale)
    return attention.prefill(q, *pages.keys_and_values, pages.tile_table(blocks), selected, start, scale)


def _attend_decode(pages: Pages, step: StepMetadata, rows: Sequence[RequestRow], q: Tensor, scale: float) -> Tensor:
    """One token of each row: q [S, H, D] → [S, H, D]."""
    from sala.backends.torch.kernels import block_selection, decode_attention

    sparse, groups = pages.layout.sparse, pages.layout.num_groups
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
        q, *pages.keys_and_values, tables, ends, is_sparse.bool(), selected, scale, max(dense, default=1)
    )


def _tokens_of(decode: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the indices of the only tokens of these rows among all tokens."""
    begins = torch.tensor([0, *lengths]).cumsum(0)[list(decode)]
    return begins.to(device, non_blocking=True)


def advance_states(
    q: Tensor, k: Tensor, v: Tensor, states: Tensor, slots: Tensor, rows: Sequence[RequestRow], slopes: Tensor,
    scale: float, has_kernels: bool | None = None,
) -> Tensor:  # fmt: skip
    """Packed rows q, k, v [T, H, D]; states [P, H, D, D] in fp32, that of rows[i] at slots[i] → [T, H, D] in q's dtype.

    A row that starts at 0 begins with an empty state, whatever its slot holds.
    """
    before = states[slots]
    fresh = [index for index, row in enumerate(rows) if row.start == 0]
    if fresh:
        before[fresh] = 0
    advance = _advance if (can_use_kernels(q) if has_kernels is None else has_kernels) else lightning_ragged
    output, after = advance(q, k, v, before, [row.length for row in rows], slopes, scale)
    states[slots] = after
    return output.to(q.dtype)


def _advance(
    q: Tensor, k: Tensor, v: Tensor, states: Tensor, lengths: Sequence[int], slopes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """q, k, v [T, H, D] and contiguous states [S, H, D, D], which are overwritten → [T, H, D], the states."""
    from sala.backends.torch.kernels import lightning, spans

    decode = [index for index, length in enumerate(lengths) if length == 1]
    if len(decode) == len(lengths):
        slots = torch.arange(len(lengths), device=q.device)
        return lightning.lightning_decode(q, k, v, states, slots, slopes, scale), states
    firsts = accumulate(lengths, initial=0)
    packed = [spans.PackedSpan(first, length, slot=index) for index, (first, length) in enumerate(zip(firsts, lengths))]  # noqa: B905
    table = spans.table_of([span for span in packed if span.num_rows > 1], q.device)
    output = lightning.lightning_prefill(q, k, v, states, table, slopes, scale)
    if decode:
        at, ones = _tokens_of(decode, lengths, q.device), [1] * len(decode)
        output[at], states[decode] = _advance(q[at], k[at], v[at], states[decode], ones, slopes, scale)
    return output, states


def can_use_kernels(x: Tensor, sparse_config: SparseConfig | None = None) -> bool:
    """Return whether the Triton kernels run on the device of x [..., D], and fit heads and pages."""
    return runs_in_triton(x.device, (x.shape[-1],), sparse_config, _option())


@functools.cache
def _option() -> str:
    """Return the option `kernels`, which reaches vLLM as a variable alone."""
    given = [one for one in from_environment(Options) if one.name == "kernels"]
    return build(Options, [given]).kernels

# ruff: noqa: N803
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Decode attention of one new token per row over a contiguous KV cache whose rows differ in length.

Lengths are read on the device, so that one CUDA graph serves every step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # cached tokens read at a time


def attend_rows(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """Return the attention [R, H, D] of q [R, H, D] over the first lengths[r] tokens of keys, values [R, L, G, D]."""
    num_rows, num_heads, dim = q.shape
    groups = keys.shape[2]
    out = torch.empty_like(q)
    _attend[(num_rows, groups)](
        q,
        keys,
        values,
        out,
        lengths,
        dim**-0.5,
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        num_heads // groups,
        dim,
        max(16, triton.next_power_of_2(num_heads // groups)),
        BLOCK,
        num_warps=4,
    )
    return out


@triton.jit
def _attend(
    q,
    keys,
    values,
    out,
    lengths,
    scale,
    row_stride,
    token_stride,
    group_stride,
    HEADS: tl.constexpr,  # query heads per group
    DIM: tl.constexpr,
    ROWS: tl.constexpr,  # HEADS, padded to the smallest size of tl.dot
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    group = tl.program_id(1)
    length = tl.load(lengths + row)
    head = tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    offset = (row * tl.num_programs(1) + group) * HEADS * DIM + head[:, None] * DIM + column[None, :]
    mask = head[:, None] < HEADS
    query = tl.load(q + offset, mask=mask, other=0.0)
    begin = row.to(tl.int64) * row_stride + group * group_stride
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        place = begin + at[:, None] * token_stride + column[None, :]
        known = at[:, None] < length
        key = tl.load(keys + place, mask=known, other=0.0)
        value = tl.load(values + place, mask=known, other=0.0)
        score = tl.dot(query, tl.trans(key)) * scale
        score = tl.where(at[None, :] < length, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        share = tl.exp(score - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(share, 1)
        found = found * shrink[:, None] + tl.dot(share.to(value.dtype), value)
        top = higher
    tl.store(out + offset, (found / total[:, None]).to(out.dtype.element_ty), mask=mask)

"""Chooses between the Triton kernels and the reference for the layers that vLLM runs."""

# mypy: disable-error-code="no-any-return, no-untyped-call"

import functools
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from sala.backends.torch.kernels import triton_kernels
from sala.backends.torch.ops.lightning import lightning_ragged
from sala.plugins.vllm.memory import Pages, RequestRow, StepMetadata


def attend(pages: Pages, step: StepMetadata, q: Tensor, scale: float, has_kernels: bool | None = None) -> Tensor:
    """Return the attention of q [T, H, D], whose keys and values are appended: [T, H, D]."""
    if has_kernels is None:
        has_kernels = can_use_kernels(q) and pages.layout.sparse.block_size % 16 == 0
    if not has_kernels:
        return pages.attend(step, q, scale)
    from sala.plugins.vllm import accelerated

    return accelerated.attend(pages, step, q, scale)


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
    if can_use_kernels(q) if has_kernels is None else has_kernels:
        from sala.plugins.vllm import accelerated

        output, after = accelerated.advance(q, k, v, before, [row.length for row in rows], slopes, scale)
    else:
        output, after = lightning_ragged(q, k, v, before, [row.length for row in rows], slopes, scale)
    states[slots] = after
    return output.to(q.dtype)


def can_use_kernels(x: Tensor) -> bool:
    """Return whether the Triton kernels run on the device of x [..., D] and fit its shape."""
    return _fits(x.shape[-1], x.device)


@functools.cache
def _fits(dim: int, device: torch.device) -> bool:
    is_wanted = os.environ.get("SALA_KERNELS") not in ("0", "off")  # vLLM has no options of ours
    return is_wanted and dim in (16, 32, 64, 128) and triton_kernels.why_not(device) is None

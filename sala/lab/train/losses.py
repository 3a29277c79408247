"""Losses over a large vocabulary, with the head and the loss computed together for one tile of rows at a time.

The logits of a whole batch would not fit into memory. Each tile computes its logits, loss and gradient at once, and
keeps the gradients of the hidden states (and of the head, if it is trained) only. With hidden states and head in bf16
the matrix products run in bf16 and accumulate in fp32; softmax and loss are always in fp32.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

TILE_ROWS = {"cuda": 8192, "cpu": 512}
_Function = TypeVar("_Function", bound=Callable[..., Any])


class LossWeights(NamedTuple):
    """Per-row weights [T] of the main loss and of the answer loss, and the share of the label in the main loss."""

    main: Tensor
    answer: Tensor
    truth: Tensor | None = None

    def part(self, rows: slice) -> "LossWeights":
        return LossWeights(self.main[rows], self.answer[rows], None if self.truth is None else self.truth[rows])


def head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: LossWeights,
    teacher: tuple[Tensor, Tensor] | None = None,
    tile_rows: int | None = None,
    is_symmetric: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the weighted loss of hidden [T, h], head [V, h], labels [T], and two unweighted sums [2] without gradient.

    The main loss is the cross-entropy of the label or, with `teacher` (its hidden states, its head), the divergence
    KL(teacher || student) mixed with the label's cross-entropy by its share; the answer loss is always the
    cross-entropy. With `is_symmetric` the divergence is the Jensen-Shannon divergence, which suits the student's own
    text: it also counts tokens that only the student finds likely. The sums, of the divergence and of the answers,
    cover the rows with a weight. On a GPU the loss of a tile is compiled, once if the number of rows is a multiple of
    `tile_rows`.
    """
    tile_rows = tile_rows or TILE_ROWS.get(hidden.device.type, TILE_ROWS["cpu"])
    return _HeadLoss.apply(hidden, head, labels, weights, teacher, tile_rows, is_symmetric)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        weights: LossWeights,
        teacher: Any,
        tile_rows: int,
        is_symmetric: bool,
    ) -> Any:
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head) if head.requires_grad else None
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss, sums = hidden.new_zeros((), dtype=wide), hidden.new_zeros(2, dtype=wide)
        compute = compiled(_tile, hidden.device.type)
        for begin in range(0, hidden.shape[0], tile_rows):
            rows = slice(begin, begin + tile_rows)
            teacher_logits = None if teacher is None else _logits(teacher[0][rows], teacher[1])
            part, part_sums, grad = compute(
                _logits(hidden[rows], head), labels[rows], weights.part(rows), teacher_logits, is_symmetric
            )
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = grad @ head
            if grad_head is not None:
                grad_head.addmm_(grad.T, hidden[rows])
            loss, sums = loss + part, sums + part_sums
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_hidden, grad_head = ctx.saved_tensors
        scaled = None if grad_head is None else grad_head * grads[0]
        return (grad_hidden * grads[0]).to(grad_hidden.dtype), scaled, None, None, None, None, None


def _logits(hidden: Tensor, head: Tensor) -> Tensor:
    """Return the logits [n, V] of hidden [n, h] and head [V, h] in at least fp32."""
    if hidden.dtype == torch.bfloat16 and hidden.is_cuda:
        return torch.mm(hidden, head.T, out_dtype=torch.float32)
    logits = hidden @ head.T
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _tile(
    logits: Tensor, labels: Tensor, weights: LossWeights, teacher_logits: Tensor | None, is_symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, the unweighted sums and the gradient of a tile of logits [n, V]."""
    main, answer, truth = weights
    share = torch.zeros_like(main) if truth is None else truth.to(main.dtype)
    logp = logits.log_softmax(-1)
    label_loss = -logp.gather(1, labels[:, None])[:, 0]
    column = torch.arange(logits.shape[1], device=logits.device)
    is_label = (column == labels[:, None]).to(logits.dtype)
    p = logp.exp()
    if teacher_logits is None:
        reported = main_loss = label_loss
        grad = (p - is_label) * (main + answer)[:, None]
    else:
        teacher_logp = teacher_logits.log_softmax(-1)
        teacher_p = teacher_logp.exp()
        if is_symmetric:
            mean_logp = torch.logaddexp(logp, teacher_logp) - math.log(2)
            ratio = 0.5 * (logp - mean_logp)
            own = (p * ratio).sum(-1)
            reported = own + 0.5 * (teacher_p * (teacher_logp - mean_logp)).sum(-1)
            slope = p * (ratio - own[:, None])
        else:
            reported = (teacher_p * (teacher_logp - logp)).sum(-1)
            slope = p - teacher_p
        main_loss = reported * (1 - share) + label_loss * share
        grad = slope * (main * (1 - share))[:, None] + (p - is_label) * (answer + main * share)[:, None]
    sums = torch.stack(((reported * (main != 0)).sum(), (label_loss * (answer != 0)).sum()))
    return (main_loss * main + label_loss * answer).sum(), sums, grad


@cache
def compiled(function: _Function, device: str) -> _Function:
    """Return the function, compiled for a GPU."""
    return torch.compile(function, dynamic=False) if device == "cuda" else function  # type: ignore[return-value]

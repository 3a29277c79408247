"""Losses over a large vocabulary: the head and the loss together, a few rows at a time.

Logits of a whole batch would fill the memory several times over. Here a tile of rows gets its logits, its loss and
its gradient at once, and only gradients of the hidden states (and of the head, if it learns) are kept.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

TILE_ROWS = {"cuda": 8192, "cpu": 512}


def head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    main: Tensor,
    answer: Tensor,
    teacher: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden [T, h], head [V, h], labels [T]; `main` and `answer` [T] weigh each row's two losses.

    The main loss is the cross-entropy of the label, or with `teacher` (its hidden states, its head) the divergence
    KL(teacher || student); the answer's is always the cross-entropy. Returns their weighted sum, and apart from it,
    without gradient, the two unweighted sums over the rows that have a weight, [2].
    """
    return _HeadLoss.apply(hidden, head, labels, main, answer, teacher)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, main: Tensor, answer: Tensor, teacher: Any
    ) -> Any:
        tile_rows = TILE_ROWS.get(hidden.device.type, TILE_ROWS["cpu"])
        learns_head = head.requires_grad
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head) if learns_head else None
        loss, sums = hidden.new_zeros(()), hidden.new_zeros(2)
        compute = _tile_function(hidden.device.type)
        for begin in range(0, hidden.shape[0], tile_rows):
            rows = slice(begin, begin + tile_rows)
            wanted = None if teacher is None else teacher[0][rows] @ teacher[1].T
            part, part_sums, grad = compute(hidden[rows] @ head.T, labels[rows], main[rows], answer[rows], wanted)
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
        return grad_hidden * grads[0], scaled, None, None, None, None


def _tile(
    logits: Tensor, labels: Tensor, main: Tensor, answer: Tensor, wanted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, unweighted sums and the gradient of one tile's logits [n, V]."""
    logp = logits.log_softmax(-1)
    chosen = -logp.gather(1, labels[:, None])[:, 0]
    column = torch.arange(logits.shape[1], device=logits.device)
    is_label = (column == labels[:, None]).to(logits.dtype)
    p = logp.exp()
    if wanted is None:
        main_loss = chosen
        grad = (p - is_label) * (main + answer)[:, None]
    else:
        wanted_logp = wanted.log_softmax(-1)
        wanted_p = wanted_logp.exp()
        main_loss = (wanted_p * (wanted_logp - logp)).sum(-1)
        grad = (p - wanted_p) * main[:, None] + (p - is_label) * answer[:, None]
    sums = torch.stack(((main_loss * (main != 0)).sum(), (chosen * (answer != 0)).sum()))
    return (main_loss * main + chosen * answer).sum(), sums, grad


@cache
def _tile_function(device: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(_tile, dynamic=False) if device == "cuda" else _tile

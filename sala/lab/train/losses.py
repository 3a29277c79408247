"""Compute losses over a large vocabulary: the head and the loss together, one tile of rows at a time.

The logits of a whole batch would fill the memory several times over. Here a tile of rows gets its logits, its loss and
its gradient at once, and only gradients of the hidden states (and of the head, if it learns) are kept. With hidden
states and head in bf16 the matrix products run in bf16 and accumulate in fp32; softmax and loss are always in fp32.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

TILE_ROWS = {"cuda": 8192, "cpu": 512}


class LossWeights(NamedTuple):
    """Weights of each row [T]: of the main loss, of the answer's, and the label's share in the main loss."""

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
) -> tuple[Tensor, Tensor]:
    """hidden [T, h], head [V, h], labels [T] → the weighted loss, and without gradient two unweighted sums [2].

    The main loss is the cross-entropy of the label, or with `teacher` (its hidden states, its head) the divergence
    KL(teacher || student), into which the label's cross-entropy is mixed by its share; the answer's is always the
    cross-entropy. The sums, of the divergence and of the answers, are over the rows that have a weight. On a GPU the
    loss of a tile is compiled: a number of rows that is a multiple of `tile_rows` is compiled once.
    """
    tile_rows = tile_rows or TILE_ROWS.get(hidden.device.type, TILE_ROWS["cpu"])
    return _HeadLoss.apply(hidden, head, labels, weights, teacher, tile_rows)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: LossWeights, teacher: Any, tile_rows: int
    ) -> Any:
        learns_head = head.requires_grad
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head) if learns_head else None
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss, sums = hidden.new_zeros((), dtype=wide), hidden.new_zeros(2, dtype=wide)
        compute = _tile_function(hidden.device.type)
        for begin in range(0, hidden.shape[0], tile_rows):
            rows = slice(begin, begin + tile_rows)
            wanted = None if teacher is None else _logits(teacher[0][rows], teacher[1])
            part, part_sums, grad = compute(_logits(hidden[rows], head), labels[rows], weights.part(rows), wanted)
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
        return (grad_hidden * grads[0]).to(grad_hidden.dtype), scaled, None, None, None, None


def _logits(hidden: Tensor, head: Tensor) -> Tensor:
    """hidden [n, h], head [V, h] → [n, V] in at least fp32."""
    if hidden.dtype == torch.bfloat16 and hidden.is_cuda:
        return torch.mm(hidden, head.T, out_dtype=torch.float32)
    logits = hidden @ head.T
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _tile(logits: Tensor, labels: Tensor, weights: LossWeights, wanted: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, unweighted sums and the gradient of one tile's logits [n, V]."""
    main, answer, truth = weights
    share = torch.zeros_like(main) if truth is None else truth.to(main.dtype)
    logp = logits.log_softmax(-1)
    chosen = -logp.gather(1, labels[:, None])[:, 0]
    column = torch.arange(logits.shape[1], device=logits.device)
    is_label = (column == labels[:, None]).to(logits.dtype)
    p = logp.exp()
    if wanted is None:
        shown = main_loss = chosen
        grad = (p - is_label) * (main + answer)[:, None]
    else:
        wanted_logp = wanted.log_softmax(-1)
        wanted_p = wanted_logp.exp()
        shown = (wanted_p * (wanted_logp - logp)).sum(-1)
        main_loss = shown * (1 - share) + chosen * share
        grad = (p - wanted_p) * (main * (1 - share))[:, None] + (p - is_label) * (answer + main * share)[:, None]
    sums = torch.stack(((shown * (main != 0)).sum(), (chosen * (answer != 0)).sum()))
    return (main_loss * main + chosen * answer).sum(), sums, grad


@cache
def _tile_function(device: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(_tile, dynamic=False) if device == "cuda" else _tile

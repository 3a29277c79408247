"""Training objectives: next tokens, a teacher's distribution, or a teacher's mixers.

Each objective is a module, so that Accelerate can distribute it. It takes a batch and the scales of its losses, and
returns the loss and the unscaled sums for the log.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sala.backends.torch.batch import whole
from sala.backends.torch.fast.dispatch import select_ops
from sala.backends.torch.model import SalaModel
from sala.lab.train.block_selection_loss import BlockSelectionLoss, count_queries
from sala.lab.train.losses import LossWeights, head_loss

# tokens [B, n] long; loss_mask, answer [B, n] bool; truth [B]; lengths [documents], or absent
RowBatch = Mapping[str, Tensor]


class Objective(nn.Module):
    """`terms` names the losses, `units` the module classes that FSDP wraps as one unit."""

    terms: tuple[str, ...]
    units: tuple[str, ...] = ("Layer",)


class NextToken(Objective):
    """Cross-entropy of the tokens with a loss, extra weight for answers, and optionally the block-selection loss."""

    terms: tuple[str, ...] = ("loss", "answer")

    def __init__(self, model: SalaModel, has_selection_loss: bool = False) -> None:
        super().__init__()
        self.student = model
        self.selection_loss = BlockSelectionLoss(model) if has_selection_loss else None
        if has_selection_loss:
            self.terms = (*self.terms, "choice")

    def forward(self, rows: RowBatch, scales: Tensor) -> tuple[Tensor, Tensor]:
        return self.compute_loss(rows, scales, None)

    def compute_loss(
        self, rows: RowBatch, scales: Tensor, teacher: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        if self.selection_loss is None:
            return _loss(self.student, _hidden(self.student, rows), rows, scales, teacher)
        self.selection_loss.begin(rows["tokens"], _targets(rows)[1].view_as(rows["tokens"]))
        hidden = _hidden(self.student, rows)
        selection = self.selection_loss.end()
        loss, sums = _loss(self.student, hidden, rows, scales, teacher)
        return loss + selection * scales[2], torch.cat((sums, selection.detach()[None]))


class Distil(NextToken):
    """Kullback-Leibler divergence from a teacher's next-token distribution, and cross-entropy of answers.

    Rows with a `truth` have a mixed target: that share of the text's own next token, the rest from the teacher.

    With `window` set, the teacher's context is limited to that many tokens.
    """

    terms = ("kl", "answer")

    def __init__(
        self, student: SalaModel, teacher: SalaModel, window: int | None = None, has_selection_loss: bool = False
    ) -> None:
        super().__init__(student, has_selection_loss)
        self.window = window
        self._teacher = [teacher]  # in a list, so that it is not registered as a submodule

    def forward(self, rows: RowBatch, scales: Tensor) -> tuple[Tensor, Tensor]:
        teacher, tokens = self._teacher[0], rows["tokens"]
        with torch.no_grad():
            windows = tokens
            if self.window is not None and tokens.shape[1] > self.window:
                windows = tokens.view(-1, self.window)
            wanted = teacher(whole(windows, _lengths(rows), select_ops())) / teacher.config.logit_divisor
        return self.compute_loss(rows, scales, (wanted, teacher.lm_head.weight))


class Align(Objective):
    """Train each new mixer to match the teacher's mixer on the teacher's own input, layer by layer.

    The loss of a layer is the mean squared error relative to the teacher's mean square.
    """

    terms = ("error",)

    def __init__(self, mixers: Mapping[int, nn.Module], teacher: SalaModel) -> None:
        super().__init__()
        self.mixers = nn.ModuleDict({str(index): mixer for index, mixer in mixers.items()})
        self.units = tuple({type(mixer).__name__ for mixer in mixers.values()})
        self._teacher = [teacher]
        self.layer_errors: dict[int, Tensor] = {}

    def forward(self, rows: RowBatch, scales: Tensor) -> tuple[Tensor, Tensor]:
        teacher = self._teacher[0]
        batch = whole(rows["tokens"], _lengths(rows), select_ops())
        with torch.no_grad():
            x = teacher.model.embed_tokens(batch.tokens) * teacher.config.scale_emb
        total = x.new_zeros(())
        layer: Any
        for index, layer in enumerate(teacher.model.layers):
            with torch.no_grad():
                inner = layer.input_layernorm(x)
                wanted = layer.self_attn(inner, batch, None)
            if str(index) in self.mixers:
                error = _relative_error(self.mixers[str(index)](inner, batch, None), wanted)
                self.layer_errors[index] = error.detach()
                total = total + error
            with torch.no_grad():
                x = x + wanted * layer.residual_scale
                x = x + layer.mlp(layer.post_attention_layernorm(x)) * layer.residual_scale
        mean = total / len(self.mixers)
        count = batch.tokens.shape[0]
        return mean * count * scales[0], (mean * count).detach()[None]


def counts(objective: nn.Module, rows: RowBatch) -> list[int]:
    """Return how many predictions (or tokens) each term of the objective averages over."""
    if isinstance(objective, Align):
        return [rows["tokens"].numel()]
    first, second = _targets(rows)
    found = [int(first.sum()), int(second.sum())]
    if isinstance(objective, NextToken) and objective.selection_loss is not None:
        found.append(count_queries(*rows["tokens"].shape))
    return found


def _lengths(rows: RowBatch) -> tuple[int, ...] | None:
    return tuple(rows["lengths"].tolist()) if "lengths" in rows else None


def _hidden(model: SalaModel, rows: RowBatch) -> Tensor:
    return model(whole(rows["tokens"], _lengths(rows), select_ops())) / model.config.logit_divisor


def _targets(rows: RowBatch) -> tuple[Tensor, Tensor]:
    """Return masks [B * n] of the positions that predict a token with a loss, and of those that predict an answer."""
    loss_mask, answer = (torch.roll(rows[name], -1, 1) for name in ("loss_mask", "answer"))
    if "lengths" in rows:
        ends = rows["lengths"].cumsum(0) - 1
    else:
        batch, length = rows["tokens"].shape
        ends = torch.arange(1, batch + 1, device=loss_mask.device) * length - 1
    loss_mask, answer = loss_mask.flatten(), answer.flatten()
    loss_mask[ends], answer[ends] = False, False
    return loss_mask, answer


def _loss(
    model: SalaModel, hidden: Tensor, rows: RowBatch, scales: Tensor, teacher: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    loss_mask, answer = _targets(rows)
    labels = torch.roll(rows["tokens"].flatten(), -1)
    with torch.autocast(hidden.device.type, enabled=False):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        head = model.lm_head.weight.to(wide)
        if teacher is not None:
            teacher = (teacher[0].to(wide), teacher[1].to(wide))
        weights = LossWeights(loss_mask * scales[0], answer * scales[1], _truth(rows))
        return head_loss(hidden.to(wide), head, labels, weights, teacher)


def _truth(rows: RowBatch) -> Tensor | None:
    """Return the share of the text's own token in each target [B * n]; None if only the teacher counts."""
    if "truth" not in rows:
        return None
    return rows["truth"].repeat_interleave(rows["tokens"].shape[1])


def _relative_error(found: Tensor, wanted: Tensor) -> Tensor:
    wide = wanted.float()
    return (found.float() - wide).square().mean() / wide.square().mean().clamp(min=1e-12)

"""Training objectives: next tokens, a teacher's distribution, or a teacher's mixers.

Each objective is a module, so that Accelerate can distribute it. It takes a batch and the scales of its losses, and
returns the loss and the unscaled sums for the log.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sala.backends.torch.batch import whole
from sala.backends.torch.fast.dispatch import select_ops
from sala.backends.torch.model import SalaModel, SparseMixer
from sala.lab.train.block_selection_loss import BlockSelectionLoss, count_queries
from sala.lab.train.fast_paths import FastPaths, set_scan, uncompiled_sparse_layers
from sala.lab.train.losses import LossWeights, head_loss
from sala.lab.train.models import hidden_states
from sala.lab.train.steps import TrainingBatch


class Objective(nn.Module):
    """`terms` names the losses, `units` the module classes that FSDP wraps as one unit."""

    terms: tuple[str, ...]
    units: tuple[str, ...] = ("Layer",)
    weights: tuple[float, ...] = ()  # of the terms; empty: as the stage says

    def counts(self, batch: TrainingBatch) -> list[int]:
        """Return how many predictions (or tokens) each term averages over."""
        return [batch.tokens.numel()]


class NextToken(Objective):
    """Cross-entropy of the tokens with a loss, extra weight for answers, and optionally the block-selection loss.

    With `is_mixed`, rows are dense or sparse by their length, and the block-selection loss counts in sparse rows only.
    `tile_rows` is the number of positions whose logits are in memory at a time.
    """

    terms: tuple[str, ...] = ("loss", "answer")

    def __init__(
        self, model: SalaModel, has_selection_loss: bool = False, is_mixed: bool = False, tile_rows: int | None = None
    ) -> None:
        super().__init__()
        self.student, self.is_mixed, self.tile_rows = model, is_mixed, tile_rows
        self.fast = FastPaths()
        self.selection_loss = BlockSelectionLoss(model) if has_selection_loss else None
        if has_selection_loss:
            self.terms = (*self.terms, "choice")

    def counts(self, batch: TrainingBatch) -> list[int]:
        queries = [] if self.selection_loss is None else [count_queries(*batch.tokens.shape)]
        return [*batch.counts[:2], *queries]

    def forward(self, batch: TrainingBatch, scales: Tensor) -> tuple[Tensor, Tensor]:
        return self.compute_loss(batch, scales, None)

    def compute_loss(
        self, batch: TrainingBatch, scales: Tensor, teacher: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Return the scaled loss and the sums of its terms; `teacher` are its hidden states [P, h] and its head."""
        mixers = (layer.self_attn for layer in self.student.model.layers)
        lengths = [mixer.sparse.dense_len for mixer in mixers if isinstance(mixer, SparseMixer)]
        is_sparse = self.is_mixed and any(batch.tokens.shape[1] >= length for length in lengths)
        observed = self.selection_loss if is_sparse or not self.is_mixed else None
        with uncompiled_sparse_layers(self.student) if is_sparse else nullcontext():
            if observed is not None:
                observed.begin(batch.tokens, batch.is_answer)
            hidden = _hidden(self.student, batch.tokens, batch.lengths)
            selection = hidden.new_zeros(()) if observed is None else observed.end()
        hidden = hidden if batch.at is None else hidden.index_select(0, batch.at)
        weights = LossWeights(batch.main * scales[0], batch.label * scales[1], batch.truth)
        with torch.autocast(hidden.device.type, enabled=False):
            dtype = self.head_dtype(hidden)
            if teacher is not None:
                teacher = (teacher[0].to(dtype), teacher[1].to(dtype))
            head = self.student.lm_head.weight.to(dtype)
            loss, sums = head_loss(
                hidden.to(dtype), head, batch.labels, weights, teacher, self.tile_rows, batch.is_symmetric
            )
        if self.selection_loss is None:
            return loss, sums
        return loss + selection * scales[2], torch.cat((sums, selection.detach()[None].to(sums.dtype)))

    def head_dtype(self, hidden: Tensor) -> torch.dtype:
        return torch.bfloat16 if self.fast.has_bf16_head else torch.promote_types(hidden.dtype, torch.float32)


class Distil(NextToken):
    """Kullback-Leibler divergence from a teacher's next-token distribution, and cross-entropy of answers.

    Rows with a `truth` have a mixed target: that share of the text's own next token, the rest from the teacher.

    With `window` set, the teacher's context is limited to that many tokens.
    """

    terms = ("kl", "answer")

    def __init__(
        self,
        student: SalaModel,
        teacher: SalaModel,
        window: int | None = None,
        has_selection_loss: bool = False,
        is_mixed: bool = False,
        tile_rows: int | None = None,
    ) -> None:
        super().__init__(student, has_selection_loss, is_mixed, tile_rows)
        self.window = window
        self._teacher = [teacher]  # in a list, so that it is not registered as a submodule

    def use(self, fast: FastPaths) -> None:
        """Compute on these paths from now on."""
        self.fast = fast
        set_scan(self.student, fast.has_scan)

    def forward(self, batch: TrainingBatch, scales: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self._teacher_hidden(batch.tokens, batch.lengths)
            wanted = wanted if batch.at is None else wanted.index_select(0, batch.at)
        return self.compute_loss(batch, scales, (wanted, self._teacher[0].lm_head.weight))

    def _teacher_hidden(self, tokens: Tensor, lengths: Sequence[int] | None) -> Tensor:
        """Return the teacher's last hidden states [B * n, h]; rows longer than its window are split."""
        if self.window is not None and tokens.shape[1] > self.window:
            tokens = tokens.view(-1, self.window)
        hidden = _hidden(self._teacher[0], tokens, lengths)
        return hidden.to(self.head_dtype(hidden))


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

    def forward(self, rows: TrainingBatch, scales: Tensor) -> tuple[Tensor, Tensor]:
        teacher = self._teacher[0]
        batch = whole(rows.tokens, rows.lengths, select_ops(teacher.kernels))
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


def _hidden(model: SalaModel, tokens: Tensor, lengths: Sequence[int] | None) -> Tensor:
    return hidden_states(model, tokens, lengths) / model.config.logit_divisor


def _relative_error(found: Tensor, wanted: Tensor) -> Tensor:
    wide = wanted.float()
    return (found.float() - wide).square().mean() / wide.square().mean().clamp(min=1e-12)

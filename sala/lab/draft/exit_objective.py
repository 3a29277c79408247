"""The loss of a trained exit: the model's distribution after every token, from the states after its first layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sala.backends.torch.batch import Features, whole
from sala.backends.torch.draft_exit import DraftExit
from sala.backends.torch.fast.dispatch import select_ops
from sala.backends.torch.model import SalaModel
from sala.lab.train.losses import LossWeights, head_loss
from sala.lab.train.objectives import Objective
from sala.lab.train.steps import TrainingBatch


class ExitObjective(Objective):
    """The exit learns; the model is frozen. Every draft of a chain is made of true states, so one step is enough."""

    units = ("DraftExit",)
    terms = ("draft",)
    num_steps = 1

    def __init__(self, exit: DraftExit, model: SalaModel, tile_rows: int | None = None) -> None:
        super().__init__()
        self.exit, self.tile_rows = exit, tile_rows
        self._model = [model.requires_grad_(False)]  # in a list, so that it is not registered as a submodule

    @property
    def model(self) -> SalaModel:
        return self._model[0]

    def counts(self, batch: TrainingBatch) -> list[int]:
        return [batch.counts[0]]

    def forward(self, batch: TrainingBatch, scales: Tensor) -> tuple[Tensor, Tensor]:
        lengths = list(batch.lengths or [batch.tokens.shape[1]] * batch.tokens.shape[0])
        early, hidden = self.observe(batch.tokens.flatten(), lengths)
        divisor = self.model.config.logit_divisor
        rows = self.model.lm_head.weight.float()
        weights = LossWeights(batch.main * scales[0], torch.zeros_like(batch.main))
        loss, sums = head_loss(
            self.exit(early) / divisor, rows, batch.labels * 0, weights, (hidden / divisor, rows), self.tile_rows
        )
        return loss, sums[:1]

    @torch.no_grad()
    def observe(self, tokens: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the normed hidden states after the first layers, and those after all of them."""
        features = Features((self.exit.config.num_layers,))
        hidden = self.model(whole(tokens, lengths, select_ops(self.model.kernels), features))
        return self.model.model.norm(features.states[0]).float(), hidden.float()

    @torch.no_grad()
    def guesses(self, tokens: Tensor, lengths: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Return the draft after every token, for each step of a chain, and the model's own choice."""
        early, hidden = self.observe(tokens, lengths)
        head = self.model.lm_head
        return [head(self.exit(early).to(head.weight.dtype)).argmax(-1)], head(hidden.to(head.weight.dtype)).argmax(-1)

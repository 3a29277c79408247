"""The loss of a trained exit: the model's distribution after every token, from the states after its first layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sala.backends.torch.batch import Features
from sala.backends.torch.draft_exit import DraftExit
from sala.backends.torch.model import SalaModel
from sala.lab.draft.objective import DraftingObjective
from sala.lab.train.losses import LossWeights, head_loss
from sala.lab.train.models import hidden_states
from sala.lab.train.steps import TrainingBatch


class ExitObjective(DraftingObjective):
    """The loss of an exit. Every draft of a chain is made of the model's states, so one step is enough."""

    units = ("DraftExit",)
    terms = ("draft",)

    def __init__(self, exit: DraftExit, model: SalaModel) -> None:
        super().__init__(model, num_steps=1)
        self.exit = exit

    def forward(self, batch: TrainingBatch, scales: Tensor) -> tuple[Tensor, Tensor]:
        early, hidden = self.observe(batch.tokens.flatten(), batch.document_lengths)
        divisor = self.model.config.logit_divisor
        rows = self.model.lm_head.weight.float()
        weights = LossWeights(batch.main * scales[0], torch.zeros_like(batch.main))
        drafted, wanted = self.exit(early) / divisor, (hidden / divisor, rows)
        loss, sums = head_loss(drafted, rows, batch.labels * 0, weights, wanted)
        return loss, sums[:1]

    @torch.no_grad()
    def observe(self, tokens: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the normed hidden states after the first layers, and those after all of them."""
        features = Features((self.exit.config.num_layers,))
        hidden = hidden_states(self.model, tokens, lengths, features)
        return self.model.model.norm(features.states[0]).float(), hidden.float()

    @torch.no_grad()
    def guesses(self, tokens: Tensor, lengths: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        early, hidden = self.observe(tokens, lengths)
        head = self.model.lm_head
        return [head(self.exit(early).to(head.weight.dtype)).argmax(-1)], head(hidden.to(head.weight.dtype)).argmax(-1)

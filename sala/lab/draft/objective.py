"""The loss of a draft head: the model's distribution after every token, for a chain of drafts.

The first draft of a chain is made of the model's hidden states, every further one of the head's own. Training follows
the chain (as EAGLE-3's training-time test does): at step j the entry of each position is made of the state that the
head computed one position earlier at step j - 1. Such an entry attends to entries of the model's states up to j
positions back, and to those of its own chain in between, as when it drafts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sala.backends.torch.batch import Features
from sala.backends.torch.draft_head import DraftHead
from sala.backends.torch.model import SalaModel
from sala.lab.train.losses import LossWeights, head_loss
from sala.lab.train.models import hidden_states
from sala.lab.train.objectives import Objective
from sala.lab.train.steps import TrainingBatch

STEP_WEIGHT = 0.8  # of the loss of each further draft
QUERY_TILE = 512  # positions whose scores are in memory at a time


class DraftingObjective(Objective):
    """A draft head or exit that learns from a frozen model; `num_steps` is the length of a chain of drafts."""

    def __init__(self, model: SalaModel, num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps
        self._model = [model.requires_grad_(False)]  # in a list, so that it is not registered as a submodule

    @property
    def model(self) -> SalaModel:
        return self._model[0]

    def counts(self, batch: TrainingBatch) -> list[int]:
        return [batch.counts[0]] * self.num_steps

    def guesses(self, tokens: Tensor, lengths: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Return the draft after every token, for each step of a chain, and the model's own choice."""
        raise NotImplementedError


class DraftObjective(DraftingObjective):
    """The loss of a draft head, for each draft of a chain."""

    units = ("DraftHead",)

    def __init__(self, head: DraftHead, model: SalaModel, num_steps: int) -> None:
        super().__init__(model, num_steps)
        self.head = head
        self.weights = tuple(STEP_WEIGHT**number for number in range(num_steps))
        self.terms = tuple(f"draft {number}" for number in range(1, num_steps + 1))

    def forward(self, batch: TrainingBatch, scales: Tensor) -> tuple[Tensor, Tensor]:
        tokens, lengths = batch.tokens.flatten(), batch.document_lengths
        states, hidden = self.observe(tokens, lengths)
        targets, rows = self.targets(hidden), self.rows
        own = rows if self.head.lm_head is None else self.head.lm_head.weight
        sums: list[Tensor] = []
        loss = hidden.new_zeros((), dtype=torch.float32)
        for number, drafted in enumerate(self.chain(tokens, states, lengths)):
            weights = LossWeights(batch.main * scales[number], torch.zeros_like(batch.main))
            normed = self.normed(drafted)
            part, part_sums = head_loss(normed, own.to(normed.dtype), batch.labels * 0, weights, (targets, rows))
            loss = loss + part
            sums.append(part_sums[0])
        return loss, torch.stack(sums)

    @torch.no_grad()
    def observe(self, tokens: Tensor, lengths: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Return the model's hidden states for the head, and the normed ones [T, hidden] that its own head takes."""
        features = Features(self.head.config.feature_layers)
        hidden = hidden_states(self.model, tokens, lengths, features)
        return [state.float() for state in features.states], hidden.float()

    @torch.no_grad()
    def guesses(self, tokens: Tensor, lengths: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        states, hidden = self.observe(tokens, lengths)
        wanted = self.model.lm_head(hidden.to(self.model.lm_head.weight.dtype)).argmax(-1)
        own = self.rows if self.head.lm_head is None else self.head.lm_head.weight
        chain = self.chain(tokens, states, lengths)
        return [self.head.tokens[(self.normed(drafted) @ own.T).argmax(-1)] for drafted in chain], wanted

    def targets(self, hidden: Tensor) -> Tensor:
        return hidden / self.model.config.logit_divisor

    @property
    def rows(self) -> Tensor:
        """Return the rows of the model's head for the tokens that can be drafted."""
        return self.model.lm_head.weight.index_select(0, self.head.tokens).float()

    def normed(self, drafted: Tensor) -> Tensor:
        normed: Tensor = self.head.norm(drafted)
        return normed / self.model.config.logit_divisor if self.head.lm_head is None else normed

    def chain(self, tokens: Tensor, states: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """Return the head's states of every position at each step of the chain, [T, hidden] each."""
        head = self.head
        embedded = (self.model.model.embed_tokens(tokens) * self.model.config.scale_emb).float()
        positions = torch.cat([torch.arange(length, device=tokens.device) for length in lengths])
        is_first = positions == 0
        state, past, outputs = head.fused(states), [], []
        for _ in range(self.num_steps):
            before = torch.where(is_first[:, None], 0, state.roll(1, 0))
            entry = head.entry(embedded, before)
            past.append(head.keys_values(entry, positions))
            queries = head.queries(entry, positions)
            state = head.output(before, self.attend(*queries, past, lengths))
            outputs.append(state)
        return outputs

    def attend(
        self, near: Tensor, far: Tensor, past: Sequence[tuple[Tensor, Tensor]], lengths: Sequence[int]
    ) -> Tensor:
        """Return the attention [T, H, D] of the last step's queries to keys and values [T, G, D] of all steps."""
        shared = self.head.num_heads // self.head.num_groups
        wide = [(k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)) for k, v in past]
        out, begin = [], 0
        for length in lengths:
            document = slice(begin, begin + length)
            pieces = [(k[document], v[document]) for k, v in wide]
            for first in range(0, length, QUERY_TILE):
                tile = slice(begin + first, min(begin + first + QUERY_TILE, begin + length))
                out.append(checkpoint(self._attend_tile, near[tile], far[tile], pieces, first, use_reentrant=False))
            begin += length
        return torch.cat(out)

    def _attend_tile(self, near: Tensor, far: Tensor, past: Sequence[tuple[Tensor, Tensor]], first: int) -> Tensor:
        """Return the attention [n, H, D] of the queries first, first + 1, … of a document."""
        config, depth, scale = self.head.config, len(past) - 1, self.head.dim**-0.5
        at = torch.arange(first, first + len(near), device=near.device)
        begin = max(0, first - config.window + 1)
        keys, values = past[0][0][begin : first + len(near)], past[0][1][begin : first + len(near)]
        place = torch.arange(begin, first + len(near), device=near.device)
        distance = at[:, None] - place
        is_near = (distance >= depth) & (distance < config.window)
        scores = [torch.einsum("nhd,mhd->hnm", near, keys).masked_fill(~is_near, float("-inf"))]
        count = min(config.num_first, first + len(near))
        first_place = torch.arange(count, device=near.device)
        is_far = at[:, None] - first_place >= max(config.window, depth)
        is_any_far = bool(is_far.any())
        if is_any_far:
            far_scores = torch.einsum("nhd,mhd->hnm", far, past[0][0][:count])
            scores.append(far_scores.masked_fill(~is_far, float("-inf")))
        for step in range(1, depth + 1):  # the entries of the own chain, at one position each
            own = (at - depth + step).clamp(min=0)
            one = torch.einsum("nhd,nhd->hn", near, past[step][0][own])
            scores.append(one.masked_fill(at < depth - step, float("-inf"))[..., None])
        weights = (torch.cat(scores, -1) * scale).softmax(-1)
        sizes = [score.shape[-1] for score in scores]
        parts = list(weights.split(sizes, -1))
        out = torch.einsum("hnm,mhd->nhd", parts.pop(0), values)
        if is_any_far:
            out = out + torch.einsum("hnm,mhd->nhd", parts.pop(0), past[0][1][:count])
        for step, part in enumerate(parts, 1):
            own = (at - depth + step).clamp(min=0)
            out = out + part[..., 0].T[..., None] * past[step][1][own]
        return out

"""Measure how far a student is from its teacher on the teacher's own answers to held-out prompts.

A probe file holds token ids, so that a measurement takes seconds on a GPU and covers the same positions in every run.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sala.backends.torch.batch import whole
from sala.backends.torch.model import SalaModel
from sala.lab.train.documents import has_loop
from sala.lab.train.halo.slots import Slots, SlotUpdate

_TILE = 1024  # positions whose logits are in memory at a time
_STEPS = 8  # decoding steps between two checks for finished answers


class ProbeCase(NamedTuple):
    """A prompt, and the teacher's greedy answer (up to its first repetition)."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def read_cases(file: Path) -> list[ProbeCase]:
    entries = json.loads(file.read_text(encoding="utf-8"))
    return [ProbeCase(tuple(entry["prompt"]), tuple(entry["answer"])) for entry in entries]


class Probe:
    """Compare students with a teacher, whose hidden states are computed once.

    Rows are padded to `length` and computed `rows` at a time.
    """

    def __init__(self, cases: Sequence[ProbeCase], teacher: SalaModel, rows: int = 16, length: int = 512) -> None:
        fitting = [case for case in cases if len(case.prompt) + len(case.answer) <= length]
        self.cases, self.rows = fitting, rows
        self.device = teacher.lm_head.weight.device
        tokens = torch.zeros((-(-len(fitting) // rows) * rows, length), dtype=torch.long)
        kinds = torch.zeros_like(tokens)  # 1 where the next token belongs to the answer, 2 where it begins it
        for row, (prompt, answer) in enumerate(fitting):
            tokens[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
            kinds[row, len(prompt) - 1 :][: len(answer)] = 1
            kinds[row, len(prompt) - 1] = 2
        self.tokens, kinds = tokens.to(self.device), kinds.flatten().to(self.device)
        self.at = kinds.nonzero()[:, 0]
        self.labels, self.is_first = self.tokens.flatten()[self.at + 1], kinds[self.at] == 2
        self.teacher_head = teacher.lm_head.weight.detach()
        self.wanted = self._hidden(teacher)

    @torch.no_grad()
    def _hidden(self, model: SalaModel) -> Tensor:
        """Return the hidden states [P, hidden] that predict the tokens of the answers."""
        parts = [model(whole(part)).float() for part in self.tokens.split(self.rows)]
        return torch.cat(parts)[self.at] / model.config.logit_divisor

    @torch.no_grad()
    def __call__(self, student: SalaModel) -> dict[str, float]:
        """Return the mean divergence, that of first tokens, the top-1 agreement and the cross-entropy."""
        hidden, head = self._hidden(student), student.lm_head.weight.detach().float()
        kl, same, chosen = [], [], []
        for begin in range(0, len(self.at), _TILE):
            part = slice(begin, begin + _TILE)
            with torch.autocast(self.device.type, enabled=False):  # bf16 logits are too coarse to compare
                logp = (hidden[part] @ head.T).log_softmax(-1)
                wanted = (self.wanted[part] @ self.teacher_head.float().T).log_softmax(-1)
            kl.append((wanted.exp() * (wanted - logp)).sum(-1))
            same.append((logp.argmax(-1) == wanted.argmax(-1)).float())
            chosen.append(-logp.gather(1, self.labels[part, None])[:, 0])
        divergence = torch.cat(kl)
        return {
            "kl": float(divergence.mean()),
            "first": float(divergence[self.is_first].mean()),
            "agree": float(torch.cat(same).mean()),
            "loss": float(torch.cat(chosen).mean()),
        }

    def ended(self, student: SalaModel, end: int, max_tokens: int = 160) -> float:
        """Return the share of prompts whose greedy answer ends within `max_tokens` and does not loop.

        Attention is dense, as it is in texts as short as these.
        """
        prompts = [case.prompt for case in self.cases]
        if not prompts:
            return 0.0
        slots = Slots(student, len(prompts), max(map(len, prompts)) + max_tokens, [end], seed=0)
        slots.update([SlotUpdate(at, 0, 0, ids, len(ids) + max_tokens, 0.0, 0.0) for at, ids in enumerate(prompts)])
        with torch.autocast(self.device.type, enabled=False):  # the slots choose their own precision
            while slots.is_active.any():
                slots.run(_STEPS)
        rows = zip(prompts, slots.tokens.tolist(), slots.position.tolist(), strict=True)
        answers = [tokens[len(ids) : last + 1] for ids, tokens, last in rows]
        return sum(ids[-1] == end and not has_loop(ids) for ids in answers) / len(answers)

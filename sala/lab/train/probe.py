"""Measure how far a student is from its teacher on the teacher's own answers to held-out prompts.

    python -m sala.lab.train.probe PROBE.json TEACHER STUDENT

A probe file holds token ids, so that a measurement takes seconds on a GPU and covers the same positions in every run.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sala.backends.torch.batch import whole
from sala.backends.torch.loader import pick_device
from sala.backends.torch.model import SalaModel
from sala.lab.train.documents import has_loop
from sala.lab.train.models import load_for_training

_TILE = 1024  # positions whose logits are in memory at a time


@dataclass(frozen=True, slots=True)
class ProbeCase:
    """A prompt, the teacher's greedy answer (up to its first repetition), and whether it ended with an end token."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    is_ended: bool


def read_cases(file: Path) -> list[ProbeCase]:
    entries = json.loads(file.read_text(encoding="utf-8"))
    return [ProbeCase(tuple(e["prompt"]), tuple(e["answer"]), e["is_ended"]) for e in entries]


class Probe:
    """Compare students with a teacher, whose hidden states are computed once.

    Rows are padded to `length` and computed `rows` at a time, so that a compiled student sees a known shape; with
    `is_packed`, unpadded rows are concatenated, which is less work.
    """

    def __init__(
        self,
        cases: Sequence[ProbeCase],
        teacher: SalaModel,
        rows: int = 16,
        length: int = 512,
        is_packed: bool = False,
    ) -> None:
        fitting = [case for case in cases if len(case.prompt) + len(case.answer) <= length]
        self.cases, self.rows, self.length, self.is_packed = fitting, rows, length, is_packed
        self.device = teacher.lm_head.weight.device
        tokens = torch.zeros((-(-len(fitting) // rows) * rows, length), dtype=torch.long)
        at: list[int] = []
        first: list[bool] = []
        labels: list[int] = []
        for row, case in enumerate(fitting):
            ids = (*case.prompt, *case.answer)
            tokens[row, : len(ids)] = torch.tensor(ids)
            at += [row * length + place for place in range(len(case.prompt) - 1, len(ids) - 1)]
            first += [True] + [False] * (len(case.answer) - 1)
            labels += case.answer
        self.tokens = tokens.to(self.device)
        self.at, self.labels = torch.tensor(at, device=self.device), torch.tensor(labels, device=self.device)
        self.is_first = torch.tensor(first, device=self.device)
        self.teacher_head = teacher.lm_head.weight.detach()
        self.wanted = self._hidden(teacher)

    @torch.no_grad()
    def _hidden(self, model: SalaModel) -> Tensor:
        """Return the hidden states [P, hidden] that predict the tokens of the answers."""
        if not self.is_packed:
            parts = [model(whole(part)).float() for part in self.tokens.split(self.rows)]
            return torch.cat(parts)[self.at] / model.config.logit_divisor
        sizes = [len(case.prompt) + len(case.answer) for case in self.cases]
        is_real = torch.arange(self.length) < torch.tensor(sizes)[:, None]
        tokens = self.tokens[: len(sizes)][is_real.to(self.device)]
        hidden = self._unpack(model(whole(tokens, sizes)).float(), is_real)
        return hidden[self.at] / model.config.logit_divisor

    def _unpack(self, packed: Tensor, is_real: Tensor) -> Tensor:
        """Return packed hidden states in the layout of padded rows."""
        out = packed.new_zeros((self.tokens.numel(), packed.shape[1]))
        out[: is_real.numel()][is_real.flatten().to(self.device)] = packed
        return out

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

    @torch.no_grad()
    def ended(self, student: SalaModel, end: int, most: int = 160) -> float:
        """Return the share of prompts whose greedy answer ends within `most` tokens and does not loop.

        Every step recomputes whole rows, because a student in training has no KV cache.
        """
        num_cases = len(self.cases)
        length = -(-(max(len(case.prompt) for case in self.cases) + most) // 64) * 64
        tokens = torch.zeros((num_cases, length), dtype=torch.long)
        for row, case in enumerate(self.cases):
            tokens[row, : len(case.prompt)] = torch.tensor(case.prompt)
        tokens = tokens.to(self.device)
        sizes = torch.tensor([len(case.prompt) for case in self.cases], device=self.device)
        rows = torch.arange(num_cases, device=self.device)
        done = torch.zeros(num_cases, dtype=torch.bool, device=self.device)
        head = student.lm_head.weight.detach().float()
        for _ in range(most):
            hidden = student(whole(tokens)).view(num_cases, length, -1)[rows, sizes - 1].float()
            with torch.autocast(self.device.type, enabled=False):
                best = (hidden @ head.T).argmax(-1)
            tokens[rows, sizes] = torch.where(done, tokens[rows, sizes], best)
            sizes = torch.where(done, sizes, sizes + 1)
            done |= best == end
            if bool(done.all()):
                break
        begins = [len(case.prompt) for case in self.cases]
        answers = [tokens[row, begins[row] : int(sizes[row])].tolist() for row in range(num_cases)]
        return sum(bool(done[row]) and not has_loop(a) for row, a in enumerate(answers)) / max(1, num_cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probe", type=Path)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("student", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--ended", action="store_true", help="also generate the student's answers (slow without a GPU)")
    options = parser.parse_args()
    device = pick_device(options.device)
    probe = Probe(read_cases(options.probe), load_for_training(options.teacher, device), is_packed=True)
    student = load_for_training(options.student, device)
    values = probe(student)
    if options.ended:
        values["ended"] = probe.ended(student, student.config.eos_token_id[0])
    print(json.dumps(values, indent=2))


if __name__ == "__main__":
    main()

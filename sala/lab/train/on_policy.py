"""On-policy distillation: the student writes answers, and the teacher scores every token of them.

A student that only sees its teacher's text never learns to return from its own mistakes. The loss here is on the
student's own text. Inside a loop the teacher agrees with the loop, so answers are cut at the first repetition.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sala.backends.torch.model import SalaModel
from sala.lab.train.data import Array, TrainingRow
from sala.lab.train.documents import ANSWER, NGRAM, DialogueWeights, TokenizedDocuments, loop_start, weigh_dialogue
from sala.lab.train.halo.sample import Marks, Opening, Writer
from sala.lab.train.recipe import OnPolicy


class StudentRows:
    """Rows of answers that the student writes, a new round of them every `options.every` steps."""

    def __init__(self, student: SalaModel, prompts: Sequence[Sequence[int]], options: OnPolicy, seed: int) -> None:
        self.student, self.prompts, self.options, self.seed = student, prompts, options, seed
        self._writer: Writer | None = None
        self._round, self._documents = -1, TokenizedDocuments.of([])

    def __call__(self, step: int) -> list[TrainingRow]:
        """Return the rows of a step, written by the student as it is at the first step of the round."""
        number, place = divmod(step, self.options.every)
        if number != self._round:
            self._round, self._documents = number, self._write(number)
        first = place * self.options.rows
        documents = [self._documents.document(at) for at in range(first, first + self.options.rows)]
        pad = self.student.config.eos_token_id[0]
        weights = DialogueWeights(given=0.0, question=0.0, answer=self.options.weight, truth=0.0, first=1.0)
        rows = [weigh_dialogue(*document, self.options.seq_len, pad, weights) for document in documents]
        return [replace(row, kind="on-policy") for row in rows]

    def _write(self, number: int) -> TokenizedDocuments:
        rng = np.random.default_rng([self.seed, number])
        count, temperatures = self.options.rows * self.options.every, self.options.temperatures
        chosen = rng.integers(len(self.prompts), size=count)
        openings = [
            Opening(tuple(self.prompts[at]), temperatures[index % len(temperatures)])
            for index, at in enumerate(chosen.tolist())
        ]
        if self._writer is None:
            ends = self.student.config.eos_token_id
            self._writer = Writer(self.student, count, self.options.seq_len, ends, Marks(), self.seed)
        self._writer.restart()
        return TokenizedDocuments.of([cut_at_loop(*document) for document in self._writer.write(openings).items()])


def first_questions(documents: TokenizedDocuments, longest: int) -> list[list[int]]:
    """Return what precedes the first answer of each dialogue, if it has at most `longest` tokens."""
    out = []
    for tokens, roles, _ in documents.items():
        answers = np.flatnonzero(roles == ANSWER)
        if len(answers) and 0 < answers[0] <= longest:
            out.append(tokens[: answers[0]].tolist())
    return out


def cut_at_loop(
    tokens: Sequence[int] | Array, roles: Sequence[int] | Array, is_ended: bool
) -> tuple[list[int], list[int], bool]:
    """Cut an answer after the first n-gram that it repeats: the tokens that led into a loop stay, the loop goes."""
    ids, marks = list(map(int, tokens)), list(map(int, roles))
    begin = marks.index(ANSWER) if ANSWER in marks else len(ids)
    end = min(begin + loop_start(ids[begin:]) + NGRAM, len(ids))
    return ids[:end], marks[:end], is_ended and end == len(ids)

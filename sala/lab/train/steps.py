"""Steps that mix rows of several lengths and kinds in micro-batches of fixed shapes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sala.errors import InputError
from sala.lab.train.data import MicroBatch, TrainingRow
from sala.lab.train.documents import WeightedRow, stack

RowMaker = Callable[[int], WeightedRow]


@dataclass(frozen=True, slots=True)
class StepPart:
    """The rows that one source contributes to every step."""

    make: RowMaker
    rows: int
    length: int
    is_sparse: bool = False


class MixedSteps:
    """The micro-batches of step i: parts of the same length and regime share a micro-batch.

    Each of the `world` processes gets its share of every part's rows. Raise InputError if they cannot be divided.
    """

    def __init__(self, parts: Sequence[StepPart], rank: int = 0, world: int = 1) -> None:
        for part in parts:
            if part.rows % world:
                raise InputError("rows", f"is {part.rows}", f"use a multiple of {world}, the number of processes")
        self.parts, self.rank, self.world = list(parts), rank, world

    @property
    def tokens_per_step(self) -> int:
        return sum(part.rows * part.length for part in self.parts)

    def __call__(self, step: int) -> list[MicroBatch]:
        shapes = dict.fromkeys((part.length, part.is_sparse) for part in self.parts)
        out = []
        for length, is_sparse in shapes:
            rows = []
            for part in self.parts:
                if (part.length, part.is_sparse) == (length, is_sparse):
                    share = part.rows // self.world
                    first = step * part.rows + self.rank * share
                    rows += [part.make(number) for number in range(first, first + share)]
            out.append(stack(rows, is_sparse))
        return out


def text_row(row: TrainingRow) -> WeightedRow:
    """Return a row of text with weights: 1 - truth for the teacher's distribution, truth for the text's tokens."""
    loss_mask = row.loss_mask.astype(np.float32)
    loss_mask[0] = 0
    return WeightedRow(
        row.tokens, loss_mask * np.float32(1 - row.truth), loss_mask * np.float32(row.truth), row.answer, "text"
    )


def needle_row(row: TrainingRow, answer_share: float) -> WeightedRow:
    """Return a needle row with weights: the haystack from the teacher, the answers from the text.

    The weights of the answers add up to `answer_share` times the length of the row.
    """
    teacher, truth = row.loss_mask.astype(np.float32), row.answer.astype(np.float32)
    teacher[0] = 0
    count = int(row.answer.sum())
    if count:
        truth *= answer_share * len(row.tokens) / count
    return WeightedRow(row.tokens, teacher, truth.astype(np.float32), row.answer, "needle")

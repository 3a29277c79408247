"""Steps that mix rows of several lengths and kinds: the same micro-batches of fixed shapes to the last step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sala.errors import InputError
from sala.lab.train.data import MicroBatch, TrainingRow
from sala.lab.train.documents import WeightedRow, stack

RowMaker = Callable[[int], WeightedRow]


@dataclass(frozen=True, slots=True)
class StepPart:
    """So many rows of one source in every step."""

    make: RowMaker
    rows: int
    length: int
    is_sparse: bool = False


class MixedSteps:
    """The micro-batches of step number i: parts of the same length and regime are computed together.

    Of `world` processes each gets its share of every part's rows.
    """

    def __init__(self, parts: Sequence[StepPart], rank: int = 0, world: int = 1) -> None:
        for part in parts:
            if part.rows % world:
                raise InputError("rows", f"is {part.rows}", f"{world} processes must share them")
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
    """Weigh a row of text: the teacher's distribution counts by 1 - truth, the text itself by truth."""
    learn = row.learn.astype(np.float32)
    learn[0] = 0
    return WeightedRow(row.tokens, learn * np.float32(1 - row.truth), learn * np.float32(row.truth), row.answer, "text")


def needle_row(row: TrainingRow, answer_share: float) -> WeightedRow:
    """Weigh a needle row: the haystack by the teacher, the answers by the truth, together `answer_share` per token."""
    teacher, truth = row.learn.astype(np.float32), row.answer.astype(np.float32)
    teacher[0] = 0
    count = int(row.answer.sum())
    if count:
        truth *= answer_share * len(row.tokens) / count
    return WeightedRow(row.tokens, teacher, truth.astype(np.float32), row.answer, "needle")

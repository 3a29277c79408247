"""Steps of rows of several lengths and kinds, in micro-batches of fixed shapes, as the objectives take them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sala.errors import InputError
from sala.lab.train.data import RowMaker, TrainingRow


@dataclass(frozen=True, slots=True)
class StepPart:
    """The rows that one source contributes to every step, or to every n-th step."""

    make: RowMaker
    rows: int
    length: int
    is_sparse: bool = False
    every: int = 1


class TrainingBatch(NamedTuple):
    """Rows of one length that run in one forward pass, with a loss at P positions, those that predict a token.

    The loss is Σ (main · main loss + label · cross-entropy), where the main loss is the cross-entropy or the divergence
    from a teacher; with `truth`, that share of it is the cross-entropy.
    """

    tokens: Tensor  # [B, n]
    labels: Tensor  # [P]
    main: Tensor  # [P]
    label: Tensor  # [P]
    truth: Tensor | None  # [P]
    at: Tensor | None  # [P], into B * n; None: all positions
    is_answer: Tensor  # [B, n]: whether the next token is part of an answer
    lengths: Sequence[int] | None  # of documents that do not attend to each other
    name: str  # kinds and length, for the log
    counts: Sequence[int]  # positions with a main loss, with a cross-entropy, and with any of them
    is_symmetric: bool = False  # the student wrote it: its divergence from the teacher is the Jensen-Shannon divergence

    @property
    def document_lengths(self) -> list[int]:
        """The lengths of the documents that do not attend to each other; without packing, of the rows."""
        return list(self.lengths or [self.tokens.shape[1]] * self.tokens.shape[0])

    def to(self, device: torch.device) -> "TrainingBatch":
        moved: Any = (x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for x in self)
        return TrainingBatch(*moved)


@dataclass(frozen=True, slots=True)
class Steps:
    """The micro-batches of step i: parts of the same length and regime share a micro-batch of at most `micro_rows`.

    Each of the `world` processes gets its share of every part's rows. Raise InputError if they cannot be divided.
    """

    parts: Sequence[StepPart]
    collate: Callable[[Sequence[TrainingRow]], TrainingBatch]
    rank: int = 0
    world: int = 1
    micro_rows: int | None = None

    def __post_init__(self) -> None:
        for part in self.parts:
            if part.rows % self.world:
                raise InputError("rows", f"is {part.rows}", f"use a multiple of {self.world}, the number of processes")

    def __call__(self, step: int) -> list[TrainingBatch]:
        return [self.collate(rows) for rows in self.rows(step)]

    def rows(self, step: int) -> list[list[TrainingRow]]:
        shapes: dict[tuple[int, bool], list[TrainingRow]] = {}
        for part in self.parts:
            if step % part.every:
                continue
            share = part.rows // self.world
            first = step // part.every * part.rows + self.rank * share
            rows = shapes.setdefault((part.length, part.is_sparse), [])
            rows += [part.make(number) for number in range(first, first + share)]
        size = self.micro_rows or max(map(len, shapes.values()), default=1)
        return [rows[at : at + size] for rows in shapes.values() for at in range(0, len(rows), size)]


def collate(rows: Sequence[TrainingRow], packing: str = "stream", tile_rows: int = 0) -> TrainingBatch:
    """Return the rows as a batch with a loss at all positions.

    With `tile_rows` only positions with a weight count, padded by others to a quarter, half … or all of the tokens: few
    sizes mean few compilations and captures. Each is a multiple of `tile_rows`.
    """
    tokens = np.stack([row.tokens for row in rows]).astype(np.int64)
    is_weighted = rows[0].teacher_weight is not None
    main = [row.loss_mask if row.teacher_weight is None else row.teacher_weight for row in rows]
    label = [row.answer if row.truth_weight is None else row.truth_weight for row in rows]
    lengths = tuple(length for row in rows for length in row.lengths) if packing == "documents" else None
    last = np.cumsum(lengths or [tokens.shape[1]] * len(rows)) - 1

    def next_token(values: Any) -> Any:
        shifted = np.roll(np.stack(values).reshape(-1), -1)
        shifted[last] = 0  # the last token of a document predicts nothing
        return shifted

    labels, answer = next_token(tokens), next_token([row.answer for row in rows])
    weights = [next_token(values).astype(np.float32) for values in (main, label)]
    wanted = np.flatnonzero((weights[0] != 0) | (weights[1] != 0))
    truth = np.repeat([row.truth for row in rows], tokens.shape[1]).astype(np.float32)
    at = None
    if tile_rows:
        tiles, quarter = -(-max(len(wanted), 1) // tile_rows), -(-tokens.size // (4 * tile_rows))
        at = np.arange(-(-tiles // quarter) * quarter * tile_rows) % tokens.size
        at[: len(wanted)] = wanted
        is_real = np.arange(len(at)) < len(wanted)
        weights = [np.where(is_real, weight[at], 0).astype(np.float32) for weight in weights]
        labels = labels[at]
    return TrainingBatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        main=torch.from_numpy(weights[0]),
        label=torch.from_numpy(weights[1]),
        truth=torch.from_numpy(truth) if truth.any() and not is_weighted else None,
        at=None if at is None else torch.from_numpy(at),
        is_answer=torch.from_numpy(answer.reshape(tokens.shape)),
        lengths=lengths,
        name=f"{'+'.join(sorted({row.kind for row in rows}))}-{tokens.shape[1]}",
        counts=[*(int(np.count_nonzero(weight)) for weight in weights), len(wanted)],
        is_symmetric=rows[0].kind == "on-policy",
    )


def weigh_text(row: TrainingRow) -> TrainingRow:
    """Return a row of text with weights: 1 - truth for the teacher's distribution, truth for the text's tokens."""
    mask = row.loss_mask.astype(np.float32)
    mask[0] = 0
    return replace(row, teacher_weight=mask * np.float32(1 - row.truth), truth_weight=mask * np.float32(row.truth))


def weigh_needle(row: TrainingRow, answer_share: float) -> TrainingRow:
    """Return a needle row with weights: the haystack from the teacher, the answers from the text.

    The weights of the answers add up to `answer_share` times the length of the row.
    """
    teacher, truth = row.loss_mask.astype(np.float32), row.answer.astype(np.float32)
    teacher[0] = 0
    count = int(row.answer.sum())
    if count:
        truth *= answer_share * len(row.tokens) / count
    return replace(row, kind="needle", teacher_weight=teacher, truth_weight=truth.astype(np.float32))

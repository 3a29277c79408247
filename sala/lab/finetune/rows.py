"""Rows of examples for the Trainer: a row holds one or more examples, which do not attend to each other."""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sala.lab.finetune.dialogues import Example
from sala.lab.finetune.options import FinetuneOptions

IGNORED = -100
Row = tuple[Example, ...]


def make_rows(examples: Sequence[Example], options: FinetuneOptions) -> list[Row]:
    return pack(examples, options.max_length) if options.packing else [(example,) for example in examples]


def pack(examples: Sequence[Example], max_length: int) -> list[Row]:
    """Pack examples into rows of at most `max_length` tokens: best-fit decreasing."""
    order = sorted(range(len(examples)), key=lambda index: (-len(examples[index]), index))
    rows: list[list[Example]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index in order:
        example = examples[index]
        at = bisect_left(free, (len(example), -1))
        if at == len(free):
            rows.append([example])
            left, row = max_length - len(example), len(rows) - 1
        else:
            left, row = free.pop(at)
            rows[row].append(example)
            left -= len(example)
        if left:
            insort(free, (left, row))
    return [tuple(row) for row in rows]


def collate(rows: Sequence[Row], pad_id: int = 0) -> dict[str, Tensor]:
    """Return a batch padded to the longest row; positions start at 0 in every example."""
    width = max(sum(map(len, row)) for row in rows)
    lines = []
    for row in rows:
        gap = width - sum(map(len, row))
        tokens = np.concatenate([*(example.tokens for example in row), np.full(gap, pad_id)])
        has_loss = np.concatenate([*(example.loss_mask for example in row), np.zeros(gap, np.bool_)])
        positions = np.concatenate([np.arange(size) for size in (*map(len, row), gap)])
        lines.append((tokens, np.arange(width) < width - gap, positions, np.where(has_loss, tokens, IGNORED)))
    names = ("input_ids", "attention_mask", "position_ids", "labels")
    columns = (torch.from_numpy(np.stack(column).astype(np.int64)) for column in zip(*lines, strict=True))
    return dict(zip(names, columns, strict=True))

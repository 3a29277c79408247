"""Rows of examples for the Trainer: a row holds one or more examples, which do not attend to each other."""

from bisect import bisect_left, insort
from collections.abc import Sequence

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
    width = max(sum(len(example) for example in row) for row in rows)
    shape = (len(rows), width)
    batch = {
        "input_ids": torch.full(shape, pad_id, dtype=torch.long),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "position_ids": torch.zeros(shape, dtype=torch.long),
        "labels": torch.full(shape, IGNORED, dtype=torch.long),
    }
    for number, row in enumerate(rows):
        at = 0
        for example in row:
            span = slice(at, at + len(example))
            tokens = torch.from_numpy(example.tokens)
            batch["input_ids"][number, span] = tokens
            batch["attention_mask"][number, span] = 1
            batch["position_ids"][number, span] = torch.arange(len(example))
            batch["labels"][number, span] = torch.where(torch.from_numpy(example.loss_mask), tokens, IGNORED)
            at += len(example)
        if at < width:
            batch["position_ids"][number, at:] = torch.arange(width - at)
    return batch

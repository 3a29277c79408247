"""Rows of examples for the Trainer: a row holds one or more examples, which do not attend to each other."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from sala.lab.finetune.dialogues import Example

IGNORED = -100


class ExampleRows(Dataset[tuple[Example, ...]]):
    def __init__(self, rows: Sequence[tuple[Example, ...]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Example, ...]:
        return self.rows[index]

    @property
    def num_tokens(self) -> int:
        return sum(len(example) for row in self.rows for example in row)

    @property
    def num_learned(self) -> int:
        return sum(int(example.loss_mask.sum()) for row in self.rows for example in row)


def collate(rows: Sequence[tuple[Example, ...]], pad_id: int = 0) -> dict[str, Tensor]:
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

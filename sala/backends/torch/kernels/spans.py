"""The table of spans: what prefill kernels read on the device about the spans whose rows are packed into one tensor.

It is [NUM_FIELDS, S] in int32, field after field. A span of padding has no rows.
"""

# mypy: disable-error-code="import-untyped"

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

FIRST: tl.constexpr = tl.constexpr(0)  # the span's first row among the packed rows
COUNT: tl.constexpr = tl.constexpr(1)  # its rows
START: tl.constexpr = tl.constexpr(2)  # the position of its first row
SLOT: tl.constexpr = tl.constexpr(3)  # its state
DENSE: tl.constexpr = tl.constexpr(4)  # how many of its rows attend to all tokens before them; others are sparse
SNAPSHOTS: tl.constexpr = tl.constexpr(5)  # lengths after which the state is copied; -1 for none
MAX_SNAPSHOTS: tl.constexpr = tl.constexpr(8)
SNAPSHOT_SLOTS: tl.constexpr = tl.constexpr(13)  # where to
NUM_FIELDS = 21
MAX_SPANS = 128  # spans of a table


class PackedSpan(NamedTuple):
    """One span, see the fields above; `snapshots` are (length, slot) pairs."""

    first: int
    num_rows: int
    start: int = 0
    slot: int = 0
    num_dense: int = 0
    snapshots: Sequence[tuple[int, int]] = ()


def fill(table: "np.ndarray[Any, Any]", spans: Sequence[PackedSpan]) -> None:
    """Write the spans into a table [NUM_FIELDS, S], and padding after them."""
    table[:] = 0
    table[SNAPSHOTS.value :] = -1
    for index, span in enumerate(spans):
        assert len(span.snapshots) <= MAX_SNAPSHOTS.value
        table[: SNAPSHOTS.value, index] = span[: SNAPSHOTS.value]
        for at, (length, slot) in enumerate(span.snapshots):
            table[SNAPSHOTS.value + at, index] = length
            table[SNAPSHOT_SLOTS.value + at, index] = slot


def table_of(spans: Sequence[PackedSpan], device: torch.device | str = "cpu") -> Tensor:
    """Return the table of these spans."""
    table = np.empty((NUM_FIELDS, len(spans)), np.int32)
    fill(table, spans)
    return torch.from_numpy(table).to(device, non_blocking=True)

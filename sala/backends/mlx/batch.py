"""A plan packed for the model: the tokens of all rows in one array, and the position of each row in it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import mlx.core as mx
import numpy as np

from sala.backends.mlx.cache import Indices, Span
from sala.backends.mlx.gather import Gather
from sala.backends.mlx.ops import REFERENCE, Ops
from sala.backends.rows import PackedRows, as_slice, token_ids
from sala.protocol import Plan


@dataclass(frozen=True)
class Batch(PackedRows[Span]):
    ops: Ops = REFERENCE
    computed: mx.array | None = None  # the tokens, where they are not known yet: the step before samples them
    indices: Indices = field(default_factory=dict)  # filled by the first layer
    gather: Gather | None = None  # takes what the sampled rows attend to

    @cached_property
    def tokens(self) -> mx.array:
        """[T]"""
        return mx.array(np.asarray(self.ids, np.int32)) if self.computed is None else self.computed

    @cached_property
    def positions(self) -> mx.array:
        """[T]"""
        return mx.array(np.concatenate([np.arange(span.start, span.end, dtype=np.int32) for span in self.spans]))

    def split(self, x: mx.array) -> list[mx.array]:
        """Split x [T, …] into the rows of each span."""
        if len(self.spans) == 1:
            return [x]
        return list(mx.split(x, list(accumulate(self.lengths))[:-1]))


def pack(plan: Plan, ops: Ops = REFERENCE, tokens: mx.array | None = None, gather: Gather | None = None) -> Batch:
    """Return the rows of a plan as one batch, which the model runs by `ops`; `tokens` [T] replace those of the rows."""
    return Batch(token_ids(plan), tuple(Span.of(row) for row in plan.rows), ops, tokens, gather=gather)


def take(hidden: mx.array, rows: Sequence[int]) -> mx.array:
    """Return hidden[rows]: a view where the rows are consecutive, which needs no index on the device."""
    piece = as_slice(rows)
    return hidden[mx.array(np.asarray(rows, np.int32)) if piece is None else piece]

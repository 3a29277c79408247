"""A plan packed for the model: the tokens of all rows in one tensor, and where each row lies in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sala.backends.rows import PackedRows, as_slice, token_ids
from sala.backends.torch.cache import Span, send
from sala.backends.torch.gather import Gather
from sala.backends.torch.ops import REFERENCE, Ops
from sala.protocol import Plan


@dataclass(frozen=True, slots=True)
class Sequences:
    """Whole sequences without a cache, one after another, as in training."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    lengths: tuple[int, ...]
    ops: Ops = REFERENCE
    features: "Features | None" = None  # see `Batch`


def whole(
    tokens: Tensor, lengths: Sequence[int] | None = None, ops: Ops = REFERENCE, features: "Features | None" = None
) -> Sequences:
    """Pack tokens [B, n], a sequence per row, or [T] with the lengths of the sequences in it."""
    if lengths is None:
        lengths = (tokens.shape[1],) * tokens.shape[0]
    positions = torch.cat([torch.arange(length, device=tokens.device) for length in lengths])
    return Sequences(tokens.flatten(), positions, tuple(lengths), ops, features)


@dataclass
class Features:
    """Hidden states after some layers, which a forward pass leaves here: [T, hidden] each."""

    layers: tuple[int, ...]
    states: list[Tensor] = field(default_factory=list)

    def add(self, num_layers: int, x: Tensor) -> None:
        if num_layers in self.layers:
            self.states.append(x)


@dataclass(frozen=True)
class Batch(PackedRows[Span]):
    device: torch.device
    ops: Ops = REFERENCE
    settle: list[Callable[[Sequence[int]], None]] = field(default_factory=list)  # filled by the fused forward instead
    gather: Gather | None = None  # takes what the sampled rows attend to
    features: Features | None = None  # takes hidden states after some layers

    @cached_property
    def tokens(self) -> Tensor:
        """[T], copied to the device at first use."""
        return send(torch.tensor(self.ids, dtype=torch.long), self.device)

    @cached_property
    def positions(self) -> Tensor:
        """[T]"""
        return send(torch.cat([torch.arange(span.start, span.end) for span in self.spans]), self.device)

    def fold_accepted(self, num_accepted: Sequence[int]) -> None:
        """Advance the states of spans with drafts by the tokens that were accepted."""
        for settle in self.settle:
            settle(num_accepted)
        self.fold(num_accepted, self.ops.lightning_fold)


def pack(
    plan: Plan,
    device: torch.device,
    ops: Ops = REFERENCE,
    gather: Gather | None = None,
    features: Features | None = None,
) -> Batch:
    """Return the rows of a plan as one batch, which the model runs by `ops`."""
    spans = tuple(Span.of(row, device) for row in plan.rows)
    return Batch(token_ids(plan), spans, device, ops, gather=gather, features=features)


def take(hidden: Tensor, rows: Sequence[int]) -> Tensor:
    """Return hidden[rows]: a view where the rows are consecutive, which needs no index on the device."""
    piece = as_slice(rows)
    return hidden[torch.tensor(rows, device=hidden.device) if piece is None else piece]

"""The positions of tokens in a padded or packed batch, and the sequences that they form."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from sala.backends.torch.batch import Batch, Sequences
from sala.backends.torch.fast.dispatch import select_ops
from sala.errors import InputError


class WholeRows(Sequences):
    """Whole sequences that move to the device of each layer."""

    __slots__ = ()

    def to(self, device: Any, **_: Any) -> "WholeRows":
        place = torch.device(device)
        if self.positions.device == place:
            return self
        return WholeRows(self.tokens, self.positions.to(place), self.lengths, self.ops)


class CachedRows(Batch):
    """Rows with a KV cache that move to the device of each layer."""

    def to(self, device: Any, **_: Any) -> "CachedRows":
        place = torch.device(device)
        if place == self.device:
            return self
        spans = tuple(replace(span, device=place) for span in self.spans)
        return CachedRows(self.ids, spans, place, self.ops)


@dataclass(frozen=True)
class BatchLayout:
    """`places` [T] are the indices of the tokens among B * n, or None if there is no padding; `counts` is per row.

    `lengths` are those of the sequences, which are the rows unless several are packed into one.
    """

    shape: tuple[int, int]
    places: Tensor | None
    counts: tuple[int, ...]
    lengths: tuple[int, ...]

    def pack(self, x: Tensor) -> Tensor:
        """[B, n, …] → [T, …]"""
        flat = x.flatten(0, 1)
        return flat if self.places is None else flat[self.places]

    def unpack(self, x: Tensor) -> Tensor:
        """[T, …] → [B, n, …], with zeros for padding."""
        if self.places is not None:
            empty = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
            x = empty.index_copy(0, self.places, x)
        return x.unflatten(0, self.shape)

    def whole(self, device: torch.device, kernels: str) -> WholeRows:
        """Return the whole sequences as the model takes them; positions of each start at 0."""
        positions = torch.cat([torch.arange(length, device=device) for length in self.lengths])
        return WholeRows(positions, positions, self.lengths, select_ops(kernels))


def find_layout(
    shape: tuple[int, int], attention_mask: Tensor | None, position_ids: Tensor | None = None
) -> BatchLayout:
    """Return the layout of a batch.

    `attention_mask` [B, n or more; the last n count] is ones and zeros; `position_ids` that restart separate sequences.
    """
    num_rows, num_columns = shape
    places, counts = None, (num_columns,) * num_rows
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[0] != num_rows or attention_mask.shape[1] < num_columns:
            remedy = "give 1 for tokens and 0 for padding, [batch, length]"
            raise InputError("attention_mask", f"has the shape {list(attention_mask.shape)}", remedy)
        mask = attention_mask[:, -num_columns:].bool()
        if not bool(mask.all()):
            places, counts = mask.flatten().nonzero().squeeze(1), tuple(mask.sum(1).tolist())
    lengths = tuple(count for count in counts if count)
    if position_ids is not None and num_columns > 1:
        starts = position_ids.expand(shape) == 0 if position_ids.dim() == 2 else None
        if starts is not None and bool(starts[:, 1:].any()):
            lengths = _split(starts, places, counts)
    return BatchLayout(shape, places, counts, lengths)


def _split(starts: Tensor, places: Tensor | None, counts: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths of the sequences; a position of 0 starts a new one, and so does every row."""
    flags = starts.flatten() if places is None else starts.flatten()[places]
    borders = {*flags.nonzero().squeeze(1).tolist(), *accumulate(counts, initial=0)}
    return tuple(end - begin for begin, end in pairwise(sorted(borders)))

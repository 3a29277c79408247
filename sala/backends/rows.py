"""A row of a plan as backends see it; each adds what it needs on its device."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RowSpan:
    """One row: `length` tokens at positions `start`…, its pages and its slot."""

    start: int
    length: int
    slot: int
    sparse_from: int  # first position in the sparse regime
    num_drafts: int
    pages: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + self.length

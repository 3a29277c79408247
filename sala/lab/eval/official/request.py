"""What is asked of a benchmark."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sala.lab.eval.official.data import Data
from sala.text.tokenizer import Tokenizer

Progress = Callable[[str, int], None]  # called once for each task and length, before its cases are made
MAX_CHARS = 64  # characters of a token at most, which saves counting the tokens of texts that are far too long


@dataclass
class BenchmarkRequest:
    """`limits` has the number of cases of each task by length, in ascending order."""

    tasks: Sequence[str]
    limits: dict[int, int]
    tokenizer: Tokenizer
    data: Data
    seed: int = 0
    haystack: str | None = None
    has_judge: bool = False  # a model that tells whether documents support a statement
    notes: list[str] = field(default_factory=list)  # what a reader of the scores must know

    @property
    def lengths(self) -> list[int]:
        return [*self.limits]

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text))

    def length_of(self, *texts: str) -> int | None:
        """Return the smallest length that holds the texts; None if all are too short."""
        if sum(map(len, texts)) > MAX_CHARS * self.lengths[-1]:
            return None
        at = bisect_left(self.lengths, sum(map(self.count, texts)))
        return self.lengths[at] if at < len(self.limits) else None

    def remark(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

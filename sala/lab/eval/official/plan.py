"""The order of the cases, and what is to be read: prompts that begin alike are adjacent and read that part once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from sala.lab.eval.official.case import Prepared
from sala.lab.eval.tasks.case import count_shared

MIN_SHARED = 256  # tokens of a shared prefix that are worth a snapshot
MAX_BOUNDARIES = 8  # snapshots that one prompt leaves


@dataclass(frozen=True)
class Step:
    """A case in its turn; `known` tokens of it were read for an earlier one, and snapshots are due at `boundaries`."""

    case: Prepared
    known: int
    boundaries: tuple[int, ...]

    @property
    def num_to_read(self) -> int:
        return len(self.case.token_ids) - self.known


@dataclass(frozen=True)
class Volume:
    """Tokens of prompts that are asked for, those to be read, and at most how many are written."""

    num_cases: int
    asked: int
    read: int
    written: int

    @classmethod
    def of(cls, steps: Sequence[Step]) -> "Volume":
        asked, read = (
            (sum(sizes) for sizes in zip(*((len(one.case.token_ids), one.num_to_read) for one in steps), strict=True))
            if steps
            else (0, 0)
        )
        return cls(len(steps), asked, read, sum(one.case.question.max_tokens for one in steps))

    def seconds(self, read_per_second: float, write_per_second: float) -> float:
        """Return how long it takes at these speeds if every answer is as long as it may be."""
        return self.read / read_per_second + self.written / write_per_second


def arrange(cases: Sequence[Prepared]) -> list[Step]:
    """Return the cases, short lengths first, and those of a length so that common prefixes are adjacent."""
    by_length = sorted(cases, key=lambda one: (one.question.length, one.token_ids.astype(">i4").tobytes()))
    steps = []
    for _, group in groupby(by_length, key=lambda one: one.question.length):
        members = [*group]
        shared = [count_shared(one.token_ids, other.token_ids) for one, other in pairwise(members)]
        shared = [size if size >= MIN_SHARED else 0 for size in shared]
        for at, case in enumerate(members):
            known = shared[at - 1] if at else 0
            steps.append(Step(case, min(known, len(case.token_ids) - 1), _branches(shared[at:], known)))
    return steps


def _branches(shared: Sequence[int], known: int) -> tuple[int, ...]:
    """Return where later prompts leave this one, beyond what is `known`; `shared` is what neighbours have in common."""
    found: list[int] = []
    least: int | None = None
    for size in shared:
        least = size if least is None else min(least, size)
        if least <= known or len(found) == MAX_BOUNDARIES:
            break
        if not found or least < found[-1]:
            found.append(least)
    return tuple(sorted(found))

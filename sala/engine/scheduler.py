"""Which sequences run in the next step, and how much of each.

Requests are admitted in the order of arrival. Every step carries one token of each decoding sequence and whole prefill
chunks, as many as the step's budget holds; the sequence that has waited longest comes first. So a short prompt is not
stuck behind a long one, no sequence starves, and a prompt is cut at the same places whatever else runs (prefill is
batch-invariant). When pages run out, the youngest sequence is preempted and computed again later.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from sala.engine.cache import Hybrid, SequenceState

_ARRIVAL = attrgetter("id")


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does for a sequence: compute `num_tokens` tokens, then verify `drafts`."""

    sequence: SequenceState
    num_tokens: int
    drafts: tuple[int, ...] = ()
    mask: bytes | None = None


class Scheduler:
    """Holds the waiting and the running sequences and plans each step."""

    def __init__(self, hybrid: Hybrid, max_batch: int, step_tokens: int) -> None:
        self._hybrid = hybrid
        self.max_batch = max_batch
        self._step_tokens = step_tokens
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []  # in order of arrival
        self.num_preemptions = 0
        self._turn = 0  # even when a step is planned, odd for sequences with a prefill chunk in it

    def __iter__(self) -> Iterator[SequenceState]:
        yield from self.running
        yield from self.waiting

    def add(self, sequence: SequenceState) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Drop a sequence, waiting or running. The caller releases its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def preempt(self, sequence: SequenceState) -> None:
        """Put a running sequence back into the queue: it keeps its tokens and gives up its memory."""
        self._hybrid.release(sequence)
        self.running.remove(sequence)
        self.requeue(sequence)
        self.num_preemptions += 1

    def requeue(self, sequence: SequenceState) -> None:
        """Insert a sequence into the queue by its order of arrival."""
        insort(self.waiting, sequence, key=_ARRIVAL)

    def plan(self) -> list[Work]:
        """Admit what fits and return the work of the next step."""
        self._turn += 2
        self._admit()
        suspects = [sequence for sequence in self.running if sequence.is_suspect]
        group = suspects[:1] or list(self.running)
        decoding = [sequence for sequence in group if sequence.is_decoding and self._has_page(sequence)]
        work = [Work(sequence, 1) for sequence in decoding if sequence in self.running]  # others were preempted
        prefilling = [sequence for sequence in group if sequence in self.running and not sequence.is_decoding]
        budget = self._step_tokens
        for sequence in sorted(prefilling, key=lambda sequence: (sequence.turn, sequence.id)):
            chunk = min(self._step_tokens, sequence.next_stop() - sequence.num_computed)
            if chunk <= budget:
                work.append(Work(sequence, chunk))
                budget -= chunk
                sequence.turn = self._turn + 1
        return work

    def _admit(self) -> None:
        for sequence in list(self.waiting):
            if len(self.running) >= self.max_batch:
                return
            sibling = sequence.after
            if sibling and not sibling.is_finished and sibling.num_computed < sibling.prompt_len - 1:
                continue  # its sibling computes the prompt for both
            if not self._hybrid.admit(sequence):
                return  # in order, so that a large request is not overtaken for ever
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_ARRIVAL)
            sequence.turn = self._turn

    def _has_page(self, sequence: SequenceState) -> bool:
        """Reserve space for the next token, preempting the youngest sequence if necessary."""
        while sequence in self.running and not self._hybrid.extend(sequence, len(sequence.tokens)):
            self.preempt(self.running[-1])
        return sequence in self.running

    def can_draft(self, sequence: SequenceState, count: int) -> bool:
        """Reserve pages for drafts, but never by preempting another sequence."""
        return self._hybrid.extend(sequence, len(sequence.tokens) + count)

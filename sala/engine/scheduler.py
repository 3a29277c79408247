"""Sequences: requests in progress; which of them run in the next step, and how much of each.

Requests are admitted in the order of arrival, within their shares. Every step carries one token of each decoding
sequence and prefill chunks within a budget of tokens. Prompts are computed in the order of arrival, so that first
tokens come one after another; a prompt that is much shorter than the first one may overtake it, but at least half of
the budget is left to the first. So a short prompt is not stuck behind a long one, and no prompt starves. When pages run
out, the youngest sequence is preempted and computed again later.

When the batch is full, clients have equal shares of it, and so have the requests of one client: the next sequence is of
the client, and then of the request, that has the fewest running. One that has two fewer than another takes its place
from it. So a request with a thousand answers queues behind its own answers.

Background requests (batches) come after all others, however early they arrived: another request that finds no room
preempts them.

Where chunks decide the bits of a result (`Capacity.can_split` is false), a prompt is cut at the same places whatever
else runs. Otherwise chunks fill the budget, which is smaller while sequences decode, so that they do not wait long.
"""

import sys
from array import array
from bisect import insort
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Protocol

from sala.config import Regime
from sala.options import Attention
from sala.protocol import Capacity, Control, Gathered, SampledToken, Sampling

MUCH_SHORTER = 4  # times: such a prompt may overtake
LEAST_BUDGET = 512  # tokens of prefill in a step, however slow it is
TOKEN_BYTES = 4
_ORDER = attrgetter("order")
_ids = count()


def as_bytes(tokens: Sequence[int]) -> bytes:
    """Return tokens as bytes, four per token, little-endian."""
    return _little(array("I", tokens)).tobytes()


def as_tokens(data: bytes) -> list[int]:
    return _little(array("I", data)).tolist()


def _little(numbers: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


@dataclass(eq=False, slots=True)
class Request:
    """What a caller asks of the engine. `boundaries` are lengths at which later prompts may go on differently."""

    prompt: Sequence[int]
    sampling: Sampling
    stop_ids: Collection[int] = ()
    salt: str = ""  # requests with other salts share nothing; that of an adapter holds its fingerprint
    boundaries: tuple[int, ...] = ()
    controls: tuple[Control, ...] = ()
    forced: tuple[int, ...] = ()  # tokens that the answer must begin with
    is_background: bool = False  # runs behind all requests that are not
    adapter: str = ""  # fingerprint of the adapter that answers; empty: the model alone
    owner: str = ""  # the client: it has a share of the batch, and of the cache for its snapshots; empty: the salt's
    group: int = 0  # sequences that were requested together have the same number; 0: by itself
    attention: Attention | None = None  # None: as the engine's options say
    kept: tuple[int, ...] = ()  # lengths after which the prefix is written to disk, instead of the whole prompt


@dataclass(eq=False, slots=True)
class SequenceState:
    """A request that has been submitted: the engine's record of one answer."""

    request: Request
    sampling: Sampling  # with a seed
    regime: Regime
    max_len: int  # tokens, prompt and answer together
    boundaries: tuple[int, ...]
    after: "SequenceState | None" = None  # a sibling whose prefill it shares
    tokens: list[int] = field(init=False)
    token_bytes: bytearray = field(init=False)
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    num_computed: int = 0
    num_pending: int = 0  # tokens that steps in flight sample
    num_cached: int | None = None  # of the prompt, known at the first admission
    is_running: bool = False  # admitted by the scheduler
    is_loading: bool = False  # waits for a prefix from disk; others may overtake it
    is_suspect: bool = False  # took part in a step that failed: runs alone to its end
    sampled: list[SampledToken] = field(default_factory=list)
    gathered: Gathered | None = None  # what its tokens attended to, if sources are wanted
    drafts: object = None  # what `engine.draft` knows of its drafts
    forced: deque[int] = field(init=False)
    finish_reason: str | None = None
    error: Exception | None = None
    id: int = field(default_factory=lambda: next(_ids))
    owner: str = field(init=False)
    group: tuple[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.owner = self.request.owner or self.request.salt
        self.group = self.owner, self.request.group or -self.id - 1
        self.tokens = list(self.request.prompt)
        self.token_bytes = bytearray(as_bytes(self.tokens))
        self.forced = deque(self.request.forced)

    @property
    def order(self) -> tuple[bool, int]:
        """Return the key by which sequences are served: those in the background last, otherwise by arrival."""
        return self.request.is_background, self.id

    def take_error(self) -> Exception:
        """Return the error and drop it: its traceback refers to this sequence, which could not be freed."""
        assert self.error is not None
        error, self.error = self.error, None
        return error

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def length(self) -> int:
        """The number of tokens, including those that are not known yet."""
        return len(self.tokens) + self.num_pending

    @property
    def num_remaining(self) -> int:
        """How many tokens are not computed yet; the next token is sampled after the last of them."""
        return self.length - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_remaining == 1

    @property
    def can_run_ahead(self) -> bool:
        """Whether the next step may be launched: the last token is known, or need not be known for it."""
        if not self.num_pending:
            return True
        is_steered = self.forced or not all(control.allows_drafts for control in self.request.controls)
        return not is_steered and self.length < self.max_len

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.token_bytes += as_bytes((token,))

    def next_stop(self) -> int:
        """Return how far the prefill may run before a snapshot is due: the next boundary, or the last token but one."""
        last = len(self.tokens) - 1
        return min((at for at in self.boundaries if self.num_computed < at < last), default=last)


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does for a sequence: compute `num_tokens` tokens, then verify `drafts`."""

    sequence: SequenceState
    num_tokens: int
    drafts: tuple[int, ...] = ()
    mask: bytes | None = None
    source: str = ""  # of the drafts


class SequenceCache(Protocol):
    """What the scheduler asks of the cache."""

    def admit(self, sequence: SequenceState) -> bool:
        """Give a sequence what it needs to start. Return False if there is not enough."""
        ...

    def extend(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Give a sequence pages for `num_tokens` tokens in all. Return False if there are too few."""
        ...

    def release(self, sequence: SequenceState) -> None:
        """Release everything a sequence holds."""
        ...


class Scheduler:
    """Holds the waiting and the running sequences and plans each step."""

    def __init__(self, memory: SequenceCache, capacity: Capacity, max_batch: int, prefill_s: float) -> None:
        self._memory = memory
        self.max_batch = max_batch
        self._step_tokens = capacity.prefill_chunk
        self._page_size = capacity.page_size
        self._can_split = capacity.can_split
        self._prefill_s = prefill_s  # seconds that prefill may add to a step in which sequences decode
        self._prefill_rate: float | None = None  # tokens per second
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []  # in the order in which they are served
        self.num_preemptions = 0
        self._is_settled = False  # no sequence was added or removed since the last admission

    def __iter__(self) -> Iterator[SequenceState]:
        yield from self.running
        yield from self.waiting

    def add(self, sequence: SequenceState) -> None:
        self.requeue(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Drop a sequence, waiting or running. The caller releases its pages."""
        self._is_settled = False
        if sequence.is_running:
            self.running.remove(sequence)
            sequence.is_running = False
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def preempt(self, sequence: SequenceState) -> None:
        """Put a running sequence back into the queue: it keeps its tokens and gives up its memory."""
        self._memory.release(sequence)
        self.remove(sequence)
        self.requeue(sequence)
        self.num_preemptions += 1

    def requeue(self, sequence: SequenceState) -> None:
        """Insert a sequence into the queue where it belongs."""
        self._is_settled = False
        insort(self.waiting, sequence, key=_ORDER)

    def plan(self) -> list[Work]:
        """Admit what fits and return the work of the next step."""
        if self.waiting and not (self._is_settled and len(self.running) >= self.max_batch):
            self._admit()
            self._is_settled = True
        suspects = [sequence for sequence in self.running if sequence.is_suspect]
        group = [sequence for sequence in suspects[:1] or self.running if sequence.can_run_ahead]
        decoding = [sequence for sequence in group if sequence.is_decoding and self._has_page(sequence)]
        work = [Work(sequence, 1) for sequence in decoding if sequence.is_running]  # others were preempted
        prefilling = [sequence for sequence in group if sequence.is_running and not sequence.is_decoding]
        return work + self._prefill(prefilling, bool(work))

    def measure(self, num_tokens: int, seconds: float) -> None:
        """Record how long a step with so many tokens of prefill took."""
        if num_tokens >= LEAST_BUDGET and seconds > 0:
            rate = num_tokens / seconds
            self._prefill_rate = rate if self._prefill_rate is None else 0.8 * self._prefill_rate + 0.2 * rate

    def _prefill(self, sequences: list[SequenceState], is_decoding: bool) -> list[Work]:
        """Divide the budget among prompts, given in the order of arrival."""
        if not sequences:
            return []
        budget = self._budget(is_decoding)
        first, *others = sequences
        most = max(first.num_remaining // MUCH_SHORTER, budget // MUCH_SHORTER)
        short = [sequence for sequence in others if sequence.num_remaining <= most]
        sizes: dict[int, int] = {}
        taken = self._divide(budget // 2 if self._can_split else budget, short, sizes)
        left = max(0, budget - taken) if self._can_split else budget
        left -= self._divide(left, [first], sizes)
        self._divide(left, [sequence for sequence in others if sequence.id not in sizes], sizes)
        return [Work(sequence, sizes[sequence.id]) for sequence in sequences if sequence.id in sizes]

    def _divide(self, budget: int, sequences: list[SequenceState], sizes: dict[int, int]) -> int:
        """Give chunks to sequences, one after another, and return how many tokens they have together."""
        taken = 0
        for sequence in sequences:
            size = self._chunk(sequence, budget - taken)
            if size:
                sizes[sequence.id] = size
                taken += size
        return taken

    def _chunk(self, sequence: SequenceState, budget: int) -> int:
        """Return the size of the next chunk of a prompt within the budget; 0 if there is none."""
        done = sequence.num_computed
        if not self._can_split:
            size = min(self._step_tokens, sequence.next_stop() - done)
            return size if size <= budget else 0
        size = len(sequence.tokens) - done
        if size <= budget:
            return size
        whole = (done + budget) // self._page_size * self._page_size - done  # chunks end with a page
        return whole if whole > 0 else budget if self._step_tokens < self._page_size else 0

    def _budget(self, is_decoding: bool) -> int:
        """Return the tokens of prefill in the next step."""
        if not self._can_split or not is_decoding:
            return self._step_tokens
        allowed = self._step_tokens // 2 if self._prefill_rate is None else int(self._prefill_rate * self._prefill_s)
        return min(self._step_tokens, max(allowed, LEAST_BUDGET))

    def _admit(self) -> None:
        served: set[str] = set()  # clients that have their share of a full batch
        while (sequence := self._next(served)) is not None:
            if self._make_room(sequence):
                self.waiting.remove(sequence)
                insort(self.running, sequence, key=_ORDER)
                sequence.is_running = True
            elif len(self.running) < self.max_batch:
                return  # others don't overtake it, so that a large request does not wait for ever
            else:
                served.add(sequence.owner)  # requests of other clients may still get a share

    def _make_room(self, sequence: SequenceState) -> bool:
        """Return whether a sequence has a place now, if necessary that of another."""
        while len(self.running) >= self.max_batch or not self._memory.admit(sequence):
            if not self._preempt_for(sequence):
                return False
        return True

    def _next(self, served: Collection[str]) -> SequenceState | None:
        """Return the waiting sequence to admit next, if it can be admitted; none of the clients in `served`.

        Only the first of a group that may run is looked at closely: a request may have a thousand of them.
        """
        owners, groups = self._count_running()
        first: dict[tuple[str, int], SequenceState] = {}
        for one in self.waiting:
            if one.group not in first and not one.is_loading and not self._waits_for_sibling(one):
                first[one.group] = one
        found = min(
            [one for one in first.values() if one.owner not in served],
            key=lambda one: (one.request.is_background, owners[one.owner], groups[one.group], one.id),
            default=None,
        )
        return None if found is None or found.num_pending else found  # a pending token is soon known

    def _waits_for_sibling(self, sequence: SequenceState) -> bool:
        """Return whether another answer to the same prompt is computing it for both."""
        sibling = sequence.after
        return sibling is not None and not sibling.is_finished and sibling.num_computed < sibling.prompt_len - 1

    def _count_running(self) -> tuple[Counter[str], Counter[tuple[str, int]]]:
        return Counter(one.owner for one in self.running), Counter(one.group for one in self.running)

    def _preempt_for(self, sequence: SequenceState) -> bool:
        """Preempt a sequence that runs in the background or beyond a fair share. Return False if there is none."""
        if self.running and self.running[-1].request.is_background:
            if not sequence.request.is_background:
                self.preempt(self.running[-1])
            return not sequence.request.is_background
        owners, groups = self._count_running()
        victims = [one for one in self.running if owners[one.owner] > owners[sequence.owner] + 1]
        victims = victims or [
            one
            for one in self.running
            if one.owner == sequence.owner and groups[one.group] > groups[sequence.group] + 1
        ]
        if victims:
            self.preempt(max(victims, key=lambda one: (owners[one.owner], groups[one.group], one.id)))
        return bool(victims)

    def _has_page(self, sequence: SequenceState) -> bool:
        """Reserve space for the next token, preempting the youngest sequence if necessary."""
        while sequence.is_running and not self._memory.extend(sequence, sequence.length):
            self.preempt(self.running[-1])
        return sequence.is_running

    def can_draft(self, sequence: SequenceState, count: int) -> bool:
        """Reserve pages for drafts, but never by preempting another sequence."""
        return self._memory.extend(sequence, len(sequence.tokens) + count)

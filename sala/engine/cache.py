"""Sequences, and the pages, slots and snapshots that they hold in the hybrid cache.

Pages hold keys and values, slots hold the state of the lightning layers. `Hybrid` alone admits, extends, truncates and
releases both. A snapshot, which a later request can continue from, is a slot with the state after `length` tokens and
the pages of those tokens. It is found by comparing tokens, not hashes: there are few, and comparing bytes is fast.
"""

import heapq
import sys
from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from sala.config import SparseConfig
from sala.protocol import Control, Executor, SampledToken, Sampling


class Pool:
    """Hands out numbers 0…size-1, lowest first, and takes each back when its last owner releases it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size))
        self._counts = [0] * size

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_owners(self, number: int) -> int:
        return self._counts[number]

    def take(self, count: int) -> list[int]:
        assert count <= len(self._free), "ask num_free first"
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for number in taken:
            self._counts[number] = 1
        return taken

    def share(self, numbers: list[int] | tuple[int, ...]) -> None:
        for number in numbers:
            assert self._counts[number] > 0, f"{number} is free"
            self._counts[number] += 1

    def release(self, numbers: list[int] | tuple[int, ...]) -> None:
        for number in numbers:
            assert self._counts[number] > 0, f"{number} is free already"
            self._counts[number] -= 1
            if not self._counts[number]:
                heapq.heappush(self._free, number)


TOKEN_BYTES = 4


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
class Snapshot:
    """The state after `length` tokens: their pages and a slot."""

    tokens: bytes  # at least `length` of them; shared with other snapshots of the same prompt
    length: int
    sparse_from: int
    salt: str
    pages: tuple[int, ...]
    slot: int
    used: int = 0  # clock of the last use


class PrefixCache:
    """Snapshots by last use. The caller that adds and removes them keeps track of their pages and slots."""

    def __init__(self, agreement_len: int) -> None:
        self._agreement_len = agreement_len
        self._snapshots: list[Snapshot] = []
        self._clock = 0

    def __len__(self) -> int:
        return len(self._snapshots)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._snapshots)

    def find(self, tokens: bytes, sparse_from: int, salt: str) -> Snapshot | None:
        """Return the longest snapshot that `tokens` continue by at least one token, in a compatible regime."""
        most = len(tokens) // TOKEN_BYTES - 1
        shorter = (snapshot for snapshot in self if snapshot.length <= most)
        fitting = (snapshot for snapshot in shorter if self._fits(snapshot, tokens, sparse_from, salt))
        return max(fitting, key=lambda snapshot: snapshot.length, default=None)

    def has(self, tokens: bytes, length: int, sparse_from: int, salt: str) -> Snapshot | None:
        """Return the snapshot of exactly the first `length` tokens, if there is one."""
        same = (snapshot for snapshot in self._snapshots if snapshot.length == length)
        return next((snapshot for snapshot in same if self._fits(snapshot, tokens, sparse_from, salt)), None)

    def agrees(self, length: int, one: int, other: int) -> bool:
        """Return whether the state after `length` tokens is the same for both values of `sparse_from`."""
        return one == other or length <= self._agreement_len

    def _fits(self, snapshot: Snapshot, tokens: bytes, sparse_from: int, salt: str) -> bool:
        size = snapshot.length * TOKEN_BYTES
        is_same = snapshot.salt == salt and self.agrees(snapshot.length, snapshot.sparse_from, sparse_from)
        return is_same and len(tokens) >= size and snapshot.tokens[:size] == tokens[:size]

    def add(self, snapshot: Snapshot) -> None:
        self._snapshots.append(snapshot)
        self.touch(snapshot)

    def touch(self, snapshot: Snapshot) -> None:
        self._clock += 1
        snapshot.used = self._clock

    def oldest(self, keep: Snapshot | None = None) -> Snapshot | None:
        """Return the snapshot to evict first: the least recently used one other than `keep`."""
        loose = (snapshot for snapshot in self if snapshot is not keep)
        return min(loose, key=lambda snapshot: snapshot.used, default=None)

    def remove(self, snapshot: Snapshot) -> None:
        self._snapshots.remove(snapshot)


_ids = count()


@dataclass(eq=False, slots=True)
class Request:
    """What a caller asks of the engine. `boundaries` are lengths at which later prompts may go on differently."""

    prompt: Sequence[int]
    sampling: Sampling
    stop_ids: Collection[int] = ()
    salt: str = ""
    boundaries: tuple[int, ...] = ()
    controls: tuple[Control, ...] = ()
    forced: tuple[int, ...] = ()  # tokens that the answer must begin with


@dataclass(eq=False, slots=True)
class SequenceState:
    """A request that has been submitted: the engine's record of one answer."""

    request: Request
    sampling: Sampling  # with a seed
    sparse_from: int
    max_len: int  # tokens, prompt and answer together
    boundaries: tuple[int, ...]
    after: "SequenceState | None" = None  # a sibling whose prefill it shares
    tokens: list[int] = field(init=False)
    token_bytes: bytearray = field(init=False)
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    num_computed: int = 0
    num_cached: int | None = None  # of the prompt, known at the first admission
    turn: int = 0  # of the scheduler, when it was admitted or last had a prefill chunk
    is_suspect: bool = False  # took part in a step that failed: runs alone to its end
    sampled: list[SampledToken] = field(default_factory=list)
    forced: deque[int] = field(init=False)
    finish_reason: str | None = None
    error: Exception | None = None
    id: int = field(default_factory=lambda: next(_ids))

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.token_bytes = bytearray(as_bytes(self.tokens))
        self.forced = deque(self.request.forced)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_remaining(self) -> int:
        """How many tokens are not computed yet; the next token is sampled after the last of them."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_remaining == 1

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.token_bytes += as_bytes((token,))

    def next_stop(self) -> int:
        """Return how far the prefill may run before a snapshot is due: the next boundary, or the last token but one."""
        last = len(self.tokens) - 1
        return min((at for at in self.boundaries if self.num_computed < at < last), default=last)


class Hybrid:
    """Keeps track of the executor's pages (KV cache) and slots (recurrent states).

    Full pages are shared between sequences and snapshots. A page that is not full has at most one writer: a sequence
    that continues from a snapshot in the middle of a page gets a copy of that page. (The page's first writer may go on:
    it writes only beyond what the snapshot needs.)
    """

    def __init__(self, executor: Executor, sparse: SparseConfig, num_snapshots: int) -> None:
        capacity = executor.capacity
        self._executor = executor
        self._page_size = capacity.page_size
        self._num_snapshots = num_snapshots
        self.pages = Pool(capacity.num_pages)
        self.slots = Pool(capacity.num_slots)
        self.prefix = PrefixCache(sparse.agreement_len)

    def admit(self, sequence: SequenceState) -> bool:
        """Give a sequence a slot, pages, and the longest cached prefix. Return False if they do not fit."""
        needed = self._num_pages(len(sequence.tokens))
        cached = self.prefix.find(bytes(sequence.token_bytes), sequence.sparse_from, sequence.request.salt)
        shared = cached.length // self._page_size if cached else 0
        if cached is not None and not self._make_room(needed - shared, 1, cached):
            cached, shared = None, 0  # there is one page too few to keep the snapshot beside its copy: begin anew
        if cached is None and not self._make_room(needed, 1):
            return False
        sequence.slot = self.slots.take(1)[0]
        sequence.pages = self.pages.take(needed - shared)
        try:
            if cached is None:
                self._executor.clear_state(sequence.slot)
            else:
                self._continue_from(cached, shared, sequence)
        except BaseException:  # half a copy is of no use
            self.release(sequence)
            raise
        sequence.num_computed = cached.length if cached else 0
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
        return True

    def _continue_from(self, snapshot: Snapshot, shared: int, sequence: SequenceState) -> None:
        assert sequence.slot is not None
        self.prefix.touch(snapshot)
        self._executor.copy_states([(snapshot.slot, sequence.slot)])
        rows = snapshot.length % self._page_size
        if rows:
            self._executor.copy_page(snapshot.pages[shared], sequence.pages[0], rows)
        self.pages.share(snapshot.pages[:shared])
        sequence.pages = [*snapshot.pages[:shared], *sequence.pages]

    def extend(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Give a sequence pages for `num_tokens` tokens in all. Return False if there are too few."""
        missing = self._num_pages(num_tokens) - len(sequence.pages)
        if missing > 0:
            if not self._make_room(missing, 0):
                return False
            sequence.pages += self.pages.take(missing)
        return True

    def truncate(self, sequence: SequenceState) -> None:
        """Release the pages beyond the last token, which rejected drafts leave behind."""
        keep = self._num_pages(len(sequence.tokens))
        self.pages.release(sequence.pages[keep:])
        del sequence.pages[keep:]

    def release(self, sequence: SequenceState) -> None:
        """Release everything a sequence holds; what it computed is lost unless a snapshot has it."""
        self.pages.release(sequence.pages)
        sequence.pages = []
        if sequence.slot is not None:
            self.slots.release([sequence.slot])
            sequence.slot = None
        sequence.num_computed = 0

    def snapshot(self, sequence: SequenceState) -> None:
        """Keep the present state as a snapshot, if a slot is free or another snapshot can be evicted for it."""
        assert sequence.slot is not None
        if self._is_known(sequence) or not self._make_space(1):
            return
        slot = self.slots.take(1)[0]
        try:
            self._executor.copy_states([(sequence.slot, slot)])
        except BaseException:
            self.slots.release([slot])
            raise
        pages = tuple(sequence.pages[: self._num_pages(sequence.num_computed)])
        self.pages.share(pages)
        self._add(sequence, pages, slot)

    def donate(self, sequence: SequenceState) -> None:
        """Turn the slot and pages of a finished sequence into a snapshot, without a copy."""
        is_whole = 0 < sequence.num_computed <= len(sequence.tokens)
        if not is_whole or sequence.slot is None or self._is_known(sequence) or not self._make_space(0):
            self.release(sequence)
            return
        keep = self._num_pages(sequence.num_computed)
        pages, slot = tuple(sequence.pages[:keep]), sequence.slot
        self.pages.release(sequence.pages[keep:])
        self._add(sequence, pages, slot)
        sequence.pages, sequence.slot = [], None

    def insert(self, tokens: bytes, sparse_from: int, salt: str) -> Snapshot | None:
        """Add a snapshot whose pages and slot the caller fills (from a file). Return None if it does not fit."""
        length = len(tokens) // TOKEN_BYTES
        if not self._make_space(0) or not self._make_room(self._num_pages(length), 1):
            return None
        pages, slot = tuple(self.pages.take(self._num_pages(length))), self.slots.take(1)[0]
        snapshot = Snapshot(tokens, length, sparse_from, salt, pages, slot)
        self.prefix.add(snapshot)
        return snapshot

    def forget(self, snapshot: Snapshot) -> None:
        """Drop a snapshot and release what it holds."""
        self.prefix.remove(snapshot)
        self.pages.release(snapshot.pages)
        self.slots.release([snapshot.slot])

    def _is_known(self, sequence: SequenceState) -> bool:
        same = self.prefix.has(
            bytes(sequence.token_bytes), sequence.num_computed, sequence.sparse_from, sequence.request.salt
        )
        if same is not None:
            self.prefix.touch(same)
        return same is not None

    def _add(self, sequence: SequenceState, pages: tuple[int, ...], slot: int) -> None:
        tokens = bytes(sequence.token_bytes[: sequence.num_computed * TOKEN_BYTES])
        self.prefix.add(
            Snapshot(tokens, sequence.num_computed, sequence.sparse_from, sequence.request.salt, pages, slot)
        )

    def _make_space(self, num_slots: int) -> bool:
        """Evict snapshots until one more may be kept and there are free slots. Return False if that fails."""
        while len(self.prefix) >= self._num_snapshots or self.slots.num_free < num_slots:
            oldest = self.prefix.oldest()
            if oldest is None:
                return False
            self.forget(oldest)
        return True

    def _make_room(self, num_pages: int, num_slots: int, keep: Snapshot | None = None) -> bool:
        """Evict snapshots other than `keep`, but none if evicting all of them would not be enough."""
        if self.pages.num_free >= num_pages and self.slots.num_free >= num_slots:
            return True
        loose = [snapshot for snapshot in self.prefix if snapshot is not keep]
        held = Counter(page for snapshot in loose for page in snapshot.pages)
        freed = sum(1 for page, count in held.items() if self.pages.num_owners(page) == count)
        if self.slots.num_free + len(loose) < num_slots or self.pages.num_free + freed < num_pages:
            return False
        while self.pages.num_free < num_pages or self.slots.num_free < num_slots:
            oldest = self.prefix.oldest(keep)
            assert oldest is not None
            self.forget(oldest)
        return True

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

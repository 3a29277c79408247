"""The only door to the cache: admits, extends, snapshots and releases pages and slots together."""

from collections import Counter
from collections.abc import Iterable

from sala.config import SparseConfig
from sala.engine.cache.pools import Pool
from sala.engine.cache.prefix import TOKEN_BYTES, PrefixCache, Snapshot
from sala.engine.sequence import SequenceState
from sala.protocol import Executor


class Hybrid:
    """Accounts for the executor's pages and slots.

    Whole pages are shared between sequences and snapshots. A page that is not full has one writer at most: who
    continues from a snapshot in the middle of a page gets a copy of it. (Its first writer may go on: it writes only
    beyond what the snapshot needs.)
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
        """A slot, pages for all tokens, and what is known of their past; False if there is no room."""
        needed = self._num_pages(len(sequence.tokens))
        past = self.prefix.find(bytes(sequence.token_bytes), sequence.sparse_from, sequence.request.salt)
        shared = past.length // self._page_size if past else 0
        if past is not None and not self._make_room(needed - shared, 1, past):
            past, shared = None, 0  # keeping the past alive beside its copy takes a page too many: begin anew
        if past is None and not self._make_room(needed, 1):
            return False
        sequence.slot = self.slots.take(1)[0]
        sequence.pages = self.pages.take(needed - shared)
        try:
            if past is None:
                self._executor.clear_state(sequence.slot)
            else:
                self._continue_from(past, shared, sequence)
        except BaseException:  # half a copy is no past
            self.release(sequence)
            raise
        sequence.num_computed = past.length if past else 0
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
        return True

    def _continue_from(self, past: Snapshot, shared: int, sequence: SequenceState) -> None:
        assert sequence.slot is not None
        self.prefix.touch(past)
        self._executor.copy_states([(past.slot, sequence.slot)])
        rows = past.length % self._page_size
        if rows:
            self._executor.copy_page(past.pages[shared], sequence.pages[0], rows)
        self.pages.share(past.pages[:shared])
        sequence.pages = [*past.pages[:shared], *sequence.pages]

    def extend(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Pages for so many tokens in all; False if there is no room."""
        missing = self._num_pages(num_tokens) - len(sequence.pages)
        if missing > 0:
            if not self._make_room(missing, 0):
                return False
            sequence.pages += self.pages.take(missing)
        return True

    def truncate(self, sequence: SequenceState) -> None:
        """Give back the pages beyond the tokens that are there (drafts were rejected)."""
        keep = self._num_pages(len(sequence.tokens))
        self.pages.release(sequence.pages[keep:])
        del sequence.pages[keep:]

    def release(self, sequence: SequenceState) -> None:
        """Take everything back; what was computed is lost unless it is in a snapshot."""
        self.pages.release(sequence.pages)
        sequence.pages = []
        if sequence.slot is not None:
            self.slots.release([sequence.slot])
            sequence.slot = None
        sequence.num_computed = 0

    def snapshot(self, sequence: SequenceState) -> None:
        """Keep the present state for later, if a slot can be had without hurting anybody who runs."""
        assert sequence.slot is not None
        if self._is_known(sequence) or not self._num_snapshots:
            return
        while len(self.prefix) >= self._num_snapshots or not self.slots.num_free:
            if not self._evict():
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
        """The sequence is over: its own slot and pages become a snapshot, without a copy."""
        is_whole = 0 < sequence.num_computed <= len(sequence.tokens)
        if not is_whole or sequence.slot is None or not self._num_snapshots or self._is_known(sequence):
            self.release(sequence)
            return
        while len(self.prefix) >= self._num_snapshots:
            if not self._evict():
                self.release(sequence)
                return
        keep = self._num_pages(sequence.num_computed)
        pages, slot = tuple(sequence.pages[:keep]), sequence.slot
        self.pages.release(sequence.pages[keep:])
        self._add(sequence, pages, slot)
        sequence.pages, sequence.slot = [], None

    def insert(self, tokens: bytes, sparse_from: int, salt: str) -> Snapshot | None:
        """Room for a past that comes from elsewhere (a file); the caller fills its pages and its slot."""
        length = len(tokens) // TOKEN_BYTES
        if not self._num_snapshots:
            return None
        while len(self.prefix) >= self._num_snapshots:
            if not self._evict():
                return None
        if not self._make_room(self._num_pages(length), 1):
            return None
        pages, slot = tuple(self.pages.take(self._num_pages(length))), self.slots.take(1)[0]
        snapshot = Snapshot(tokens, length, sparse_from, salt, pages, slot)
        self.prefix.add(snapshot)
        return snapshot

    def forget(self, snapshot: Snapshot) -> None:
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

    def _make_room(self, num_pages: int, num_slots: int, keep: Snapshot | None = None) -> bool:
        """Give up snapshots, oldest first, but none if all of them together would not be enough."""
        if keep is not None:
            keep.pins += 1
        try:
            if not self._could_make_room(num_pages, num_slots):
                return False
            while self.pages.num_free < num_pages or self.slots.num_free < num_slots:
                self._evict()
            return True
        finally:
            if keep is not None:
                keep.pins -= 1

    def _could_make_room(self, num_pages: int, num_slots: int) -> bool:
        loose = [snapshot for snapshot in self.prefix if not snapshot.pins]
        if self.slots.num_free + len(loose) < num_slots:
            return False
        if self.pages.num_free >= num_pages:
            return True
        held = Counter(page for snapshot in loose for page in snapshot.pages)
        freed = sum(1 for page, count in held.items() if self.pages.num_owners(page) == count)
        return self.pages.num_free + freed >= num_pages

    def _evict(self) -> bool:
        oldest = self.prefix.oldest()
        if oldest is None:
            return False
        self.forget(oldest)
        return True

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def integrity(self, sequences: Iterable[SequenceState]) -> list[str]:
        """Every page and slot is accounted for: an empty list, or what is wrong."""
        pages: Counter[int] = Counter()
        slots: Counter[int] = Counter()
        for sequence in sequences:
            pages.update(sequence.pages)
            slots.update([] if sequence.slot is None else [sequence.slot])
        for snapshot in self.prefix:
            pages.update(snapshot.pages)
            slots.update([snapshot.slot])
        pinned = [f"a snapshot of {snapshot.length} tokens is pinned" for snapshot in self.prefix if snapshot.pins]
        return self.pages.problems("page", pages) + self.slots.problems("slot", slots) + pinned

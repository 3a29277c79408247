"""The tiers of the cache below the device: host memory and disk.

A snapshot that is evicted from the device moves to host memory (`--cache-ram`), and from there to disk (`--cache-dir`).
Snapshots that another one continues are dropped instead: their conversation is still cached. The prefix of a long
prompt, and what it shares with others, is also written to disk as soon as its request has finished, so that a restart
finds it. A request for which a lower tier has more than the device gets that copy restored into its own pages and slot.

Bytes are copied out on the engine's thread; files are read and written by a thread of their own, while others go on.
Nothing here ever fails a request: what cannot be moved is computed again.
"""

import queue
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from weakref import WeakMethod

from sala.config import Regime, SparseConfig
from sala.engine.cache import Hybrid, PrefixCache
from sala.engine.prefixes import Prefix, Snapshot
from sala.engine.scheduler import SequenceState
from sala.engine.sessions import MAX_PENDING, MIN_TOKENS, Blobs, DiskTier, TierUse
from sala.protocol import Blob, Executor

SMALLEST_BLOCK = 64 << 20  # of host memory, unless there is less
READ_LIMIT_S = 60.0  # after which a request no longer waits for a file


@dataclass(eq=False, slots=True)
class HostCopy(Prefix):
    """A copy of a snapshot: a region of host memory, and the tensors in it."""

    start: int
    nbytes: int
    blobs: Blobs


class HostTier:
    """Copies of snapshots in host memory, evicted by the same rules as snapshots. Each lies within one block."""

    def __init__(
        self, blocks: Sequence[memoryview], sparse: SparseConfig, on_evict: Callable[[HostCopy], None]
    ) -> None:
        """`on_evict` is a method of the object that holds this one. Held weakly, so that both are freed at once."""
        sizes = [block.nbytes for block in blocks]
        self._starts = [sum(sizes[:index]) + index for index in range(len(sizes))]  # gaps keep regions of blocks apart
        self._blocks = blocks
        self._size, self._largest = sum(sizes), max(sizes)
        self._free = [(start, start + size) for start, size in zip(self._starts, sizes, strict=True)]  # in order
        self._on_evict = WeakMethod(on_evict)
        self._held: Counter[str] = Counter()  # bytes by owner
        self.prefix: PrefixCache[HostCopy] = PrefixCache(sparse)

    @property
    def use(self) -> TierUse:
        return TierUse(len(self.prefix), self._held.total(), self._size)

    def put(
        self, snapshot: Snapshot, nbytes: int, dump: Callable[[memoryview], Blobs], keep: HostCopy | None = None
    ) -> bool:
        """Copy a snapshot, evicting others than `keep` for it. Return False if it does not fit."""
        tokens = snapshot.tokens
        known = self.prefix.has(tokens, snapshot.length, snapshot.regime, snapshot.salt)
        if known is not None:
            known.is_branch |= snapshot.is_branch
            self.prefix.touch(known)
            return True
        start = self._take(snapshot.owner, nbytes, keep)
        if start is None:
            return False
        try:
            index = bisect_right(self._starts, start) - 1
            at = start - self._starts[index]
            blobs = dump(self._blocks[index][at : at + nbytes])
        except BaseException:
            self._give(start, nbytes)
            raise
        facts = (snapshot.length, snapshot.regime, snapshot.salt, snapshot.owner)
        copy = HostCopy(*facts, start, nbytes, blobs)
        copy.is_branch = snapshot.is_branch
        self.prefix.add(copy, tokens)
        self._held[snapshot.owner] += nbytes
        return True

    def remove(self, copy: HostCopy) -> None:
        self.prefix.remove(copy)
        self._held[copy.owner] -= copy.nbytes
        self._give(copy.start, copy.nbytes)

    def clear(self) -> None:
        for copy in list(self.prefix):
            self.remove(copy)

    def _take(self, owner: str, nbytes: int, keep: HostCopy | None) -> int | None:
        """Return where a region of so many bytes for an owner begins; evict copies until there is one."""
        while nbytes <= self._largest:
            for index, (start, end) in enumerate(self._free):
                if end - start >= nbytes:
                    self._free[index : index + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                    return start
            ranks = self.prefix.rank(self._held.__getitem__, self._size, owner, nbytes)
            first = self.prefix.first(ranks, () if keep is None else (keep,))
            if first is None:
                return None
            if not first.is_inner and (on_evict := self._on_evict()) is not None:
                on_evict(first)
            self.remove(first)
        return None

    def _give(self, start: int, nbytes: int) -> None:
        """Return a region; regions that touch become one."""
        joined: list[tuple[int, int]] = []
        for begin, end in sorted([*self._free, (start, start + nbytes)]):
            if joined and joined[-1][1] == begin:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((begin, end))
        self._free = joined


def block_sizes(num_bytes: int) -> list[int]:
    """Divide memory into powers of two: pinned blocks of other sizes take more than they hold. Drops a small rest."""
    bits = range(num_bytes.bit_length() - 1, SMALLEST_BLOCK.bit_length() - 2, -1)
    return [1 << bit for bit in bits if num_bytes >> bit & 1] or [num_bytes]


class Loaded(NamedTuple):
    """What a sequence is about to continue from: a copy in a lower tier."""

    tier: str
    length: int
    blobs: Blobs
    copy: HostCopy | None = None


class TieredHybrid(Hybrid):
    """Keeps track of pages and slots, with tiers below them."""

    def __init__(
        self,
        executor: Executor,
        sparse: SparseConfig,
        max_snapshots: int | None,
        host_bytes: int = 0,
        disk: DiskTier | None = None,
        warn: Callable[[str], None] = print,
    ) -> None:
        super().__init__(executor, sparse, max_snapshots)
        self.disk = disk
        self.is_paused = False  # nothing is moved to lower tiers, and nothing is read
        self._warn = warn
        self.host: HostTier | None = None
        if host_bytes:
            blocks = [executor.host_memory(size) for size in block_sizes(host_bytes)]
            self.host = HostTier(blocks, sparse, self._sink)
        self._in_use: HostCopy | None = None  # while it is restored
        self._reading: dict[int, tuple[SequenceState, float]] = {}  # by id: waiting for a file, until when
        self._read: queue.SimpleQueue[tuple[int, int, Blobs | None]] = queue.SimpleQueue()
        self._ready: dict[int, Loaded] = {}  # by id: from disk, for sequences that wait to be admitted

    # up

    def request(self, sequence: SequenceState) -> None:
        """Start to read the prefix of a new request, if it is on disk and nowhere else; the request waits for it."""
        if self.disk is None or self.is_paused:
            return
        request, tokens = sequence.request, bytes(sequence.token_bytes)
        known = self.prefix.find(tokens, sequence.regime, request.salt)
        stored = self.host.prefix.find(tokens, sequence.regime, request.salt) if self.host is not None else None
        length = max(known.length if known else 0, stored.length if stored else 0)
        file = self.disk.find(tokens, sequence.regime, request.salt, length + self._page_size)
        if file is not None:
            number, count, results = sequence.id, file.entry.num_tokens, self._read
            self._reading[number] = sequence, time.monotonic() + READ_LIMIT_S
            sequence.is_loading = True
            self.disk.read(file, tokens, request.salt, lambda blobs: results.put((number, count, blobs)))

    def collect(self, wait_s: float) -> None:
        """Take what has been read, for requests that wait to be admitted; wait for it if there is nothing else."""
        while self._reading:
            try:
                number, length, blobs = self._read.get(timeout=wait_s) if wait_s else self._read.get_nowait()
            except queue.Empty:
                break
            wait_s = 0.0
            sequence, _ = self._reading.pop(number, (None, 0.0))
            if sequence is not None:
                sequence.is_loading = False
                if blobs is not None and not sequence.is_finished:
                    self._ready[number] = Loaded("disk", length, blobs)
        for number, (sequence, until) in list(self._reading.items()):
            if time.monotonic() > until:
                sequence.is_loading = False
                del self._reading[number]

    @property
    def is_reading(self) -> bool:
        return bool(self._reading)

    def num_below(self, tokens: bytes, regime: Regime, salt: str, length: int) -> int:
        """Return the length of the longest prefix in these tiers that these tokens continue, and at least `length`."""
        copy = self.host.prefix.find(tokens, regime, salt) if self.host is not None else None
        length = max(length, copy.length if copy else 0)
        file = self.disk.find(tokens, regime, salt, length) if self.disk is not None else None
        return length if file is None else file.entry.num_tokens

    def admit(self, sequence: SequenceState) -> bool:
        found = self._below(sequence)
        if found is None:
            return super().admit(sequence)
        self._in_use = found.copy  # making room may evict other copies, but not this one
        try:
            if not self._make_room(sequence.owner, self._num_pages(len(sequence.tokens)), 1):
                return False
            is_restored = self._restore(sequence, found)
        finally:
            self._in_use = None
        self._ready.pop(sequence.id, None)
        return is_restored or super().admit(sequence)

    def _below(self, sequence: SequenceState) -> Loaded | None:
        """Return a copy of a prefix in a lower tier, if it is longer than the one on the device by a page."""
        tokens, request = sequence.token_bytes, sequence.request
        known = self.prefix.find(tokens, sequence.regime, request.salt)
        found = self._ready.get(sequence.id)
        copy = self.host.prefix.find(tokens, sequence.regime, request.salt) if self.host is not None else None
        if copy is not None and (found is None or copy.length >= found.length):
            found = Loaded("host", copy.length, copy.blobs, copy)
        if found is not None and found.length > (known.length + self._page_size if known else 0):
            return found
        self._ready.pop(sequence.id, None)
        return None

    def _restore(self, sequence: SequenceState, found: Loaded) -> bool:
        """Give a sequence pages and a slot with what a lower tier has. Return False, and nothing, if that fails."""
        slot = self._take(sequence, self._num_pages(len(sequence.tokens)))
        try:
            pages = sequence.pages[: self._num_pages(found.length)]
            self._executor.restore(found.blobs, pages, found.length, slot)
            sequence.num_computed = found.length
            self.snapshot(sequence)  # others may want it too
        except Exception as error:
            self.release(sequence)
            if found.copy is not None and self.host is not None:
                self.host.remove(found.copy)
            self._warn(f"a prefix of {found.length:,} tokens cannot be restored: {error or type(error).__name__}")
            return False
        except BaseException:
            self.release(sequence)
            raise
        if found.copy is not None and self.host is not None:
            self.host.prefix.touch(found.copy)
        self._count(sequence, found.tier)
        return True

    def release(self, sequence: SequenceState) -> None:
        super().release(sequence)
        self._ready.pop(sequence.id, None)

    # down

    def finished(self, sequence: SequenceState) -> None:
        """Write the prompt, except its last token, to disk: the next turn, or the same question again, begins with it.

        Of a prompt with documents only these are written: the next question is another one. What other conversations
        begin with too is written as well: where some branched off already, and where the request says that they may.
        """
        if self.disk is None or sequence.error is not None or self.is_paused:
            return
        salt, tokens = sequence.request.salt, sequence.token_bytes
        lengths = sequence.request.kept or (sequence.prompt_len - 1,)
        if sum(map(self._executor.capacity.copy_bytes, lengths)) > MAX_PENDING:
            lengths = lengths[-1:]
        shared = self.prefix.branches(tokens, lengths[-1], sequence.regime, salt)
        shared_lengths = {snapshot.length for snapshot in shared} | self._new_boundaries(sequence, lengths[-1])
        for length in sorted({*lengths, *shared_lengths}):
            snapshot = self.prefix.has(tokens, length, sequence.regime, salt)
            if snapshot is not None and snapshot not in self.unstored:
                self._write(snapshot, partial(self._dump, snapshot), is_inner=length < lengths[-1])

    def _new_boundaries(self, sequence: SequenceState, end: int) -> set[int]:
        """Return the boundaries before `end` that were far from cached: of later turns, little of them is new."""
        least = (sequence.num_cached or 0) + MIN_TOKENS
        return {length for length in sequence.request.boundaries if least <= length < end}

    def _evict(self, snapshot: Snapshot | None) -> None:
        assert snapshot is not None
        if not snapshot.is_inner and not self.is_paused:
            self._push(snapshot)
        super()._evict(snapshot)

    def _push(self, snapshot: Snapshot) -> None:
        """Copy a snapshot to the next tier."""
        try:
            if self.host is not None:
                size = self._executor.capacity.copy_bytes(snapshot.length)
                if self.host.put(snapshot, size, lambda memory: self._dump(snapshot, memory), self._in_use):
                    return
            self._write(snapshot, lambda: self._dump(snapshot))
        except Exception as error:
            self._warn(f"a prefix of {snapshot.length:,} tokens cannot be kept: {error or type(error).__name__}")

    def _sink(self, copy: HostCopy) -> None:
        """Write a copy that leaves host memory to disk; its memory is used again, so its bytes are copied first."""

        def dump() -> Blobs:
            own = {name: memoryview(bytes(blob.data)) for name, blob in copy.blobs.items()}
            return {name: Blob(blob.dtype, blob.shape, own[name]) for name, blob in copy.blobs.items()}

        self._write(copy, dump)

    def _write(self, prefix: Prefix, dump: Callable[[], Blobs], is_inner: bool = False) -> None:
        if self.disk is not None:
            try:
                self.disk.write(prefix, prefix.tokens, dump, is_inner, prefix.is_branch)
            except Exception as error:
                self._warn(f"a prefix of {prefix.length:,} tokens is not written: {error or type(error).__name__}")

    def _dump(self, snapshot: Snapshot, memory: memoryview | None = None) -> Blobs:
        return self._executor.dump(snapshot.pages, snapshot.length, snapshot.slot, memory)

    def clear(self) -> None:
        super().clear()
        if self.host is not None:
            self.host.clear()

    @property
    def uses(self) -> dict[str, TierUse]:
        tiers = {"host": self.host, "disk": self.disk}
        return {name: tier.use for name, tier in tiers.items() if tier is not None}

"""The pages, slots and snapshots of the hybrid cache.

Pages hold keys and values, slots hold the state of the lightning layers. `Hybrid` alone admits, extends, truncates and
releases both. A snapshot, which a later request can continue from, is a slot with the state after `length` tokens and
the pages of those tokens. Snapshots are found in a radix tree, by comparing tokens.
"""

import heapq
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Generic

from sala.config import Regime, SparseConfig
from sala.engine.prefixes import ClientUse, Node, P, Prefix, PrefixStatistics, Snapshot, first_to_evict, rank_clients
from sala.engine.scheduler import TOKEN_BYTES, SequenceState
from sala.protocol import Executor

MAX_GHOSTS, GHOST_BYTES = 10_000, 16 << 20  # limits of the record of evicted prefixes, which says why a prompt missed


class Pool:
    """Hands out numbers 0…size-1, lowest first, and takes each back when its last owner releases it.

    Owners that run pin their numbers: these cannot be freed by evicting snapshots.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size))
        self._counts = [0] * size
        self._pins = [0] * size
        self.num_pinned = 0

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

    def share(self, numbers: Collection[int]) -> None:
        for number in numbers:
            assert self._counts[number] > 0, f"{number} is free"
            self._counts[number] += 1

    def release(self, numbers: Collection[int]) -> None:
        for number in numbers:
            assert self._counts[number] > 0, f"{number} is free already"
            self._counts[number] -= 1
            if not self._counts[number]:
                heapq.heappush(self._free, number)

    def pin(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self.num_pinned += not self._pins[number]
            self._pins[number] += 1

    def unpin(self, numbers: Collection[int]) -> None:
        for number in numbers:
            assert self._pins[number] > 0, f"{number} is not pinned"
            self._pins[number] -= 1
            self.num_pinned -= not self._pins[number]

    def num_evictable(self, keep: Collection[int] = ()) -> int:
        """Return how many numbers are free or would be without the snapshots, except one that holds `keep`."""
        return self.size - self.num_pinned - sum(not self._pins[number] for number in keep)


class PrefixCache(Generic[P]):
    """Prefixes by their tokens, in a radix tree for each salt, and the order in which they are evicted.

    Prefixes that exactly one other prefix continues are evicted first: they are earlier turns of a conversation whose
    tip is cached. Tips, and prefixes at which conversations branch off (even if only one branch is still cached), are
    evicted last. Within a group the least recently used prefix goes first. Prefixes of clients that hold more than
    their share go before all others. The caller keeps track of what prefixes hold.
    """

    def __init__(self, sparse: SparseConfig) -> None:
        self.sparse = sparse
        self._roots: dict[str, Node] = {}
        self._prefixes: dict[P, None] = {}  # in the order in which they were added
        self._clock = 0
        self.clients: dict[str, ClientUse] = {}  # those with prefixes here
        self.nbytes = 0  # size of all labels

    def __len__(self) -> int:
        return len(self._prefixes)

    def __iter__(self) -> Iterator[P]:
        return iter(self._prefixes)

    def agrees(self, length: int, one: Regime, other: Regime) -> bool:
        """Return whether the state after `length` tokens is the same for both regimes."""
        return one == other or length <= self.sparse.agreed_len(one, other)

    def find(self, tokens: bytes | bytearray, regime: Regime | None, salt: str) -> P | None:
        """Return the longest prefix that `tokens` continue by a token or more; without `regime` in any regime."""
        found = None
        for node in self._path(salt, tokens, len(tokens) - TOKEN_BYTES):
            for prefix in node.prefixes:
                if regime is None or self.agrees(prefix.length, prefix.regime, regime):
                    found = prefix
        return found

    def has(self, tokens: bytes | bytearray, length: int, regime: Regime, salt: str) -> P | None:
        """Return the prefix of exactly the first `length` tokens, if there is one."""
        size = length * TOKEN_BYTES
        at_end = (prefix for node in self._path(salt, tokens, size) if node.size == size for prefix in node.prefixes)
        return next((prefix for prefix in at_end if self.agrees(length, prefix.regime, regime)), None)

    def _path(self, salt: str, tokens: bytes | bytearray, size: int) -> Iterator[Node]:
        """Yield the nodes that the first `size` bytes pass through, from the root: each token is compared once."""
        node = self._roots.get(salt)
        while node is not None and node.size <= size:
            yield node
            child = node.children.get(bytes(tokens[node.size : node.size + TOKEN_BYTES]))
            node = child if child is not None and tokens.startswith(child.label, node.size) else None

    def add(self, prefix: P, tokens: bytes | bytearray) -> None:
        """Add a prefix, whose tokens these begin with."""
        node = prefix.node = self._node_of(prefix.salt, tokens, prefix.length * TOKEN_BYTES)
        if not node.prefixes:
            node.num_next = sum(1 for _ in _next(node))
            _continue(_above(node), 1 - node.num_next)
        node.prefixes.append(prefix)
        _continue(node, 0)
        self._prefixes[prefix] = None
        self.clients.setdefault(prefix.owner, ClientUse()).num_prefixes += 1
        self.touch(prefix)

    def _node_of(self, salt: str, tokens: bytes | bytearray, size: int) -> Node:
        """Return the node at which the first `size` bytes end; make it if there is none."""
        self._roots.setdefault(salt, Node(b"", 0, None))
        *_, node = self._path(salt, tokens, size)
        child = node.children.get(bytes(tokens[node.size : node.size + TOKEN_BYTES])) if node.size < size else None
        if child is not None:
            node = _split(child, _common(child.label, bytes(tokens[node.size : size])))
        label = bytes(tokens[node.size : size])
        if label:
            self.nbytes += len(label)
            node.children[label[:TOKEN_BYTES]] = node = Node(label, size, node)
        return node

    def touch(self, prefix: P) -> None:
        self._clock += 1
        client = self.clients[prefix.owner]
        client.num_uses += 1
        client.used_at = time.monotonic()
        prefix.used, prefix.turn = self._clock, client.num_uses

    def remove(self, prefix: P) -> None:
        del self._prefixes[prefix]
        client = self.clients[prefix.owner]
        client.num_prefixes -= 1
        if not client.num_prefixes:
            del self.clients[prefix.owner]
        node = prefix.node
        node.prefixes.remove(prefix)
        if not node.prefixes:
            _continue(_above(node), node.num_next - 1)
        while node.parent is not None and not node.prefixes and not node.children:
            self.nbytes -= len(node.label)
            del node.parent.children[node.label[:TOKEN_BYTES]]
            node = node.parent
        if node.parent is not None and not node.prefixes and len(node.children) == 1:
            (child,) = node.children.values()  # joined with a node at which nothing ends or branches off any more
            child.label, child.parent = node.label + child.label, node.parent
            node.parent.children[node.label[:TOKEN_BYTES]] = child
        elif not node.prefixes and not node.children:
            del self._roots[prefix.salt]

    def branches(self, tokens: bytes | bytearray, length: int, regime: Regime, salt: str) -> list[P]:
        """Return the prefixes of the first `length` tokens at which conversations branch off."""
        nodes = self._path(salt, tokens, length * TOKEN_BYTES)
        found = [prefix for node in nodes for prefix in node.prefixes if prefix.is_branch]
        return [prefix for prefix in found if self.agrees(prefix.length, prefix.regime, regime)]

    def rank(self, held: Callable[[str], int], size: int, asking: str = "", num_asked: int = 0) -> dict[str, int]:
        """Return whose prefixes to evict first: those of idle owners, then of owners with more than their share."""
        return rank_clients(self.clients, held, size, asking, num_asked)

    def first(
        self,
        ranks: Mapping[str, int] | None = None,
        keep: Collection[P] = (),
        is_wanted: Callable[[P], bool] = lambda _: True,
    ) -> P | None:
        """Return the prefix to evict first, by the ranks of owners, if `is_wanted` and not in `keep`."""
        loose = (one for one in self._prefixes if one not in keep and is_wanted(one))
        return first_to_evict(loose, self.clients, ranks or {})


def _above(node: Node) -> Node | None:
    """Return the nearest node towards the root with prefixes."""
    above = node.parent
    while above is not None and not above.prefixes:
        above = above.parent
    return above


def _continue(node: Node | None, count: int) -> None:
    """Record that so many more prefixes continue those of a node; if there are several, conversations branch off."""
    if node is not None:
        node.num_next += count
        for prefix in node.prefixes if node.num_next > 1 else ():
            prefix.is_branch = True


def _next(node: Node) -> Iterator[Node]:
    """Yield the nearest nodes below with prefixes."""
    left = list(node.children.values())
    while left:
        child = left.pop()
        if child.prefixes:
            yield child
        else:
            left.extend(child.children.values())


def _common(one: bytes, other: bytes) -> int:
    """Return how many bytes two labels share, in whole tokens."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(low * TOKEN_BYTES, middle * TOKEN_BYTES)
        low, high = (middle, high) if one[part] == other[part] else (low, middle - 1)
    return low * TOKEN_BYTES


def _split(node: Node, size: int) -> Node:
    """Cut the label of a node after `size` bytes; return the node that is new in between."""
    assert node.parent is not None
    head, tail = node.label[:size], node.label[size:]
    middle = Node(head, node.size - len(tail), node.parent)
    node.parent.children[head[:TOKEN_BYTES]] = middle
    middle.children[tail[:TOKEN_BYTES]] = node
    node.label, node.parent = tail, middle
    return middle


class Hybrid:
    """Keeps track of the executor's pages (KV cache) and slots (recurrent states).

    Full pages are shared between sequences and snapshots. A page that is not full has at most one writer: a sequence
    that continues from a snapshot in the middle of a page gets a copy of that page. (The page's first writer may go on:
    it writes only beyond what the snapshot needs.)
    """

    def __init__(self, executor: Executor, sparse: SparseConfig, max_snapshots: int | None) -> None:
        capacity = executor.capacity
        self._executor = executor
        self._page_size = capacity.page_size
        self._max_snapshots = capacity.num_slots if max_snapshots is None else max_snapshots
        self.pages = Pool(capacity.num_pages)
        self.slots = Pool(capacity.num_slots)
        self.prefix: PrefixCache[Snapshot] = PrefixCache(sparse)
        self.ghosts: PrefixCache[Prefix] = PrefixCache(sparse)  # prefixes that were evicted
        self.statistics = PrefixStatistics()
        self.unstored: set[Snapshot] = set()  # a step is about to store their states: they must not be evicted
        self._held: dict[str, Counter[int]] = {}  # pages of snapshots by owner
        self._running: set[SequenceState] = set()  # those with a slot and pages

    def admit(self, sequence: SequenceState) -> bool:
        """Give a sequence a slot, pages, and the longest cached prefix. Return False if they do not fit."""
        needed = self._num_pages(len(sequence.tokens))
        cached = self.prefix.find(sequence.token_bytes, sequence.regime, sequence.request.salt)
        shared = cached.length // self._page_size if cached else 0
        if cached is not None and not self._make_room(sequence.owner, needed - shared, 1, cached):
            cached, shared = None, 0  # one page too few to keep the snapshot beside its copy: start over
        if cached is None and not self._make_room(sequence.owner, needed, 1):
            return False
        slot = self._take(sequence, needed - shared)
        try:
            if cached is None:
                self._executor.clear_state(slot)
            else:
                self._continue_from(cached, shared, sequence)
        except BaseException:  # half a copy is of no use
            self.release(sequence)
            raise
        sequence.num_computed = cached.length if cached else 0
        self._count(sequence, "device")
        return True

    def _take(self, sequence: SequenceState, num_pages: int) -> int:
        sequence.slot, sequence.pages = self.slots.take(1)[0], self.pages.take(num_pages)
        self.pages.pin(sequence.pages)
        self._running.add(sequence)
        return sequence.slot

    def _continue_from(self, snapshot: Snapshot, shared: int, sequence: SequenceState) -> None:
        assert sequence.slot is not None
        self.prefix.touch(snapshot)
        self._executor.copy_states([(snapshot.slot, sequence.slot)])
        rows = snapshot.length % self._page_size
        if rows:
            self._executor.copy_page(snapshot.pages[shared], sequence.pages[0], rows)
        self.pages.share(snapshot.pages[:shared])
        self.pages.pin(snapshot.pages[:shared])
        sequence.pages = [*snapshot.pages[:shared], *sequence.pages]

    def _count(self, sequence: SequenceState, tier: str) -> None:
        """At the first admission, count the tokens of a prompt by where they were found, or why they were not."""
        if sequence.num_cached is not None:
            return
        tokens, salt = sequence.token_bytes, sequence.request.salt
        found = sequence.num_cached = sequence.num_computed
        self.statistics.hit[tier] += found
        ghost = self.ghosts.find(tokens, sequence.regime, salt)
        for cause, prefix in (("evicted", ghost), ("regime", self.prefix.find(tokens, None, salt))):
            if prefix is not None and prefix.length > found:
                self.statistics.missed[cause] += prefix.length - found
                found = prefix.length
        self.statistics.missed["new"] += sequence.prompt_len - min(found, sequence.prompt_len)

    def extend(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Give a sequence pages for `num_tokens` tokens in all. Return False if there are too few."""
        missing = max(0, self._num_pages(num_tokens) - len(sequence.pages))
        if not self._make_room(sequence.owner, missing, 0):
            return False
        pages = self.pages.take(missing)
        self.pages.pin(pages)
        sequence.pages += pages
        return True

    def truncate(self, sequence: SequenceState) -> None:
        """Release the pages beyond the last token, which rejected drafts leave behind."""
        self._cut(sequence, self._num_pages(len(sequence.tokens)))

    def _cut(self, sequence: SequenceState, num_pages: int) -> None:
        self.pages.unpin(sequence.pages[num_pages:])
        self.pages.release(sequence.pages[num_pages:])
        del sequence.pages[num_pages:]

    def release(self, sequence: SequenceState) -> None:
        """Release everything a sequence holds; what it computed is lost unless a snapshot has it."""
        self._cut(sequence, 0)
        self._running.discard(sequence)
        if sequence.slot is not None:
            self.slots.release([sequence.slot])
            sequence.slot = None
        sequence.num_computed = 0

    def snapshot(self, sequence: SequenceState) -> None:
        """Keep the present state as a snapshot, if a slot is free or another snapshot can be evicted for it."""
        assert sequence.slot is not None
        snapshot = self.reserve(sequence, sequence.num_computed)
        if snapshot is None:
            return
        try:
            self._executor.copy_states([(sequence.slot, snapshot.slot)])
        except BaseException:
            self.forget(snapshot)
            raise
        self.unstored.discard(snapshot)

    def reserve(self, sequence: SequenceState, length: int) -> Snapshot | None:
        """Add an `unstored` snapshot, whose state the caller stores; None if it is known or has no space."""
        if self._is_known(sequence, length) or not self._make_space(sequence.owner, 1):
            return None
        pages = tuple(sequence.pages[: self._num_pages(length)])
        self.pages.share(pages)
        snapshot = self._add(sequence, length, pages, self.slots.take(1)[0])
        self.unstored.add(snapshot)
        return snapshot

    def donate(self, sequence: SequenceState) -> None:
        """Turn the slot and pages of a finished sequence into a snapshot, without a copy."""
        is_whole = sequence.slot is not None and 0 < sequence.num_computed <= len(sequence.tokens)
        if not is_whole or self._is_known(sequence, sequence.num_computed) or not self._make_space(sequence.owner, 0):
            self.release(sequence)
            return
        assert sequence.slot is not None
        self._running.discard(sequence)
        self._cut(sequence, self._num_pages(sequence.num_computed))
        self.pages.unpin(sequence.pages)
        self._add(sequence, sequence.num_computed, tuple(sequence.pages), sequence.slot)
        sequence.pages, sequence.slot = [], None

    def insert(self, tokens: bytes, regime: Regime, salt: str, owner: str = "") -> Snapshot | None:
        """Add a snapshot whose pages and slot the caller fills; None if it does not fit."""
        length = len(tokens) // TOKEN_BYTES
        if not self._make_space(owner, 0) or not self._make_room(owner, self._num_pages(length), 1):
            return None
        pages, slot = tuple(self.pages.take(self._num_pages(length))), self.slots.take(1)[0]
        return self._keep(Snapshot(length, regime, salt, owner, pages, slot), tokens)

    def _add(self, sequence: SequenceState, length: int, pages: tuple[int, ...], slot: int) -> Snapshot:
        request = sequence.request
        snapshot = Snapshot(length, sequence.regime, request.salt, sequence.owner, pages, slot)
        return self._keep(snapshot, sequence.token_bytes)

    def _keep(self, snapshot: Snapshot, tokens: bytes | bytearray) -> Snapshot:
        self.prefix.add(snapshot, tokens)
        self._held.setdefault(snapshot.owner, Counter()).update(snapshot.pages)
        return snapshot

    def forget(self, snapshot: Snapshot) -> None:
        """Drop a snapshot and release what it holds."""
        self.prefix.remove(snapshot)
        self.unstored.discard(snapshot)
        held = self._held[snapshot.owner]
        for page in snapshot.pages:
            held[page] -= 1
            if not held[page]:
                del held[page]
        if snapshot.owner not in self.prefix.clients:
            del self._held[snapshot.owner]
        self.pages.release(snapshot.pages)
        self.slots.release([snapshot.slot])

    def clear(self) -> None:
        """Drop all snapshots, what is known of earlier ones, and all counts."""
        for snapshot in list(self.prefix):
            self.forget(snapshot)
        self.ghosts = PrefixCache(self.prefix.sparse)
        self.statistics = PrefixStatistics()

    def _is_known(self, sequence: SequenceState, length: int) -> bool:
        if same := self.prefix.has(sequence.token_bytes, length, sequence.regime, sequence.request.salt):
            self.prefix.touch(same)
        return same is not None

    def _evict(self, snapshot: Snapshot | None) -> None:
        assert snapshot is not None
        self.statistics.num_evicted += 1
        self.ghosts.add(Prefix(snapshot.length, snapshot.regime, snapshot.salt, ""), snapshot.tokens)
        while self.ghosts.nbytes > GHOST_BYTES or len(self.ghosts) > MAX_GHOSTS:
            self.ghosts.remove(next(iter(self.ghosts)))
        self.forget(snapshot)

    def _make_space(self, owner: str, num_slots: int) -> bool:
        """Evict snapshots until one more may be kept and there are free slots. Return False if that fails."""
        while len(self.prefix) >= self._max_snapshots or self.slots.num_free < num_slots:
            if (first := self.prefix.first(self._rank_by_slots(owner), self.unstored)) is None:
                return False
            self._evict(first)
        return True

    def _make_room(self, owner: str, num_pages: int, num_slots: int, keep: Snapshot | None = None) -> bool:
        """Evict snapshots other than `keep`, but none if evicting all of them would not be enough."""
        if self.pages.num_free >= num_pages and self.slots.num_free >= num_slots:
            return True
        kept = {*self.unstored, *(() if keep is None else (keep,))}
        evictable = self.pages.num_evictable({page for snapshot in kept for page in snapshot.pages})
        if self.slots.num_free + len(self.prefix) - len(kept) < num_slots or evictable < num_pages:
            return False
        while self.slots.num_free < num_slots:
            self._evict(self.prefix.first(self._rank_by_slots(owner), kept))
        if self.pages.num_free < num_pages:
            self._free_pages(owner, num_pages, kept)
        return True

    def _free_pages(self, owner: str, num_pages: int, kept: Collection[Snapshot]) -> None:
        """Evict snapshots until `num_pages` pages are free."""
        running: Counter[str] = Counter()
        for one in self._running:
            running[one.owner] += sum(page not in self._held.get(one.owner, ()) for page in one.pages)

        def taken(owner: str) -> int:
            return len(self._held.get(owner, ())) + running[owner]

        while self.pages.num_free < num_pages:
            ranks = self.prefix.rank(taken, self.pages.size, owner, num_pages)
            frees = self.prefix.first(ranks, kept, lambda one: self.pages.num_owners(one.pages[-1]) == 1)
            self._evict(frees or self.prefix.first(ranks, kept))

    def _rank_by_slots(self, owner: str) -> dict[str, int]:
        """Return whose snapshots to evict first if `owner` needs a slot; running sequences hold slots too."""
        taken = Counter({name: client.num_prefixes for name, client in self.prefix.clients.items()})
        if len(self.prefix) >= self._max_snapshots:
            return self.prefix.rank(taken.__getitem__, self._max_snapshots, owner, 1)
        taken.update(one.owner for one in self._running)
        return self.prefix.rank(taken.__getitem__, self.slots.size, owner, 1)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

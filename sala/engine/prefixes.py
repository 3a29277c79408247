"""Prefixes of what was computed: what they are, and which of them is evicted first.

Snapshots on the device and copies in host memory are prefixes, and are evicted by the same rules.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sala.config import Regime

TIP_WORTH = 8  # tips are kept as if used this much later: uses by their client, per prefix of this client
IDLE_S = 3600.0  # a client that has used none of its prefixes for this long loses its share


@dataclass(eq=False, slots=True)
class Node:
    """A node of a radix tree: `label` are tokens that follow its parent's, `size` the bytes of all that lead here."""

    label: bytes
    size: int
    parent: "Node | None"
    prefixes: "list[Any]" = field(default_factory=list)  # that end here, one per regime
    children: "dict[bytes, Node]" = field(default_factory=dict)  # by their first token
    num_next: int = 0  # nodes below with prefixes, and none with prefixes between


@dataclass(eq=False, slots=True)
class Prefix:
    """The first `length` tokens of something that was computed. `owner` is the client it was computed for."""

    length: int
    regime: Regime
    salt: str
    owner: str
    used: int = field(init=False, default=0)  # clock of the last use
    turn: int = field(init=False, default=0)  # the same, counting only uses by this owner
    is_branch: bool = field(init=False, default=False)  # conversations branch off here, or did while they were cached
    node: Node = field(init=False)

    @property
    def tokens(self) -> bytes:
        labels, node = [], self.node
        while node.parent is not None:
            labels.append(node.label)
            node = node.parent
        return b"".join(reversed(labels))

    @property
    def is_inner(self) -> bool:
        """Whether this is an earlier turn of one conversation, which a longer prefix continues."""
        return self.node.num_next == 1 and not self.is_branch


@dataclass(eq=False, slots=True)
class Snapshot(Prefix):
    """The state after `length` tokens: their pages and a slot."""

    pages: tuple[int, ...]
    slot: int


class PrefixStatistics:
    """Tokens of prompts found by tier, and the others by cause. Must not reveal what another salt has."""

    def __init__(self) -> None:
        self.hit, self.missed = Counter(device=0, host=0, disk=0), Counter(new=0, evicted=0, regime=0)
        self.num_evicted = 0


@dataclass(slots=True)
class ClientUse:
    """What a client has in a tier, and when it used that."""

    num_prefixes: int = 0
    num_uses: int = 0
    used_at: float = 0.0  # seconds


P = TypeVar("P", bound=Prefix)
IDLE, BEYOND, WITHIN = range(3)  # clients, in the order in which their prefixes are evicted


def first_to_evict(prefixes: Iterable[P], clients: Mapping[str, ClientUse], ranks: Mapping[str, int]) -> P | None:
    """Return which prefix to evict first: of the clients that rank first, or else of one that is WITHIN its share.

    Inner ones go before others of the same age, the oldest before younger ones. Age is counted in uses by the same
    client: others cannot make its prefixes older.
    """

    def order(prefix: P) -> tuple[int, float, int]:
        client = clients[prefix.owner]
        age = (client.num_uses - prefix.turn) / client.num_prefixes
        return ranks.get(prefix.owner, WITHIN), (0 if prefix.is_inner else TIP_WORTH) - age, prefix.used

    return min(prefixes, key=order, default=None)


def rank_clients(
    clients: Mapping[str, ClientUse], held: Callable[[str], int], size: int, asking: str = "", num_asked: int = 0
) -> dict[str, int]:
    """Return the clients that are IDLE, and those that are BEYOND an equal share of `size` among all others.

    `asking` wants `num_asked` in addition to what it holds.
    """
    since = time.monotonic() - IDLE_S
    sharing = {name for name, client in clients.items() if client.used_at >= since} | {asking}
    wanted = {name: held(name) + (num_asked if name == asking else 0) for name in sharing}
    beyond = {name: BEYOND for name in sharing if wanted[name] * len(sharing) > size}
    return dict.fromkeys(clients.keys() - sharing, IDLE) | beyond

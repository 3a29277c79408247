"""Snapshots: states of the past that a later request may continue from.

A snapshot is a slot with the lightning state after `length` tokens, and the pages of those tokens. It is found by
comparing tokens, not hashes: there are few of them, and comparing bytes is fast.
"""

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

TOKEN_BYTES = 4


def as_bytes(tokens: Sequence[int]) -> bytes:
    """Four bytes per token, little-endian."""
    return _little(array("I", tokens)).tobytes()


def as_tokens(data: bytes) -> list[int]:
    return _little(array("I", data)).tolist()


def _little(numbers: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


@dataclass(eq=False, slots=True)
class Snapshot:
    tokens: bytes  # at least `length` of them; shared with others of the same prompt
    length: int
    sparse_from: int
    salt: str
    pages: tuple[int, ...]
    slot: int
    used: int = 0  # clock of the last use
    pins: int = field(default=0)

    def is_prefix(self, tokens: bytes) -> bool:
        size = self.length * TOKEN_BYTES
        return len(tokens) >= size and self.tokens[:size] == tokens[:size]


class PrefixCache:
    """Snapshots by last use. It owns no page and no slot by itself: whoever adds and removes accounts for them."""

    def __init__(self, agreement_len: int) -> None:
        self._agreement_len = agreement_len
        self._snapshots: list[Snapshot] = []
        self._clock = 0

    def __len__(self) -> int:
        return len(self._snapshots)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._snapshots)

    def find(self, tokens: bytes, sparse_from: int, salt: str) -> Snapshot | None:
        """The longest snapshot that `tokens` continue by at least one token, in a regime that agrees with theirs."""
        most = len(tokens) // TOKEN_BYTES - 1
        fitting = [
            snapshot
            for snapshot in self._snapshots
            if snapshot.length <= most and self._agrees(snapshot, sparse_from, salt) and snapshot.is_prefix(tokens)
        ]
        return max(fitting, key=lambda snapshot: snapshot.length, default=None)

    def has(self, tokens: bytes, length: int, sparse_from: int, salt: str) -> Snapshot | None:
        """A snapshot of exactly this past, if there is one."""
        for snapshot in self._snapshots:
            if snapshot.length == length and self._agrees(snapshot, sparse_from, salt) and snapshot.is_prefix(tokens):
                return snapshot
        return None

    def _agrees(self, snapshot: Snapshot, sparse_from: int, salt: str) -> bool:
        same_regime = snapshot.sparse_from == sparse_from or snapshot.length <= self._agreement_len
        return snapshot.salt == salt and same_regime

    def add(self, snapshot: Snapshot) -> None:
        self._snapshots.append(snapshot)
        self.touch(snapshot)

    def touch(self, snapshot: Snapshot) -> None:
        self._clock += 1
        snapshot.used = self._clock

    def oldest(self) -> Snapshot | None:
        """The one to give up first; a pinned one never."""
        loose = [snapshot for snapshot in self._snapshots if not snapshot.pins]
        return min(loose, key=lambda snapshot: snapshot.used, default=None)

    def remove(self, snapshot: Snapshot) -> None:
        self._snapshots.remove(snapshot)

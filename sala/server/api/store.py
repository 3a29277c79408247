"""Stored responses: what was asked and what was answered, by id, within limits, for the API key that asked.

A response is kept with the items of its own input and the id of the one that it follows; a conversation is put together
from these. When there are too many or they are too large, those that were used longest ago are dropped.

With a directory, every response is a file that only its owner can read: whole or not there. Files are written in a
thread; until then, and without a directory, responses are held in memory.
"""

import json
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sala.errors import InputError, SalaError, explain_write_error
from sala.server.http.body import pieces

_FILE = re.compile(r"(resp_[0-9a-f]{32})\.([0-9a-z]{1,64})\.json")
_DRAFT = ".draft"
Kept = dict[str, Any]
_log = logging.getLogger("sala.server")


@dataclass(eq=False)
class _Entry:
    owner: str
    size: int
    file: Path | None
    data: bytes | None = None  # None: in its file
    item_ids: frozenset[str] | None = None  # None: not known yet
    is_dropped: bool = False


@dataclass(frozen=True)
class KeptInput:
    """The items of an input as JSON, and their ids."""

    data: bytes
    ids: frozenset[str]

    @classmethod
    def of(cls, items: Sequence[Any]) -> "KeptInput":
        return cls(b"".join(pieces(items)), _ids(items))


class NotStored(Exception):
    """There is no response with this id."""


class ResponseStore:
    """Thread-safe. An `owner` stands for the API key of a request; nobody sees the responses of another one."""

    def __init__(self, directory: Path | None, max_bytes: int, max_responses: int) -> None:
        self._max_bytes, self._max_responses = max_bytes, max_responses
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the least recently used first
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._directory = directory
        self._writer: ThreadPoolExecutor | None = None
        if directory is not None:
            self._open(directory)

    def add(self, owner: str, response: dict[str, Any], items: KeptInput) -> bool:
        """Store a response and the items of its input; return whether there is room for it."""
        data = b"".join([b'{"response":', *pieces(response), b',"input":', items.data, b"}"])
        if len(data) > self._max_bytes or not self._max_responses:
            return False
        ids = items.ids | _ids(response["output"])
        file = None if self._directory is None else self._directory / f"{response['id']}.{owner}.json"
        entry = _Entry(owner, len(data), file, data, ids)
        with self._lock:
            self._forget(response["id"])
            self._entries[response["id"]] = entry
            self._num_bytes += entry.size
            self._make_room()
        if self._writer is not None and file is not None:
            self._writer.submit(self._write, file, entry)
        return True

    def get(self, owner: str, response_id: str) -> Kept:
        """Return a response and the items of its input. Raises NotStored."""
        with self._lock:
            entry = self._entries.get(response_id)
            if entry is None or entry.owner != owner:
                raise NotStored
            self._entries.move_to_end(response_id)
            data = entry.data
        try:
            if data is None and entry.file is not None:
                data = entry.file.read_bytes()
            kept: Kept = json.loads(data or b"")
            entry.item_ids = _ids(_items(kept))
        except (OSError, ValueError, KeyError, TypeError):  # somebody has removed or damaged the file
            with self._lock:
                self._forget(response_id)
            raise NotStored from None
        return kept

    def delete(self, owner: str, response_id: str) -> None:
        """Raises NotStored."""
        with self._lock:
            entry = self._entries.get(response_id)
            if entry is None or entry.owner != owner:
                raise NotStored
            self._forget(response_id)

    def items_before(self, owner: str, response_id: str | None, max_bytes: int) -> list[Any]:
        """Return the items of a conversation up to a response and its output. Raises NotStored, and InputError."""
        chain: list[Kept] = []
        num_bytes = 0
        while response_id is not None:
            chain.append(self.get(owner, response_id))
            num_bytes += self._size(response_id)
            if num_bytes > max_bytes:  # as if all of it had been sent
                raise InputError("previous_response_id", f"follows more than {max_bytes:,} bytes", "raise max_body")
            response_id = chain[-1]["response"]["previous_response_id"]
        return [item for kept in reversed(chain) for item in _items(kept)]

    def find_items(self, owner: str, wanted: Collection[str]) -> dict[str, Any]:
        """Return items of any stored inputs and outputs by their ids, as far as there are some."""
        with self._lock:
            mine = [(number, entry) for number, entry in reversed(self._entries.items()) if entry.owner == owner]
        found: dict[str, Any] = {}
        for number, entry in mine:
            missing = {*wanted} - found.keys()
            if not missing:
                break
            if entry.item_ids is None or missing & entry.item_ids:
                with suppress(NotStored):
                    found |= {item["id"]: item for item in _items(self.get(owner, number)) if item["id"] in missing}
        return found

    def close(self) -> None:
        """Wait until all files are written."""
        if self._writer is not None:
            self._writer.shutdown()

    def _open(self, directory: Path) -> None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for draft in directory.glob(f"*{_DRAFT}"):
                draft.unlink()
            found = [
                (file.stat(), file, match) for file in directory.iterdir() if (match := _FILE.fullmatch(file.name))
            ]
        except OSError as error:
            problem = f"responses cannot be stored in {directory}: {error.strerror}"
            raise SalaError(problem, "choose another directory with --response-store") from None
        for facts, file, match in sorted(found, key=lambda one: one[0].st_mtime_ns):
            self._entries[match[1]] = _Entry(match[2], facts.st_size, file)
            self._num_bytes += facts.st_size
        self._make_room()
        self._writer = ThreadPoolExecutor(1, "sala-responses")

    def _size(self, response_id: str) -> int:
        with self._lock:
            entry = self._entries.get(response_id)
            return 0 if entry is None else entry.size

    def _make_room(self) -> None:
        while self._num_bytes > self._max_bytes or len(self._entries) > self._max_responses:
            self._forget(next(iter(self._entries)))

    def _forget(self, response_id: str) -> None:
        entry = self._entries.pop(response_id, None)
        if entry is None:
            return
        self._num_bytes -= entry.size
        entry.is_dropped = True
        if entry.file is not None:
            with suppress(OSError):
                entry.file.unlink(missing_ok=True)

    def _write(self, path: Path, entry: _Entry) -> None:
        """Write a file under another name first, so that it is there as a whole or not at all."""
        draft = path.with_name(f".{path.name}{_DRAFT}")
        try:
            draft.unlink(missing_ok=True)
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(entry.data or b"")
                file.flush()
                os.fsync(file.fileno())
            with self._lock:
                if entry.is_dropped:
                    draft.unlink()
                else:
                    draft.replace(path)
                    entry.data = None
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            explained = explain_write_error(error, path, len(entry.data or b""))
            _log.error("a response stays in memory: %s", explained or error)


def _items(kept: Kept) -> list[Any]:
    return [*kept["input"], *kept["response"]["output"]]


def _ids(items: Sequence[Any]) -> frozenset[str]:
    return frozenset(item["id"] for item in items)

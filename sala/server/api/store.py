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
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sala.errors import InputError, SalaError, explain_write_error
from sala.server.api.records import ItemList, ItemSource, NotStored, StoredRecord
from sala.text.workers import MonitoredPool

_FILE = re.compile(r"(resp_[0-9a-f]{32})\.([0-9a-z]{1,64})\.json")
_DRAFT = ".draft"
_log = logging.getLogger("sala.server")


@dataclass(eq=False)
class _Entry:
    owner: str
    size: int
    file: Path | None
    record: StoredRecord | None = None  # None: in its file
    item_ids: frozenset[str] | None = None  # None: not known yet
    is_dropped: bool = False


class ResponseStore:
    """Thread-safe. An `owner` stands for the API key of a request; nobody sees the responses of another one."""

    def __init__(self, directory: Path | None, max_bytes: int, max_responses: int) -> None:
        self._max_bytes, self._max_responses = max_bytes, max_responses
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the least recently used first
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._directory = directory
        self.writer = MonitoredPool(1, "sala-responses")
        if directory is not None:
            self._open(directory)

    def add(self, owner: str, response: dict[str, Any], items: ItemList) -> bool:
        """Store a response and the items of its input; return whether there is room for it."""
        record = StoredRecord.of(response, items)
        if record.num_bytes > self._max_bytes or not self._max_responses:
            return False
        ids = frozenset((*items.ids, *(item["id"] for item in response["output"])))
        file = None if self._directory is None else self._directory / f"{response['id']}.{owner}.json"
        entry = _Entry(owner, record.num_bytes, file, record, ids)
        with self._lock:
            self._forget(response["id"])
            self._entries[response["id"]] = entry
            self._num_bytes += entry.size
            self._make_room()
        if file is not None:
            self.writer.submit(self._write, file, entry, record)
        return True

    def read_response(self, owner: str, response_id: str) -> list[bytes]:
        """Return a response as JSON, in blocks. Raises NotStored."""
        with self._reading(owner, response_id) as record:
            return record.read_response()

    def is_background(self, owner: str, response_id: str) -> bool:
        """Return whether a response was made in the background. Raises NotStored."""
        with self._reading(owner, response_id) as record:
            return bool(record.read_fact("background"))

    def find_input(self, owner: str, response_id: str) -> tuple[str | None, ItemSource]:
        """Return which response a response follows, and the items of its own input. Raises NotStored."""
        with self._reading(owner, response_id) as record:
            return record.read_fact("previous_response_id"), record.read_lists()[0]

    def delete(self, owner: str, response_id: str) -> None:
        """Raises NotStored."""
        with self._lock:
            entry = self._entries.get(response_id)
            if entry is None or entry.owner != owner:
                raise NotStored
            self._forget(response_id)

    def find_chain(self, owner: str, response_id: str | None, max_bytes: int) -> tuple[list[str], int]:
        """Return the ids of a response and of those that it follows, the first one first, and how many bytes they have.

        Raises NotStored, and InputError if these are too many.
        """
        chain: list[str] = []
        num_bytes = 0
        while response_id is not None:
            with self._reading(owner, response_id) as record:
                num_bytes += record.num_bytes
                if num_bytes > max_bytes:  # as if all of it had been sent
                    raise InputError("previous_response_id", f"follows more than {max_bytes:,} bytes", "raise max_body")
                chain.append(response_id)
                response_id = record.read_fact("previous_response_id")
        return chain[::-1], num_bytes

    def find_lists(self, owner: str, chain: Collection[str]) -> list[ItemSource]:
        """Return the inputs and outputs of some responses. Raises NotStored."""
        found: list[ItemSource] = []
        for response_id in chain:
            with self._reading(owner, response_id) as record:
                found += record.read_lists()
        return found

    def find_items(self, owner: str, wanted: Collection[str], max_bytes: int) -> dict[str, bytes]:
        """Return items of any stored inputs and outputs as JSON by their ids, as far as there are some.

        Raises InputError if they are too large.
        """
        with self._lock:
            mine = [(number, entry) for number, entry in reversed(self._entries.items()) if entry.owner == owner]
        found: dict[str, bytes] = {}
        missing = {*wanted}
        for number, entry in mine:
            if not missing:
                break
            if entry.item_ids is None or not missing.isdisjoint(entry.item_ids):
                with suppress(NotStored):
                    found |= self._cut_items(owner, number, entry, missing)
                    missing -= found.keys()
            if sum(map(len, found.values())) > max_bytes:  # as if all of it had been sent
                raise InputError("input", f"refers to more than {max_bytes:,} bytes", "raise max_body")
        return found

    def _cut_items(self, owner: str, response_id: str, entry: _Entry, wanted: Collection[str]) -> dict[str, bytes]:
        with self._reading(owner, response_id) as record:
            lists = record.read_lists()
            entry.item_ids = frozenset(number for each in lists for number in each.ids)
            return {number: item for each in lists for number, item in each.find(wanted)}

    def close(self) -> None:
        """Wait until all files are written."""
        self.writer.shutdown()

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

    @contextmanager
    def _reading(self, owner: str, response_id: str) -> Iterator[StoredRecord]:
        """Yield a response, which counts as used. Raises NotStored, and forgets it if its file is gone or damaged."""
        with self._lock:
            entry = self._entries.get(response_id)
            if entry is None or entry.owner != owner:
                raise NotStored
            self._entries.move_to_end(response_id)
            record = entry.record
        try:
            if record is None and entry.file is not None:
                record = StoredRecord.open(entry.file) or self._convert(owner, response_id, entry.file)
            if record is None:
                raise NotStored
            yield record
        except NotStored:
            with self._lock:
                if self._entries.get(response_id) is entry:
                    self._forget(response_id)
            raise

    def _convert(self, owner: str, response_id: str, file: Path) -> StoredRecord:
        """Return the record in a file that tells no sizes, as older versions wrote it; write it anew.

        Raises NotStored.
        """
        try:
            kept = json.loads(file.read_bytes())
            response, items = kept["response"], ItemList.of(kept["input"])
            record = StoredRecord.of(response, items)
        except (OSError, ValueError, KeyError, TypeError):
            raise NotStored from None
        if response.get("id") == response_id:
            self.add(owner, response, items)
        return record

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

    def _write(self, path: Path, entry: _Entry, record: StoredRecord) -> None:
        """Write a file under another name first, so that it is there as a whole or not at all."""
        draft = path.with_name(f".{path.name}{_DRAFT}")
        try:
            draft.unlink(missing_ok=True)
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                record.write(file)
                file.flush()
                os.fsync(file.fileno())
            with self._lock:
                if entry.is_dropped:
                    draft.unlink()
                else:
                    draft.replace(path)
                    entry.record = None
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            explained = explain_write_error(error, path, entry.size)
            _log.error("a response stays in memory: %s", explained or error)

"""Stored responses as bytes: JSON in parts, of which each can be read without the others and without parsing.

A file is one JSON object. Its first line tells the sizes of the parts that follow; the part `index` tells the ids and
the sizes of the items, so that single items can be cut out of a list of megabytes.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from sala.server.http.body import dump, pieces

FACTS, INDEX, HEAD, OUTPUT, INPUT = range(5)  # the parts of a record
BEFORE = (b'"facts":', b',"index":', b',"response":', b"", b'},"input":')  # what stands before each of them
END = b"}"
OPENING = b',"output":'  # ends the head of a response: the output follows its other fields
TOGETHER = 256  # items that are parsed before other threads have their turn
MAX_LINE = 200  # bytes of the first line
_LINE = re.compile(rb'\{"sizes":\[(\d+(?:,\d+){4})\],\n')


class NotStored(Exception):
    """There is no response with this id, or not any more."""


@dataclass(frozen=True)
class ItemSource:
    """A list of items that can be read one by one. `read_bytes` returns some bytes of its JSON: from, how many."""

    ids: Sequence[str]
    sizes: Sequence[int]  # of each item
    read_bytes: Callable[[int, int], bytes]

    def read(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield some of the items as JSON. Raises NotStored."""
        sizes = self.sizes[begin:end]
        at = 1 + sum(self.sizes[:begin]) + begin  # a bracket, and a comma after each item
        data = self.read_bytes(at, sum(sizes) + max(0, len(sizes) - 1))
        at = 0
        for size in sizes:
            yield data[at : at + size]
            at += size + 1

    def find(self, wanted: Collection[str]) -> Iterator[tuple[str, bytes]]:
        """Yield the items that have one of these ids, as JSON. Raises NotStored."""
        at = 1
        for number, size in zip(self.ids, self.sizes, strict=True):
            if number in wanted:
                yield number, self.read_bytes(at, size)
            at += size + 1

    def parse(self) -> Iterator[list[Any]]:
        """Yield the items, some at a time. Raises NotStored."""
        left = self.read(0, len(self.ids))
        while some := [*islice(left, TOGETHER)]:
            try:
                yield [json.loads(item) for item in some]
            except ValueError:
                raise NotStored from None


@dataclass(frozen=True)
class ItemList:
    """Items as a JSON list, and the id and the size of each."""

    data: bytes
    ids: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, items: Iterable[Any]) -> "ItemList":
        blocks, ids, sizes = [b"["], list[str](), list[int]()
        for item in items:
            encoded = [*pieces(item)]
            blocks += [b","] * bool(sizes) + encoded
            ids.append(item["id"])
            sizes.append(sum(map(len, encoded)))
        return cls(b"".join([*blocks, b"]"]), tuple(ids), tuple(sizes))

    @property
    def index(self) -> dict[str, Any]:
        return {"ids": self.ids, "sizes": self.sizes}

    @property
    def source(self) -> ItemSource:
        return ItemSource(self.ids, self.sizes, lambda start, size: self.data[start : start + size])


@dataclass(frozen=True)
class StoredRecord:
    """A stored response with the items of its input: in memory as `parts`, otherwise in a file.

    What reads it raises NotStored if the file is gone or damaged.
    """

    sizes: tuple[int, ...]  # of the parts
    parts: tuple[bytes, ...] | None = None
    file: Path | None = None

    @classmethod
    def of(cls, response: dict[str, Any], items: ItemList) -> "StoredRecord":
        output = ItemList.of(response["output"])
        facts = {"background": response.get("background"), "previous_response_id": response["previous_response_id"]}
        rest = {name: value for name, value in response.items() if name != "output"}
        head = [*pieces(rest)]
        head[-1] = head[-1][:-1] + OPENING
        index = b"".join(pieces({"output": output.index, "input": items.index}))
        parts = dump(facts), index, b"".join(head), output.data, items.data
        return cls(tuple(map(len, parts)), parts)

    @classmethod
    def open(cls, file: Path) -> "StoredRecord | None":
        """Return what is in a file; None if it does not begin with the sizes of parts."""
        try:
            with file.open("rb") as source:
                found = _LINE.fullmatch(source.readline(MAX_LINE))
            if found is None:
                return None
            record = cls(tuple(map(int, found[1].split(b","))), file=file)
            is_whole = file.stat().st_size == record.num_bytes
        except OSError:
            raise NotStored from None
        if not is_whole:
            raise NotStored
        return record

    @property
    def num_bytes(self) -> int:
        return len(self._line) + sum(map(len, BEFORE)) + sum(self.sizes) + len(END)

    @property
    def _line(self) -> bytes:
        return b'{"sizes":[%b],\n' % b",".join(b"%d" % size for size in self.sizes)

    def write(self, file: BinaryIO) -> None:
        file.write(self._line)
        for before, part in zip(BEFORE, self.parts or (), strict=True):
            file.write(before)
            file.write(part)
        file.write(END)

    def read(self, part: int, start: int = 0, size: int | None = None) -> bytes:
        """Return a part, or some bytes of it."""
        size = self.sizes[part] - start if size is None else size
        if self.file is None:
            return (self.parts or ())[part][start : start + size]
        try:
            with self.file.open("rb") as source:
                source.seek(len(self._line) + sum(map(len, BEFORE[: part + 1])) + sum(self.sizes[:part]) + start)
                data = source.read(size)
        except OSError:
            raise NotStored from None
        if len(data) < size:
            raise NotStored
        return data

    def read_fact(self, name: str) -> Any:
        """Return `previous_response_id` or `background` of the response."""
        return self._parse(FACTS).get(name)

    def read_response(self) -> list[bytes]:
        """Return the response as JSON, in blocks."""
        return [self.read(HEAD), self.read(OUTPUT), b"}"]

    def read_lists(self) -> list[ItemSource]:
        """Return where the items are: those of the input, then those of the output."""
        index = self._parse(INDEX)
        places = (("input", INPUT), ("output", OUTPUT))
        try:
            return [ItemSource(**index[name], read_bytes=partial(self.read, part)) for name, part in places]
        except (KeyError, TypeError):
            raise NotStored from None

    def _parse(self, part: int) -> dict[str, Any]:
        try:
            found = json.loads(self.read(part))
        except ValueError:
            raise NotStored from None
        if not isinstance(found, dict):
            raise NotStored
        return found

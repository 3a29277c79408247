"""Parse JSON of megabytes a little at a time: one call of the parser holds the interpreter's lock until it returns.

Long texts are what makes a body large. They are cut out, decoded in pieces, and put back into what is parsed without
them.
"""

import re
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import pydantic_core

BLOCK = 1 << 20
PIECE = 1 << 16  # bytes of a text that are decoded at a time; a shorter text is not cut out
LONG = 1 << 21  # bytes that are parsed by one call; about as many as take 10 ms
PAIR = 12  # bytes of the longest escape, two halves of a character
ESCAPE = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u.{4}|\\.", re.DOTALL)
STRICT: Any = {"allow_inf_nan": False, "cache_strings": "keys"}
POSITION = re.compile(r" at line \d+ column \d+")
one_at_a_time = threading.Lock()  # for bodies beyond LONG: the event loop must not wait for several calls in a row


def parse(data: bytes | bytearray) -> Any:
    """Parse strict JSON. If a key occurs twice in an object, the last value counts. Raises ValueError."""
    try:
        short, texts = _cut_out(data)
        return texts.put_back(pydantic_core.from_json(short, **STRICT))
    except ValueError as error:  # whose position is not that in the whole
        raise ValueError(POSITION.sub("", str(error))) from None


def split(data: bytes | bytearray, size: int) -> Iterator[bytes | bytearray]:
    """Yield JSON in blocks of about `size` bytes, of which none ends within an escape or a character."""
    start = 0
    while start < len(data):
        end = _find_end(data, start, start + size)
        yield data[start:end]
        start = end


def _find_end(data: bytes | bytearray, start: int, end: int) -> int:
    """Return where a block that begins at `start` ends: at `end`, or after what it would cut."""
    last = data.rfind(b"\\", max(start, end - PAIR), end)
    run = last + 1 - start - len(data[start : last + 1].rstrip(b"\\")) if last >= 0 else 0
    if run % 2 and (escape := ESCAPE.match(data, last)) is not None:
        end = max(end, escape.end())
    return next((at for at in range(end, end + 3) if at >= len(data) or data[at] & 0xC0 != 0x80), end + 3)


def leave_out_escapes(block: bytes | bytearray) -> bytes | bytearray:
    """Return a block without escaped quotes and backslashes: the remaining quotes begin or end a text."""
    return block.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in block else block


class _Texts:
    """Pieces of texts, and the marks that stand for them. Nobody can guess a mark, so no other text holds one."""

    def __init__(self) -> None:
        self._mark = f"<{secrets.token_hex(16)}>"  # begins with what completes no escape
        self._number = re.compile(f"{self._mark}([0-9a-f]{{8}})")
        self._pieces: list[str] = []

    def add(self, piece: bytes | bytearray) -> bytes:
        """Decode a piece of a text and return its mark. Raises ValueError."""
        self._pieces.append(pydantic_core.from_json(b'"' + piece + b'"'))
        return f"{self._mark}{len(self._pieces) - 1:08x}".encode()

    def put_back(self, value: Any) -> Any:
        """Return a value, changed in place, with the texts where their marks are."""
        whole = [value]
        waiting: list[Any] = [whole] if self._pieces else []
        while waiting:
            one = waiting.pop()
            if isinstance(one, dict) and any(self._mark in key for key in one):
                items = [(self._restore(key), item) for key, item in one.items()]
                one.clear()
                one.update(items)
            for place, item in enumerate(one) if isinstance(one, list) else one.items():
                if isinstance(item, str):
                    if self._mark in item:
                        one[place] = self._restore(item)
                elif isinstance(item, list | dict):
                    waiting.append(item)
        return whole[0]

    def _restore(self, text: str) -> str:
        parts = self._number.split(text)
        parts[1::2] = [self._pieces[int(number, 16)] for number in parts[1::2]]
        return "".join(parts)


def _cut_out(data: bytes | bytearray) -> tuple[bytearray, _Texts]:
    """Return JSON with marks instead of what long texts consist of, and what the marks stand for."""
    short, texts, is_inside = bytearray(), _Texts(), False
    for block in split(data, PIECE):
        num_quotes = leave_out_escapes(block).count(b'"')
        short += texts.add(block) if is_inside and not num_quotes else block
        is_inside ^= num_quotes % 2 == 1
    return short, texts

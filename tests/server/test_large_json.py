"""JSON of megabytes is parsed a little at a time, to what one call of the parser would return."""

import json
import random
from typing import Any

import pydantic_core
import pytest

from sala.server.http import large_json
from sala.server.http.body import read_json

PARTS = ["a", "b", '"', "\\", "é", "\U0001f600", "\n", "\x01", "€", "/", "u", "d83d", "\ud7ff", " ", "{", "[", ",", "]"]
BYTES = [b'"', b"\\", b"\\ud83d", b"\\ude00", b"\\u00", b"\xed\xa0\x80", b"\xf0\x9f", b"\xff", b"\n", b"{", b"]"]


def text(rng: random.Random) -> str:
    return "".join(rng.choices(PARTS[: rng.randint(1, len(PARTS))], k=rng.choice((0, 1, 5, 50, 300))))


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 3 or kind < 0.5:
        return text(rng)
    if kind < 0.6:
        return rng.choice((1, 1.5, True, None))
    if kind < 0.8:
        return [value(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {text(rng): value(rng, depth + 1) for _ in range(rng.randrange(5))}


def broken(rng: random.Random, data: bytes) -> bytes:
    """Return data with some bytes left out, replaced or added."""
    at, length = rng.randrange(len(data)), rng.randrange(8)
    return data[:at] + rng.choice((b"", *BYTES)) + data[at + length :]


def read(data: bytes, is_whole: bool) -> str:
    """Return the Python of what is parsed, so that order and types count; nothing if it is not valid."""
    try:
        return repr(pydantic_core.from_json(data, **large_json.STRICT) if is_whole else large_json.parse(data))
    except ValueError:
        return ""


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 31, 64, 100])
def test_pieces_are_what_the_whole_is(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Valid and broken JSON, of texts with all that must not be cut: escapes, halves of characters, bytes of them."""
    monkeypatch.setattr(large_json, "PIECE", size)
    rng, num_valid = random.Random(size), 0
    for _ in range(500):
        data = json.dumps(value(rng), ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 1))).encode()
        data = broken(rng, data) if rng.random() < 0.4 else data
        assert b"".join(large_json.split(data, size)) == data
        whole = read(data, is_whole=True)
        num_valid += whole != ""
        assert read(data, is_whole=False) == whole, data
    assert 250 < num_valid < 475


@pytest.mark.parametrize("letter", ["a", '"', "\\", "\x01", "é", "\U0001f600"])
@pytest.mark.parametrize("is_ascii", [True, False])
def test_no_call_of_the_parser_gets_much(letter: str, is_ascii: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long texts as values and as keys, between short ones."""
    sizes: list[int] = []
    parse = pydantic_core.from_json

    def record(data: bytes, **options: Any) -> Any:
        sizes.append(len(data))
        return parse(data, **options)

    monkeypatch.setattr(pydantic_core, "from_json", record)
    body = {"first": ["b", letter * 3_000_000, 1], letter * 3_000_000: {"c": letter * 100_000}, "last": letter}
    assert read_json(json.dumps(body, ensure_ascii=is_ascii).encode()) == body
    assert len(sizes) > 10
    assert max(sizes) < large_json.LONG


def test_an_error_does_not_name_a_place_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"^the body is not valid JSON: expected `,` or `}`$"):
        read_json(b'{"a": "' + b"b" * 3_000_000 + b'" 1}')
    with pytest.raises(ValueError, match=r"^the body is not valid JSON: control character .* a string$"):
        read_json(b'{"a": "' + b"b" * 2_000_000 + b"\n" + b"b" * 1_000_000 + b'"}')

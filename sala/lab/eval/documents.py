"""Text files and .jsonl files with a "text" per line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sala.errors import InputError

MAX_BYTES = 1 << 30
LINES = (".jsonl", ".ndjson")  # suffixes of files with one document per line


def read_bytes(file: Path, field: str = "file") -> bytes:
    """Return the content of a file; raise InputError about `field` if it cannot be read or is too large."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise InputError(field, f"{file} is larger than {MAX_BYTES >> 20} MiB", "give a part of it")
        return file.read_bytes()
    except OSError as error:
        raise InputError(field, f"{file} cannot be read: {error.strerror}", "give a text or a .jsonl file") from None


def read_documents(file: Path, field: str = "file", suffixes: tuple[str, ...] = LINES) -> list[str]:
    """Return a text file, or the "text" of each line; raise InputError about `field` with the number of a bad line."""
    try:
        content = read_bytes(file, field).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(field, f"{file} is not UTF-8 text (byte {error.start})", "convert it to text first") from None
    return list(_texts(content, file, field)) if file.suffix in suffixes else [content]


def _texts(content: str, file: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                record: Any = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            text = record.get("text") if isinstance(record, dict) else None
            if not isinstance(text, str):
                remedy = 'each line must be an object with a "text"'
                raise InputError(field, f"{file}, line {number}, has no text", remedy)
            yield text

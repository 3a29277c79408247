"""The user's texts: text files, .jsonl files with an object per line, and directories to hide needles in."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import StringConstraints, TypeAdapter, ValidationError

from sala.errors import InputError
from sala.lab.eval.tasks.prose import write_documents
from sala.options.sources import read_text

MAX_BYTES = 1 << 30
MAX_DIRECTORY = 256 << 20  # bytes of all files together
LINES = (".jsonl", ".ndjson")  # suffixes of files with one document per line
NotBlank = Annotated[str, StringConstraints(pattern=r"\S")]
T = TypeVar("T")


@dataclass(frozen=True)
class TextLine:
    text: str


@dataclass(frozen=True)
class HaystackSource:
    """Documents, and a name that identifies them."""

    name: str
    documents: list[str]


def read_documents(file: Path, field: str = "file", suffixes: tuple[str, ...] = LINES) -> list[str]:
    """Return a text file, or the "text" of each line; raise InputError about `field` with the number of a bad line."""
    if file.suffix not in suffixes:
        return [read_text(file, MAX_BYTES)]
    return [line.text for line in read_lines(file, TextLine, field, 'each line must be an object with a "text"')]


def read_lines(file: Path, kind: type[T], field: str, remedy: str) -> list[T]:
    """Return the objects of a JSONL file as dataclasses; blank lines are skipped. Raise InputError about a bad line."""
    adapter, found = TypeAdapter(kind), []
    for number, line in enumerate(read_text(file, MAX_BYTES).split("\n"), 1):
        if line.strip():
            try:
                found.append(adapter.validate_json(line, strict=True))
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False)[0]
                what = ": ".join([*map(str, first["loc"]), first["msg"]])
                raise InputError(field, f"{file}:{number} cannot be used: {what}", remedy) from None
    return found


def read_source(path: Path | None) -> HaystackSource:
    """Return a file, or all text files of a directory; without a path the built-in prose."""
    if path is None:
        return HaystackSource("prose", write_documents())
    if not path.exists():
        raise InputError("haystack", f"{path} does not exist", "give a file, or a directory with text files")
    files = _files_in(path) if path.is_dir() else [path]
    if files == [path] and path.stat().st_size > MAX_BYTES:
        raise InputError("haystack", f"{path} is larger than {MAX_BYTES >> 20} MiB", "give a part of it")
    try:
        texts = [_as_text(file.read_bytes()) for file in files]
    except OSError as error:
        raise InputError("haystack", f"{path} cannot be read: {error.strerror}", "change its permissions") from None
    if path.is_file() and texts == [None]:
        raise InputError("haystack", f"{path} is not UTF-8 text", "convert it to text first")
    documents = [text for text in texts if text]
    if not documents:
        raise InputError("haystack", f"{path} holds no text", "give a file, or a directory with text files (UTF-8)")
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    return HaystackSource(f"{path.name} {digest[:12]}", documents)


def _files_in(path: Path) -> list[Path]:
    inner = (file for file in path.rglob("*") if file.is_file())
    files = sorted(file for file in inner if not any(part.startswith(".") for part in file.relative_to(path).parts))
    total = sum(file.stat().st_size for file in files)
    if total > MAX_DIRECTORY:
        message = f"{path} holds {total / 2**20:,.0f} MiB, more than {MAX_DIRECTORY / 2**20:,.0f}"
        raise InputError("haystack", message, "give a smaller directory")
    return files


def _as_text(data: bytes) -> str | None:
    """Return the text of a file; None if it is binary."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text.strip()

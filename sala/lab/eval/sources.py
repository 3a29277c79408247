"""Texts for haystacks: the built-in prose, or the user's files."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from sala.errors import InputError
from sala.lab.eval.tasks.prose import write_documents

MAX_BYTES = 256 << 20  # of all files together


@dataclass(frozen=True)
class HaystackSource:
    """Documents, and a name that identifies them."""

    name: str
    documents: list[str]

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.documents))


def read_source(path: Path | None) -> HaystackSource:
    """Return a file, or all text files of a directory; without a path the built-in prose."""
    if path is None:
        return HaystackSource("prose", write_documents())
    documents = [text for text in map(_read, _files(path)) if text]
    if not documents:
        raise InputError("haystack", f"{path} holds no text", "give a file, or a directory with text files (UTF-8)")
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    return HaystackSource(f"{path.name} {digest[:12]}", documents)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if _read(path) is None:
            raise InputError("haystack", f"{path} is not UTF-8 text", "convert it to text first")
        return [path]
    if not path.is_dir():
        raise InputError("haystack", f"{path} does not exist", "give a file, or a directory with text files")
    inner = (file for file in path.rglob("*") if file.is_file())
    files = sorted(file for file in inner if not any(part.startswith(".") for part in file.relative_to(path).parts))
    total = sum(file.stat().st_size for file in files)
    if total > MAX_BYTES:
        message = f"{path} holds {total / 2**20:,.0f} MiB, more than {MAX_BYTES / 2**20:,.0f}"
        raise InputError("haystack", message, "give a smaller directory")
    return files


def _read(file: Path) -> str | None:
    """Return the text of a file; None if it is not text."""
    try:
        text = file.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError("haystack", f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text.strip()

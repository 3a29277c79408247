"""What Git ignores and what it tracks, from the files of a repository: neither Git nor what these files name is run."""

import os
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

MAX_IGNORE_BYTES = 1 << 20
MAX_INDEX_BYTES = 1 << 28
MAX_NAME_BYTES = 1 << 26  # of all names together: version 4 repeats the beginnings of names
HASH_BYTES = (20, 32)  # of SHA-1 and SHA-256
EXTENDED = 0x4000
Rules = list[tuple[Path, Any]]  # directories with their rules, from the outermost on


class Repository:
    """A Git repository at `root`. `problem` says why it is not known what Git tracks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.problem = ""
        self._git = _git_directory(root)

    def rules_above(self, directory: Path) -> Rules:
        """Return the rules that hold for a directory in the repository, without those in the directory itself."""
        common = _follow(self._git, _first_line(self._git / "commondir"))  # a worktree has those of its repository
        rules = list(_rules(common / "info" / "exclude", self.root))
        inner = directory.relative_to(self.root).parts
        for depth in range(len(inner)):
            rules += rules_in(self.root.joinpath(*inner[:depth]))
        return rules

    def tracks(self, path: Path) -> bool:
        """Return whether Git tracks a file, or something in a directory."""
        name = os.fsencode(path.relative_to(self.root).as_posix())
        at, below = bisect_left(self._tracked, name), bisect_left(self._tracked, name + b"/")
        return self._tracked[at : at + 1] == [name] or any(
            one.startswith(name + b"/") for one in self._tracked[below : below + 1]
        )

    @cached_property
    def _tracked(self) -> list[bytes]:
        """The paths in the index, sorted."""
        index = self._git / "index"
        try:
            if not index.is_file():  # nothing was added yet
                return []
            with index.open("rb") as stream:
                return read_index(stream.read(MAX_INDEX_BYTES + 1))
        except OSError as error:
            self.problem = f"it cannot be read: {error.strerror}"
        except ValueError as error:
            self.problem = str(error)
        return []


def find_repository(directory: Path) -> Repository | None:
    """Return the innermost repository that a directory is in."""
    return next((Repository(place) for place in (directory, *directory.parents) if (place / ".git").exists()), None)


def rules_in(directory: Path) -> Iterator[tuple[Path, Any]]:
    return _rules(directory / ".gitignore", directory)


def names_path(path: Path, is_directory: bool, rules: Rules) -> bool:
    """Return whether rules name a path: the innermost rule that matches decides."""
    for directory, spec in reversed(rules):
        relative = path.relative_to(directory).as_posix() + ("/" if is_directory else "")
        verdict = spec.check_file(relative).include
        if verdict is not None:
            return bool(verdict)
    return False


def read_index(data: bytes) -> list[bytes]:
    """Return the sorted paths in the index of a repository, versions 2 to 4. Raises ValueError where it is not one."""
    if len(data) > MAX_INDEX_BYTES:
        raise ValueError(f"it is larger than {MAX_INDEX_BYTES >> 20} MiB")
    version, number = int.from_bytes(data[4:8]), int.from_bytes(data[8:12])
    if data[:4] != b"DIRC" or version not in (2, 3, 4):
        raise ValueError("it is damaged, or of an unknown version")
    for hash_bytes in HASH_BYTES:  # which of them is said nowhere in the file, but only one fits
        with suppress(_WrongSize):
            names, end = _entries(data, version, number, hash_bytes)
            _check_extensions(data, end, hash_bytes)
            if all(names):  # without a name: one from another file
                return sorted(names)
    raise ValueError("it is damaged")


class _WrongSize(Exception):
    """The file does not consist of entries with hashes of this size."""


def _entries(data: bytes, version: int, number: int, hash_bytes: int) -> tuple[list[bytes], int]:
    """Return the names of all entries, and where these end."""
    names: list[bytes] = []
    at, size, name = 12, 0, b""
    for _ in range(number):
        begin = at + 40 + hash_bytes  # after times, owner, size and hash
        flags = int.from_bytes(data[begin : begin + 2])
        begin += 4 if flags & EXTENDED and version > 2 else 2
        shared = b""
        if version == 4:
            dropped, begin = _variable_width(data, begin)
            if dropped > len(name):
                raise _WrongSize
            shared = name[: len(name) - dropped]
        end = data.find(b"\0", begin)
        name = shared + data[begin:end]
        size += len(name)
        if end < begin or flags & 0xFFF != min(len(name), 0xFFF):
            raise _WrongSize
        if size > MAX_NAME_BYTES:
            raise ValueError(f"its names have more than {MAX_NAME_BYTES >> 20} MiB")
        names.append(name)
        at = end + 1 if version == 4 else at + (end - at) // 8 * 8 + 8
    return names, at


def _variable_width(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of version 4, and where it ends."""
    value = -1
    for end in range(at, min(at + 5, len(data))):
        value = (value + 1) << 7 | data[end] & 0x7F
        if data[end] < 0x80:
            return value, end + 1
    raise _WrongSize


def _check_extensions(data: bytes, at: int, hash_bytes: int) -> None:
    """Raise ValueError if names may be elsewhere: in another file, or in a part that only a newer Git knows."""
    end = len(data) - hash_bytes  # a checksum is last
    while at < end:
        kind = data[at : at + 4]
        if not (kind.isalnum() and kind.isascii()):
            raise _WrongSize
        if kind == b"link":
            raise ValueError("it is split; `git update-index --no-split-index` joins it")
        if kind[:1].islower() and kind != b"sdir":
            raise ValueError("it needs a newer version of Git")
        at += 8 + int.from_bytes(data[at + 4 : at + 8])
    if at != end:
        raise _WrongSize


def _git_directory(root: Path) -> Path:
    """Return where a repository keeps its own files: submodules and worktrees have a file that says where."""
    place = root / ".git"
    return _follow(root, _first_line(place).removeprefix("gitdir:").strip()) if place.is_file() else place


def _follow(directory: Path, place: str) -> Path:
    """Return a place that a repository names; what would make Windows talk to another machine is not followed."""
    return directory if place.replace("\\", "/").startswith("//") else directory / place


def _first_line(file: Path) -> str:
    try:
        if not file.is_file():
            return ""
        with file.open(encoding="utf-8", errors="surrogateescape") as lines:
            return lines.readline(4096).strip()
    except OSError:
        return ""


def _rules(file: Path, directory: Path) -> Iterator[tuple[Path, Any]]:
    try:
        if file.is_symlink() or not file.is_file() or file.stat().st_size > MAX_IGNORE_BYTES:
            return  # Git does not follow such links either
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    from pathspec import GitIgnoreSpec

    yield directory, GitIgnoreSpec.from_lines(lines)

"""Find the files below directories: no links out of them, nothing that Git ignores, in a stable order."""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sala.documents.model import LeftOut, clean_name

MAX_FILES = 100_000
MAX_DEPTH = 100
MAX_IGNORE_BYTES = 1 << 20
NEVER = {".git", ".hg", ".svn"}
INSTALLED = {"node_modules", "__pycache__"}  # of no use to a reader, and large


@dataclass(slots=True)
class Found:
    """Files as (name that is shown, path), and what was left out."""

    files: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def leave_out(self, name: str, why: str) -> None:
        self.left_out.append(LeftOut(clean_name(name), why))


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts names by path, and chapter 2 before chapter 10."""
    parts = re.findall(r"\d{1,18}|/|[^\d/]+|\d+", name)
    return [(0, 0, "") if part == "/" else (1, int(part), "") if part.isdecimal() else (2, 0, part) for part in parts]


def find_files(directory: str, name: str) -> Found:
    """Return the files below a directory; `name` is what they are shown under.

    In a Git repository, hidden files are found and ignored ones are not; elsewhere it is the other way round.
    """
    root = Path(directory).resolve()
    repository = next((place for place in (root, *root.parents) if (place / ".git").exists()), None)
    found = Found()
    rules = [] if repository is None else _rules_above(root, repository)
    _walk(root, name, root, repository is not None, rules, 0, found)
    found.files.sort(key=lambda file: natural(file[0]))
    return found


def _walk(
    directory: Path, name: str, root: Path, is_repository: bool, rules: list[tuple[Path, Any]], depth: int, found: Found
) -> None:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError as error:
        found.leave_out(name, f"it cannot be read: {error.strerror}")
        return
    if is_repository:
        rules = [*rules, *_rules_in(directory)]
    for entry in entries:
        shown = f"{name}/{entry.name}"
        if entry.name in NEVER or (entry.name.startswith(".") and not is_repository):
            continue
        if entry.name in INSTALLED:
            found.leave_out(shown, "it holds what was installed or compiled")
            continue
        is_directory = entry.is_dir(follow_symlinks=False)
        if rules and _is_ignored(Path(entry.path), is_directory, rules):
            continue
        if is_directory and depth < MAX_DEPTH:
            _walk(Path(entry.path), shown, root, is_repository, rules, depth + 1, found)
        elif is_directory:
            found.leave_out(shown, f"directories are nested more than {MAX_DEPTH} deep")
        else:
            _take(entry, shown, root, found)


def _take(entry: "os.DirEntry[str]", name: str, root: Path, found: Found) -> None:
    if entry.is_symlink():
        is_inside = Path(entry.path).resolve().is_relative_to(root)
        found.leave_out(name, "it is a link" if is_inside else "it is a link out of the directory")
    elif not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
        found.leave_out(name, "it is not a regular file")
    elif len(found.files) >= MAX_FILES:
        raise ValueError(f"it holds more than {MAX_FILES:,} files")
    else:
        found.files.append((clean_name(name), entry.path))


def _rules_above(root: Path, repository: Path) -> list[tuple[Path, Any]]:
    """Return the rules of a repository that hold for a directory in it, from the outermost on."""
    rules = list(_rules(repository / ".git" / "info" / "exclude", repository))
    inner = root.relative_to(repository).parts
    for depth in range(len(inner)):
        rules += _rules_in(repository.joinpath(*inner[:depth]))
    return rules


def _rules_in(directory: Path) -> Iterator[tuple[Path, Any]]:
    return _rules(directory / ".gitignore", directory)


def _rules(file: Path, directory: Path) -> Iterator[tuple[Path, Any]]:
    try:
        if file.is_symlink() or not file.is_file() or file.stat().st_size > MAX_IGNORE_BYTES:
            return  # Git does not follow such links either
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    from pathspec import GitIgnoreSpec

    yield directory, GitIgnoreSpec.from_lines(lines)


def _is_ignored(path: Path, is_directory: bool, rules: list[tuple[Path, Any]]) -> bool:
    """Return whether Git ignores a path: the innermost rule that matches decides."""
    for directory, spec in reversed(rules):
        relative = path.relative_to(directory).as_posix() + ("/" if is_directory else "")
        verdict = spec.check_file(relative).include
        if verdict is not None:
            return bool(verdict)
    return False

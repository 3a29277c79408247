"""Find the files below directories: no links out of them, nothing that Git ignores, in a stable order."""

import os
import re
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from sala.documents.model import LeftOut, clean_name
from sala.documents.repository import Repository, Rules, find_repository, names_path, rules_in

MAX_FILES = 100_000
MAX_DEPTH = 100
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

    In a Git repository, hidden files are found, and files that Git ignores and does not track are not; elsewhere hidden
    files are not found.
    """
    root = Path(directory).resolve()
    found = Found()
    repository = find_repository(root)
    if repository is None:
        _FileSearch(root, found).walk(root, name)
    else:
        _search_repository(repository, root, root, name, found, 0)
    found.files.sort(key=lambda file: natural(file[0]))
    return found


def _search_repository(
    repository: Repository, directory: Path, root: Path, name: str, found: Found, depth: int
) -> None:
    search = _FileSearch(root, found, repository)
    search.walk(directory, name, repository.rules_above(directory), depth)
    if search.ignored:
        found.leave_out(f"{_count(search.ignored)} in {name}", "Git ignores them")
    if repository.problem:
        why = f"{repository.problem}; what Git tracks although it is to be ignored is not read"
        found.leave_out(f"{name}/.git/index" if repository.root == directory else ".git/index", why)


def _count(ignored: "Counter[str]") -> str:
    """Return such as "1 file and 2 directories"."""
    many = {"file": "files", "directory": "directories"}
    return " and ".join(
        f"{ignored[kind]:,} {kind if ignored[kind] == 1 else many[kind]}" for kind in many if ignored[kind]
    )


@dataclass(slots=True)
class _FileSearch:
    """The search below a directory, in at most one repository; `ignored` counts what Git ignores in it."""

    root: Path
    found: Found
    repository: Repository | None = None
    ignored: "Counter[str]" = field(default_factory=Counter)

    def walk(
        self, directory: Path, name: str, rules: Rules | None = None, depth: int = 0, is_ignored: bool = False
    ) -> None:
        """Find files; in a directory that Git ignores only those that it tracks."""
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError as error:
            self.found.leave_out(name, f"it cannot be read: {error.strerror}")
            return
        if any(entry.name == ".git" for entry in entries) and not self._is_own(directory):
            _search_repository(Repository(directory), directory, self.root, name, self.found, depth)
            return
        rules = [] if self.repository is None else [*(rules or ()), *rules_in(directory)]
        for entry in entries:
            if entry.name not in NEVER and not (entry.name.startswith(".") and self.repository is None):
                self._visit(entry, f"{name}/{entry.name}", rules, depth, is_ignored)

    def _is_own(self, directory: Path) -> bool:
        return self.repository is not None and self.repository.root == directory

    def _visit(self, entry: "os.DirEntry[str]", name: str, rules: Rules, depth: int, is_ignored: bool) -> None:
        path, is_directory = Path(entry.path), entry.is_dir(follow_symlinks=False)
        if self.repository is not None and (is_ignored or (rules and names_path(path, is_directory, rules))):
            is_ignored = True
            if not self.repository.tracks(path):
                self.ignored["directory" if is_directory else "file"] += 1
                return
        if entry.name in INSTALLED:
            self.found.leave_out(name, "it holds what was installed or compiled")
        elif not is_directory:
            _take(entry, name, self.root, self.found)
        elif depth < MAX_DEPTH:
            self.walk(path, name, rules, depth + 1, is_ignored)
        else:
            self.found.leave_out(name, f"directories are nested more than {MAX_DEPTH} deep")


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

"""Read the files that a user names, in a child process with limits: what cannot be read is left out with a reason."""

import glob
import hashlib
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from sala.documents.find import natural
from sala.documents.model import MIB, Document, LeftOut, Limits, Section, clean_name
from sala.errors import InputError, MissingExtra
from sala.text.sandbox import OUT_OF_MEMORY
from sala.text.workers import SandboxProcess, WorkerKilled

CHILD = Path(__file__).with_name("child.py")
STDIN = "-"
FIND_S = 120.0
READ_S, READ_S_PER_MIB, MAX_READ_S = 30.0, 10.0, 600.0
MAX_CHARS = 512 * MIB  # of all documents
LARGE = 4 * MIB  # a file after which the process is replaced: its memory would stay as large
Files = list[tuple[str, str]]  # names that are shown, and paths
OnFile = Callable[[int, int, str], None]  # (files done, all of them, name of the next)


@dataclass(slots=True)
class DocumentSet:
    """Documents in a stable order, and the files that were left out."""

    documents: list[Document] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    num_chars: int = 0


def read_documents(paths: Sequence[str | Path], on_file: OnFile | None = None) -> DocumentSet:
    """Read files, directories, globs, and standard input for "-". The order depends on names alone.

    Raises InputError for a path that does not exist and MissingExtra where a library is needed to find the files.
    """
    found = DocumentSet()
    worker = SandboxProcess(program=CHILD)
    try:
        with _copied(paths) as (named, copies):
            files = _find(worker, named, copies, found)
            for number, (name, path) in enumerate(files):
                if on_file is not None:
                    on_file(number, len(files), name)
                _add(_read(worker, name, path), found)
            if on_file is not None and files:
                on_file(len(files), len(files), "")
    finally:
        worker.close()
    _drop_copies(found)
    return found


def read_file(worker: SandboxProcess, path: str | Path, name: str, max_s: float = MAX_READ_S) -> DocumentSet:
    """Read one file under another name than its own, in at most `max_s` seconds."""
    found = DocumentSet()
    _add(_read(worker, clean_name(name), str(path), max_s), found)
    _drop_copies(found)
    return found


def _find(worker: SandboxProcess, paths: Sequence[Path], copies: Files, found: DocumentSet) -> Files:
    """Return the files of all paths, each once, in the order of their names."""
    directories = _named([path for path in paths if path.is_dir()])
    files = _named([path for path in paths if not path.is_dir()])
    for name, directory in directories:
        files += _list(worker, name, directory, found)
    once = {Path(path).resolve(): (name, path) for name, path in reversed(files)}
    names = Counter(name for name, _ in once.values())
    told_apart = [
        (name if names[name] == 1 else clean_name(Path(path).as_posix()), path) for name, path in once.values()
    ]
    return sorted([*told_apart, *copies], key=lambda file: natural(file[0]))


def _named(paths: Sequence[Path]) -> Files:
    """Return each path once, under its last part; as it was given where others have the same."""
    once = {path.resolve(): path for path in reversed(paths)}
    short = {real: real.name if real.is_dir() else path.name for real, path in reversed(once.items())}
    number = Counter(short.values())
    return [
        (clean_name(name if number[name] == 1 else once[real].as_posix()), str(once[real]))
        for real, name in short.items()
    ]


def _list(worker: SandboxProcess, name: str, directory: str, found: DocumentSet) -> Files:
    """Return the files below a directory. Raises InputError where that takes too long."""
    try:
        reply = worker.ask("find", {"directory": directory, "name": name}, FIND_S)
    except WorkerKilled:
        reply = {"error": f"it takes more than {FIND_S:.0f} s to list"}
    inside = reply.get("text", {})
    if "missing" in inside:
        raise MissingExtra(inside["missing"], "documents")
    problem = reply.get("error") or inside.get("problem")
    if problem:
        raise InputError(directory, problem, "name a directory in it")
    found.left_out += [LeftOut(**one) for one in inside["left_out"]]
    return [(name, path) for name, path in inside["files"]]


def expand(paths: Sequence[str | Path], hint: str = "") -> list[Path]:
    """Return paths with globs expanded. Raises InputError for one that does not exist; `hint` ends its remedy."""
    found: list[Path] = []
    for path in map(str, paths):
        known = Path(path).expanduser()
        if _exists(known):
            found.append(known)
            continue
        is_pattern = glob.has_magic(path)
        names = glob.glob(str(known), recursive=True) if is_pattern else []  # noqa: PTH207 - it may be absolute
        matches = sorted(names, key=natural)
        if not matches:
            remedy = "check the pattern" if is_pattern else "check the path"
            raise InputError(path, "does not exist", remedy + hint)
        found += map(Path, matches)
    return found


def _exists(path: Path) -> bool:
    try:
        return path.exists() or path.is_symlink()
    except OSError:  # such as a name that is too long
        return False


@contextmanager
def _copied(paths: Sequence[str | Path]) -> Iterator[tuple[list[Path], Files]]:
    """Yield the paths, and copies of what can be read only once: standard input and pipes."""
    streams: list[tuple[str, BinaryIO]] = []
    if STDIN in map(str, paths):
        streams.append(("standard input", sys.stdin.buffer))
    rest = expand([path for path in paths if str(path) != STDIN])
    for path in [path for path in rest if path.exists() and stat.S_ISFIFO(path.stat().st_mode)]:
        rest.remove(path)
        streams.append((path.as_posix(), path.open("rb")))
    if not streams:
        yield rest, []
        return
    with tempfile.TemporaryDirectory(prefix="sala-") as directory:
        copies = []
        for number, (name, stream) in enumerate(streams):
            copy = Path(directory) / str(number)
            with copy.open("wb") as target:
                _copy(stream, target, Limits().file_bytes + 1)
            copies.append((clean_name(name), str(copy)))
        yield rest, copies


def _copy(source: BinaryIO, target: BinaryIO, max_bytes: int) -> None:
    while max_bytes > 0 and (piece := source.read(min(MIB, max_bytes))):
        target.write(piece)
        max_bytes -= len(piece)


def _read(worker: SandboxProcess, name: str, path: str, max_s: float = MAX_READ_S) -> dict[str, Any]:
    try:
        status = Path(path).stat()
    except OSError as error:
        return _left_out(name, f"it cannot be read: {error.strerror}")
    if not stat.S_ISREG(status.st_mode):
        return _left_out(name, "it is not a regular file")
    seconds = min(max_s, READ_S + READ_S_PER_MIB * status.st_size / MIB)
    try:
        reply = worker.ask("read", {"path": str(path), "name": name}, seconds)
    except WorkerKilled:
        return _left_out(name, f"it takes more than {seconds:.0f} s or too much memory to read")
    if status.st_size > LARGE or "error" in reply:
        worker.close()
    if "error" in reply:
        is_too_large = reply["error"] == OUT_OF_MEMORY
        return _left_out(
            name, "it takes too much memory to read" if is_too_large else f"it is damaged ({reply['error']})"
        )
    read: dict[str, Any] = reply["text"]
    return read


def _left_out(name: str, why: str) -> dict[str, Any]:
    return {"documents": [], "left_out": [{"name": name, "why": why}]}


def _add(read: dict[str, Any], found: DocumentSet) -> None:
    found.left_out += [LeftOut(**one) for one in read["left_out"]]
    for one in read["documents"]:
        document = Document(one["name"], [Section(**section) for section in one["sections"]], one["notes"])
        if found.num_chars + document.num_chars > MAX_CHARS:
            found.left_out.append(LeftOut(document.name, f"all files together hold more than {MAX_CHARS:,} characters"))
        else:
            found.documents.append(document)
            found.num_chars += document.num_chars


def _drop_copies(found: DocumentSet) -> None:
    """Leave out documents with the same text as an earlier one."""
    first: dict[bytes, str] = {}
    kept = []
    for document in found.documents:
        text = "\0".join(section.text for section in document.sections)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        if digest in first:
            found.left_out.append(LeftOut(document.name, f"it has the same text as {first[digest]}"))
        else:
            first[digest] = document.name
            kept.append(document)
    found.documents = kept

"""Sessions: snapshots in files, so that a long prompt is computed once, even across restarts.

A file is safetensors: the tokens, the pages of the sparse layers, the states of the lightning layers. Its header names
the model it belongs to (fingerprint) and a checksum of everything; a file that fails either is not used. Files appear
complete or not at all (temporary name, fsync, link).
"""

import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sala.checkpoint.reader import read_file_header, read_tensors
from sala.checkpoint.writer import publish, write_file
from sala.engine.cache import TOKEN_BYTES, Hybrid, SequenceState, Snapshot
from sala.errors import CheckpointError, InputError, SalaError, writing
from sala.protocol import Blob, Executor

FORMAT = "sala-session-1"
SUFFIX = ".sala"
MIN_TOKENS = 256  # shorter prefixes are computed faster than loaded
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_AUTOMATIC = re.compile(r"auto-[0-9a-f]{32}")
_STALE_SECONDS = 24 * 3600  # a draft that is being written is younger than this, even after a change of the clock
Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the store, as its header describes it."""

    name: str
    path: Path
    num_tokens: int
    sparse_from: int
    nbytes: int
    modified: float
    fits: bool  # made by this model, with this precision and format


class SessionStore:
    """A directory of sessions. `fingerprint` says which model, precision and format they must come from."""

    def __init__(self, directory: Path, fingerprint: str, warn: Warn = print) -> None:
        self._directory = directory
        self.fingerprint = fingerprint
        self.warn = warn
        self.refused: set[Path] = set()
        if directory.exists() and not directory.is_dir():
            raise InputError("cache-dir", f"{directory} is not a directory", "choose another")
        if os.name == "posix" and directory.is_dir() and directory.stat().st_mode & 0o002:
            raise InputError("cache-dir", f"{directory} is writable by every user", f"run: chmod o-w {directory}")
        for left in directory.glob(".*.part") if directory.is_dir() else ():  # left by a process that was killed
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                left.unlink(missing_ok=True)

    def entries(self) -> list[Entry]:
        """Return the sessions that can be read, newest first."""
        paths = self._directory.glob(f"*{SUFFIX}") if self._directory.is_dir() else ()
        found = [entry for entry in map(self._entry, paths) if entry is not None]
        return sorted(found, key=lambda entry: -entry.modified)

    def _entry(self, path: Path) -> Entry | None:
        if path in self.refused or path.is_symlink() or not path.is_file():
            return None
        try:
            metadata = read_file_header(path)[0]
            stat = path.stat()
            return Entry(
                path.stem,
                path,
                int(metadata["num_tokens"]),
                int(metadata["sparse_from"]),
                stat.st_size,
                stat.st_mtime,
                metadata.get("format") == FORMAT and metadata.get("fingerprint") == self.fingerprint,
            )
        except (SalaError, KeyError, ValueError, OSError) as error:
            self.refuse(path, str(error))
            return None

    def check_new(self, name: str) -> Path:
        """Return the path of a new session. Raises InputError if the name is taken."""
        path = self.path(name)
        if path.exists() or path.is_symlink():
            remedy = "choose another name, or remove it: sala session rm"
            raise InputError("session", f"{name!r} exists already", remedy)
        return path

    def save(self, name: str, snapshot: Snapshot, executor: Executor) -> Path:
        """Write a snapshot under a name and return its path; an existing file is never replaced."""
        path = self.check_new(name)
        size = snapshot.length * TOKEN_BYTES
        tokens = Blob("U32", (snapshot.length,), memoryview(snapshot.tokens[:size]))
        blobs = {"tokens": tokens, **executor.dump(snapshot.pages, snapshot.length, snapshot.slot)}
        metadata = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "num_tokens": str(snapshot.length),
            "sparse_from": str(snapshot.sparse_from),
        }
        metadata["checksum"] = _checksum(metadata, blobs)
        with writing(path):
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = self._directory / f".{name}.{secrets.token_hex(6)}.part"
        try:
            specs = {key: (blob.dtype, blob.shape) for key, blob in blobs.items()}
            write_file(draft, specs, lambda key: blobs[key].data, metadata)
            publish(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        return path

    def load(self, entry: Entry, hybrid: Hybrid, executor: Executor) -> Snapshot | None:
        """Load a session into the cache; None if it does not fit. Raises CheckpointError for a bad file."""
        if not entry.fits:
            raise CheckpointError(f"{entry.path} was made by another model, precision or version", "make it again")
        metadata, infos = read_file_header(entry.path)
        blobs = read_tensors(entry.path, infos)
        claimed = metadata.pop("checksum", "")
        if claimed != _checksum(metadata, blobs) or "tokens" not in blobs:
            raise CheckpointError(f"{entry.path} is damaged", "remove it: sala session rm")
        tokens = bytes(blobs.pop("tokens").data)
        if len(tokens) != entry.num_tokens * TOKEN_BYTES or entry.num_tokens > executor.capacity.max_tokens:
            raise CheckpointError(f"{entry.path} does not fit in this context", "raise --ctx")
        snapshot = hybrid.insert(tokens, entry.sparse_from, "")
        if snapshot is None:
            return None
        try:
            executor.restore(blobs, snapshot.pages, snapshot.length, snapshot.slot)
        except BaseException:
            hybrid.forget(snapshot)
            raise
        return snapshot

    def remove(self, name: str) -> None:
        path = self.path(name)
        if not path.is_file() and not path.is_symlink():
            raise InputError("session", f"{name!r} does not exist", "sala session ls shows what is there")
        path.unlink()

    def find(self, name: str) -> Entry:
        path = self.path(name)
        entry = self._entry(path) if path.exists() else None
        if entry is None:
            raise InputError("session", f"{name!r} does not exist", "sala session ls shows what is there")
        return entry

    def path(self, name: str) -> Path:
        if not _NAME.fullmatch(name) or name.endswith(SUFFIX):
            raise InputError("session", f"{name!r} is not a valid name", "use letters, digits, '.', '_' and '-'")
        return self._directory / f"{name}{SUFFIX}"

    def refuse(self, path: Path, why: str) -> None:
        self.refused.add(path)
        self.warn(f"{path.name} is not used: {why}")


class DiskTier:
    """Saves the KV cache of long prompts when they finish, and loads it for later requests. Never raises.

    `fetch` runs before and `keep` after every request. Requests with a salt are not written to disk.
    """

    def __init__(self, store: SessionStore, hybrid: Hybrid, executor: Executor, max_bytes: int | None) -> None:
        self._store = store
        self._hybrid = hybrid
        self._executor = executor
        self._max_bytes = max_bytes
        self._is_broken = False  # it has warned and writes no more

    def fetch(self, sequence: SequenceState) -> None:
        """Load the longest saved prefix of a request, if it is longer than the cached one."""
        if sequence.request.salt:
            return
        tokens, prefix = bytes(sequence.token_bytes), self._hybrid.prefix
        known = prefix.find(tokens, sequence.sparse_from, "")
        candidates = [
            entry
            for entry in self._store.entries()
            if entry.fits
            and (known.length if known else 0) < entry.num_tokens < len(sequence.tokens)
            and prefix.agrees(entry.num_tokens, entry.sparse_from, sequence.sparse_from)
        ]
        for entry in sorted(candidates, key=lambda entry: -entry.num_tokens):
            try:
                if _starts_with(entry, tokens):
                    self._store.load(entry, self._hybrid, self._executor)
                    os.utime(entry.path)
                    return
            except Exception as error:  # whatever is wrong with a file, the prompt can still be computed
                self._store.refuse(entry.path, str(error) or type(error).__name__)

    def keep(self, sequence: SequenceState) -> None:
        """Save the prompt without its last token: the next turn, or the same question again, begins with it."""
        length = sequence.prompt_len - 1
        if length < MIN_TOKENS or sequence.request.salt or self._is_broken:
            return
        snapshot = self._hybrid.prefix.has(bytes(sequence.token_bytes), length, sequence.sparse_from, "")
        if snapshot is None:
            return
        try:
            self._save(snapshot)
        except FileExistsError:
            return  # another process was faster
        except Exception as error:
            self._is_broken = True
            self._store.warn(f"the disk cache is off: {error}")

    def _save(self, snapshot: Snapshot) -> None:
        """Write a snapshot; older automatic ones are removed if the directory is full."""
        head = f"{FORMAT} {snapshot.sparse_from} {self._store.fingerprint} ".encode()
        digest = hashlib.sha256(head + snapshot.tokens[: snapshot.length * TOKEN_BYTES])
        name = f"auto-{digest.hexdigest()[:32]}"
        path = self._store.path(name)
        if path in self._store.refused:
            path.unlink(missing_ok=True)  # our own file is damaged: write it again
            self._store.refused.discard(path)
        if path.exists():
            os.utime(path)
            return
        self._store.save(name, snapshot, self._executor)
        ours = [entry for entry in self._store.entries() if _AUTOMATIC.fullmatch(entry.name)]
        total = sum(entry.nbytes for entry in ours)
        while self._max_bytes is not None and total > self._max_bytes:
            oldest = ours.pop()
            oldest.path.unlink(missing_ok=True)
            total -= oldest.nbytes


def _starts_with(entry: Entry, tokens: bytes) -> bool:
    _, infos = read_file_header(entry.path)
    stored = read_tensors(entry.path, {"tokens": infos["tokens"]})["tokens"]
    return bytes(stored.data) == tokens[: entry.num_tokens * TOKEN_BYTES]


def _checksum(metadata: Mapping[str, str], blobs: Mapping[str, Blob]) -> str:
    digest = hashlib.sha256(repr(sorted(metadata.items())).encode())
    for name in sorted(blobs):
        digest.update(f"{name} {blobs[name].dtype} {blobs[name].shape}".encode())
        digest.update(blobs[name].data)
    return digest.hexdigest()

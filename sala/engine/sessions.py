"""Snapshots in files: sessions, and the disk tier of the cache. A long prompt is computed once, even across restarts.

A file is safetensors: the tokens, the pages of the sparse layers, the states of the lightning layers. Its header names
the model it belongs to (fingerprint) and a checksum of everything; a file that fails either is not used. Files appear
complete or not at all (temporary name, fsync, link), and only their owner can read them.
"""

import errno
import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sala.checkpoint.reader import read_file_header, read_tensors
from sala.checkpoint.writer import publish, write_file
from sala.config import Regime, SparseConfig
from sala.engine.cache import Hybrid
from sala.engine.prefixes import Prefix, Snapshot
from sala.engine.scheduler import TOKEN_BYTES
from sala.engine.worker import READ, Worker
from sala.errors import CheckpointError, InputError, SalaError, explain_write_error, free_disk_bytes, writing
from sala.protocol import Blob, Executor

FORMAT = "sala-session-1"
SUFFIX = ".sala"
MIN_TOKENS = 256  # of the disk tier: shorter prefixes are computed faster than loaded
MAX_PENDING = 1 << 30  # bytes that wait to be written; more are not accepted
DISK_SHARE = 10  # without a limit, a directory takes one part in this many of the free space and its own files
RETRY_S = 60.0  # after a write has failed
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_AUTOMATIC = re.compile(r"auto-([0-9a-f]{32})")
_STALE_SECONDS = 24 * 3600  # a file that is being written is younger than this, even after a change of the clock
Warn = Callable[[str], None]
Blobs = Mapping[str, Blob]


class TierUse(NamedTuple):
    """How full a tier of the cache is: prefixes, bytes, and bytes at most."""

    prefixes: int
    used: int
    size: int


@dataclass(frozen=True, slots=True)
class SessionEntry:
    """One file of the store, as its header describes it."""

    name: str
    path: Path
    num_tokens: int
    regime: Regime
    nbytes: int
    modified: float
    fits: bool  # made by this model, with this precision and format
    adapter: str  # of a session: fingerprint of the adapter that computed it; empty: none


class SessionStore:
    """A directory of sessions. `fingerprint` says which model, precision and format they must come from.

    `topk` is the model's own number of blocks; files that were computed with another one say so.
    """

    def __init__(self, directory: Path, fingerprint: str, warn: Warn = print, topk: int = 0) -> None:
        self.directory = directory
        self.fingerprint = fingerprint
        self.warn = warn
        self.topk = topk
        self.refused: set[Path] = set()
        if directory.exists() and not directory.is_dir():
            raise InputError("cache-dir", f"{directory} is not a directory", "choose another")
        if os.name == "posix" and directory.is_dir() and directory.stat().st_mode & 0o002:
            raise InputError("cache-dir", f"{directory} is writable by every user", f"run: chmod o-w {directory}")
        for left in directory.glob(".*.part") if directory.is_dir() else ():  # left by a process that was killed
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                left.unlink(missing_ok=True)

    def entries(self) -> list[SessionEntry]:
        """Return the sessions that can be read, newest first."""
        found = [entry for entry in map(self.entry, self.paths()) if entry is not None]
        return sorted(found, key=lambda entry: -entry.modified)

    def paths(self) -> Iterable[Path]:
        return self.directory.glob(f"*{SUFFIX}") if self.directory.is_dir() else ()

    def entry(self, path: Path) -> SessionEntry | None:
        """Return what the header of a file says; None if it cannot be used."""
        if path in self.refused or path.is_symlink() or not path.is_file():
            return None
        try:
            metadata = read_file_header(path)[0]
            stat = path.stat()
            return SessionEntry(
                path.stem,
                path,
                int(metadata["num_tokens"]),
                Regime(int(metadata["sparse_from"]), int(metadata.get("topk", self.topk))),
                stat.st_size,
                stat.st_mtime,
                metadata.get("format") == FORMAT and metadata.get("fingerprint") == self.fingerprint,
                metadata.get("adapter", ""),
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
        """Write a snapshot under a name and return its path; an existing file is never replaced.

        If the snapshot has a salt, that is the fingerprint of an adapter.
        """
        path = self.check_new(name)
        blobs = executor.dump(snapshot.pages, snapshot.length, snapshot.slot)
        adapter = snapshot.salt
        self.write(path, snapshot.tokens, snapshot.regime, blobs, adapter, adapter)
        return path

    def write(self, path: Path, tokens: bytes, regime: Regime, blobs: Blobs, salt: str = "", adapter: str = "") -> None:
        """Write a prefix. With a salt, only a reader who knows it can use the file. Raises FileExistsError."""
        length = len(tokens) // TOKEN_BYTES
        blobs = {"tokens": Blob("U32", (length,), memoryview(tokens)), **blobs}
        metadata = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "num_tokens": str(length),
            "sparse_from": str(regime.sparse_from),
        }
        if regime.topk != self.topk:
            metadata["topk"] = str(regime.topk)
        if adapter:
            metadata["adapter"] = adapter
        metadata["checksum"] = _checksum(metadata, blobs, salt)
        with writing(path):
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = self.directory / f".{path.stem}.{secrets.token_hex(6)}.part"
        try:
            specs = {key: (blob.dtype, blob.shape) for key, blob in blobs.items()}
            write_file(draft, specs, lambda key: blobs[key].data, metadata, is_private=True)
            publish(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    def read(self, entry: SessionEntry, salt: str = "") -> tuple[bytes, dict[str, Blob]]:
        """Return the tokens and tensors of a file. Raises CheckpointError for a bad one, or for another salt."""
        if not entry.fits:
            raise CheckpointError(f"{entry.path} was made by another model, precision or version", "make it again")
        metadata, infos = read_file_header(entry.path)
        blobs: dict[str, Blob] = dict(read_tensors(entry.path, infos))
        claimed = metadata.pop("checksum", "")
        if claimed != _checksum(metadata, blobs, salt) or "tokens" not in blobs:
            raise CheckpointError(f"{entry.path} is damaged", "remove it: sala session rm")
        tokens = bytes(blobs.pop("tokens").data)
        if len(tokens) != entry.num_tokens * TOKEN_BYTES:
            raise CheckpointError(f"{entry.path} is damaged", "remove it: sala session rm")
        return tokens, blobs

    def read_prefix(self, entry: SessionEntry) -> bytes:
        """Return the tokens of a file alone, unchecked."""
        _, infos = read_file_header(entry.path)
        return bytes(read_tensors(entry.path, {"tokens": infos["tokens"]})["tokens"].data)

    def load(self, entry: SessionEntry, hybrid: Hybrid, executor: Executor) -> Snapshot | None:
        """Load a session into the cache; None if it does not fit. Raises CheckpointError for a bad file."""
        tokens, blobs = self.read(entry, entry.adapter)
        if entry.num_tokens > executor.capacity.max_tokens:
            raise CheckpointError(f"{entry.path} does not fit in this context", "raise --ctx")
        snapshot = hybrid.insert(tokens, entry.regime, entry.adapter)
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

    def find(self, name: str) -> SessionEntry:
        path = self.path(name)
        entry = self.entry(path) if path.exists() else None
        if entry is None:
            raise InputError("session", f"{name!r} does not exist", "sala session ls shows what is there")
        return entry

    def path(self, name: str) -> Path:
        if not _NAME.fullmatch(name) or name.endswith(SUFFIX):
            raise InputError("session", f"{name!r} is not a valid name", "use letters, digits, '.', '_' and '-'")
        return self.directory / f"{name}{SUFFIX}"

    def refuse(self, path: Path, why: str) -> None:
        self.refused.add(path)
        self.warn(f"{path.name} is not used: {why}")


class PrefixKeys:
    """Names prefixes by what they depend on: tokens, regime, salt, and the model. A salt cannot be read from a key."""

    def __init__(self, fingerprint: str, sparse: SparseConfig, topk: int) -> None:
        self._fingerprint = fingerprint
        self._sparse = sparse
        self._topk = topk  # the model's own

    def key(self, tokens: bytes, regime: Regime, salt: str) -> str:
        digest = self._begin(regime, salt)
        digest.update(tokens)
        return digest.hexdigest()[:32]

    def keys(self, tokens: bytes, regime: Regime, salt: str, marks: Iterable[tuple[int, Regime]]) -> list[str]:
        """Return the keys of the beginnings of `tokens` at these marks (length, regime), the longest first."""
        total = len(tokens) // TOKEN_BYTES
        found: list[tuple[int, str]] = []
        for kind in {kind for _, kind in marks}:
            digest, done = self._begin(kind, salt), 0
            most = total - 1 if kind == regime else min(total - 1, self._sparse.agreed_len(kind, regime))
            for length in sorted({length for length, other in marks if other == kind and length <= most}):
                digest.update(memoryview(tokens)[done * TOKEN_BYTES : length * TOKEN_BYTES])
                done = length
                found.append((length, digest.copy().hexdigest()[:32]))
        return [key for _, key in sorted(found, reverse=True)]

    def _begin(self, regime: Regime, salt: str) -> "hashlib._Hash":
        own = f"{hashlib.sha256(salt.encode()).hexdigest()} " if salt else ""
        blocks = "" if regime.topk == self._topk else f"topk {regime.topk} "
        return hashlib.sha256(f"{FORMAT} {regime.sparse_from} {self._fingerprint} {own}{blocks}".encode())


@dataclass(eq=False, slots=True)
class DiskFile:
    """A file of the directory. `key` says what is in it; None: it belongs to another model or version."""

    entry: SessionEntry
    key: str | None
    used: float
    is_inner: bool = False  # a longer prefix of the same conversation is or will be written
    is_branch: bool = False  # conversations branch off here: never inner


class DiskTier:
    """The files of a directory, which other servers may share. Only its own thread touches the disk.

    The index is in memory; it is brought up to date when the directory changes, for the requests after that.
    """

    def __init__(self, store: SessionStore, sparse: SparseConfig, max_bytes: int | None) -> None:
        self._store = store
        self._keys = PrefixKeys(store.fingerprint, sparse, store.topk)
        self._lock = threading.Lock()
        self._files: dict[str, DiskFile] = {}  # by name
        self._known: dict[str, DiskFile] = {}  # by key
        self._seen_ns: int | None = None  # when the directory had changed last, as of the last scan
        self._pending = 0
        self._paused_until = 0.0
        self._warn_once = cache(store.warn)
        self._worker = Worker("sala-cache")
        self._scan()
        if max_bytes is None:
            max_bytes = (self._used() + (free_disk_bytes(store.directory) or 0)) // DISK_SHARE
        self._max_bytes = max_bytes

    @property
    def use(self) -> TierUse:
        with self._lock:
            return TierUse(len(self._known), self._used(), self._max_bytes)

    def find(self, tokens: bytes, regime: Regime, salt: str, longer_than: int) -> DiskFile | None:
        """Return the longest prefix on disk that `tokens` continue, if it is longer than that."""
        if self._changed_ns() != self._seen_ns:
            self._worker.do(self._scan)
        with self._lock:
            files = [file for file in self._known.values() if longer_than < file.entry.num_tokens]
        marks = {(file.entry.num_tokens, file.entry.regime) for file in files}
        keys = self._keys.keys(tokens, regime, salt, marks)
        with self._lock:
            return next((self._known[key] for key in keys if key in self._known), None)

    def read(self, file: DiskFile, tokens: bytes, salt: str, done: Callable[[Blobs | None], None]) -> None:
        """Read a file and call `done` with its tensors, or with None if it cannot be used, on the worker's thread."""

        def job() -> None:
            blobs = None
            try:
                found, blobs = self._store.read(file.entry, salt)
                if not tokens.startswith(found):
                    raise SalaError(f"{file.entry.path} holds other tokens than its name says")
                self._touch(file)
            except Exception as error:  # whatever is wrong with a file, the prompt can still be computed
                blobs = None
                self._drop(file)
                if file.entry.path.exists():  # otherwise another server has removed it
                    self._store.refuse(file.entry.path, str(error) or type(error).__name__)
                    self._remove_refused(file.entry)
            done(blobs)

        self._worker.do(job, READ)

    def write(
        self,
        prefix: Prefix,
        tokens: bytes,
        dump: Callable[[], Blobs],
        is_inner: bool = False,
        is_branch: bool = False,
    ) -> bool:
        """Write a prefix, unless it is known; `dump` copies its tensors. Return False if it will not be on disk."""
        if prefix.length < MIN_TOKENS or time.monotonic() < self._paused_until:
            return False
        key = self._keys.key(tokens, prefix.regime, prefix.salt)
        with self._lock:
            known, pending = self._known.get(key), self._pending
            marks = {(one.entry.num_tokens, one.entry.regime) for one in self._known.values()}
        if known is not None:
            self._worker.do(lambda: self._touch(known, is_branch))
            return True
        if pending > MAX_PENDING:
            return False
        blobs = dump()
        size = sum(blob.data.nbytes for blob in blobs.values())
        if size > self._max_bytes:
            limit = f"may take {self._max_bytes / 1e6:,.1f} MB, which is too little for this model"
            self._warn_once(f"the cache in {self._store.directory} {limit}; free some space or raise cache_disk")
            return False
        older = self._keys.keys(tokens, prefix.regime, prefix.salt, marks)
        with self._lock:
            self._pending += size
        facts = (tokens, prefix.regime, prefix.salt)
        kind = (is_inner and not is_branch, is_branch)
        self._worker.do(lambda: self._save(key, blobs, older, kind, *facts))
        return True

    def flush(self) -> None:
        self._worker.flush()

    def close(self) -> None:
        self._worker.close()

    # on the worker's thread

    def _save(
        self,
        key: str,
        blobs: Blobs,
        older: list[str],
        kind: tuple[bool, bool],
        tokens: bytes,
        regime: Regime,
        salt: str,
    ) -> None:
        size = sum(blob.data.nbytes for blob in blobs.values())
        try:
            self._make_room(size)
            name = f"auto-{key}"
            path = self._store.path(name)
            if path in self._store.refused:
                path.unlink(missing_ok=True)  # our own file is damaged: write it again
                self._store.refused.discard(path)
            self._store.write(path, tokens, regime, blobs, salt)
            entry = self._store.entry(path)
            with self._lock:
                if entry is not None:
                    self._files[name] = self._known[key] = DiskFile(entry, key, time.time(), *kind)
                for one in older:
                    if one in self._known:
                        self._known[one].is_inner = not self._known[one].is_branch
            self._paused_until = 0.0
            self._make_room(0)  # a file is a little larger than its tensors, and others write here too
        except FileExistsError:
            pass  # another server was faster
        except Exception as error:
            self._paused_until = time.monotonic() + RETRY_S
            explained = explain_write_error(error) if isinstance(error, OSError) else None
            self._store.warn(f"the disk cache is not written for {RETRY_S:.0f} s: {explained or error}")
        finally:
            with self._lock:
                self._pending -= size

    def _make_room(self, size: int) -> None:
        """Remove files until one of `size` bytes fits: those that longer ones continue first, then the oldest."""
        self._scan()
        with self._lock:
            files = [file for name, file in self._files.items() if _AUTOMATIC.fullmatch(name)]
            left = self._used() + size - self._max_bytes
        for file in sorted(files, key=lambda file: (not file.is_inner, file.used)):
            if left <= 0:
                return
            file.entry.path.unlink(missing_ok=True)
            self._drop(file)
            left -= file.entry.nbytes

    def _scan(self) -> None:
        """Bring the index up to date: read the headers of new files, drop those that are gone."""
        changed = self._changed_ns()
        paths = {path.stem: path for path in self._store.paths()}
        with self._lock:
            gone = [file for name, file in self._files.items() if name not in paths]
            new = [path for name, path in paths.items() if name not in self._files]
        for file in gone:
            self._drop(file)
        for path in new:
            entry = self._store.entry(path)
            if entry is None:
                continue
            key = self._key_of(entry) if entry.fits else None
            with self._lock:
                file = self._files[entry.name] = DiskFile(entry, key, entry.modified)
                if key is not None:
                    self._known[key] = file
        self._seen_ns = changed

    def _key_of(self, entry: SessionEntry) -> str | None:
        """Return the key of a file: the name of an automatic one says it, sessions are read for it."""
        found = _AUTOMATIC.fullmatch(entry.name)
        if found is not None:
            return found[1]
        try:
            return self._keys.key(self._store.read_prefix(entry), entry.regime, entry.adapter)
        except Exception as error:
            self._store.refuse(entry.path, str(error) or type(error).__name__)
            return None

    def _remove_refused(self, entry: SessionEntry) -> None:
        """Remove a file of ours that cannot be used: it would take space and not be counted."""
        if _AUTOMATIC.fullmatch(entry.name):
            with suppress(OSError):
                entry.path.unlink(missing_ok=True)
                self._store.refused.discard(entry.path)

    def _touch(self, file: DiskFile, is_branch: bool = False) -> None:
        file.used = time.time()
        if is_branch:
            file.is_branch, file.is_inner = True, False
        try:
            os.utime(file.entry.path)
        except FileNotFoundError:
            self._drop(file)
        except OSError:
            pass  # a disk that is read-only now can still be read

    def _drop(self, file: DiskFile) -> None:
        with self._lock:
            self._files.pop(file.entry.name, None)
            if file.key is not None and self._known.get(file.key) is file:
                del self._known[file.key]

    def _used(self) -> int:
        return sum(file.entry.nbytes for name, file in self._files.items() if _AUTOMATIC.fullmatch(name))

    def _changed_ns(self) -> int | None:
        try:
            return self._store.directory.stat().st_mtime_ns
        except OSError as error:
            if error.errno != errno.ENOENT:
                self._paused_until = time.monotonic() + RETRY_S
            return None


def _checksum(metadata: Mapping[str, str], blobs: Blobs, salt: str = "") -> str:
    digest = hashlib.sha256(repr(sorted(metadata.items())).encode())
    digest.update(salt.encode())
    for name in sorted(blobs):
        digest.update(f"{name} {blobs[name].dtype} {blobs[name].shape}".encode())
        digest.update(blobs[name].data)
    return digest.hexdigest()

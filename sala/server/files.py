"""Files that clients upload and get: kept on disk per owner, whole or not at all, readable by this user only.

A file is `ID` beside `ID.json`, which describes it. The description is written first and the contents appear under
their name last, so a crash leaves nothing that counts as a file. One process at a time owns a directory.
"""

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from sala.errors import writing
from sala.server.http.errors import ApiError

_log = logging.getLogger("sala.server")
MAX_NAME = 256
_OURS = re.compile(r"file-[0-9a-f]{32}(\.json)?")


@dataclass(frozen=True)
class StoredFile:
    id: str
    owner: str  # digest of the key that it belongs to
    filename: str
    purpose: str
    num_bytes: int
    created: float  # seconds since 1970
    expires_at: int
    facts: dict[str, Any] = field(default_factory=dict)  # of a document, for lists

    def show(self) -> dict[str, Any]:
        """Return the file as OpenAI's API describes it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": int(self.created),
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """The files of a directory. Its methods may block and may be called from any thread."""

    def __init__(self, directory: Path, max_files: int, max_bytes: int, keep_s: float) -> None:
        self.directory = directory
        self.is_used: Callable[[str], bool] = lambda file_id: False  # such files are neither deleted nor do they expire
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._files: dict[str, StoredFile] = {}
        self._claims: dict[str, tuple[str, int]] = {}  # owners and sizes of the files that are being written
        self._lock = threading.RLock()
        self._process_lock: Any = None

    @property
    def is_open(self) -> bool:
        return self._process_lock is not None

    def open(self) -> None:
        """Create the directory, take possession of it, and read what is there. Raises ApiError if that fails."""
        from filelock import FileLock, Timeout

        with self._lock:
            if self.is_open:
                return
            lock = FileLock(self.directory / ".lock", timeout=0, thread_local=False, mode=0o600)
            try:
                self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                lock.acquire()
                self._load()
            except Timeout:
                raise _unavailable(
                    "another server uses the directory of files; give this one its own --files-dir"
                ) from None
            except (OSError, RuntimeError) as error:
                _log.error("%s cannot be used: %s", self.directory, error)
                raise _unavailable("the directory of files cannot be used; choose another with --files-dir") from None
            self._process_lock = lock

    def close(self) -> None:
        with self._lock:
            if self._process_lock is not None:
                self._process_lock.release()
                self._process_lock = None

    def _load(self) -> None:
        """Read the descriptions and remove what a crash has left."""
        for draft in self.directory.glob(".*.part"):
            draft.unlink(missing_ok=True)
        for record in read_private(self.directory, "file-*.json"):
            with contextlib.suppress(TypeError):
                file = StoredFile(**record)
                if self._path(file.id).is_file():
                    self._files[file.id] = file
        for path in list(self.directory.iterdir()):
            if _OURS.fullmatch(path.name) and path.stem not in self._files:
                path.unlink(missing_ok=True)

    def add(
        self,
        owner: str,
        filename: str,
        purpose: str,
        source: IO[bytes],
        keep_s: float | None = None,
        facts: dict[str, Any] | None = None,
    ) -> StoredFile:
        """Keep a copy of what `source` holds. Raises ApiError if the owner has too much already.

        Raises DiskFull and NotWritable, too.
        """
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        file_id = new_id("file")
        with self._lock:
            self._check_room(owner, size)
            self._claims[file_id] = owner, size
        draft = self.directory / f".{file_id}.part"
        try:
            with writing(draft, needed=size), open_private(draft, "xb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
                target.flush()
                os.fsync(target.fileno())
            return self.adopt(draft, owner, filename, purpose, file_id, keep_s, facts)
        finally:
            draft.unlink(missing_ok=True)
            with self._lock:
                del self._claims[file_id]

    def adopt(
        self,
        path: Path,
        owner: str,
        filename: str,
        purpose: str,
        file_id: str,
        keep_s: float | None = None,
        facts: dict[str, Any] | None = None,
    ) -> StoredFile:
        """Turn a finished file beside ours into one of ours. What was adopted already is returned."""
        known = self._files.get(file_id)
        if known is not None:
            return known
        created = time.time()
        expires_at = int(created + (self._keep_s if keep_s is None else keep_s))
        size, facts = path.stat().st_size, facts or {}
        file = StoredFile(file_id, owner, filename[:MAX_NAME], purpose, size, created, expires_at, facts)
        write_private(self._path(file_id).with_suffix(".json"), asdict(file))
        path.replace(self._path(file_id))
        with self._lock:
            self._files[file_id] = file
        return file

    def owned(self, owner: str) -> list[StoredFile]:
        """Return the files of an owner, oldest first."""
        with self._lock:
            files = [file for file in self._files.values() if file.owner == owner and not self._is_over(file)]
        return sorted(files, key=lambda file: (file.created, file.id))

    def find(self, owner: str, file_id: str) -> StoredFile:
        """Return a file of an owner. Raises ApiError if there is none."""
        file = self._files.get(file_id)
        if file is None or file.owner != owner or self._is_over(file):
            raise ApiError(
                404, "there is no such file; GET /v1/files lists them", param="file_id", code="file_not_found"
            )
        return file

    def path(self, file: StoredFile) -> Path:
        return self._path(file.id)

    def delete(self, file: StoredFile) -> None:
        if self.is_used(file.id):
            raise ApiError(409, "a batch is using that file; cancel the batch first", code="file_in_use")
        with self._lock:
            self._files.pop(file.id, None)
        self._path(file.id).unlink(missing_ok=True)
        self._path(file.id).with_suffix(".json").unlink(missing_ok=True)

    def sweep(self) -> None:
        """Delete the files that have expired."""
        for file in list(self._files.values()):
            if self._is_over(file):
                self.delete(file)

    def _is_over(self, file: StoredFile) -> bool:
        return time.time() >= file.expires_at and not self.is_used(file.id)

    def _check_room(self, owner: str, size: int) -> None:
        held = [file.num_bytes for file in self.owned(owner)]
        held += [size for one, size in self._claims.values() if one == owner]
        if len(held) >= self._max_files:
            message = f"there are {len(held):,} files already, and {self._max_files:,} are allowed; delete some"
            raise ApiError(400, message, param="file", code="too_many_files")
        if sum(held) + size > self._max_bytes:
            message = f"all files together would have more than {self._max_bytes:,} bytes; delete some"
            raise ApiError(400, message, param="file", code="files_too_large")

    def _path(self, file_id: str) -> Path:
        return self.directory / file_id


def new_id(prefix: str) -> str:
    return f"{prefix}{'_' if prefix == 'batch' else '-'}{secrets.token_hex(16)}"


def open_private(path: Path, mode: str) -> Any:
    """Open a file that only this user can read."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def write_private(path: Path, value: Any) -> None:
    """Write JSON, as a whole or not at all, to a file that only this user can read."""
    draft = path.with_name(f".{path.name}.part")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    with writing(path):
        with open_private(draft, "xb") as file:
            file.write(json.dumps(value).encode())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)


def read_private(directory: Path, pattern: str) -> Iterator[Any]:
    """Yield the JSON objects in the files of a directory; what cannot be read is left out."""
    for path in sorted(directory.glob(pattern)):
        with contextlib.suppress(ValueError, OSError):
            yield json.loads(path.read_bytes())


def _unavailable(message: str) -> ApiError:
    return ApiError(503, message, code="files_unavailable")

"""API keys: one or two from the settings, any number from a file that `sala key` maintains.

The file holds digests only. It is read again when it changes, so that a key can be added or revoked while the server
runs; those who change it take turns. Keys have 256 random bits, so a plain SHA-256 cannot be searched.
"""

import functools
import hashlib
import hmac
import logging
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sala.checkpoint.writer import write_atomically
from sala.errors import InputError, SalaError

_log = logging.getLogger("sala.server")
PREFIX = "sala-"
MAX_FILE_BYTES = 1 << 20
LOCK_S = 10.0  # longest wait for another program that changes the file
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Role = Literal["user", "admin"]


class Key(BaseModel):
    """Who has a key, and what it permits. Keys with the same salt share what the prefix cache holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    role: Role = "user"
    salt: str = Field("", max_length=64)
    # limits; 0: those of the settings
    max_sequences: int = Field(0, ge=0)  # answers at a time
    max_tokens_per_minute: int = Field(0, ge=0)
    max_requests_per_minute: int = Field(0, ge=0)
    created: int = 0

    @property
    def owner(self) -> str:
        """By which the server knows what belongs to the key."""
        return owner_of(self.name)


class KeyFile:
    """A file of keys."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._keys: dict[str, Key] | None = {}  # None: that version is damaged
        self.version: tuple[int, int, int] | None = None  # that was read last; None: there is none, or it is unreadable

    def read(self) -> dict[str, Key]:
        """Return the keys by digest, read again if the file has changed. Raises SalaError for a damaged file."""
        with self._lock:
            try:
                stat = self.path.stat()
                version = stat.st_mtime_ns, stat.st_size, stat.st_ino
                if version != self.version:
                    self._keys = self._load(stat.st_size)
                    self.version = version
            except OSError as error:
                self.version = None
                raise SalaError(f"the keys in {self.path} cannot be read: {error.strerror}", "see: sala key") from None
            if self._keys is None:
                raise SalaError(f"{self.path} is not a file of keys", "make one with: sala key add NAME")
            return self._keys

    def _load(self, size: int) -> dict[str, Key] | None:
        try:
            if size > MAX_FILE_BYTES:
                return None
            return {key.digest: key for key in _Keys.model_validate_json(self.path.read_bytes()).keys}
        except ValueError:
            return None

    def add(self, name: str, role: Role = "user", salt: str = "", **limits: int) -> str:
        """Add a key and return it; it cannot be read from the file. Raises InputError if the name is taken."""
        text = PREFIX + secrets.token_urlsafe(32)
        try:
            key = Key(
                name=name,
                digest=digest_of(text.encode()),
                role=role,
                salt=salt,
                created=int(time.time()),
                **limits,
            )
        except ValidationError:
            raise InputError("NAME", f"{name!r} is not valid", "use letters, digits, '.', '_' and '-'") from None
        with self._changing():
            keys = [*self.read().values()] if self.path.exists() else []
            if any(key.name == name for key in keys):
                raise InputError("NAME", f"{name!r} has a key already", f"revoke it first: sala key revoke {name}")
            self._write([*keys, key])
        return text

    def revoke(self, name: str) -> None:
        """Remove a key. Raises InputError if there is none of that name."""
        with self._changing():
            keys = [*self.read().values()]
            if all(key.name != name for key in keys):
                raise InputError("NAME", f"{name!r} has no key", "sala key list shows those that have one")
            self._write([key for key in keys if key.name != name])

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Keep every other thread and process from changing the file inside the block."""
        from filelock import FileLock, Timeout

        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=LOCK_S, mode=0o600)
        try:
            lock.acquire()
        except Timeout:
            raise SalaError(f"another program is changing {self.path}", "try again when it has ended") from None
        try:
            yield
        finally:
            lock.release()

    def _write(self, keys: Iterable[Key]) -> None:
        write_atomically(self.path, _Keys(keys=list(keys)).model_dump_json(indent=1) + "\n")
        self.path.chmod(0o600)


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[Key]


class KeyRing:
    """All keys of a server."""

    def __init__(self, api_key: str | None, admin_key: str | None, file: Path | None) -> None:
        self._file = None if file is None else KeyFile(file)
        has_admin = admin_key is not None or file is not None
        given = {"admin": admin_key, "api": api_key}
        self._own = [
            (text.encode(), _own_key(name, text, "user" if name == "api" and has_admin else "admin"))
            for name, text in given.items()
            if text is not None
        ]
        self._logged: object = None  # the problem of the file that was logged last, until it is readable again

    def find(self, given: Iterable[bytes]) -> Key | None:
        """Return the first of the given keys that is valid. While the file cannot be read, its keys are not."""
        known = self._known()
        for key in given:
            own = [mine for text, mine in self._own if hmac.compare_digest(key, text)]
            found = own[0] if own else known.get(digest_of(key))
            if found is not None:
                return found
        return None

    def find_owner(self, owner: str) -> Key | None:
        """Return the key of an owner, unless it was revoked."""
        keys = [*(mine for _, mine in self._own), *self._known().values()]
        return next((key for key in keys if key.owner == owner), None)

    def _known(self) -> dict[str, Key]:
        if self._file is None:
            return {}
        try:
            keys = self._file.read()
            self._logged = None
            return keys
        except SalaError as error:
            problem = str(error), self._file.version
            if problem != self._logged:  # once for each version of the file, not for each request
                _log.error("%s", error)
            self._logged = problem
            return {}


def _own_key(name: str, text: str, role: Role) -> Key:
    return Key.model_validate({"name": name, "digest": digest_of(text.encode()), "role": role})


@functools.lru_cache(maxsize=64)
def key_ring(api_key: str | None, admin_key: str | None, file: Path | None) -> KeyRing:
    return KeyRing(api_key, admin_key, file)


@functools.lru_cache(maxsize=1024)
def owner_of(name: str) -> str:
    return hashlib.sha256(f"sala owner {name}".encode()).hexdigest()[:32]


def digest_of(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()

"""The fingerprint of a checkpoint: a hash of every byte of its tensors, remembered until one of its files changes.

Reading 19 GB at every start would be slow, so a file in the user's cache remembers the hash and what the file system
says of the files: size, number, time of the last write and time of the last change. An edit that keeps the size and
restores the time of the last write still moves the time of the last change, which no program can set (on Windows that
is the time of creation). Samples of all tensors are compared too, for file systems that keep no such times.
"""

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import platformdirs

SETTLED_SECONDS = 2.0  # of file systems with coarse times: a file that is younger may change again unnoticed
_PIECE_BYTES = 16 << 20
_SAMPLE_BYTES = 4096
_THREADS = 4
_MAX_REMEMBERED = 64  # checkpoints


class Tensor(Protocol):
    """Where a tensor lies, as `reader.TensorInfo` says."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def file(self) -> Path: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names, shapes and all bytes of the tensors."""
    files = sorted({info.file for info in tensors.values()})
    identity, newest = _identify(files)
    sampled = _digest(tensors, _samples)
    known = _remembered()
    if known.get(identity, {}).get("samples") == sampled:
        return str(known[identity]["fingerprint"])
    whole = hash_all(tensors)
    if newest < time.time() - SETTLED_SECONDS and _identify(files)[0] == identity:
        others = [(key, entry) for key, entry in known.items() if key != identity][1 - _MAX_REMEMBERED :]
        _remember(dict(others) | {identity: {"samples": sampled, "fingerprint": whole}})
    return whole


def hash_all(tensors: Mapping[str, Tensor]) -> str:
    """Read all tensors, pieces of several at a time."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return _digest(tensors, lambda info: _pieces(info.start, info.end), pool)


def _digest(
    tensors: Mapping[str, Tensor],
    cut: Callable[[Tensor], Iterable[tuple[int, int]]],
    pool: ThreadPoolExecutor | None = None,
) -> str:
    """Hash the tensors' names, shapes and the hashes of the parts into which `cut` divides them."""
    parts = [(info.file, *part) for _, info in sorted(tensors.items()) for part in cut(info)]
    digest = hashlib.sha256()
    for name, info in sorted(tensors.items()):
        digest.update(f"{name} {info.dtype} {info.shape} ".encode())
    for part in (map if pool is None else pool.map)(_hash_part, parts):
        digest.update(part)
    return digest.hexdigest()


def _hash_part(part: tuple[Path, int, int]) -> bytes:
    file, start, end = part
    with file.open("rb") as handle:
        handle.seek(start)
        return hashlib.sha256(handle.read(end - start)).digest()


def _pieces(start: int, end: int) -> Iterable[tuple[int, int]]:
    return ((at, min(at + _PIECE_BYTES, end)) for at in range(start, end, _PIECE_BYTES))


def _samples(info: Tensor) -> Iterable[tuple[int, int]]:
    size = info.end - info.start
    for at in (0, size // 3, size // 2, max(0, size - _SAMPLE_BYTES)):
        yield info.start + at, min(info.start + at + _SAMPLE_BYTES, info.end)


def _identify(files: Iterable[Path]) -> tuple[str, float]:
    """Return what the file system says of the files, as a hash, and when one of them changed last."""
    facts, newest = [], 0.0
    for file in files:
        stat = file.stat()
        facts.append((str(file.resolve()), stat.st_size, stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns))
        newest = max(newest, stat.st_mtime, stat.st_ctime)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest(), newest


def _memory() -> Path:
    return Path(platformdirs.user_cache_dir("sala")) / "fingerprints.json"


def _remembered() -> dict[str, dict[str, str]]:
    try:
        found = json.loads(_memory().read_text("utf-8"))
        return {str(key): {name: str(value) for name, value in entry.items()} for key, entry in found.items()}
    except (OSError, ValueError, AttributeError):  # missing or damaged: everything is hashed again
        return {}


def _remember(entries: Mapping[str, Mapping[str, str]]) -> None:
    path = _memory()
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    with contextlib.suppress(OSError):  # where nothing can be remembered, every start hashes all
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(entries), "utf-8")
        draft.replace(path)

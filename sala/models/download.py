"""Download a model: fetch its files in parallel, verify sizes and hashes, then publish the directory.

Large files of huggingface.co are downloaded by hf-xet, all others, and those for which that fails, over HTTP. An
interrupted file is resumed over HTTP and starts over with hf-xet; finished files are kept either way.
"""

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

from sala.checkpoint.reader import INDEX_FILE, Checkpoint, read_index
from sala.checkpoint.writer import sync_directory, write_atomically
from sala.config import read_json_object
from sala.errors import CheckpointError, SalaError, check_space
from sala.models.hub import AlreadyThere, Busy, Hub, Listing, check_repo_id, check_revision, find_cached, folder_name
from sala.models.transfer import DownloadError, RemoteFile, Stop, WrongHash, fetch, size_of, verify, writing_model

PARTIAL = ".partial"
REGISTRY = ".sala.json"
XET_FOLDER = "xet"
HEADROOM = 1.05
WORKERS = 4  # files at a time
REPORT_SECONDS = 0.1
Progress = Callable[[str, int, int], None]
Note = Callable[[str], None]
Report = Callable[[int], None]


class RecordedFile(BaseModel):
    size: int
    sha256: str | None = None


class DownloadRecord(BaseModel, extra="forbid", strict=True):
    """The facts of a download, as `.sala.json` in the model's directory has them."""

    repo_id: Annotated[str, AfterValidator(check_repo_id)] | None = None
    revision: Annotated[str, AfterValidator(check_revision)] | None = None
    downloaded_at: Annotated[float, Field(ge=0, lt=1e12)] | None = None
    files: dict[str, RecordedFile]

    def write(self, directory: Path) -> None:
        write_atomically(directory / REGISTRY, self.model_dump_json(indent=2) + "\n")


def pull(
    directory: Path,
    repo_id: str,
    revision: str | None = None,
    hub: Hub | None = None,
    on_progress: Progress = lambda *_: None,
    note: Note = lambda _: None,
    stop: Stop | None = None,
) -> Path:
    """Download a model and return its directory.

    `on_progress(file, done, total)` is called once for every file at first, then for its bytes, from several threads.
    `stop` ends the download; it is set if one of the files fails.
    """
    stop, folder = stop or Stop(), folder_name(repo_id)
    if revision is not None:
        check_revision(revision)
    if find_cached(repo_id, revision) is not None:
        raise AlreadyThere(f"{repo_id} is in the Hugging Face cache already", "it is used from there")
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
        with writing_model(draft):
            draft.mkdir(exist_ok=True)
            missing = sum(file.size - _size_there(draft, file) for file in listing.files)
            check_space(directory, int(missing * HEADROOM), repo_id)
        hashes = _Transfer(hub, listing, draft, on_progress, note, stop).run()
        try:
            read_json_object(draft / "config.json")
            Checkpoint(draft).close()
        except SalaError as error:
            raise DownloadError(error.message.replace(f"{draft}/", ""), "the model is damaged on the hub") from None
        _publish(draft, target, listing, hashes)
        for old in find_partials(directory, folder):
            shutil.rmtree(old, ignore_errors=True)
        return target


@contextlib.contextmanager
def hold(directory: Path, folder: str) -> Iterator[None]:
    """Keep every other thread and process from changing the model inside the block; raise Busy if one does."""
    from filelock import FileLock, Timeout

    place = directory / PARTIAL
    with writing_model(place):
        place.mkdir(parents=True, exist_ok=True)
        if place.is_symlink() or not place.is_dir():
            raise DownloadError(f"{PARTIAL} in the models directory must be a directory", "move it away")
        lock = FileLock(place / f"{folder}.lock", timeout=0, thread_local=False)
        try:
            lock.acquire()
        except (Timeout, RuntimeError):  # the latter if this very thread holds it
            raise Busy(f"{folder} is being downloaded or removed", "wait until that has ended") from None
    try:
        yield
    finally:
        lock.release()


def find_partials(directory: Path, folder: str | None = None) -> list[Path]:
    """Return the directories of unfinished downloads: of one model, or of all."""
    place = directory / PARTIAL
    if place.is_symlink() or not place.is_dir():
        return []
    wanted = re.compile((".+" if folder is None else re.escape(folder)) + r"@[0-9a-f]{40,64}")
    paths = [path for path in sorted(place.iterdir()) if wanted.fullmatch(path.name)]
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def _size_there(draft: Path, file: RemoteFile) -> int:
    return min(max(size_of(draft / file.name), size_of(draft / f"{file.name}.part")), file.size)


def _reporter(on_progress: Progress, file: RemoteFile) -> Report:
    """Return a function that reports the bytes of a file that are done, at most ten times a second."""
    reported = 0.0

    def report(done: int) -> None:
        nonlocal reported
        if time.monotonic() - reported >= REPORT_SECONDS or done == file.size:
            reported = time.monotonic()
            on_progress(file.name, done, file.size)

    return report


@dataclass(frozen=True, slots=True)
class _Transfer:
    """The download of a listing into a directory, a few files at a time."""

    hub: Hub
    listing: Listing
    draft: Path
    on_progress: Progress
    note: Note
    stop: Stop

    def run(self) -> dict[str, str]:
        """Return the sha256 of every file; all of them are verified and have their names."""
        for file in self.listing.files:
            self.on_progress(file.name, _size_there(self.draft, file), file.size)
        weights = [file for file in self.listing.files if file.name.endswith(".safetensors")]
        hashes = self._fetch([file for file in self.listing.files if file not in weights])
        if INDEX_FILE in hashes:
            _check_index(self.draft / INDEX_FILE, {file.name for file in self.listing.files})
        return hashes | self._fetch(weights)

    def _fetch(self, files: Sequence[RemoteFile]) -> dict[str, str]:
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="download") as pool:
            tasks = {pool.submit(self._fetch_one, file): file.name for file in files}
            try:
                return {tasks[task]: task.result() for task in as_completed(tasks)}
            except BaseException:
                self.stop.set()
                raise

    def _fetch_one(self, file: RemoteFile) -> str:
        target, part = self.draft / file.name, self.draft / f"{file.name}.part"
        with writing_model(part, file.size):
            if target.exists():  # finished before: it is verified again like any other
                target.replace(part)
            is_resumed = size_of(part) > 0
            try:
                sha256 = self._download(file, part)
            except WrongHash:
                if not is_resumed:
                    raise
                sha256 = self._download(file, part)  # the part from before was wrong: start over
            part.replace(target)
        return sha256

    def _download(self, file: RemoteFile, part: Path) -> str:
        report = _reporter(self.on_progress, file)
        if not (self.hub.has_xet and file.sha256 and not size_of(part) and self._fetch_by_xet(file, part, report)):
            fetch(self.hub.client, file, part, self.stop, report)
        sha256 = verify(part, file, self.stop)
        report(file.size)
        return sha256

    def _fetch_by_xet(self, file: RemoteFile, part: Path, report: Report) -> bool:
        """Return whether hf-xet downloaded the file; otherwise HTTP is tried."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils._xet import abort_xet_session

        try:
            with self.stop.calling(abort_xet_session):
                path = hf_hub_download(
                    self.listing.repo_id, file.name, revision=self.listing.commit, endpoint=self.hub.client.url,
                    local_dir=self.draft / XET_FOLDER, token=self.hub.token or False,
                    tqdm_class=_progress_class(file, self.stop, report),
                )  # fmt: skip
            Path(path).replace(part)
            return True
        except Exception as error:  # hf-xet raises RuntimeError, huggingface_hub HTTP errors and OSError
            self.stop.check()  # also raises if the error is that the download was cancelled
            self.note(f"{file.name}: Xet failed ({type(error).__name__}), downloading over HTTP")
            return False


def _progress_class(file: RemoteFile, stop: Stop, report: Report) -> Any:
    """Return a class that huggingface_hub uses in place of a tqdm bar."""

    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *_: object, total: int | None = None, initial: int = 0, **__: object) -> None:
            super().__init__(total=total, initial=initial, disable=True)

        def update(self, count: float | None = 1) -> None:
            stop.check()
            self.n += int(count or 0)
            report(max(0, min(self.n, file.size - 1)))  # the last byte counts when the hash is verified

        def update_transfer(self, count: float | None = 1) -> None:
            stop.check()

        set_transfer_postfix_str = tqdm.set_postfix_str

    return Bar


def _check_index(path: Path, names: set[str]) -> None:
    """Raise DownloadError unless the index places all weights in files of the repository."""
    try:
        shards = set(read_index(path).values())
    except CheckpointError as error:
        raise DownloadError(error.message.replace(f"{path.parent}/", ""), "do not use this model") from None
    for shard in shards:
        if shard not in names or not shard.endswith(".safetensors"):
            message = f"{INDEX_FILE} places weights in {shard[:100]!r}, which is not a file of the model"
            raise DownloadError(message, "do not use this model")


def _publish(draft: Path, target: Path, listing: Listing, hashes: Mapping[str, str]) -> None:
    """Write the registry, remove files that are not part of the model, and give the directory its name."""
    with writing_model(target):
        for path in draft.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in hashes:
                path.unlink()
        files = {file.name: RecordedFile(size=file.size, sha256=hashes[file.name]) for file in listing.files}
        record = DownloadRecord(
            repo_id=listing.repo_id, revision=listing.commit, downloaded_at=time.time(), files=files
        )
        record.write(draft)
        draft.rename(target)
        sync_directory(target.parent)

"""The models directory: what is listed, what can be removed, and what nobody may touch."""

import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sala.checkpoint.writer import write_weights
from sala.errors import InputError, ModelNotFound, SalaError
from sala.models.catalog import DownloadJob, Downloads, Library, embedded_folder
from sala.models.download import PARTIAL, REGISTRY, hold, pull
from sala.models.hub import AlreadyThere, Busy, Hub
from tests.server.fake_hub import COMMIT, TOKEN, FakeHub, serve, tree

HOSTILE = [
    "..", ".", "", "/", "../outside", "%2e%2e%2fx", "a%2Fb", "/etc", "x/../y", "~", "a\0b", ".partial", ".trash-1",
    "a\\b", "C:\\", "x" * 300, "link", "nowhere", ".sala.json", "../models/own", "own/", "own/.", "./own",
]  # fmt: skip


def make(path: Path, config: str = "{}") -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(config)
    write_weights(path, {"a": ("U8", (1000,))}, lambda _: bytes(1000))
    return path


@pytest.fixture
def library(tmp_path: Path) -> Library:
    make(tmp_path / "models" / "own", '{"quantization": {"bits": 4, "group_size": 64}}')
    make(tmp_path / "outside")
    (tmp_path / "models" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "models" / "alias").symlink_to(tmp_path / "models" / "own")
    (tmp_path / "models" / "empty").mkdir()
    (tmp_path / "models" / "file").write_text("x")
    make(tmp_path / "models" / ".hidden")
    make(tmp_path / "models" / PARTIAL / f"org--half@{COMMIT}")
    make(tmp_path / "models" / "with space")
    return Library(tmp_path / "models")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    files = {file.name: file.read_bytes() for file in make(tmp_path / "source").iterdir()}
    with serve(FakeHub(files)) as hub:
        yield hub


def test_what_is_listed(library: Library) -> None:
    (entry,) = library.list()
    assert (entry.id, entry.is_ours, entry.repo_id, entry.downloaded_at) == ("own", True, None, None)
    assert entry.quantization == {"bits": 4, "group_size": 64}
    assert entry.size_bytes == sum(file.stat().st_size for file in entry.path.iterdir())
    assert library.find("own") == entry
    assert [(partial.id, partial.size_bytes > 1000) for partial in library.partials()] == [("org/half", True)]


def test_a_model_of_a_hub(fake: FakeHub, tmp_path: Path) -> None:
    began = time.time()
    pull(tmp_path / "models", "org/model", hub=Hub(fake.url))
    library = Library(tmp_path / "models")
    (entry,) = library.list()
    assert (entry.id, entry.repo_id, entry.revision) == ("org--model", "org/model", COMMIT)
    assert entry.downloaded_at is not None
    assert began <= entry.downloaded_at <= time.time()
    assert library.find("org/model") == library.find("org--model") == entry
    library.delete("org/model")
    assert library.list() == []
    assert not [name for name in tree(tmp_path / "models") if not name.startswith(PARTIAL)]
    with pytest.raises(ModelNotFound):
        library.delete("org/model")


def test_the_embedded_model(tmp_path: Path) -> None:
    folder = embedded_folder()
    assert folder is not None
    make(tmp_path / folder)
    make(tmp_path / "smol-sala-0")
    make(tmp_path / "smol-sala")  # nobody finds it by that name: it is the embedded model's
    library = Library(tmp_path)
    assert {entry.id for entry in library.list()} == {"smol-sala", "smol-sala-0"}
    entry = library.find("smol-sala")
    assert entry is not None
    assert entry.path.name == folder
    library.delete("smol-sala")
    assert not (tmp_path / folder).exists()
    assert (tmp_path / "smol-sala" / "config.json").exists()


@pytest.mark.parametrize("model_id", HOSTILE, ids=lambda text: ascii(text)[:20])
def test_nothing_else_is_removed(library: Library, tmp_path: Path, model_id: str) -> None:
    before = tree(tmp_path)
    assert library.find(model_id) is None
    with pytest.raises(ModelNotFound):
        library.delete(model_id)
    assert tree(tmp_path) == before
    with pytest.raises(ModelNotFound):
        library.delete(str(tmp_path / "models" / "own"))
    assert tree(tmp_path) == before


def test_removed(library: Library, tmp_path: Path) -> None:
    (tmp_path / "models" / "own" / "to-outside").symlink_to(tmp_path / "outside")
    (tmp_path / "models" / ".trash-0123").mkdir()  # left by a crash
    before = {name: what for name, what in tree(tmp_path).items() if "own" not in name and "trash" not in name}
    library.delete("own")
    after = tree(tmp_path)
    assert not (tmp_path / "models" / "own").exists()
    assert {name: what for name, what in after.items() if not name.endswith(".lock")} == {
        **before,
        "models/alias": after["models/alias"],
    }
    with pytest.raises(ModelNotFound):
        library.delete("own")


def test_half_a_download_can_be_dropped(library: Library) -> None:
    library.delete("org/half")
    assert library.partials() == ()
    with pytest.raises(ModelNotFound):
        library.delete("org/half")


def test_not_while_it_is_being_fetched(library: Library, tmp_path: Path) -> None:
    with hold(tmp_path / "models", "own"), pytest.raises(Busy):
        library.delete("own")
    assert library.find("own") is not None


def test_models_from_elsewhere(library: Library, tmp_path: Path) -> None:
    outside = make(tmp_path / "else" / "own")
    odd = make(tmp_path / "else" / ".my model!")
    library = Library(tmp_path / "models")
    for path in (outside, odd, tmp_path / "models" / "own", outside):
        library.register(path)
    entries = {entry.id: entry for entry in library.list()}
    assert set(entries) == {"own", "own-2", "my-model-"}
    assert entries["own"].is_ours
    assert not entries["own-2"].is_ours
    assert entries["own-2"].path == outside
    before = tree(tmp_path)
    library.delete("own-2")
    assert tree(tmp_path) == before
    assert library.find("own-2") is None
    with pytest.raises(ModelNotFound):
        library.delete("own-2")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "null", "\xff",
             '{"repo_id": "../x", "revision": null, "downloaded_at": null, "files": {}}',
             '{"repo_id": null, "revision": 5, "downloaded_at": null, "files": {}}', "[" * 100_000,
             '{"repo_id": null, "revision": null, "downloaded_at": Infinity, "files": {}}'],
    ids=range(10),
)  # fmt: skip
def test_a_corrupt_registry_is_made_anew(tmp_path: Path, text: str) -> None:
    path = make(tmp_path / "org--model")
    (path / REGISTRY).write_text(text, encoding="latin-1")
    for _ in range(2):
        (entry,) = Library(tmp_path).list()
        assert (entry.id, entry.repo_id, entry.revision) == ("org--model", "org/model", None)
    assert (path / (REGISTRY + ".bad")).read_text(encoding="latin-1") == text
    record = json.loads((path / REGISTRY).read_text())
    assert record["files"]["model.safetensors"]["size"] > 1000


def test_a_registry_that_is_missing_or_a_link(tmp_path: Path) -> None:
    path = make(tmp_path / "models" / "org--model")
    (tmp_path / "secret").write_text("precious")
    (entry,) = Library(tmp_path / "models").list()
    assert entry.repo_id == "org/model"
    assert not (path / REGISTRY).exists()
    (path / REGISTRY).symlink_to(tmp_path / "secret")
    assert len(Library(tmp_path / "models").list()) == 1
    assert (tmp_path / "secret").read_text() == "precious"


@pytest.mark.parametrize("config", ["", "[]", "5", "[" * 100_000, '{"quantization": 5}'], ids=range(5))
def test_a_strange_config_is_listed(tmp_path: Path, config: str) -> None:
    make(tmp_path / "odd", config)
    (entry,) = Library(tmp_path).list()
    assert entry.quantization is None


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    assert Library(tmp_path / "missing").list() == []
    assert not (tmp_path / "missing").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(SalaError, match="is not a directory"):
        Library(tmp_path / "file")


def wait(
    downloads: Downloads, job_id: str, until: Callable[[DownloadJob], bool] = lambda job: job.is_over
) -> DownloadJob:
    for _ in range(1000):
        job = downloads.get(job_id)
        assert job is not None
        if until(job):
            return job
        time.sleep(0.01)
    raise AssertionError(job)


def test_a_job(fake: FakeHub, tmp_path: Path) -> None:
    fake.files["code.py"] = b"x"
    library = Library(tmp_path / "models")
    downloads = Downloads(library, fake.url)
    job = downloads.start("org/model")
    assert job.status in ("queued", "running", "done")
    job = wait(downloads, job.id)
    assert (job.status, job.error) == ("done", None)
    assert job.done_bytes == job.total_bytes == sum(map(len, fake.files.values())) - 1
    assert "code.py" in job.skipped[0]
    assert [entry.id for entry in library.list()] == ["org--model"]
    before = tree(tmp_path / "models")
    with pytest.raises(AlreadyThere):
        downloads.start("org/model")
    assert tree(tmp_path / "models") == before
    with pytest.raises(InputError):
        downloads.start("../x")
    with pytest.raises(InputError):
        downloads.start("a/b", "../x")


def test_jobs_that_fail_say_why(fake: FakeHub, tmp_path: Path) -> None:
    downloads = Downloads(Library(tmp_path / "models"), fake.url)
    job = wait(downloads, downloads.start("org/unknown").id)
    assert job.status == "failed"
    assert job.error is not None
    assert "does not exist or is private" in job.error
    fake.faults["model.safetensors"] = ("wrong", 1)
    job = wait(downloads, downloads.start("org/model").id)
    assert job.status == "failed"
    assert "does not have the hash" in str(job.error)
    assert Library(tmp_path / "models").list() == []
    for job in downloads.list():
        assert TOKEN not in repr(job)
        assert str(tmp_path) not in repr(job)
    assert wait(downloads, downloads.start("org/model").id).status == "done"


def test_the_same_model_is_the_same_job(fake: FakeHub, tmp_path: Path) -> None:
    fake.pause = 0.1
    downloads = Downloads(Library(tmp_path / "models"), fake.url)
    jobs = {downloads.start("org/model").id for _ in range(5)}
    assert len(jobs) == 1
    active = downloads.find_active("org--model")
    assert active is not None
    assert active == downloads.get(active.id) or active.id in jobs
    assert downloads.find_active("org/model") is not None
    assert downloads.find_active("../x") is None
    assert wait(downloads, jobs.pop()).status == "done"
    assert len(fake.requests_of("model.safetensors")) == 1


def test_cancel_then_again(fake: FakeHub, tmp_path: Path) -> None:
    fake.files["model.safetensors"] = make_weights(tmp_path / "large", 400_000)
    fake.pause = 0.1
    downloads = Downloads(Library(tmp_path / "models"), fake.url)
    job = downloads.start("org/model")
    wait(downloads, job.id, lambda job: job.done_bytes > 60_000)
    cancelled = downloads.cancel(job.id)
    assert cancelled is not None
    assert wait(downloads, job.id).status == "cancelled"
    assert Library(tmp_path / "models").list() == []
    fake.pause = 0
    assert wait(downloads, downloads.start("org/model").id).status == "done"
    assert "range" in fake.requests_of("model.safetensors")[-1].headers
    assert downloads.cancel("dl-unknown") is None


def make_weights(path: Path, size: int) -> bytes:
    path.mkdir()
    write_weights(path, {"a": ("U8", (size,))}, lambda _: bytes(size))
    return (path / "model.safetensors").read_bytes()


def test_two_at_a_time(fake: FakeHub, tmp_path: Path) -> None:
    fake.pause = 0.2
    downloads = Downloads(Library(tmp_path / "models"), fake.url)
    jobs = [downloads.start(f"org/model{number}") for number in range(4)]
    time.sleep(0.1)
    assert sum(job.status == "running" for job in downloads.list()) == 2
    waiting = [job for job in downloads.list() if job.status == "queued"]
    assert len(waiting) == 2
    downloads.cancel(waiting[0].id)
    assert wait(downloads, waiting[0].id).status == "cancelled"
    downloads.close()
    assert all(wait(downloads, job.id).is_over for job in jobs)
    with pytest.raises(Busy):
        downloads.start("org/model")


def test_everything_at_once(fake: FakeHub, tmp_path: Path) -> None:
    """Threads list, fetch and delete as they like: in the end the list is what is on disk, and all of it whole."""
    library = Library(tmp_path / "models")
    downloads = Downloads(library, fake.url)
    problems: list[BaseException] = []
    until = time.monotonic() + 2

    def play(seed: int) -> None:
        dice = random.Random(seed)
        while time.monotonic() < until:
            try:
                dice.choice([library.list, downloads.list, start, delete, cancel])()
            except (AlreadyThere, Busy, ModelNotFound):
                pass
            except BaseException as error:
                problems.append(error)

    def start() -> None:
        downloads.start("org/model")

    def delete() -> None:
        library.delete("org/model")

    def cancel() -> None:
        for job in downloads.list():
            if not job.is_over:
                downloads.cancel(job.id)

    threads = [threading.Thread(target=play, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    downloads.close()
    assert problems == []
    assert all(job.status in ("done", "cancelled", "failed") for job in downloads.list())
    on_disk = [path.name for path in (tmp_path / "models").iterdir() if not path.name.startswith(".")]
    assert [entry.id for entry in library.list()] == on_disk
    for name in on_disk:
        assert {file.name for file in (tmp_path / "models" / name).iterdir()} == {*fake.files, REGISTRY}
    shutil.rmtree(tmp_path / "models" / PARTIAL)
    if on_disk:
        library.delete("org/model")
    assert library.list() == []

"""Downloads from a hub that cuts, lies and misleads: the model is right in the end, or it is not there."""

import errno
import json
import multiprocessing
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from sala.checkpoint.writer import write_weights
from sala.errors import InputError, SalaError
from sala.models import download as download_module
from sala.models.catalog import Library
from sala.models.download import PARTIAL, REGISTRY, hold, pull
from sala.models.embedded import find_model
from sala.models.hub import AlreadyThere, Busy, Hub, find_cached, folder_name, parse_repo, read_token
from sala.models.transfer import Cancelled, DownloadDiskFull, DownloadError, HubClient, Stop, check_address
from tests.server.fake_hub import COMMIT, TOKEN, FakeHub, serve, tree

HOSTILE = [
    "/", "..", "a/..", "../x", "a/b/c", "", ".", "~", "~/x", "C:\\x", "a\0b", "a/b\0", "%2e%2e", "%2e%2e/x",
    "a" * 10_240, "a/" + "b" * 10_240, "оpenbmb/MiniCPM", "a/ｂ", "https://huggingface.co/a/b", "git@github.com:a/b",
    "a//b", "a/b/", "/a/b", "a/.b", ".a/b", "-a/b", "a/b-", "a--b/c", "a/b--c", "a/b..c", "a b/c", "a/b\n",
    "a/b?x=1", "a/b#c", "a\\b", "a/b%2fc", "a/.", "./a", "datasets/../a",
]  # fmt: skip


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a model whose weights are two shards of some hundred kilobytes."""
    path = tmp_path_factory.mktemp("weights")
    specs = {"a": ("F32", (300, 256)), "b": ("F32", (200, 256))}
    data = {"a": bytes(range(256)) * 1200, "b": bytes(reversed(range(256))) * 800}
    write_weights(path, specs, lambda name: data[name], shard_bytes=310_000)
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    assert len(files) == 3
    return {
        **files,
        "config.json": b'{"model_type": "x"}',
        "tokenizer.json": b"{}",
        "README.md": b"# hi",
        "LICENSE": b"",
    }


SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def fake(weights: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    with serve(FakeHub(dict(weights))) as hub:
        yield hub


def fetch(fake: FakeHub, models: Path, **options: Any) -> Path:
    hub = Hub(fake.url, timeout=options.pop("timeout", 5.0), delay=0.01, tries=options.pop("tries", 3))
    return pull(models, fake.repo_id, hub=hub, **options)


def check(path: Path, fake: FakeHub, left_out: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    found = {file.name: file.read_bytes() for file in path.iterdir() if file.name != REGISTRY}
    assert found == {name: data for name, data in fake.files.items() if name not in left_out}
    record = json.loads((path / REGISTRY).read_text())
    assert (record["repo_id"], record["revision"]) == (fake.repo_id, COMMIT)
    assert record["files"][SHARD]["size"] == len(fake.files[SHARD])
    assert not [each for each in (path.parent / PARTIAL).iterdir() if each.is_dir()]


def test_a_whole_model(fake: FakeHub, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    path = fetch(fake, tmp_path, on_progress=lambda *numbers: told.append(numbers))
    assert path == tmp_path / "org--model"
    check(path, fake)
    first = told[: len(fake.files)]
    assert {name for name, *_ in first} == set(fake.files)
    assert all(done == 0 for _, done, _ in first)
    last = {name: (done, total) for name, done, total in told}
    assert all(done == total == len(fake.files[name]) for name, (done, total) in last.items())
    assert all(request.headers["authorization"] == f"Bearer {TOKEN}" for request in fake.seen)
    assert all(request.headers["accept-encoding"] == "identity" for request in fake.seen)
    with pytest.raises(AlreadyThere):
        fetch(fake, tmp_path)
    check(path, fake)


def test_code_and_pickles_are_left_out_and_told(fake: FakeHub, tmp_path: Path) -> None:
    bad = {
        "modeling.py": b"boom", "pytorch_model.bin": b"\x80\x04", "x.pt": b"", "x.ckpt": b"", "x.pickle": b"",
        "chat_template.py": b"", "LICENSE.PY": b"", "onnx/model.safetensors": b"", "../../x.safetensors": b"",
        "sub/config.json": b"", "rust_model.ot": b"", "a b.safetensors": b"", ".sala.json": b"{}",
    }  # fmt: skip
    fake.files.update(bad)
    notes: list[str] = []
    check(fetch(fake, tmp_path, note=notes.append), fake, set(bad))
    assert "modeling.py" in notes[0]
    assert "pytorch_model.bin" in notes[0]
    assert {request.path.rpartition("/")[2] for request in fake.seen[1:]} == set(fake.files) - set(bad) - {
        "LICENSE"
    }  # empty


def test_cut_in_the_middle_then_resumed(fake: FakeHub, tmp_path: Path) -> None:
    fake.faults[SHARD] = ("cut", 1)
    check(fetch(fake, tmp_path), fake)
    first, second = fake.requests_of(SHARD)
    assert "range" not in first.headers
    assert second.headers["range"] == f"bytes={len(fake.files[SHARD]) // 2}-"


def test_resumed_by_a_later_run(fake: FakeHub, tmp_path: Path) -> None:
    fake.faults[SHARD] = ("cut", 1)
    with pytest.raises(DownloadError, match="connection was lost"):
        fetch(fake, tmp_path, tries=1)
    assert not (tmp_path / "org--model").exists()
    part = tmp_path / PARTIAL / f"org--model@{COMMIT}" / f"{SHARD}.part"
    assert part.stat().st_size == len(fake.files[SHARD]) // 2
    fake.seen.clear()
    told: dict[str, int] = {}
    check(fetch(fake, tmp_path, on_progress=lambda name, done, _: told.setdefault(name, done)), fake)
    assert told[SHARD] == len(fake.files[SHARD]) // 2
    assert [request.headers.get("range") for request in fake.requests_of(SHARD)] == [f"bytes={told[SHARD]}-"]
    assert not fake.requests_of("config.json")  # it was there, and was only verified


@pytest.mark.parametrize("fault", ["ignore_range", "other_start", "unsatisfiable", "busy"])
def test_a_rest_that_cannot_be_had(fake: FakeHub, tmp_path: Path, fault: str) -> None:
    fake.faults[SHARD] = ("cut", 1)
    with pytest.raises(DownloadError):
        fetch(fake, tmp_path, tries=1)
    fake.faults[SHARD] = (fault, 1)
    check(fetch(fake, tmp_path), fake)


def test_the_file_changed_meanwhile(fake: FakeHub, tmp_path: Path) -> None:
    fake.faults[SHARD] = ("cut", 1)
    with pytest.raises(DownloadError):
        fetch(fake, tmp_path, tries=1)
    changed = bytes(byte ^ 1 for byte in fake.files[SHARD][-1000:])
    fake.files[SHARD] = fake.files[SHARD][:-1000] + changed
    part = tmp_path / PARTIAL / f"org--model@{COMMIT}" / f"{SHARD}.part"
    part.write_bytes(b"of another version" + part.read_bytes()[18:])
    check(fetch(fake, tmp_path), fake)
    first, second = fake.requests_of(SHARD)[-2:]
    assert "range" in first.headers
    assert "range" not in second.headers  # the hash was wrong, so that it began anew


def test_a_damaged_beginning_is_found_and_downloaded_again(fake: FakeHub, tmp_path: Path) -> None:
    fake.faults[SHARD] = ("cut", 1)
    with pytest.raises(DownloadError):
        fetch(fake, tmp_path, tries=1)
    draft = tmp_path / PARTIAL / f"org--model@{COMMIT}"
    part = draft / f"{SHARD}.part"
    part.write_bytes(b"\0" * part.stat().st_size)
    fake.faults[SHARD] = ("wrong", 2)
    with pytest.raises(DownloadError, match="does not have the hash"):
        fetch(fake, tmp_path)
    assert (draft / f"{SHARD}.bad").exists()
    assert not (tmp_path / "org--model").exists()
    fake.faults.clear()
    (draft / "config.json").write_bytes(b"x" * len(fake.files["config.json"]))  # finished files are verified again too
    check(fetch(fake, tmp_path), fake)


@pytest.mark.parametrize("name", [SHARD, "tokenizer.json"])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("wrong", "does not have the hash"),
        ("longer", "bytes; the hub declares"),
        ("endless", "longer than the hub declares"),
        ("bomb", "was sent compressed"),
        ("gated", "restricted to users who accepted"),
        ("missing", "answers 404"),
    ],
)
def test_not_what_was_declared(fake: FakeHub, tmp_path: Path, name: str, fault: str, words: str) -> None:
    fake.faults[name] = (fault, 1)
    with pytest.raises(DownloadError, match=words):
        fetch(fake, tmp_path)
    assert not (tmp_path / "org--model").exists()
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert size <= sum(map(len, fake.files.values())) + 1000
    check(fetch(fake, tmp_path), fake)


def test_a_stalled_peer(fake: FakeHub, tmp_path: Path) -> None:
    fake.faults[SHARD] = ("stall", 9)
    began = time.monotonic()
    with pytest.raises(DownloadError, match="has stopped sending data"):
        fetch(fake, tmp_path, timeout=0.2)
    assert time.monotonic() - began < 3
    assert len(fake.requests_of(SHARD)) == 3
    fake.faults.clear()
    check(fetch(fake, tmp_path), fake)


def test_redirected_to_other_storage(fake: FakeHub, tmp_path: Path) -> None:
    """Files may lie on another host of the hub; the token stays at home."""
    with serve(FakeHub(fake.files)) as storage:
        fake.redirect = storage.url + "/cdn/{name}"
        storage.faults[SHARD] = ("cut", 1)
        check(fetch(fake, tmp_path), fake)
        assert len(storage.requests_of(SHARD)) == 2
        assert "range" in storage.requests_of(SHARD)[1].headers
        assert all("authorization" not in request.headers for request in storage.seen)


@pytest.mark.parametrize(
    "target",
    [
        "http://example.com/x", "https://example.com/x", "file:///etc/passwd", "ftp://127.0.0.1/x", "http://10.0.0.1/x",
        "http://169.254.169.254/latest", "http://127.0.0.1\\@example.com/", "http://x@127.0.0.1/", "data:,x",
        "//evil.com/x",
        "http://127.0.0.1.evil.com/x", "http://[::ffff:10.0.0.1]/", "http://0x7f.1:99999/",
    ],
)  # fmt: skip
def test_redirected_where_it_may_not(fake: FakeHub, tmp_path: Path, target: str) -> None:
    fake.redirect = target
    with pytest.raises(DownloadError, match=r"the hub (redirects|gives)"):
        fetch(fake, tmp_path)
    assert not (tmp_path / "org--model").exists()


def test_redirected_in_a_loop(fake: FakeHub, tmp_path: Path) -> None:
    fake.redirect = f"{fake.url}/org/model/resolve/{COMMIT}/{{name}}"
    with pytest.raises(DownloadError, match="in a loop"):
        fetch(fake, tmp_path)


@pytest.mark.parametrize(
    ("url", "is_allowed"),
    [
        ("https://huggingface.co/a", True),
        ("https://cdn-lfs.huggingface.co/a", True),
        ("https://cas-bridge.xethub.hf.co/a?sig=1", True),
        ("https://storage.mirror.org/a", True),
        ("http://huggingface.co/a", False),
        ("https://hf.co.evil.com/a", False),
        ("https://evilhf.co/a", False),
        ("https://127.0.0.1/a", False),
        ("https://localhost/a", False),
        ("https://192.168.1.1/a", False),
        ("https://[::1]/a", False),
        ("file://huggingface.co/etc/passwd", False),
        ("https://huggingface.co:0/", False),
        ("https://huggingface.co\\@evil.com/", False),
        ("https://a@huggingface.co/", False),
    ],
)
def test_targets_of_the_public_hub(url: str, is_allowed: bool) -> None:
    client = HubClient("https://huggingface.co", TOKEN, trusted_hosts=("mirror.org",))
    if is_allowed:
        client.check_target(url)
        return
    with pytest.raises(DownloadError) as caught:
        client.check_target(url)
    assert TOKEN not in str(caught.value)


def test_addresses() -> None:
    for address in ("8.8.8.8", "2606:4700::1111", "198.18.0.7"):
        check_address(address)
    for address in (
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "::", "::1", "fe80::1%eth0",
        "fd00::1",
        "::ffff:127.0.0.1", "224.0.0.1", "100.64.0.1",
    ):  # fmt: skip
        with pytest.raises(DownloadError):
            check_address(address)


def test_a_name_that_leads_into_this_network(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is the address at the other end of the connection, not what the name promised."""
    client = HubClient("http://hub.example", None)
    resolve = socket.create_connection
    port = int(fake.url.rpartition(":")[2])
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: resolve(("127.0.0.1", port), 5))
    monkeypatch.setenv("no_proxy", "*")
    with client.open("http://hub.example/api/models/org/model/revision/main", {}, Stop()):
        pass  # the hub itself may be here
    count = len(fake.seen)
    with (
        pytest.raises(DownloadError, match="not on the public internet"),
        client.open("http://cdn.hub.example/x", {}, Stop()),
    ):
        pass
    assert len(fake.seen) == count  # not a byte was sent


def test_the_token_is_never_sent_in_clear_text() -> None:
    assert HubClient("http://hub.example", TOKEN)._token is None
    assert HubClient("http://127.0.0.1:1", TOKEN)._token == TOKEN


def test_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "abc\r\nX-Evil: 1")
    assert read_token() is None
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    assert read_token() is None
    (tmp_path / "token").write_text("hf_x\n")
    assert read_token() == "hf_x"


def test_full_disk_before(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    size = sum(map(len, fake.files.values()))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=int(size * 1.04)))
    with pytest.raises(DownloadDiskFull, match=r"needs 0\.5 MB.* are free.*SALA_MODELS_DIR"):
        fetch(fake, tmp_path)
    assert len(fake.seen) == 1  # only the listing
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=int(size * 1.06)))
    check(fetch(fake, tmp_path), fake)


def test_full_disk_meanwhile(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Path.open

    class Full:
        """A file on a disk that has no room."""

        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def write(self, chunk: bytes) -> int:
            if self.handle.tell() + len(chunk) > 100_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.handle.write(chunk)  # type: ignore[no-any-return]

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: object) -> None:
            self.handle.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.handle, name)

    def open_full(self: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        handle = original(self, mode, *arguments, **options)
        return Full(handle) if self.name == f"{SHARD}.part" and mode in ("ab", "wb") else handle

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_full)
        with pytest.raises(DownloadDiskFull, match=rf"no space left on the disk for .*{SHARD}.*needs 0.3 MB.*free"):
            fetch(fake, tmp_path)
    part = tmp_path / PARTIAL / f"org--model@{COMMIT}" / f"{SHARD}.part"
    assert 0 < part.stat().st_size <= 100_000
    check(fetch(fake, tmp_path), fake)
    assert "range" in fake.requests_of(SHARD)[-1].headers


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "RepoNotFound", "does not exist or is private"),
        (404, "RepoNotFound", "does not exist or is private"),
        (403, "GatedRepo", "restricted to users who accepted its terms"),
        (401, "GatedRepo", "restricted to users who accepted its terms"),
        (404, "RevisionNotFound", "no revision main"),
        (500, "", "answers 500"),
    ],
)
def test_refused(fake: FakeHub, tmp_path: Path, status: int, code: str, words: str) -> None:
    fake.status, fake.error_code = status, code
    with pytest.raises(DownloadError, match=words) as caught:
        fetch(fake, tmp_path)
    assert TOKEN not in str(caught.value)
    assert not [path for path in tmp_path.iterdir() if path.name != PARTIAL]


def test_no_hub_at_all(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="cannot be reached"):
        pull(tmp_path, "org/model", hub=Hub("http://127.0.0.1:9", delay=0.01))


def test_offline_by_choice(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        fetch(fake, tmp_path)
    assert fake.seen == []


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "sub/x.safetensors", "config.json", "missing.safetensors", 5]
)
def test_an_index_that_leads_outside(fake: FakeHub, tmp_path: Path, name: object) -> None:
    index = {"metadata": {}, "weight_map": {"a": name, "b": "model-00002-of-00002.safetensors"}}
    fake.files["model.safetensors.index.json"] = json.dumps(index).encode()
    with pytest.raises(DownloadError, match=r"not a file of the model|no weight_map from names to files"):
        fetch(fake, tmp_path)
    assert not fake.requests_of(SHARD)  # found out before the weights are fetched
    assert not (tmp_path / "org--model").exists()


@pytest.mark.parametrize("text", [b"[]", b"{}", b"{", b'{"weight_map": 5}', b"[" * 100_000])
def test_an_index_that_is_none(fake: FakeHub, tmp_path: Path, text: bytes) -> None:
    fake.files["model.safetensors.index.json"] = text
    with pytest.raises(DownloadError, match="no weight_map"):
        fetch(fake, tmp_path)


def test_weights_that_are_none(fake: FakeHub, tmp_path: Path) -> None:
    fake.files[SHARD] = b"\xff" * 1000
    with pytest.raises(DownloadError, match="damaged on the hub") as caught:
        fetch(fake, tmp_path)
    assert str(tmp_path) not in str(caught.value)
    assert not (tmp_path / "org--model").exists()


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        (SHARD, {"size": None, "lfs": {"sha256": "0" * 64}}),
        (SHARD, {"lfs": {"sha256": "../../x", "size": 10}}),
        (SHARD, {"lfs": {"sha256": "0" * 64, "size": -1}}),
        (SHARD, {"lfs": {"sha256": "0" * 64, "size": 1 << 60}}),
        ("config.json", {"blobId": None}),
        ("config.json", {"size": True}),
        ("tokenizer.json", {"size": 1 << 40}),
        ("config.json", {"rfilename": 5}),
        ("config.json", {"rfilename": "Config.json"}),
        ("README.md", {"rfilename": "config.json"}),
    ],
)
def test_a_listing_that_makes_no_sense(fake: FakeHub, tmp_path: Path, name: str, lie: dict[str, Any]) -> None:
    fake.lies[name] = lie
    with pytest.raises(DownloadError):
        fetch(fake, tmp_path)
    assert not (tmp_path / "org--model").exists()


def test_a_commit_that_is_a_path(fake: FakeHub, tmp_path: Path) -> None:
    fake.commit = "../../../x"
    before = tree(tmp_path)
    with pytest.raises(DownloadError, match="is not valid"):
        fetch(fake, tmp_path / "models")
    assert {name for name in tree(tmp_path) if PARTIAL not in name} - {"models"} == set(before)


def test_a_model_without_weights(fake: FakeHub, tmp_path: Path) -> None:
    del fake.files["model.safetensors.index.json"]
    with pytest.raises(DownloadError, match=r"no config.json with safetensors"):
        fetch(fake, tmp_path)


@pytest.mark.parametrize("repo_id", HOSTILE, ids=lambda text: ascii(text)[:20])
def test_hostile_ids(fake: FakeHub, tmp_path: Path, repo_id: str) -> None:
    models = tmp_path / "models"
    (models / "precious").mkdir(parents=True)
    (models / "precious" / "config.json").write_text("{}")
    (tmp_path / "outside").write_text("precious")
    before = tree(tmp_path)
    with pytest.raises(InputError):
        pull(models, repo_id, hub=Hub(fake.url))
    with pytest.raises(InputError):
        parse_repo(repo_id)
    with pytest.raises(InputError):
        folder_name(repo_id)
    assert tree(tmp_path) == before
    assert fake.seen == []


def test_ids() -> None:
    assert parse_repo("openbmb/MiniCPM-SALA") == ("openbmb/MiniCPM-SALA", None)
    assert parse_repo("a/b@refs/pr/1") == ("a/b", "refs/pr/1")
    assert folder_name("a_b.c/d-e.F") == "a_b.c--d-e.F"
    for revision in ("", "../x", "a b", "-x", "a" * 200, "a@b", "x//y", "\0"):
        with pytest.raises(InputError):
            parse_repo(f"a/b@{revision}")


@pytest.mark.parametrize("url", ["ftp://x", "file:///x", "https://", "https://a@b", "https://a/?x", "x", "https://a b"])
def test_addresses_of_hubs(url: str) -> None:
    with pytest.raises(InputError):
        Hub(url)


def test_where_the_hub_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/")
    assert Hub().client.url == Hub("https://huggingface.co").client.url == "https://mirror.example"
    assert Hub("https://other.example").client.url == "https://other.example"


def test_cancelled_and_taken_up_again(fake: FakeHub, tmp_path: Path) -> None:
    fake.pause, stop = 0.05, Stop()

    def progress(name: str, done: int, _: int) -> None:
        if name == SHARD and done:
            stop.set()

    with pytest.raises(Cancelled):
        fetch(fake, tmp_path, on_progress=progress, stop=stop)
    assert not (tmp_path / "org--model").exists()
    fake.pause = 0
    check(fetch(fake, tmp_path), fake)
    assert "range" in fake.requests_of(SHARD)[-1].headers


def test_cancelled_while_nothing_comes(fake: FakeHub, tmp_path: Path) -> None:
    fake.faults[SHARD] = ("stall", 9)
    stop = Stop()
    threading.Timer(0.5, stop.set).start()
    began = time.monotonic()
    with pytest.raises(Cancelled):
        fetch(fake, tmp_path, stop=stop, timeout=30)
    assert time.monotonic() - began < 2.5


def test_the_same_model_twice_at_once(fake: FakeHub, tmp_path: Path) -> None:
    fake.pause = 0.03
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(fetch(fake, tmp_path))
        except DownloadError as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(result, Busy | AlreadyThere) for result in results) == 2
    check(tmp_path / "org--model", fake)
    assert len(fake.requests_of(SHARD)) == 1


def _hold(directory: Path, ready: Any, done: Any) -> None:
    with hold(directory, "org--model"):
        ready.set()
        done.wait(20)


def test_two_processes(fake: FakeHub, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(tmp_path, ready, done))
    process.start()
    assert ready.wait(20)
    with pytest.raises(Busy):
        fetch(fake, tmp_path)
    process.kill()  # whoever dies leaves no lock behind
    process.join()
    check(fetch(fake, tmp_path), fake)


def test_a_models_directory_that_cannot_be_used(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DownloadError, match="cannot be written"):
        fetch(fake, tmp_path / "file")
    (tmp_path / "models").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "models" / PARTIAL).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DownloadError, match="must be a directory"):
        fetch(fake, tmp_path / "models")
    assert not any((tmp_path / "elsewhere").iterdir())

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(download_module.Path, "mkdir", read_only)
    with pytest.raises(DownloadError, match="Read-only"):
        fetch(fake, tmp_path / "other")


def test_a_model_in_the_hugging_face_cache_is_used_in_place(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "cache" / "models--org--model"
    snapshot = place / "snapshots" / COMMIT
    (place / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    for number, (name, data) in enumerate(fake.files.items()):
        (place / "blobs" / str(number)).write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert find_cached("org/model") == find_cached("org/model", COMMIT) == snapshot
    assert find_cached("org/model", "other") is find_cached("org/other") is None
    with pytest.raises(AlreadyThere, match="Hugging Face cache"):
        fetch(fake, tmp_path / "models")
    assert not fake.seen
    assert Library(tmp_path / "models").find("org/model").path == snapshot  # type: ignore[union-attr]
    monkeypatch.setenv("SALA_MODELS_DIR", str(tmp_path / "models"))
    assert find_model("org/model") == find_model("org--model") == snapshot
    with pytest.raises(SalaError, match="hf cache"):
        Library(tmp_path / "models").delete("org/model")
    (snapshot / SHARD).unlink()  # a download that was not finished
    assert find_cached("org/model") is None
    check(fetch(fake, tmp_path / "models"), fake)


def test_modelscope(fake: FakeHub, tmp_path: Path) -> None:
    fake.files["modeling.py"] = b"boom"
    hub = Hub(fake.url, is_modelscope=True)
    path = pull(tmp_path, "org/model", hub=hub)
    assert {file.name for file in path.iterdir()} == {*fake.files, REGISTRY} - {"modeling.py"}
    record = json.loads((path / REGISTRY).read_text())
    assert len(record["revision"]) == 64
    assert {request.path.partition("?")[0].rpartition("/")[0] for request in fake.seen} == {
        "/api/v1/models/org/model/repo", "/models/org/model/resolve/master",
    }  # fmt: skip
    assert all("authorization" not in request.headers for request in fake.seen)
    assert Hub("modelscope").client.url == "https://modelscope.cn"


def test_large_files_of_the_public_hub_come_through_xet(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its protocol does not run here: the library's function is replaced by one that writes the file, or fails."""
    brought = []

    def download(repo_id: str, name: str, *, local_dir: Path, revision: str, tqdm_class: Any, **_: object) -> str:
        brought.append((repo_id, name, revision))
        if name != SHARD:
            raise RuntimeError("no xet today")
        local_dir.mkdir(exist_ok=True)
        (local_dir / name).write_bytes(fake.files[name])
        with tqdm_class(total=len(fake.files[name])) as bar:
            bar.update(len(fake.files[name]))
        return str(local_dir / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    hub, notes = Hub(fake.url), list[str]()
    assert not hub.has_xet
    hub.has_xet = True
    check(pull(tmp_path, "org/model", hub=hub, note=notes.append), fake)
    assert sorted(brought) == [("org/model", SHARD, COMMIT), ("org/model", SHARD.replace("1-of", "2-of"), COMMIT)]
    assert not fake.requests_of(SHARD)
    assert notes == [f"{SHARD.replace('1-of', '2-of')}: Xet failed (RuntimeError), downloading over HTTP"]
    assert Hub("https://huggingface.co").has_xet

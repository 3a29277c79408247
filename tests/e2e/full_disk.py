"""Run by `test_full_disk.py`: `small` is a file system of 4 MB, `closed` a read-only one."""

import io
import logging
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from sala import cli
from sala.errors import SalaError
from sala.llm import LLM
from sala.models.catalog import Library
from sala.models.download import PARTIAL, pull
from sala.models.hub import Hub
from sala.models.transfer import DownloadDiskFull
from sala.server.app import create_app
from sala.server.serving import prepare_models_dir
from sala.server.settings import Settings
from tests.e2e.test_jobs import read, request, write
from tests.server.conftest import wait_for
from tests.server.fake_hub import COMMIT, FakeHub, serve
from tests.server.test_library import make, make_weights

DISKS = Path(os.environ["DISKS"])
SMALL, CLOSED = DISKS / "small", DISKS / "closed"
FULL = r"no space left on the disk for {} \((needs [\d.]+ .B, )?[\d.]+ .B are free\); free some space"
TEXT = "All work and no play. " * 40


def fill(left: int) -> None:
    """Leave so many bytes of the small disk."""
    room = os.statvfs(SMALL)
    with (SMALL / "others").open("ab") as file:
        file.write(bytes(max(0, room.f_bavail * room.f_bsize - left)))


def free() -> None:
    (SMALL / "others").unlink()


@pytest.fixture(autouse=True)
def _disk() -> Iterator[None]:
    yield
    for path in SMALL.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def told(capsys: pytest.CaptureFixture[str], path: Path | str) -> None:
    """Check that the last command named the file, the sizes and a remedy, in one line."""
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(FULL.format(path), line), line


def test_a_batch_goes_on_when_there_is_room(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", [request(f"q{number}") for number in range(40)])
    command = ["batch", str(source), "-o", str(SMALL / "out.jsonl"), "-m", str(tiny), "--device", "cpu"]
    fill(8192)
    assert cli.run(command) == 1
    told(capsys, SMALL / "out.jsonl.part")
    assert not (SMALL / "out.jsonl").exists()
    free()
    assert cli.run(command) == 0
    assert re.search(r"\d+ answered, 0 refused, [1-9]\d* from an earlier run", capsys.readouterr().err)
    assert set(read(SMALL / "out.jsonl")) == {f"q{number}" for number in range(40)}
    assert len((SMALL / "out.jsonl").read_text().splitlines()) == 40


def test_sessions(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "doc.txt").write_text(TEXT)
    command = ["session", "save", "novel", "-f", str(tmp_path / "doc.txt"), "-m", str(tiny), "--device", "cpu"]
    fill(8192)
    assert cli.run([*command, "--sessions-dir", str(SMALL / "s")]) == 1
    told(capsys, SMALL / "s" / ".*")
    assert list((SMALL / "s").iterdir()) == []
    assert cli.run([*command, "--sessions-dir", str(CLOSED / "s")]) == 1
    assert f"{CLOSED}/s/novel.sala cannot be accessed: Read-only file system; change" in capsys.readouterr().err


def test_a_quantized_model_is_whole_or_not_there(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["quantize", str(tiny), "-o", str(SMALL / "q"), "--bits", "8", "--device", "cpu"]
    fill(300_000)
    assert cli.run(command) == 1
    told(capsys, SMALL / ".*")
    assert not (SMALL / "q").exists()
    free()
    assert cli.run(command) == 0
    assert LLM(SMALL / "q", device="cpu", ctx=256).generate("x", max_tokens=2).token_ids
    assert cli.run([*command[:3], str(CLOSED / "q")]) == 1
    assert f"{CLOSED}/q cannot be made in {CLOSED}" in capsys.readouterr().err


def test_results_of_an_evaluation(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["perplexity", str(SMALL / "text.txt"), "--lengths", "64", "-o", str(SMALL / "p.json"), "-m", str(tiny)]
    (SMALL / "text.txt").write_text(TEXT)
    fill(0)
    assert cli.run(command) == 1
    told(capsys, SMALL / "p.jsonl")
    assert not (SMALL / "p.json").exists()
    free()
    assert cli.run(command) == 0
    before = (SMALL / "p.json").read_bytes()
    fill(0)
    assert cli.run(["key", "add", "anna", "--keys-file", str(SMALL / "keys.json")]) == 1
    told(capsys, SMALL / "keys.json")
    assert cli.run([*command, "--tokens", "100", "--force"]) == 1
    assert (SMALL / "p.json").read_bytes() == before


def test_a_conversation_that_cannot_be_saved(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"hello\n/save {SMALL}/talk.json\n/bye\n"))
    fill(0)
    assert cli.run(["chat", "-m", str(tiny), "-n", "3", "--device", "cpu"]) == 0
    told(capsys, SMALL / "talk.json")
    assert not (SMALL / "talk.json").exists()


@pytest.mark.parametrize("place", [SMALL, CLOSED])
def test_the_cache_of_a_disk_without_room_is_one_warning(tiny: Path, place: Path) -> None:
    wanted = LLM(tiny, device="cpu", ctx=2048).generate(TEXT, temperature=0, max_tokens=8).token_ids
    fill(8192)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with LLM(tiny, device="cpu", ctx=2048, cache_dir=place / "cache", cache_disk="10M") as llm:
            for _ in range(3):
                assert llm.generate(TEXT, temperature=0, max_tokens=8).token_ids == wanted
                llm.reset()
                llm.tiers.disk.flush()  # type: ignore[union-attr]
    (message,) = [str(one.message) for one in caught]
    wanted_words = FULL.format(".*") if place is SMALL else r"cannot be accessed: Read-only file system; change"
    assert re.search(wanted_words, message), message


def test_a_cache_that_has_become_read_only_is_read(tiny: Path) -> None:
    def ask() -> Any:
        with LLM(tiny, device="cpu", ctx=2048, cache_dir=SMALL / "cache", cache_disk="1M") as llm:
            return llm.generate(TEXT, temperature=0, max_tokens=8)

    first = ask()
    subprocess.run(["mount", "-o", "remount,ro", str(SMALL)], check=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = ask()
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(SMALL)], check=True)
    assert again.token_ids == first.token_ids
    assert again.usage.cached_tokens == first.usage.prompt_tokens - 1


@pytest.mark.filterwarnings("ignore:the cache in")
def test_keys_and_values_on_a_disk_that_fills_up_later(tiny: Path) -> None:
    """Their space was reserved at the start: a write into a mapped file without it would end the process."""
    wanted = LLM(tiny, device="cpu", ctx=2048).generate(TEXT, temperature=0, max_tokens=8).token_ids
    with LLM(tiny, device="cpu", ctx=2048, kv_home="disk", kv_home_size="2M", cache_dir=SMALL / "cache") as llm:
        fill(0)
        assert llm.capacity.offload == "on disk"
        assert llm.generate(TEXT, temperature=0, max_tokens=8).token_ids == wanted


def test_without_a_limit_of_its_own_a_cache_on_a_full_disk_says_that_it_is_too_small(tiny: Path) -> None:
    fill(100_000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with LLM(tiny, device="cpu", ctx=2048, cache_dir=SMALL / "cache") as llm:
            for number in range(2):
                llm.generate(f"{number} {TEXT}", temperature=0, max_tokens=2)
    (message,) = [str(one.message) for one in caught]
    assert f"the cache in {SMALL}/cache may take 0.0 MB" in message


def test_a_download_that_fills_the_disk(tmp_path: Path) -> None:
    files = {file.name: file.read_bytes() for file in make(tmp_path / "source").iterdir()}
    files["model.safetensors"] = make_weights(tmp_path / "large", 2_000_000)
    with serve(FakeHub(files)) as fake:
        hub = Hub(fake.url, delay=0.01)
        fill(1_900_000)
        with pytest.raises(DownloadDiskFull, match=r"org/model needs 2\.1 MB, 1\.\d MB are free"):
            pull(SMALL, "org/model", hub=hub)
        free()
        fake.pause = 0.01

        def fill_meanwhile(name: str, done: int, _: int) -> None:
            if name == "model.safetensors" and done:
                fill(100_000)

        message = FULL.format(".*model.safetensors.part") + ".*what has been downloaded is kept"
        with pytest.raises(DownloadDiskFull, match=message):
            pull(SMALL, "org/model", hub=hub, on_progress=fill_meanwhile)
        assert (SMALL / PARTIAL / f"org--model@{COMMIT}" / "model.safetensors.part").stat().st_size > 0
        assert Library(SMALL).list() == []
        free()
        path = pull(SMALL, "org/model", hub=hub)
        assert "range" in fake.requests_of("model.safetensors")[-1].headers
        assert (path / "model.safetensors").read_bytes() == files["model.safetensors"]
        with pytest.raises(SalaError, match=r"cannot be accessed: Read-only file system; .*SALA_MODELS_DIR"):
            pull(CLOSED / "models", "org/model", hub=hub)
    assert [entry.id for entry in Library(CLOSED / "models").list()] == ["kept"]
    told: list[str] = []
    for place in (SMALL, CLOSED / "models"):
        prepare_models_dir(place, told.append)
    (line,) = told
    assert line.startswith(f"warning: {CLOSED}/models cannot be written, so nothing can be downloaded; choose")


def test_files_of_clients(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """507 for the client, without a path; the log has the file and the sizes. Responses stay in memory."""
    places = {"files_dir": SMALL / "files", "response_store": SMALL / "responses", "models_dir": tmp_path / "models"}
    app = create_app(Settings(model=str(tiny), device="cpu", **places))
    logging.getLogger("sala.server").propagate = True
    with TestClient(app, base_url="http://localhost") as client:

        def upload(text: str) -> Any:
            return client.post("/v1/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"})

        kept = upload("{}\n")
        assert kept.status_code == 200
        fill(0)
        body = {"input_file_id": kept.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        for refused in (upload("{}\n" * 100), client.post("/v1/batches", json=body)):
            assert (refused.status_code, refused.json()["error"]["code"]) == (507, "disk_full")
            assert str(SMALL) not in refused.text
            assert re.search(FULL.format(f"{SMALL}/files/.*"), caplog.messages[-1])
        assert len(client.get("/v1/files").json()["data"]) == 1
        assert client.get("/v1/batches").json()["data"] == []
        response = client.post("/v1/responses", json={"input": "hello", "max_output_tokens": 2}).json()
        wait_for(lambda: "stays in memory" in caplog.text)
        assert re.search(FULL.format(f"{SMALL}/responses/.*"), caplog.messages[-1])
        assert client.get(f"/v1/responses/{response['id']}").json()["output"] == response["output"]


def test_models_on_a_disk_that_is_read_only(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    """507 without a path for what would change it; the log names it. The model that is loaded answers."""
    models = CLOSED / "models"
    app = create_app(Settings(model=str(tiny), device="cpu", models_dir=models, hub_url="http://127.0.0.1:1"))
    logging.getLogger("sala.server").propagate = True
    with TestClient(app, base_url="http://localhost") as client:
        wait_for(lambda: client.get("/health").json()["status"] == "ok")  # while a model is loaded, none is deleted
        job = client.post("/v1/models/download", json={"repo_id": "org/model"}).json()["job"]
        refused = client.delete("/v1/models/kept")
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "not_writable"), refused.text
        assert str(CLOSED) not in refused.text
        assert f"{models}/" in caplog.messages[-1]
        assert "Read-only file system" in caplog.messages[-1]
        wait_for(lambda: client.get(f"/v1/models/download/{job['id']}").json()["status"] == "failed")
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
    assert (models / "kept" / "config.json").exists()

"""Models over HTTP: listing, fetching, loading and deleting, with a fake hub and a fake runtime."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient
from huggingface_hub import constants

from sala.engine.service import PrefixUse
from sala.models.catalog import Downloads, Library
from sala.server.admin import models
from sala.server.app import add_handlers, create_app
from sala.server.http.errors import ApiError
from sala.server.http.security import need_key
from sala.server.settings import Settings
from sala.text.workers import FairPool
from tests.server.fake_hub import COMMIT, TOKEN, FakeHub, serve, tree
from tests.server.test_hub import HOSTILE
from tests.server.test_library import make

CARD = {
    "id", "object", "created", "owned_by", "root", "path", "loaded", "repo_id", "revision", "quantization",
    "size_bytes", "downloaded_at", "context_length", "trained_length", "requests", "cache",
}  # fmt: skip


@dataclass
class FakeRuntime:
    library: Library
    loaded: dict[str, Any] = field(default_factory=dict)
    is_loading: bool = False
    is_busy: bool = False

    async def load(self, model_id: str) -> Any:
        entry = self.library.find(model_id)
        if entry is None:
            raise ApiError(404, "there is no such model", param="model", code="model_not_found")
        status = SimpleNamespace(running=1, waiting=2, prefix=PrefixUse({"device": 3}, {"new": 1}))
        llm = SimpleNamespace(ctx=4096, config=SimpleNamespace(trained_length=2048))
        model = SimpleNamespace(id=entry.id, path=entry.path, llm=llm, loaded_at=1.0)
        model.service = SimpleNamespace(status=lambda: status)
        self.loaded[entry.id] = model
        return model

    async def unload(self, model_id: str) -> None:
        if self.is_busy:
            raise ApiError(409, "it has requests to answer", code="model_busy")
        del self.loaded[model_id]


@dataclass
class Server:
    """The routes, by a client and by what is behind them."""

    app: FastAPI
    client: TestClient
    hub: FakeHub
    models: Path

    def get(self, path: str, **options: Any) -> Any:
        return self.client.get(path, **options)

    def download(self, repo_id: str = "org/model", **more: Any) -> Any:
        return self.client.post("/models/download", json={"repo_id": repo_id, **more})

    def wait(self, job_id: str, until: Callable[[Any], bool] = lambda job: job["status"] in ENDS) -> Any:
        for _ in range(1000):
            job = self.get(f"/models/download/{job_id}").json()
            if until(job):
                return job
            time.sleep(0.01)
        raise AssertionError(job)


ENDS = ("done", "failed", "cancelled")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    files = {file.name: file.read_bytes() for file in make(tmp_path / "source").iterdir()}
    make(tmp_path / "models" / "own", '{"quantization": {"bits": 4}}')
    (tmp_path / "models" / "link").symlink_to(tmp_path / "source")
    with serve(FakeHub(files)) as hub:
        app = make_app(Settings(models_dir=tmp_path / "models", hub_url=hub.url))
        with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
            yield Server(app, client, hub, tmp_path / "models")
        app.state.downloads.close()
        app.state.body_pool.close()


def make_app(settings: Settings) -> FastAPI:
    app = FastAPI()
    app.state.settings = settings
    app.state.body_pool = FairPool(1, 1, "bodies")
    app.state.library = Library(Path(settings.models_dir))
    app.state.downloads = Downloads(app.state.library, settings.hub_url, settings.hub_hosts)
    app.state.runtime = FakeRuntime(app.state.library)
    add_handlers(app)
    app.include_router(models.router, dependencies=[Depends(need_key)])
    return app


def test_list_and_describe(server: Server) -> None:
    answer = server.get("/models").json()
    assert answer["object"] == "list"
    (card,) = answer["data"]
    assert set(card) == CARD
    assert (card["id"], card["object"], card["owned_by"], card["loaded"]) == ("own", "model", "local", False)
    assert card["quantization"] == {"bits": 4}
    assert card["created"] > 1_600_000_000
    assert server.get("/models/own").json() == card
    missing = server.get("/models/nobody/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
    assert set(missing.json()["error"]) == {"message", "type", "param", "code"}


def test_download(server: Server) -> None:
    answer = server.download(revision=COMMIT)
    assert answer.status_code == 202
    job = answer.json()["job"]
    assert (job["repo_id"], job["revision"], job["object"]) == ("org/model", COMMIT, "model.download")
    job = server.wait(job["id"])
    assert job["status"] == "done"
    assert job["done_bytes"] == job["total_bytes"] == sum(map(len, server.hub.files.values()))
    assert job["files"]["config.json"] == {"done": 2, "total": 2}
    assert server.get("/models/download").json()["data"] == [job]
    for name in ("org/model", "org--model", "org%2Fmodel"):
        card = server.get(f"/models/{name}").json()
        assert (card["id"], card["repo_id"], card["owned_by"]) == ("org--model", "org/model", "org")
    before = tree(server.models)
    again = server.download()
    assert again.status_code == 409
    assert again.json()["error"]["code"] == "model_exists"
    assert tree(server.models) == before


@pytest.mark.parametrize("repo_id", HOSTILE, ids=lambda text: ascii(text)[:20])
def test_hostile_downloads(server: Server, repo_id: str) -> None:
    before = tree(server.models.parent)
    answer = server.download(repo_id)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "repo_id"
    assert tree(server.models.parent) == before
    assert server.hub.seen == []


@pytest.mark.parametrize(
    "body", ["x", [], 5, {}, {"repo_id": 5}, {"repo_id": None}, {"repo_id": "a/b", "x": 1},
             {"repo_id": "a/b", "revision": 5}, {"repo_id": "a/b", "revision": "../x"}, {"repo_id": "a/b", "url": "http://x"}],
    ids=range(10),
)  # fmt: skip
def test_bad_bodies(server: Server, body: Any) -> None:
    assert server.client.post("/models/download", json=body).status_code == 400
    text = server.client.post("/models/download", content=json.dumps(body), headers={"Content-Type": "text/plain"})
    assert text.status_code in (400, 415)
    assert server.hub.seen == []


def test_a_download_that_fails(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    server.hub.status, server.hub.error_code = 401, "GatedRepo"
    job = server.wait(server.download().json()["job"]["id"])
    assert job["status"] == "failed"
    assert "accepted its terms" in job["error"]
    assert TOKEN not in json.dumps(job)
    assert str(server.models) not in json.dumps(job)
    assert TOKEN not in "".join(capfd.readouterr())


def test_events(server: Server) -> None:
    server.hub.pause = 0.1
    job_id = server.download().json()["job"]["id"]
    lines = []
    with server.client.stream("GET", f"/models/download/{job_id}/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = list(response.iter_lines())
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [line for line in lines if line.startswith("event: ")][-1] == "event: model_status"
    assert {event["event"] for event in events[:-1]} == {"download_progress"}
    assert all(event["model"] == "org/model" for event in events)
    assert events[-2]["data"]["model.safetensors"]["done"] == len(server.hub.files["model.safetensors"])
    assert events[-1]["data"] == {"status": "done", "error": None}
    assert server.get("/models/download/dl-unknown/events").status_code == 404


def test_cancel_twice_at_once_and_delete_meanwhile(server: Server) -> None:
    server.hub.pause = 0.3
    job_id = server.download().json()["job"]["id"]
    assert server.download().json()["job"]["id"] == job_id
    for name in ("org/model", "org--model"):
        busy = server.client.delete(f"/models/{name}")
        assert busy.status_code == 409
        assert busy.json()["error"]["code"] == "model_busy"
    cancelled = server.client.delete(f"/models/download/{job_id}")
    assert cancelled.status_code == 200
    assert server.wait(job_id)["status"] == "cancelled"
    server.hub.pause = 0
    again = server.download().json()["job"]["id"]
    assert again != job_id
    assert server.wait(again)["status"] == "done"
    assert server.client.delete("/models/download/dl-unknown").status_code == 404


@pytest.mark.parametrize("hosts", [(), ("files.example",)])
def test_downloads_follow_redirects_to_the_hosts_of_the_settings(
    hosts: tuple[str, ...], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is http://mirror.example, by a proxy, and keeps its weights on another host."""
    hub = server.hub
    hub.redirect = "https://files.example/{name}"
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, hub.url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    place = {"models_dir": tmp_path / "others", "files_dir": tmp_path / "files"}
    downloads = create_app(Settings(hub_url="http://mirror.example", hub_hosts=hosts, **place)).state.downloads
    job = downloads.start("org/model")
    while not job.is_over and not any(seen.path == "files.example:443" for seen in hub.seen):
        time.sleep(0.01)
        job = downloads.get(job.id)
    assert ("not one of its own hosts" in (job.error or "")) == (not hosts)
    assert any(seen.path == "files.example:443" for seen in hub.seen) == bool(hosts)
    downloads.close()


def test_load_and_unload(server: Server) -> None:
    answer = server.client.post("/models/load", json={"model": "own"})
    assert answer.status_code == 200
    card = answer.json()
    assert set(card) == CARD
    assert (card["loaded"], card["context_length"], card["trained_length"]) == (True, 4096, 2048)
    assert card["cache"] == {"hit_rate": 0.75, "tiers": {}}
    assert card["requests"] == {"running": 1, "waiting": 2}
    assert server.get("/models").json()["data"][0]["loaded"]
    loaded = server.client.delete("/models/own")
    assert loaded.status_code == 409
    assert loaded.json()["error"]["code"] == "model_loaded"
    server.app.state.runtime.is_busy = True
    assert server.client.post("/models/unload", json={"model": "own"}).status_code == 409
    server.app.state.runtime.is_busy = False
    answer = server.client.post("/models/unload", json={"model": "own"})
    assert answer.status_code == 200
    assert answer.json()["loaded"] is False
    assert server.client.post("/models/unload", json={"model": "own"}).status_code == 404
    assert server.client.post("/models/load", json={"model": "nothing"}).status_code == 404
    assert server.client.post("/models/load", json={"model": "../source"}).status_code == 404
    assert server.client.post("/models/load", json={}).status_code == 400


def test_delete(server: Server) -> None:
    server.app.state.runtime.is_loading = True
    assert server.client.delete("/models/own").status_code == 409
    server.app.state.runtime.is_loading = False
    answer = server.client.delete("/models/own")
    assert answer.json() == {"id": "own", "object": "model", "deleted": True, "note": None}
    assert not (server.models / "own").exists()
    assert server.client.delete("/models/own").status_code == 404
    assert server.get("/models").json()["data"] == []


def test_a_model_of_other_programs_is_not_deleted(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "cache" / "models--org--shared"
    make(place / "snapshots" / COMMIT)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    before = tree(tmp_path)
    answer = server.client.delete("/models/org/shared")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_elsewhere")
    assert "hf cache rm model/org/shared" in answer.text
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "path", ["..", "%2e%2e", "%2e%2e%2fsource", "a%2Fb", "link", "%2Fetc", "/etc", "own%2F..%2F..%2Fsource", ".partial",
             "own%00", "%5c..%5csource", "..%2f..%2f..%2f..%2ftmp", "x" * 5000],
    ids=range(13),
)  # fmt: skip
def test_hostile_deletes(server: Server, path: str) -> None:
    before = tree(server.models.parent)
    answer = server.client.delete(f"/models/{path}")
    assert answer.status_code in (400, 404, 405)
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert str(server.models.parent) not in answer.text
    assert tree(server.models.parent) == before


def test_models_from_elsewhere_are_only_forgotten(server: Server, tmp_path: Path) -> None:
    outside = make(tmp_path / "else" / "mine")
    server.app.state.library.register(outside)
    assert {card["id"] for card in server.get("/models").json()["data"]} == {"own", "mine"}
    before = tree(tmp_path)
    assert server.client.delete("/models/mine").json()["deleted"] is True
    assert tree(tmp_path) == before
    assert server.get("/models/mine").status_code == 404


def test_keys(tmp_path: Path) -> None:
    make(tmp_path / "models" / "own")
    key, admin = "user-key-of-the-test", "admin-key-of-the-test"
    app = make_app(Settings(models_dir=tmp_path / "models", api_key=key, admin_key=admin))
    as_user, as_admin = ({"Authorization": f"Bearer {each}"} for each in (key, admin))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        assert client.get("/models").status_code == 401
        assert client.get("/models", headers=as_user).json()["data"][0]["path"] == "own"
        assert client.get("/models", headers=as_admin).json()["data"][0]["path"] == str(tmp_path / "models" / "own")
        guarded = [
            ("POST", "/models/download", {"repo_id": "a/b"}), ("GET", "/models/download", None),
            ("GET", "/models/download/x", None), ("GET", "/models/download/x/events", None),
            ("DELETE", "/models/download/x", None), ("POST", "/models/load", {"model": "own"}),
            ("POST", "/models/unload", {"model": "own"}), ("DELETE", "/models/own", None),
        ]  # fmt: skip
        for method, path, body in guarded:
            assert client.request(method, path, json=body).status_code == 401
            assert client.request(method, path, json=body, headers=as_user).status_code == 403
        assert (tmp_path / "models" / "own").exists()
        assert client.delete("/models/own", headers=as_admin).status_code == 200


def test_documented(server: Server) -> None:
    paths = server.app.openapi()["paths"]
    assert set(paths["/models/{model_id}"]["delete"]["responses"]) >= {"200", "401", "403", "404", "409"}
    assert "202" in paths["/models/download"]["post"]["responses"]
    assert "text/event-stream" in paths["/models/download/{job_id}/events"]["get"]["responses"]["200"]["content"]

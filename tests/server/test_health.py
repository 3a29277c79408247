"""Health: up is not enough, the engine must move; and the pages that need no key say nothing."""

import asyncio
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from sala.documents.reader import DocumentSet
from sala.errors import InputError
from sala.options import Sampling
from sala.server import documents
from sala.server.admin import monitoring
from sala.server.admin.monitoring import Metrics
from sala.server.app import create_app
from sala.server.settings import Settings
from sala.text.control import GrammarCompiler, num_compiling
from sala.text.workers import MonitoredPool
from tests.server.conftest import Puppet, Server, wait_for
from tests.server.live import FakeRuntime, make_app


def ask(app: FastAPI) -> dict[str, tuple[int, str]]:
    caller = TestClient(app, base_url="http://localhost")
    answers = {path: caller.get(path) for path in ("/health", "/health/live", "/health/ready")}
    others = {"load"} if app.state.settings.api_key is None else set()
    assert {path: set(answer.json()) - {"status"} for path, answer in answers.items()} == {
        "/health": others, "/health/live": set(), "/health/ready": set(),
    }  # fmt: skip
    assert ("retry-after" in answers["/health"].headers) == (answers["/health"].status_code == 503)
    return {path.rpartition("/")[2]: (answer.status_code, answer.json()["status"]) for path, answer in answers.items()}


@pytest.fixture
def app() -> FastAPI:
    return make_app(Settings(api_key="k"))


def test_ready(app: FastAPI) -> None:
    assert ask(app) == {"health": (200, "ok"), "live": (200, "ok"), "ready": (200, "ok")}


def test_loading(app: FastAPI) -> None:
    app.state.runtime = FakeRuntime({}, is_loading=True)
    assert ask(app) == {"health": (503, "loading"), "live": (200, "ok"), "ready": (503, "loading")}
    app.state.runtime = None
    assert ask(app)["health"] == (503, "loading")


def test_a_second_model_that_loads_disturbs_nobody(app: FastAPI) -> None:
    app.state.runtime.is_loading = True
    assert ask(app)["ready"] == (200, "ok")


def test_no_model() -> None:
    app = make_app(Settings())
    app.state.runtime = FakeRuntime({})
    assert ask(app) == {"health": (200, "idle"), "live": (200, "ok"), "ready": (503, "idle")}
    app.state.settings = Settings(idle_unload_s=60)
    assert ask(app)["ready"] == (200, "idle")


def test_dead_engine(app: FastAPI) -> None:
    app.state.runtime.loaded["tiny"].service.change(is_alive=False)
    assert ask(app) == {"health": (503, "unhealthy"), "live": (200, "ok"), "ready": (503, "unhealthy")}


def test_stuck_engine(app: FastAPI) -> None:
    worker = app.state.runtime.loaded["tiny"].service
    worker.change(heartbeat_s=61.0)
    assert ask(app)["health"] == (200, "ok")  # it has nothing to do
    worker.change(running=1)
    assert ask(app)["health"] == (503, "unhealthy")
    worker.change(heartbeat_s=59.0)
    assert ask(app)["health"] == (200, "ok")
    worker.change(running=0, waiting=1, heartbeat_s=61.0)
    assert ask(app)["health"] == (503, "unhealthy")


def test_what_the_server_is_busy_with_is_for_those_with_a_key(
    app: FastAPI, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, go = MonitoredPool(1, "test"), threading.Event()
    app.state.metrics = Metrics({"test": pool})
    jobs = [pool.submit(go.wait) for _ in range(3)]
    wait_for(lambda: pool.num_waiting == 2)
    caller = TestClient(app, base_url="http://localhost")
    assert caller.get("/health", headers={"authorization": "Bearer wrong"}).json() == {"status": "ok"}
    try:
        with ThreadPoolExecutor(1) as other:
            compiler = GrammarCompiler(tiny / "tokenizer.json", 512, frozenset())
            monkeypatch.setattr(compiler._worker, "ask_all", lambda *_: {"error": str(go.wait())})
            hard = other.submit(compiler.compile, Sampling(regex="(?i)a"))
            wait_for(lambda: num_compiling() == 1)
            load = caller.get("/health", headers={"authorization": "Bearer k"}).json()["load"]
            assert load == {"event_loop_lag_s": 0.0, "jobs_waiting": {"test": 2}, "compilations": 1}
            text = caller.get("/metrics", headers={"authorization": "Bearer k"}).text
            assert 'sala_jobs_waiting{pool="test"} 2.0' in text
            assert "sala_compilations 1.0" in text
            go.set()
            with pytest.raises(InputError, match="not understood"):
                hard.result(10)
    finally:
        go.set()
    assert all(job.result(10) for job in jobs)
    assert num_compiling() == 0
    pool.shutdown()


def test_threads_that_are_stuck(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that wait are no reason to restart the server, unless nothing at all gets on."""
    pool, go = MonitoredPool(1, "test"), threading.Event()
    app.state.metrics = Metrics({"test": pool})
    jobs = [pool.submit(go.wait) for _ in range(2)]
    assert ask(app)["health"] == (200, "ok")
    monkeypatch.setattr(monitoring, "MAX_SILENCE_S", 0.0)
    assert ask(app)["health"] == (503, "unhealthy")
    go.set()
    assert all(job.result(10) for job in jobs)
    assert ask(app)["health"] == (200, "ok")
    pool.shutdown()


def test_a_document_that_is_read_for_ever(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may take as long as the process that reads it is given, and no longer."""
    reader, go = documents.DocumentReader(), threading.Event()
    monkeypatch.setattr(documents, "read_file", lambda *_: (go.wait(20), DocumentSet())[1])
    app.state.metrics = Metrics({"documents": reader})

    async def upload() -> Any:
        return await asyncio.gather(*(reader.read("me", "x.txt", io.BytesIO(b"x")) for _ in range(3)))

    with ThreadPoolExecutor(1) as other:
        try:
            reading = other.submit(asyncio.run, upload())
            wait_for(lambda: reader.num_waiting == 2)
            monkeypatch.setattr(monitoring, "MAX_SILENCE_S", 0.0)
            assert ask(app)["health"] == (200, "ok")
            monkeypatch.setattr(documents, "MAX_S", 0.0)
            assert ask(app)["health"] == (503, "unhealthy")
        finally:
            go.set()
        assert len(reading.result(10)) == 3
    assert ask(app)["health"] == (200, "ok")
    reader.close()


def test_everything_that_jobs_wait_for_is_told(server: Server, puppet: Puppet, monkeypatch: pytest.MonkeyPatch) -> None:
    go, logits = threading.Event(), puppet.logits
    monkeypatch.setattr(puppet, "logits", lambda row: (go.wait(20), logits(row))[1], raising=False)
    client = TestClient(server.app, base_url="http://localhost")

    def waiting(name: str) -> int:
        return int(client.get("/health").json()["load"]["jobs_waiting"][name])

    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    schema = {"name": "x", "schema": {"enum": ["this test alone"]}}
    grammar = {**chat, "response_format": {"type": "json_schema", "json_schema": schema}}
    names = ("encode", "bodies", "threads", "documents", "batches", "responses")
    assert [waiting(name) for name in names] == [0] * 6
    with ThreadPoolExecutor(4) as others:
        with server.llm.tokenizer._template._worker._turn:
            sent = [others.submit(server.post, "/v1/chat/completions", chat) for _ in range(3)]
            wait_for(lambda: (waiting("templates"), waiting("prepare")) == (2, 1))
        with server.llm.inputs._grammars._worker._turn:
            sent.append(others.submit(server.post, "/v1/chat/completions", grammar))
            wait_for(lambda: waiting("grammars") == 1)
        scored = {"prompt": ["one", "two", "three"], "max_tokens": 0, "echo": True, "logprobs": 0}
        sent.append(others.submit(server.post, "/v1/completions", scored))
        wait_for(lambda: waiting("scores") == 2)
        go.set()
        assert [one.result(20).status_code for one in sent] == [200] * 5


def test_draining(app: FastAPI) -> None:
    app.state.is_draining = True
    assert ask(app) == {"health": (503, "draining"), "live": (200, "ok"), "ready": (503, "draining")}


def test_the_reference_page_needs_nothing_from_elsewhere(app: FastAPI) -> None:
    caller = TestClient(app, base_url="http://localhost")
    page = caller.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for text in (page.text, caller.get("/docs/page.js").text, caller.get("/docs/page.css").text):
        assert "http://" not in text
        assert "https://" not in text
        assert "innerHTML" not in text
    assert "<script>" not in page.text
    assert " style=" not in page.text
    assert caller.get("/docs/page.js").headers["content-type"].startswith("text/javascript")


def test_the_schema_needs_the_key(app: FastAPI) -> None:
    caller = TestClient(app, base_url="http://localhost")
    assert caller.get("/openapi.json").status_code == 401
    schema = caller.get("/openapi.json", headers={"X-Api-Key": "k"}).json()
    assert "/health" in schema["paths"]


def test_routes_are_built_before_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI would build those of a router when it is first asked for one, on the event loop."""
    app = create_app(Settings(models_dir=tmp_path))
    monkeypatch.setattr("fastapi.routing.get_dependant", lambda **_: pytest.fail("a route is built"))
    caller = TestClient(app, base_url="http://localhost")
    assert caller.get("/health/live").status_code == 200
    assert caller.get("/v1/nowhere").status_code == 404

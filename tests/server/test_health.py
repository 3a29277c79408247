"""Health: up is not enough, the engine must move; and the pages that need no key say nothing."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from sala.server.settings import Settings
from tests.server.live import FakeRuntime, make_app


def ask(app: FastAPI) -> dict[str, tuple[int, str]]:
    caller = TestClient(app, base_url="http://localhost")
    answers = {path: caller.get(path) for path in ("/health", "/health/live", "/health/ready")}
    assert all(set(answer.json()) == {"status"} for answer in answers.values())
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

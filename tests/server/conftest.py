"""A real server in a thread, with a tiny random model."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI

from sala.protocol import Plan, Result, Row, SampledToken
from sala.server.app import create_app
from sala.server.settings import Settings

END = 259  # the token that ends a turn of the tiny model


@dataclass
class Server:
    app: FastAPI
    uvicorn: uvicorn.Server
    thread: threading.Thread
    url: str = ""

    @property
    def port(self) -> int:
        return self.uvicorn.servers[0].sockets[0].getsockname()[1]

    @property
    def service(self) -> Any:
        runtime = self.app.state.runtime
        return runtime.loaded[runtime.default_id].service

    @property
    def llm(self) -> Any:
        runtime = self.app.state.runtime
        return runtime.loaded[runtime.default_id].llm

    def client(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=30, trust_env=False, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def wait_idle(self, seconds: float = 5.0) -> None:
        wait_for(lambda: self.service.status().running + self.service.status().waiting == 0, seconds)

    def stop(self) -> None:
        self.uvicorn.should_exit = True
        self.thread.join(20)


def wait_for(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def start(model: Path, room: Path, **settings: Any) -> Server:
    values = {"model": str(model), "models_dir": room, "device": "cpu", "ctx": 2048, "drain_s": 1.0, **settings}
    values.setdefault("files_dir", room.with_name(f"{room.name}-files"))
    app = create_app(Settings(**values))
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", http="h11")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    out = Server(app, server, thread)
    wait_for(lambda: server.started, 20)
    out.url = f"http://127.0.0.1:{out.port}"
    wait_for(lambda: app.state.runtime.loaded, 20)
    return out


@pytest.fixture(scope="session")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests that do it no harm."""
    out = start(tiny, tmp_path_factory.mktemp("room"))
    yield out
    out.stop()


@pytest.fixture
def make_server(tiny: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Servers with settings of their own."""
    servers: list[Server] = []

    def make(model: Path = tiny, **settings: Any) -> Server:
        servers.append(start(model, tmp_path / "models", **settings))
        return servers[-1]

    yield make
    for one in servers:
        one.stop()


class Puppet:
    """Stands before an executor: says what it is told to, takes the time it is told to, fails when it is told to."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.capacity = executor.capacity
        self.script: list[int] | None = None  # tokens of every answer
        self.delay_s = 0.0
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def launch(self, plan: Plan) -> Callable[[], Result]:
        result = self.run(plan)
        return lambda: result

    def run(self, plan: Plan) -> Result:
        time.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        result = self._executor.run(plan)
        if self.script is None:
            return result
        return Result(tuple(self._speak(row, sampled) for row, sampled in zip(plan.rows, result.sampled, strict=True)))

    def _speak(self, row: Row, sampled: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
        at = row.start + len(row.tokens) - row.prompt_len
        if not sampled or self.script is None or at >= len(self.script):
            return sampled
        return (SampledToken(self.script[at], -0.5, sampled[0].top_logprobs),)


@pytest.fixture
def puppet(server: Server) -> Iterator[Puppet]:
    """The shared server's model, on strings for the time of a test."""
    engine = server.llm.engine
    puppet = Puppet(engine._executor)
    engine._executor = puppet
    yield puppet
    puppet.delay_s, puppet.error = 0.0, None
    server.wait_idle(10)
    engine._executor = puppet._executor
    engine.forget()


@pytest.fixture
def say(server: Server, puppet: Puppet) -> Callable[[str], None]:
    """Makes the model answer every prompt with this text."""

    def script(text: str) -> None:
        puppet.script = [*text.encode(), END]

    return script


def join_calls(events: list[Any]) -> list[dict[str, Any]]:
    """The tool calls of a streamed chat, put together as clients do: by index."""
    calls: list[dict[str, Any]] = []
    for delta in [choice["delta"] for event in events if event != "[DONE]" for choice in event["choices"]]:
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                assert (piece["index"], piece["function"]["arguments"]) == (len(calls), "")
                calls.append({**piece, "function": {**piece["function"]}})
            else:
                assert piece.keys() == {"index", "function"}
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return calls


def read_events(text: str) -> list[Any]:
    """The data of server-sent events, [DONE] as a word, comments left out."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]

"""A small application with our guards around it, on a real port, and raw sockets to treat it badly."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import StreamingResponse

from sala.engine.service import ServiceStatus
from sala.server.admin import monitoring
from sala.server.app import add_guards, add_handlers
from sala.server.http import page
from sala.server.http.security import need_admin_key, need_key
from sala.server.serving import Server, open_socket
from sala.server.settings import Settings

IDLE = ServiceStatus(0, 0, 0, 10, 0, 4, 0, 0, heartbeat_s=0.1, is_alive=True)


@dataclass
class FakeService:
    now: ServiceStatus = IDLE

    def status(self) -> ServiceStatus:
        return self.now

    def change(self, **values: Any) -> None:
        self.now = replace(self.now, **values)


@dataclass
class FakeModel:
    service: FakeService = field(default_factory=FakeService)


@dataclass
class FakeRuntime:
    loaded: dict[str, FakeModel] = field(default_factory=lambda: {"tiny": FakeModel()})
    is_loading: bool = False
    has_failed: bool = False
    default_id: str = "tiny"


def make_app(settings: Settings) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.state.settings = settings
    app.state.runtime = FakeRuntime()
    app.state.metrics = monitoring.Metrics()
    app.state.num_streams = 0
    add_handlers(app)
    add_guards(app, settings)
    app.include_router(monitoring.health_router)
    app.include_router(page.router)
    app.include_router(monitoring.metrics_router, dependencies=[Depends(need_key)])
    app.include_router(_routes(), dependencies=[Depends(need_key)])
    return app


def _routes() -> APIRouter:
    router = APIRouter()

    @router.post("/echo")
    async def echo(request: Request) -> dict[str, int]:
        return {"size": len(await request.body())}

    @router.post("/deaf")
    async def deaf() -> dict[str, bool]:
        return {"heard": False}

    @router.get("/slow/{seconds}")
    async def slow(seconds: float) -> dict[str, float]:
        await asyncio.sleep(seconds)
        return {"slept": seconds}

    @router.get("/flood")
    async def flood(request: Request) -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            request.app.state.num_streams += 1
            try:
                for _ in range(100_000):
                    yield b"x" * 10_000
            finally:
                request.app.state.num_streams -= 1

        return StreamingResponse(pieces())

    @router.delete("/thing", dependencies=[Depends(need_admin_key)])
    async def delete_thing() -> dict[str, bool]:
        return {"deleted": True}

    @router.get("/broken")
    async def broken() -> None:
        raise RuntimeError("secret of /etc/sala at 0x7f00")

    return router


@dataclass
class Live:
    port: int
    server: Server
    app: FastAPI

    @contextmanager
    def connect(self) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as one:
            yield one

    def talk(self, data: bytes) -> "Answer":
        """Send these bytes, and read one answer."""
        with self.connect() as one:
            one.sendall(data)
            return read_answer(one)

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> "Answer":
        return self.talk(request(method, path, body, **headers))


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error = json.loads(self.body)["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        return error


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """`x_api_key="k"` becomes a header."""
    named = {"host": "localhost", **{name.replace("_", "-"): value for name, value in headers.items()}}
    if body:
        named["content-length"] = str(len(body))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def read_answer(one: socket.socket) -> Answer:
    """One answer, by its Content-Length."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = one.recv(65536)
        if not piece:
            raise ConnectionError(f"closed after {data!r}")
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        body += one.recv(65536)
    return Answer(int(first.split()[1]), headers, body)


def is_closed(one: socket.socket, within: float) -> bool:
    """Whether the other side ends the connection in that time."""
    one.settimeout(within)
    try:
        while one.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


@contextmanager
def serving(settings: Settings, app: FastAPI | None = None) -> Iterator[Live]:
    app = app or make_app(settings)
    listener = open_socket(settings.host, settings.port)
    server = Server(app, settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield Live(listener.getsockname()[1], server, app)
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def wait_until(is_so: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)

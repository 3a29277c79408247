"""Runs the server: where it listens, what signals do to it, and how it ends.

The first SIGTERM or SIGINT lets running requests end, for `drain_s` at most; new ones get 503. The second ends it
at once. The process fails if it could not start or if the engine has died, so that a supervisor can start another.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from sala.errors import SalaError
from sala.server.http.connection import Connection
from sala.server.http.errors import ApiError
from sala.server.http.limits import MAX_HEADER_BYTES
from sala.server.settings import Settings, check_listening

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

Note = Callable[[str], None]
BACKLOG = 512
KEEP_ALIVE_S = 30
DEAD_S = 2.0  # a worker that is being replaced is gone for a moment; one that stays away has died
GRACE_S = 10.0  # for closing what is open, after the requests have ended
QUICK_S = 0.5

log = logging.getLogger("sala.server")


def serve(settings: Settings, note: Note) -> int:
    """Serve until a signal comes; returns the exit code."""
    check_listening(settings)
    prepare_models_dir(settings.models_dir)
    listener = open_socket(settings.host, settings.port)
    with contextlib.closing(listener):
        set_up_log(settings.log_level)
        from sala.server.app import create_app

        app = create_app(settings)
        server = make_server(app, settings, partial(greet, settings, listener, note))
        return run(server, listener)


def run(server: "Server", listener: socket.socket) -> int:
    server.is_process = True
    try:
        server.run(sockets=[listener])
    except SystemExit:  # uvicorn's way to say that the application did not start
        server.exit_code = 1
    if server.front.failure is not None:
        raise as_user_error(server.front.failure)
    if server.force_exit:  # whatever still runs in other threads is not waited for
        sys.stderr.flush()
        os._exit(server.exit_code)
    return server.exit_code


def prepare_models_dir(path: Path) -> None:
    """It must be a directory that can be read; downloads need more, and say so when they come."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        next(path.iterdir(), None)
    except OSError as error:
        reason = "is a file" if isinstance(error, FileExistsError | NotADirectoryError) else str(error.strerror).lower()
        raise SalaError(
            f"the models directory {path} cannot be used: {reason}", "name another with --models-dir"
        ) from None


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens already, so that nobody else can take the port."""
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise SalaError(f"{host} is no known address", "give one of this machine with --host") from None
    family, kind, protocol, _, address = min(places, key=lambda place: place[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name != "nt":  # there it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _explain(error, host, port) from None
    return listener


def _explain(error: OSError, host: str, port: int) -> SalaError:
    if error.errno == errno.EADDRINUSE:
        return SalaError(f"port {port} of {host} is in use", "choose another with --port, or end what uses it")
    if error.errno == errno.EADDRNOTAVAIL:
        return SalaError(f"{host} is no address of this machine", "give one that is with --host")
    if error.errno == errno.EACCES:
        return SalaError(f"port {port} may not be used without more rights", "choose one above 1023 with --port")
    return SalaError(f"{host}:{port} cannot be listened on: {error.strerror}", "choose others with --host and --port")


def greet(settings: Settings, listener: socket.socket, note: Note) -> None:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    url = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
    reach = "" if settings.is_local else f" (and at every address of {host})" if host != shown else ""
    note(f"sala listens at {url}/v1{reach}; web page: {url}/; documentation: {url}/docs")
    if not settings.is_local and settings.api_key is None:
        note("warning: there is no key; whoever can reach this machine can use the server")


def make_server(app: Any, settings: Settings, on_start: Callable[[], None] = lambda: None) -> "Server":
    front = Front(app)
    config = uvicorn.Config(
        cast(Any, front),
        http=cast(Any, partial(Connection, settings=settings)),
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        backlog=BACKLOG,
    )
    return Server(config, front, settings, on_start)


class Front:
    """The application as uvicorn sees it: counts what runs, turns new requests away while the server is ending."""

    def __init__(self, app: Any) -> None:
        self.app: ASGIApp = app
        self.state = app.state
        self.num_running = 0
        self.is_draining = False
        self.failure: BaseException | None = None

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await self._start(scope, receive, send)

    async def _start(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """The application's life. If it cannot begin, the reason is kept and the trace is not shown."""

        async def without_trace(message: "Message") -> None:
            known = isinstance(sys.exception(), SalaError | MemoryError | asyncio.CancelledError)
            await send({**message, "message": ""} if known and "message" in message else message)

        try:
            await self.app(scope, receive, without_trace)
        except Exception as error:
            self.failure = error
            raise

    async def _answer(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        is_probe = scope["path"].startswith("/health")
        if self.is_draining and not is_probe:
            headers = {"retry-after": "5", "connection": "close"}
            ending = ApiError(503, "the server is shutting down; try again soon", code="shutting_down", headers=headers)
            await ending.response()(scope, receive, send)
            return
        self.num_running += not is_probe
        try:
            await Exchange(scope, receive, send).run(self.app)
        finally:
            self.num_running -= not is_probe


class Exchange:
    """One request and its answer, watched for the log."""

    def __init__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self.began = time.monotonic()
        self.status = 0
        self.is_read = False

    async def run(self, app: "ASGIApp") -> None:
        try:
            await app(self.scope, self.receive, self.send)
        finally:
            # The path as it was sent is plain ASCII; what follows the question mark may be private.
            path = (self.scope.get("raw_path") or b"").decode("ascii", "replace")[:200]
            client = (self.scope.get("client") or ("-",))[0]
            taken = (time.monotonic() - self.began) * 1000
            log.info("%s %s %s %s %.0f ms", client, self.scope["method"], path, self.status or "gone", taken)

    async def receive(self) -> "Message":
        self.is_read = True
        return await self._receive()

    async def send(self, message: "Message") -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if not self.is_read and any(name == b"expect" for name, _ in self.scope["headers"]):
                # The client waits with its body, and nobody asked for it: what comes next cannot be known.
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await self._send(message)


class Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, front: Front, settings: Settings, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self.front = front
        self.settings = settings
        self.exit_code = 0
        self.is_process = False  # whether the process is ours, to be ended if all else fails
        self._on_start = on_start
        self._num_signals = 0
        self._deadline: float | None = None
        self._dead_since: float | None = None
        self._has_loaded = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals == 1 and self.started:
            self.drain()
        elif self._num_signals == 2 and not self.should_exit:
            self.force_exit = self.should_exit = True
        else:  # nothing is lost: what is on disk is whole at any time
            os._exit(self.exit_code)

    def drain(self) -> None:
        """Let what runs come to its end, and take nothing new."""
        if self.front.is_draining:
            return
        self.front.is_draining = True
        self.front.state.is_draining = True
        self._deadline = time.monotonic() + self.settings.drain_s
        if self.is_process:
            self._end_at_last()

    def _end_at_last(self) -> None:
        """See to it that the process ends, even if something hangs. A model that is just loading is not waited for."""
        is_loading = is_loading_only(self.front)
        last = threading.Timer(QUICK_S if is_loading else self.settings.drain_s + GRACE_S, os._exit, (self.exit_code,))
        last.daemon = True
        last.start()

    async def on_tick(self, counter: int) -> bool:
        is_over = await super().on_tick(counter)
        if counter % 10 == 0:
            self._check_engine()
        if self._deadline is not None and not self.should_exit:
            if time.monotonic() >= self._deadline:
                self._cut_off()
            self.should_exit = not self.front.num_running or time.monotonic() >= self._deadline
        return is_over or self.should_exit

    def _cut_off(self) -> None:
        """Time is up: the requests see that their clients are gone, and end."""
        if self.front.num_running:
            log.warning("%d requests did not end in time", self.front.num_running)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def _check_engine(self) -> None:
        if self.front.is_draining:
            return
        self._check_first_load()
        if not has_died(self.front.state):
            self._dead_since = None
            return
        self._dead_since = self._dead_since or time.monotonic()
        if time.monotonic() - self._dead_since >= DEAD_S:
            self._fail("the engine has died; the server ends")

    def _check_first_load(self) -> None:
        """A model that was named and cannot be loaded is a reason to end. Without a name, another can be fetched."""
        runtime = getattr(self.front.state, "runtime", None)
        if self._has_loaded or runtime is None or runtime.is_loading:
            return
        self._has_loaded = True
        if not runtime.loaded and self.settings.model is not None:
            self._fail(f"the model was not loaded; if it is too large see: sala estimate {self.settings.model}")
        elif not runtime.loaded:
            log.warning("no model is loaded; fetch one on the web page, or name one with --model")

    def _fail(self, reason: str) -> None:
        log.error(reason)
        self.exit_code = 1
        self.drain()


def is_loading_only(front: Front) -> bool:
    runtime = getattr(front.state, "runtime", None)
    return runtime is not None and runtime.is_loading and not front.num_running


def has_died(state: Any) -> bool:
    runtime = getattr(state, "runtime", None)
    loaded = list(runtime.loaded.values()) if runtime is not None else []
    return any(not each.worker.status().is_alive for each in loaded)


def as_user_error(error: BaseException) -> Exception:
    if isinstance(error, SalaError):
        return error
    if isinstance(error, MemoryError):
        return SalaError("the model does not fit into memory", "see what would: sala estimate")
    return SalaError(f"the server did not start ({type(error).__name__})", "the lines above say why")


class OneLine(logging.Formatter):
    """Control characters are spelt out, so that nobody can steer a terminal or forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return super().formatMessage(record).replace("\n", "\\n")


def set_up_log(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    handler.addFilter(lambda record: record.msg != "Application startup failed. Exiting.")  # the reason follows
    ours = logging.getLevelNamesMapping()[level.upper()]
    for name, threshold in (("sala", ours), ("uvicorn", ours if level == "debug" else max(ours, logging.WARNING))):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(threshold)

"""Run the server: the listening socket, signals, draining and the exit code.

After the first SIGTERM or SIGINT running requests may finish, for `drain_s` seconds at most; new ones get 503. A
second signal ends the process at once. The exit code is 1 if the server could not start or if the engine has died, so
that a supervisor restarts it.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn

from sala.errors import SalaError
from sala.server.http.connection import NUM_EXTRA, Connection, Front, Turns
from sala.server.http.keys import KeyFile
from sala.server.http.security import MAX_HEADER_BYTES, limit_arenas, trim_memory
from sala.server.settings import Settings, check_listening

Note = Callable[[str], None]
BACKLOG = 512
KEEP_ALIVE_S = 30
DEAD_S = 2.0  # an engine that is being replaced is absent for a moment; after this time it counts as dead
GRACE_S = 10.0  # for closing connections and models, after the requests have finished
QUICK_S = 0.5
OWN_FILES = 192  # that the server may have open besides connections: weights, caches, pipes
TICKS = 2  # of uvicorn, ten a second, between two looks at the engines
COLLECT_S = 5.0  # between two collections of garbage, at least
YOUNG = 10_000  # new objects between two collections among the youngest
NEVER = 1 << 30
IDLE_S = 1.0  # without requests, after which freed memory is returned
QUIET_S = 10.0  # between messages about connections that could not be accepted

log = logging.getLogger("sala.server")


def serve(settings: Settings, note: Note) -> int:
    """Serve until a signal arrives; return the exit code."""
    limit_arenas()
    check_listening(settings)
    prepare_models_dir(settings.models_dir, note)
    if settings.keys_file is not None:
        KeyFile(settings.keys_file).read()
    settings = fit_descriptors(settings, note)
    listener = open_socket(settings.host, settings.port)
    with contextlib.closing(listener):
        set_up_log(settings.log_level)
        from sala.server.app import create_app

        server = Server(create_app(settings), settings, partial(greet, settings, listener, note))
        server.is_process = True
        try:
            server.run(sockets=[listener])
        except SystemExit:  # uvicorn exits like this when the application did not start
            server.exit_code = 1
    if server.front.failure is not None:
        raise as_user_error(server.front.failure)
    if server.force_exit:  # don't wait for other threads
        sys.stderr.flush()
        os._exit(server.exit_code)
    return server.exit_code


def prepare_models_dir(path: Path, note: Note = lambda _: None) -> None:
    """Check that it is a readable directory; say so if nothing can be downloaded into it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        next(path.iterdir(), None)
    except OSError as error:
        reason = "is a file" if isinstance(error, FileExistsError | NotADirectoryError) else str(error.strerror).lower()
        problem = f"the models directory {path} cannot be used: {reason}"
        raise SalaError(problem, "choose another with --models-dir") from None
    if not os.access(path, os.W_OK):
        note(f"warning: {path} cannot be written, so nothing can be downloaded; choose another with --models-dir")


def fit_descriptors(settings: Settings, note: Note) -> Settings:
    """Raise the limit of open files as far as allowed; return the settings with as many connections as it permits."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return settings
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.max_connections + NUM_EXTRA + OWN_FILES
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return settings
    allowed = max(1, soft - NUM_EXTRA - OWN_FILES)
    note(f"warning: {soft} files may be open at a time, so max_connections is {allowed}; raise it with: ulimit -n")
    return replace(settings, max_connections=allowed)


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that already listens, so that no other process can take the port."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise SalaError(f"{host} is not a known address", "give an address of this machine with --host") from None
    family, kind, protocol, _, address = min(addresses, key=lambda found: found[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name != "nt":  # on Windows it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        known = {
            errno.EADDRINUSE: (
                f"port {port} of {host} is in use",
                "choose another with --port, or stop the process that uses it",
            ),
            errno.EADDRNOTAVAIL: (f"{host} is not an address of this machine", "give one that is with --host"),
            errno.EACCES: (f"port {port} needs more privileges", "choose one above 1023 with --port"),
        }
        other = f"cannot listen on {host}:{port}: {error.strerror}", "choose others with --host and --port"
        raise SalaError(*known.get(error.errno or 0, other)) from None
    return listener


def greet(settings: Settings, listener: socket.socket, note: Note) -> None:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    url = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
    reach = "" if settings.is_local else f" (and at every address of {host})" if host != shown else ""
    note(f"sala listens at {url}/v1{reach}; web page: {url}/; documentation: {url}/docs")
    if not settings.is_local and not settings.needs_key:
        note("warning: no API key is set; anyone who can reach this machine can use the server")


class Server(uvicorn.Server):
    def __init__(self, app: Any, settings: Settings, on_start: Callable[[], None] = lambda: None) -> None:
        self.front = Front(app)
        config = uvicorn.Config(
            cast(Any, self.front),
            http=cast(Any, partial(Connection, settings=settings, turns=Turns())),
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
        super().__init__(config)
        self.settings = settings
        self.exit_code = 0
        self.is_process = False  # whether to end the whole process if the server does not stop
        self._on_start = on_start
        self._num_signals = 0
        self._deadline: float | None = None
        self._dead_since: float | None = None
        self._has_loaded = False
        self._quiet_until = 0.0
        self._garbage = GarbageCollector()
        self._memory = IdleMemory()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        await super().startup(sockets)
        self._on_start()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log that connections cannot be accepted now and then; asyncio would do so hundreds of times a second."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            loop.default_exception_handler(context)
        elif loop.time() >= self._quiet_until:
            self._quiet_until = loop.time() + QUIET_S
            log.error("a connection could not be accepted: %s", error.strerror)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals == 1 and self.started:
            self.drain()
        elif self._num_signals == 2 and not self.should_exit:
            self.force_exit = self.should_exit = True
        else:  # files on disk are consistent at any time, so nothing is lost
            os._exit(self.exit_code)

    def drain(self) -> None:
        """Let running requests finish, and refuse new ones."""
        if self.front.state.is_draining:
            return
        self.front.state.is_draining = True
        self._deadline = time.monotonic() + self.settings.drain_s
        if not self.is_process:
            return
        # make sure that the process ends even if something hangs; don't wait for a model that is still loading
        is_loading = self.front.state.runtime.is_loading and not self.front.num_running
        last = threading.Timer(QUICK_S if is_loading else self.settings.drain_s + GRACE_S, os._exit, (self.exit_code,))
        last.daemon = True
        last.start()

    async def on_tick(self, counter: int) -> bool:
        is_over = await super().on_tick(counter)
        if counter % TICKS == 0:
            self._check_engine()
            if self.is_process:
                self._garbage.tick(self.front.state.runtime)
                self._memory.tick(self.front.state.runtime, self.front.state.metrics.statistics.num_accepted)
        if self._deadline is not None and not self.should_exit:
            if time.monotonic() >= self._deadline:
                self._cut_off()
            self.should_exit = not self.front.num_running or time.monotonic() >= self._deadline
        return is_over or self.should_exit

    def _cut_off(self) -> None:
        """Disconnect the clients of requests that did not finish in time, which cancels these requests."""
        if self.front.num_running:
            log.warning("%d requests did not finish in time", self.front.num_running)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def _check_engine(self) -> None:
        if self.front.state.is_draining:
            return
        self._check_first_load()
        if not has_died(self.front.state):
            self._dead_since = None
            return
        self._dead_since = self._dead_since or time.monotonic()
        if time.monotonic() - self._dead_since >= DEAD_S:
            self._fail("the engine has died; stopping the server")

    def _check_first_load(self) -> None:
        """Stop if the default model cannot be loaded. If none was named and none is there, one can be downloaded."""
        runtime = self.front.state.runtime
        if self._has_loaded or runtime.is_loading:
            return
        self._has_loaded = True
        if not runtime.loaded and (self.settings.model is not None or runtime.has_failed):
            model = self.settings.model or runtime.default_id
            self._fail(f"the model could not be loaded; if it is too large, see: sala estimate {model}")
        elif not runtime.loaded:
            log.warning("no model is loaded; download one on the web page, or name one with --model")

    def _fail(self, reason: str) -> None:
        log.error(reason)
        self.exit_code = 1
        self.drain()


class GarbageCollector:
    """Collects cyclic garbage when it disturbs least: the interpreter does nothing else meanwhile.

    A full collection goes through every object; by default one begins whenever there are a quarter more. Objects of
    libraries and models are exempt here: there are half a million of them. The rest is collected so rarely that it
    takes a hundredth of the time.
    """

    def __init__(self) -> None:
        self._known: set[int] | None = None  # the models that were loaded at the last collection
        self._due = 0.0
        self._running: asyncio.Future[None] | None = None

    def tick(self, runtime: Any) -> None:
        """Collect in a thread, if it is time."""
        known = {id(model) for model in list(runtime.loaded.values())}
        is_new = known != self._known and not runtime.is_loading
        if (self._running is None or self._running.done()) and (is_new or time.monotonic() >= self._due):
            if is_new:
                self._known = known
            self._running = asyncio.get_running_loop().run_in_executor(None, self._collect, is_new)

    def _collect(self, is_new: bool) -> None:
        began = time.thread_time()
        if is_new:
            gc.set_threshold(YOUNG, 10, NEVER)
            gc.unfreeze()
        gc.collect()
        if is_new:
            gc.freeze()
        self._due = time.monotonic() + max(COLLECT_S, 100 * (time.thread_time() - began))


class IdleMemory:
    """Returns freed memory to the system once all requests have ended: glibc would keep what they took."""

    def __init__(self) -> None:
        self._num_returned = 0  # of requests, by the time memory was last returned
        self._idle_since: float | None = None
        self._running: asyncio.Future[None] | None = None

    def tick(self, runtime: Any, num_accepted: int) -> None:
        """Return it in a thread, if there have been requests and none has come for a moment."""
        is_busy = any(model.service.num_requests for model in list(runtime.loaded.values()))
        if is_busy or num_accepted == self._num_returned:
            self._idle_since = None
            return
        self._idle_since = self._idle_since or time.monotonic()
        if time.monotonic() - self._idle_since >= IDLE_S:
            self._num_returned = num_accepted
            self._running = asyncio.get_running_loop().run_in_executor(None, trim_memory)


def has_died(state: Any) -> bool:
    return any(not each.service.status().is_alive for each in list(state.runtime.loaded.values()))


def as_user_error(error: BaseException) -> Exception:
    if isinstance(error, SalaError):
        return error
    if isinstance(error, MemoryError):
        return SalaError("the model does not fit into memory", "see what does: sala estimate")
    return SalaError(f"the server did not start ({type(error).__name__})", "the lines above say why")


class OneLine(logging.Formatter):
    """Escapes control characters, so that a client can neither control the terminal nor forge a log line."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return super().formatMessage(record).replace("\n", "\\n")


def set_up_log(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    handler.addFilter(lambda record: record.msg != "Application startup failed. Exiting.")  # our own message follows
    # asyncio's warning when several events of a stream are written before the loss of its client is noticed
    logging.getLogger("asyncio").addFilter(lambda record: record.msg != "socket.send() raised exception.")
    ours = logging.getLevelNamesMapping()[level.upper()]
    for name, threshold in (("sala", ours), ("uvicorn", ours if level == "debug" else max(ours, logging.WARNING))):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(threshold)

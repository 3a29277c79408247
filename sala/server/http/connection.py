"""Client connections and their requests: deadlines, draining, the log of requests.

`Connection` is uvicorn's HTTP protocol with the deadlines that it lacks. `Front` wraps the application.

A header must arrive in time, a body must keep arriving, and the client must keep reading the response. A client that
misses a deadline gets an error where possible and is disconnected. When the limit of connections is reached, the one
that has been idle for longest is closed.
"""

import asyncio
import http
import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from sala.errors import SalaError
from sala.server.http.errors import ApiError
from sala.server.http.sse import dump
from sala.server.settings import Settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("sala.server")
LINGER_S = 2.0  # how long a refused client may keep sending, so that it gets to read the error
MIN_BODY_BYTES = 1024  # a body that delivers less within the deadline counts as stalled


class Connection(H11Protocol):
    def __init__(self, *arguments: Any, settings: Settings, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.settings = settings
        self.since = self.loop.time()
        self.num_received = 0
        self.is_refused = False
        self._wait: str | None = None
        self._wait_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    # Called by the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        has_room = len(self.connections) < self.settings.max_connections or self._make_room()
        super().connection_made(transport)
        if has_room:
            self._watch()
        else:
            busy = "there are too many connections; try again in a moment"
            self.refuse(ApiError(503, busy, code="too_many_connections", headers={"retry-after": "5"}))

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            return
        self.num_received += len(data)
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self.settings.body_deadline_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    # Called by uvicorn.

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        # h11's exception, which is being handled by our caller, knows a better status than 400
        status = getattr(sys.exception(), "error_status_hint", 400)
        self.refuse(ApiError(status, "this is not a valid HTTP request", code="bad_request"))

    def shutdown(self) -> None:
        if self.is_refused:
            self.transport.abort()
        else:
            super().shutdown()

    def _unsupported_upgrade_warning(self) -> None:
        self.logger.debug("ignored a request to upgrade the protocol")

    # Deadlines.

    @property
    def is_idle(self) -> bool:
        """Return whether no request is being read or answered."""
        return self.is_refused or self.cycle is None or self.cycle.response_complete

    def refuse(self, error: ApiError) -> None:
        """Send an error and close the connection, leaving the client some time to read it."""
        is_answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        self.is_refused = True
        self._cancel_timers()
        self._unset_keepalive_if_required()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if is_answering or self.transport.is_closing():
            self.transport.abort()
            return
        is_asked = self.cycle is not None and not self.cycle.response_complete
        self.transport.write(_compose(error, self.cycle.scope["path"] if is_asked else ""))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._wait_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _make_room(self) -> bool:
        """Close the connection that has been idle for longest; return whether there was one."""
        idle = [each for each in self.connections if isinstance(each, Connection) and each.is_idle]
        if not idle:
            return False
        oldest = min(idle, key=lambda each: each.since)
        self.connections.discard(oldest)
        oldest.transport.abort()
        return True

    def _watch(self) -> None:
        """Set the deadline for what the connection is waiting for now."""
        if self.is_refused:
            return
        wait = None if self.transport.is_closing() else self._find_wait()
        if wait == self._wait:
            return
        self._wait = wait
        if self._wait_timer is not None:
            self._wait_timer.cancel()
            self._wait_timer = None
        if wait is not None:
            self._start(*self._deadline(wait))

    def _find_wait(self) -> str | None:
        theirs, ours = self.conn.their_state, self.conn.our_state
        if theirs is h11.SEND_BODY:
            return "rest" if ours in (h11.DONE, h11.MUST_CLOSE) else "body"
        if theirs is h11.IDLE and self.timeout_keep_alive_task is None:
            return "header"
        return None

    def _deadline(self, wait: str) -> tuple[float, Callable[[], None]]:
        return {
            "header": (self.settings.header_deadline_s, self._end_header),
            "body": (self.settings.body_deadline_s, self._end_body),
            "rest": (LINGER_S, self.transport.abort),  # the rest of a body whose response has been sent already
        }[wait]

    def _start(self, seconds: float, act: Callable[[], None]) -> None:
        self.num_received = 0
        self._wait_timer = self.loop.call_later(seconds, act)

    def _end_header(self) -> None:
        self.refuse(ApiError(408, "the request header did not arrive in time", code="request_timeout"))

    def _end_body(self) -> None:
        if (
            self.flow.read_paused or self.num_received >= MIN_BODY_BYTES
        ):  # data still arrives, or it is our side that has paused
            self._start(*self._deadline("body"))
            return
        self.refuse(ApiError(408, "the request body stopped arriving", code="request_timeout"))

    def _cancel_timers(self) -> None:
        for timer in (self._wait_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._wait_timer = self._stall_timer = None


def _compose(error: ApiError, path: str) -> bytes:
    """Return an error as bytes of HTTP."""
    body = dump(error.envelope(path))
    lines = [f"HTTP/1.1 {error.status_code} {http.HTTPStatus(error.status_code).phrase}"]
    lines += [f"{name}: {value}" for name, value in (error.headers or {}).items()]
    lines += ["content-type: application/json", f"content-length: {len(body)}", "connection: close", "", ""]
    return "\r\n".join(lines).encode() + body


class Front:
    """The application as uvicorn sees it: counts running requests, and refuses new ones while the server drains."""

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
        """Run the lifespan. If the application cannot start, keep the reason and don't log the stack trace."""

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
    """One request and its response, observed for the log."""

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
            # the raw path is plain ASCII; the query is left out, since it may be private
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
                # the client holds its body back and we never asked for it: the next bytes could be anything
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await self._send(message)

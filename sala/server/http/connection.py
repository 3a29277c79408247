"""Client connections and their requests: deadlines, draining, the log of requests.

`Connection` is uvicorn's HTTP protocol with the deadlines that it lacks. `Front` wraps the application.

A header must arrive in time, a body must keep arriving, and the client must keep reading the response. A client that
misses a deadline gets an error where possible and is disconnected.

When the limit of connections is reached, room is made: a client that has stopped reading or sends its body slowly is
disconnected first, then an idle one, last an idle one that has shown a key. If there is none of these, or one address
has more than its share, a few more connections are accepted, but only for a request with a key or for /health; not
where one of several keys has half of all connections already.

Requests that a client sends without waiting for responses (pipelining), and bodies in many small chunks, take turns
with those of other connections. What is left of such a body when the response has been sent is discarded.
"""

import asyncio
import http
import logging
import math
import re
import sys
import time
from collections import deque
from typing import Any

import h11
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from sala.errors import SalaError
from sala.server.http.errors import ApiError
from sala.server.http.keys import Key
from sala.server.http.security import MAX_HEADER_BYTES, MAX_HEADERS, find_key, header_too_large
from sala.server.settings import Settings, is_loopback

log = logging.getLogger("sala.server")
LINGER_S = 2.0  # how long a refused client may keep sending, so that it gets to read the error
MIN_BODY_BYTES = 1024  # a body that delivers less within the deadline counts as stalled
STALLED_S = 5.0  # a client that has not read for so long, or sends less than `MIN_BODY_BYTES` a second, makes room
NUM_EXTRA = 16  # connections beyond the limit, for requests with a key and for /health
EXTRA_HEADER_S = 2.0  # in which such a request must arrive
NUM_EVENTS = 256  # at a time, in about a millisecond
PIECE = 4096  # bytes given to h11 at a time, unless they are known to be one event
MAX_TRAILER_BYTES = 8192  # lines after a body in chunks, or the line before a chunk
BLANK_LINE = re.compile(rb"\n\r?\n")


class Parser(h11.Connection):
    """What clients send, as events of HTTP: a few at a time, however small they are.

    h11 makes an event of each chunk of a body and parses each line of a header, even if they have a byte each. What one
    read of a socket brings could keep the event loop busy for a fifth of a second. So a limited number of events is
    returned until `allow` is called again, and h11 gets no more than it can parse in a moment.
    """

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self.is_cut = False  # it had to stop, though there is more to parse
        self._num_allowed = NUM_EVENTS
        self._unread = bytearray()  # what h11 has not been given yet
        self._num_expected = 0  # bytes of the body that are still to come, if its length was declared

    @property
    def has_more(self) -> bool:
        """Return whether there is something that has been received and not parsed."""
        return bool(self._unread or self.trailing_data[0])

    def allow(self) -> None:
        """Let the next events be returned."""
        self.is_cut = False
        self._num_allowed = NUM_EVENTS

    def discard(self) -> None:
        """Forget what has been received and not parsed."""
        self._unread.clear()

    def receive_data(self, data: bytes) -> None:
        self._unread += data

    def next_event(self) -> Any:
        """Return the next event; NEED_DATA also if no more are allowed. Raises h11.RemoteProtocolError."""
        if not self._num_allowed:
            self.is_cut = True
            return h11.NEED_DATA
        self._num_allowed -= 1
        event = self._parse()
        while event is h11.NEED_DATA and self._unread:
            size = max(PIECE, self._num_expected)
            super().receive_data(bytes(self._unread[:size]))
            del self._unread[:size]
            event = self._parse()
        if isinstance(event, h11.Request):
            headers = dict(event.headers)
            is_chunked = b"transfer-encoding" in headers
            self._num_expected = 0 if is_chunked else int(headers.get(b"content-length", 0))
        elif isinstance(event, h11.Data):
            self._num_expected = max(0, self._num_expected - len(event.data))
        return event

    def _parse(self) -> Any:
        """Return the next event in what h11 has been given; check before and after what it takes its time for."""
        if self.their_state is h11.IDLE:
            self._check_header()
        event = super().next_event()
        is_partial = event is h11.NEED_DATA and self.their_state is h11.SEND_BODY
        if is_partial and len(self.trailing_data[0]) > MAX_TRAILER_BYTES:
            raise h11.RemoteProtocolError("too many bytes between two chunks, or after the last")
        return event

    def _check_header(self) -> None:
        """Raise h11.RemoteProtocolError if a header, complete or not, has too many lines to be parsed."""
        data = self.trailing_data[0]
        blank = BLANK_LINE.search(data)
        if data.count(b"\n", 0, blank.start() if blank else len(data)) > MAX_HEADERS + 1:
            raise h11.RemoteProtocolError("too many lines in a header", error_status_hint=431)


class Turns:
    """Lets one connection go on in each round of the event loop: with its next request, or with the next chunks.

    Otherwise the clients that send much at once would fill every round, and all others would wait for them.
    """

    def __init__(self) -> None:
        self._waiting: deque[Connection] = deque()

    def add(self, connection: "Connection") -> None:
        self._waiting.append(connection)
        if len(self._waiting) == 1:
            connection.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        connection = self._waiting.popleft()
        if self._waiting:
            connection.loop.call_soon(self._go_on)
        connection.go_on()


class Flow(FlowControl):
    """Lets nobody resume reading while the connection waits for its turn: what it has read is to be parsed first."""

    is_held = False

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class Connection(H11Protocol):
    conn: Parser
    flow: Flow

    def __init__(self, *arguments: Any, settings: Settings, turns: Turns, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn = Parser(MAX_HEADER_BYTES)
        self.settings = settings
        self.turns = turns
        self.since = self.loop.time()
        self.num_received = 0
        self.is_refused = False
        self.is_extra = False  # beyond the limit of connections
        self.key: Key | None = None  # the last valid one that a request has shown
        self._has_responded = False  # just now
        self._is_queued = False  # the next request, or more of a body, is here and waits for its turn
        self._wait: str | None = None
        self._wait_since = 0.0
        self._paused_at: float | None = None  # since then the client has not read what was sent
        self._timers: dict[str, asyncio.TimerHandle] = {}  # wait: for the client to send; stall: for it to read

    # Called by the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        has_room = len(self.connections) < self.settings.max_connections or self._make_room()
        super().connection_made(transport)
        self.flow = Flow(transport)
        self.is_extra = not has_room or self._is_over_share()
        if not self.is_extra or self._find_extra_place():
            self._watch()
        else:
            self._refuse_as_busy()

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            return
        self.num_received += len(data)
        super().data_received(data)
        self._watch()

    def handle_events(self) -> None:
        if self._is_queued:
            return
        if self._has_responded and self.conn.has_more:
            self._queue()
            return
        self.conn.allow()
        super().handle_events()
        if self.conn.is_cut and not self.is_refused:
            if self._find_wait() == "rest":
                self._linger()
            else:
                self._queue()
        if self.is_refused or self.is_idle:
            return
        self.key = find_key(Request(dict(self.cycle.scope)), self.settings) or self.key
        if self.is_extra and not self.cycle.scope["path"].startswith("/health") and not self._is_key_within_share():
            self._refuse_as_busy()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel("wait", "stall")
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._paused_at = self.loop.time()
        if "stall" not in self._timers:
            self._timers["stall"] = self.loop.call_later(self.settings.body_deadline_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._paused_at = None
        self._cancel("stall")

    # Called by uvicorn.

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        self._has_responded = True
        super().on_response_complete()  # which handles the next request if it is here
        self._has_responded = False
        if self._is_queued and self._find_wait() == "rest":
            self._linger()
        self._watch()

    def go_on(self) -> None:
        """Handle the next request, or more of a body, which is here already: its turn has come."""
        self._is_queued = self.flow.is_held = False
        if not (self.is_refused or self.transport.is_closing()):
            self.flow.resume_reading()
            self.handle_events()
            self._watch()

    def send_400_response(self, msg: str) -> None:
        # h11's exception, which is being handled by our caller, knows a better status than 400
        status = getattr(sys.exception(), "error_status_hint", 400)
        invalid = ApiError(status, "this is not a valid HTTP request", code="bad_request")
        self.refuse(header_too_large() if status == 431 else invalid)

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
        """Return whether no request is being read or answered, and none is here that waits for its turn."""
        return self.is_refused or self.cycle is None or (self.cycle.response_complete and not self._is_queued)

    def refuse(self, error: ApiError) -> None:
        """Send an error and close the connection, leaving the client some time to read it."""
        is_asked = self.cycle is not None and not self.cycle.response_complete
        self.is_refused = True
        if is_asked:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.is_closing() or (is_asked and self.cycle.response_started):
            self.transport.abort()
            return
        headers, body = error.compose(self.cycle.scope["path"] if is_asked else "")
        lines = [f"HTTP/1.1 {error.status_code} {http.HTTPStatus(error.status_code).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "connection: close", "", ""]).encode() + body)
        self._linger()

    def _linger(self) -> None:
        """End the connection after a response; until the client has had time to read it, discard what it sends."""
        self.is_refused = True
        self._cancel("wait", "stall")
        self._unset_keepalive_if_required()
        self.conn.discard()
        try:
            self.transport.write_eof()
        except OSError:  # the client is gone
            self.transport.abort()
            return
        self.flow.is_held = False
        self.flow.resume_reading()
        self._timers["wait"] = self.loop.call_later(LINGER_S, self.transport.abort)

    def _queue(self) -> None:
        """Wait for a turn to handle what has been received, and receive nothing meanwhile."""
        self._is_queued = True
        self.flow.pause_reading()
        self.flow.is_held = True
        self.turns.add(self)

    @property
    def is_stalled(self) -> bool:
        """Return whether the client has stopped reading, or sends its body slowly."""
        now = self.loop.time()
        if self._paused_at is not None:
            return now - self._paused_at >= STALLED_S
        waited = now - self._wait_since
        is_slow = waited >= STALLED_S and self.num_received < waited * MIN_BODY_BYTES
        return self._wait == "body" and is_slow and not self.flow.read_paused

    def _make_room(self) -> bool:
        """Disconnect the client that is missed least; return whether there was one."""
        others = [each for each in self.connections if isinstance(each, Connection)]
        loose = [each for each in others if each.is_stalled or each.is_idle]
        if not loose:
            return False
        self._drop(min(loose, key=lambda each: (not each.is_stalled, each.key is not None, each.since)))
        return True

    def _is_over_share(self) -> bool:
        """Return whether the client's address has more than its share of connections that have shown no key."""
        address = self.client[0] if self.client else ""
        share = self.settings.max_per_address
        if not share:
            share = self.settings.max_connections if is_loopback(address) else self.settings.max_connections // 2 or 1
        keyless = [each for each in self.connections if isinstance(each, Connection) and each.key is None]
        return sum(each.client is not None and each.client[0] == address for each in keyless) > share

    def _is_key_within_share(self) -> bool:
        """Return whether the client has a key which, if it is one of several, has less than half of all connections."""
        if self.key is None or self.settings.keys_file is None:
            return self.key is not None
        own = [each for each in self.connections if isinstance(each, Connection) and each.key == self.key]
        return len(own) - 1 < max(1, self.settings.max_connections // 2)

    def _find_extra_place(self) -> bool:
        """Return whether one more connection beyond the limit may send a request; the oldest such one may go for it."""
        extra = [each for each in self.connections if isinstance(each, Connection) and each.is_extra]
        waiting = [each for each in extra if each is not self and (each.is_idle or each.is_stalled)]
        if len(extra) > NUM_EXTRA and waiting:
            self._drop(min(waiting, key=lambda each: each.since))
            return True
        return len(extra) <= NUM_EXTRA

    def _drop(self, connection: "Connection") -> None:
        self.connections.discard(connection)
        connection.transport.abort()

    def _refuse_as_busy(self) -> None:
        busy = "there are too many connections; try again in a moment"
        self.refuse(ApiError(503, busy, code="too_many_connections", retry_s=5))

    def _watch(self) -> None:
        """Set the deadline for what the connection is waiting for now."""
        if self.is_refused:
            return
        wait = None if self.transport.is_closing() else self._find_wait()
        if wait == self._wait:
            return
        self._wait = wait
        self._cancel("wait")
        if wait is not None:
            self._start_timer()

    def _find_wait(self) -> str | None:
        theirs, ours = self.conn.their_state, self.conn.our_state
        if theirs is h11.SEND_BODY:
            return "rest" if ours in (h11.DONE, h11.MUST_CLOSE) else "body"
        if theirs is h11.IDLE and self.timeout_keep_alive_task is None:
            return "header"
        return None

    def _start_timer(self) -> None:
        self.num_received, self._wait_since = 0, self.loop.time()
        seconds = {
            "header": min(self.settings.header_deadline_s, EXTRA_HEADER_S if self.is_extra else math.inf),
            "body": self.settings.body_deadline_s,
            "rest": LINGER_S,  # of a body whose response has been sent already
        }[self._wait or "rest"]
        self._timers["wait"] = self.loop.call_later(seconds, self._end_wait)

    def _end_wait(self) -> None:
        if self._wait == "rest":
            self.transport.abort()
        elif self._wait == "header" and self.is_extra:
            self._refuse_as_busy()
        elif self._wait == "header":
            self.refuse(ApiError(408, "the request header did not arrive in time", code="request_timeout"))
        elif self.flow.read_paused or self.num_received >= MIN_BODY_BYTES:  # we have paused, or data still arrives
            self._start_timer()
        else:
            self.refuse(ApiError(408, "the request body stopped arriving", code="request_timeout"))

    def _cancel(self, *names: str) -> None:
        for name in names:
            if name in self._timers:
                self._timers.pop(name).cancel()


class Front:
    """The application as uvicorn sees it: counts and logs requests, and refuses new ones while the server drains."""

    def __init__(self, app: Any) -> None:
        self.app: ASGIApp = app
        self.state = app.state
        self.state.is_draining = False
        self.num_running = 0
        self.failure: BaseException | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._start(scope, receive, send)
            return
        is_probe = scope["path"].startswith("/health")
        if self.state.is_draining and not is_probe:
            ending, close = "the server is shutting down; try again soon", {"connection": "close"}
            await ApiError(503, ending, code="shutting_down", headers=close, retry_s=5)(scope, receive, send)
            return
        self.num_running += not is_probe
        try:
            await self._answer(scope, receive, send)
        finally:
            self.num_running -= not is_probe

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the lifespan. If the application cannot start, keep the reason and don't log the stack trace."""

        async def without_trace(message: Message) -> None:
            known = isinstance(sys.exception(), SalaError | MemoryError | asyncio.CancelledError)
            await send({**message, "message": ""} if known and "message" in message else message)

        try:
            await self.app(scope, receive, without_trace)
        except Exception as error:
            self.failure = error
            raise

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and log it."""
        began = time.monotonic()
        status: int | str = "gone"
        is_read = False

        async def read() -> Message:
            nonlocal is_read
            is_read = True
            return await receive()

        async def write(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if not is_read and any(name == b"expect" for name, _ in scope["headers"]):
                    # the client holds its body back and we never asked for it: the next bytes could be anything
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        try:
            await self.app(scope, read, write)
        finally:
            # the raw path is plain ASCII; the query is left out, since it may be private
            path = (scope.get("raw_path") or b"").decode("ascii", "replace")[:200]
            client = (scope.get("client") or ("-",))[0]
            log.info("%s %s %s %s %.0f ms", client, scope["method"], path, status, (time.monotonic() - began) * 1000)

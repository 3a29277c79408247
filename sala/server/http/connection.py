"""One client connection: HTTP as uvicorn speaks it, with the deadlines that it lacks.

A header must arrive in time, a body must keep coming, an answer must keep being read. Whoever does not hold to that is
told so where possible, and cut off. When all connections are taken, one that does nothing makes room.
"""

import asyncio
import http
import sys
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from sala.server.http.errors import ApiError, dump
from sala.server.settings import Settings

LINGER_S = 2.0  # how long a client that was refused may go on sending, so that it can read why
MIN_BODY_BYTES = 1024  # a body that brings less in its time is as good as idle


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

    # What the transport tells us.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        has_room = len(self.connections) < self.settings.max_connections or self._make_room()
        super().connection_made(transport)
        if has_room:
            self._watch()
        else:
            busy = "too many connections; try again in a moment"
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

    # What uvicorn tells us.

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        # h11 knows better than 400 what is wrong; its error is being handled where this is called
        status = getattr(sys.exception(), "error_status_hint", 400)
        self.refuse(ApiError(status, "this is no valid HTTP request", code="bad_request"))

    def shutdown(self) -> None:
        if self.is_refused:
            self.transport.abort()
        else:
            super().shutdown()

    def _unsupported_upgrade_warning(self) -> None:
        self.logger.debug("a request to upgrade the protocol was passed over")

    # What we add.

    @property
    def is_idle(self) -> bool:
        """Whether no request is being read or answered."""
        return self.is_refused or self.cycle is None or self.cycle.response_complete

    def refuse(self, error: ApiError) -> None:
        """Say why, and end the connection. The client gets some time to hear it."""
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
        """Close the connection that has been idle for longest, if there is one."""
        idle = [each for each in self.connections if isinstance(each, Connection) and each.is_idle]
        if not idle:
            return False
        oldest = min(idle, key=lambda each: each.since)
        self.connections.discard(oldest)
        oldest.transport.abort()
        return True

    def _watch(self) -> None:
        """Set the deadline for what we wait for now."""
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
            "rest": (LINGER_S, self.transport.abort),  # of a body that nobody wants: the answer is out already
        }[wait]

    def _start(self, seconds: float, act: Callable[[], None]) -> None:
        self.num_received = 0
        self._wait_timer = self.loop.call_later(seconds, act)

    def _end_header(self) -> None:
        self.refuse(ApiError(408, "the header of the request did not arrive in time", code="request_timeout"))

    def _end_body(self) -> None:
        if self.flow.read_paused or self.num_received >= MIN_BODY_BYTES:  # it moves, or it is we who are slow
            self._start(*self._deadline("body"))
            return
        self.refuse(ApiError(408, "the body of the request did not keep coming", code="request_timeout"))

    def _cancel_timers(self) -> None:
        for timer in (self._wait_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._wait_timer = self._stall_timer = None


def _compose(error: ApiError, path: str) -> bytes:
    """An answer as it goes over the wire."""
    body = dump(error.envelope(path))
    lines = [f"HTTP/1.1 {error.status_code} {http.HTTPStatus(error.status_code).phrase}"]
    lines += [f"{name}: {value}" for name, value in (error.headers or {}).items()]
    lines += ["content-type: application/json", f"content-length: {len(body)}", "connection: close", "", ""]
    return "\r\n".join(lines).encode() + body

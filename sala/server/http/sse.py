"""Write JSON and server-sent events, and notice when the client has disconnected."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def dump(value: Any) -> bytes:
    """Return compact JSON in ASCII, so that strings with lone surrogates can be sent too."""
    return json.dumps(value, separators=(",", ":")).encode()


def encode(data: Any) -> bytes:
    """Return one unnamed event."""
    return b"data: " + dump(data) + b"\n\n"


def encode_named(event: Mapping[str, Any]) -> bytes:
    """Return one event whose name is its `type`."""
    return f"event: {event['type']}\n".encode() + encode(event)


class EventStream(Response):
    """Send events until they end, the client disconnects or `is_given_up` is set; then call `close` in any case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], is_given_up: asyncio.Event, close: Callable[[], None]) -> None:
        super().__init__(None, 200, {"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._is_given_up = is_given_up
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_first(self._write(send), wait_for_disconnect(receive), self._is_given_up.wait())
        except OSError:  # the connection was lost while we were writing
            return
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def run_first(*works: Coroutine[Any, Any, Any]) -> None:
    """Run all coroutines until one ends, and cancel the others. Raises what the first coroutine raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not tasks[0].cancelled():
        tasks[0].result()


async def wait_for_disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def until_gone(request: Request, work: Coroutine[Any, Any, T], undo: Callable[[T], None] | None = None) -> T:
    """Return the result of `work`; raise ClientDisconnect if the client leaves first.

    `undo` releases a result that cannot be delivered because this coroutine was cancelled.
    """
    task = asyncio.create_task(work)
    listener = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, listener}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    except asyncio.CancelledError:
        if undo is not None and task.done() and not task.cancelled() and task.exception() is None:
            undo(task.result())
        raise
    finally:
        for one in (listener, task):
            one.cancel()
        await asyncio.gather(listener, task, return_exceptions=True)

"""Server-sent events: how they are written, and what happens when nobody reads them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sala.server.http.errors import dump

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def encode(data: Any) -> bytes:
    return b"data: " + dump(data) + b"\n\n"


class EventStream(Response):
    """Sends events until they end, the client leaves or `is_given_up` is set; `close` is called in any case."""

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
        except OSError:  # the connection is gone: so be it
            return
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def run_first(*works: Coroutine[Any, Any, Any]) -> None:
    """Run all until one of them ends; the others are stopped. Raises what the first raised."""
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
    """The result of `work`, unless the client leaves before. `undo` is for a result that nobody will get."""
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

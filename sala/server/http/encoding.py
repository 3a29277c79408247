"""Large answers: made and encoded in a pool, where they take turns, and sent in blocks: nothing waits for them."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sala.server.http.body import pieces
from sala.text.workers import MonitoredPool

BLOCK = 1 << 18  # bytes that are encoded, or sent, before others have their turn
NUM_ENCODERS = 2


async def encode(pool: MonitoredPool, make: Callable[[], Any]) -> list[bytes]:
    """Make a value and encode it, both in the pool; return the JSON in blocks. Others get their turn between these."""

    def encoded() -> Iterator[bytes]:
        yield from pieces(make())

    left, blocks, is_over = encoded(), [], False
    while not is_over:
        block, is_over = await pool.run(_take_block, left)
        blocks.append(block)
    return blocks


def _take_block(left: Iterator[bytes]) -> tuple[bytes, bool]:
    """Return the next pieces, and whether they are the last."""
    taken, size = [], 0
    for piece in left:
        taken.append(piece)
        size += len(piece)
        if size >= BLOCK:
            return b"".join(taken), False
    return b"".join(taken), True


class BlocksResponse(Response):
    """JSON in blocks, which are sent one by one: to send a large body at once would take the event loop long."""

    media_type = "application/json"

    def __init__(self, blocks: Sequence[bytes], headers: dict[str, str] | None = None) -> None:
        length = {"content-length": str(sum(map(len, blocks)))}
        super().__init__(headers={**(headers or {}), **length})
        self._left = deque(blocks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while self._left:
            block = self._left.popleft()
            await send({"type": "http.response.body", "body": block, "more_body": bool(self._left)})
            await asyncio.sleep(0)


def split(data: bytes) -> Iterator[bytes]:
    """Yield bytes in blocks of a size that is sent quickly."""
    for at in range(0, len(data), BLOCK):
        yield data[at : at + BLOCK]

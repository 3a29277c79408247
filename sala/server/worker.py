"""The server's view of a model: its engine service, with the server's limits and log."""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from sala.engine.loop import Observer
from sala.engine.requests import Submission
from sala.engine.service import ServiceStatus, Stream
from sala.llm import LLM

MAX_PENDING = 1 << 20  # bytes of an answer that wait for a slow reader
SCORE_CHUNK = 256  # tokens scored between two steps of the other requests
T = TypeVar("T")


class Worker:
    """Runs one model for many clients: `open` a stream, read it to its end, and `cancel` it in any case."""

    def __init__(self, llm: LLM, max_queue: int = 64, observer: Observer | None = None) -> None:
        self._llm = llm
        self.service = llm.service
        self.service.max_queue = max_queue
        self.service.observe(observer, logging.getLogger("sala.server"))
        self.service.start()

    @property
    def num_requests(self) -> int:
        """Requests that wait or run, or whose answers are still being sent."""
        return self.service.num_requests

    def status(self) -> ServiceStatus:
        return self.service.status()

    async def open(self, prepare: Callable[[LLM], Submission]) -> Stream:
        """Queue a request. `prepare` runs in the thread pool; what it raises is raised here."""
        return await self.service.open(lambda: prepare(self._llm), MAX_PENDING)

    async def call(self, work: Callable[[LLM], T]) -> T:
        """Run something short that does not need the engine, such as encoding, in the thread pool."""
        return await self.service.call(work, self._llm)

    def cancel(self, stream: Stream) -> None:
        """Release a stream that is no longer read."""
        stream.close()

    async def close(self, drain_s: float = 0.0) -> None:
        """Take no more requests, give the running ones `drain_s` to end, then free the model."""
        await asyncio.to_thread(self._llm.close, drain_s)

"""Responses in the background: those that are under way, and the events of those that are streamed.

The events of a streamed response are kept, encoded, so that a client that lost its connection can replay and follow
them. All of them together have a limit; above it, those of the response that began first are dropped.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

from sala.engine.service import Stream
from sala.server.api.answers import TURN, Chunk, explain
from sala.server.api.records import ItemList
from sala.server.api.responses import ResponseReply
from sala.server.api.store import ResponseStore
from sala.server.http.body import dump
from sala.server.http.encoding import split
from sala.server.http.errors import ApiError
from sala.server.http.security import HeldBytes
from sala.server.settings import Settings
from sala.text.workers import MonitoredPool

OVERHEAD = 64  # bytes of an event beyond its text


class Events:
    """The events of one response, by their sequence numbers. Used on the event loop only."""

    def __init__(self, reply: ResponseReply) -> None:
        self._reply = reply
        self._events: list[bytes] | None = []  # None: dropped
        self._changed = asyncio.Event()
        self._is_over = False
        self._num_bytes = 0

    async def append(self, chunk: Chunk, pool: MonitoredPool) -> int:
        """Add an event and return how many bytes it takes."""
        if self._events is None:
            return 0
        event = b"".join(await self._reply.encode(chunk, pool))
        if self._events is None:  # dropped meanwhile
            return 0
        self._events.append(event)
        self._num_bytes += len(event) + OVERHEAD
        self._notify()
        return len(event) + OVERHEAD

    def end(self) -> None:
        self._is_over = True
        self._notify()

    def drop(self) -> int:
        """Forget all events and return how many bytes they took."""
        freed, self._num_bytes, self._events = self._num_bytes, 0, None
        self._notify()
        return freed

    async def follow(self, start: int, ping_s: float) -> AsyncIterator[bytes]:
        """Yield the events from a number on, with those to come, and pings; at last an error if they are dropped."""
        at = start
        while self._events is not None:
            if at < len(self._events):
                for block in split(self._events[at]):
                    yield block
                at += 1
                if at % TURN == 0:
                    await asyncio.sleep(0)
            elif self._is_over:
                return
            else:
                try:
                    await asyncio.wait_for(self._changed.wait(), ping_s)
                except TimeoutError:
                    yield self._reply.ping
        message = "the events of this response are not kept any more; get the response without stream"
        error = {"type": "error", "code": "events_dropped", "message": message, "param": None, "sequence_number": at}
        yield self._reply.event_head(error) + dump(error) + b"\n\n"

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(eq=False)
class BackgroundJob:
    """A response that is being generated in the background; with `events` if it is streamed.

    `held` are the bytes of its request. They count until it has ended.
    """

    owner: str
    reply: ResponseReply
    stream: Stream
    items: ItemList
    held: HeldBytes
    events: Events | None = None
    task: "asyncio.Task[None] | None" = None
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        if self.reply.body.stream:
            self.events = Events(self.reply)

    @property
    def state(self) -> dict[str, Any]:
        return self.reply.snapshot("in_progress" if self.stream.handle.is_started else "queued")


@dataclass(eq=False)
class Responses:
    """What the server knows of responses: those that are stored, those that are under way, and events."""

    store: ResponseStore
    max_event_bytes: int
    max_logs: int
    pool: MonitoredPool
    jobs: dict[str, BackgroundJob] = field(default_factory=dict)
    logs: OrderedDict[tuple[str, str], Events] = field(default_factory=OrderedDict)  # by owner and id
    num_event_bytes: int = 0

    @classmethod
    def open(cls, settings: Settings, pool: MonitoredPool) -> "Responses":
        """`pool` is where answers are encoded."""
        limit, count = settings.max_response_bytes, settings.max_responses
        return cls(ResponseStore(settings.response_store, limit, count), limit, count, pool)

    def find_job(self, owner: str, response_id: str) -> BackgroundJob | None:
        job = self.jobs.get(response_id)
        return job if job is not None and job.owner == owner else None

    def find_events(self, owner: str, response_id: str) -> Events | None:
        return self.logs.get((owner, response_id))

    def start(self, job: BackgroundJob) -> None:
        self.jobs[job.reply.id] = job
        if job.events is not None:
            self.logs[job.owner, job.reply.id] = job.events
        job.task = asyncio.create_task(self._run(job))
        job.task.add_done_callback(lambda _: job.held.release())

    async def cancel(self, job: BackgroundJob) -> None:
        job.is_cancelled = True
        job.stream.close()
        if job.task is not None:
            await asyncio.wait([job.task])

    def forget(self, owner: str, response_id: str) -> None:
        """Drop the events of a response, if there are any."""
        events = self.logs.pop((owner, response_id), None)
        if events is not None:
            self.num_event_bytes -= events.drop()

    async def close(self) -> None:
        """End what is under way, and wait until all is stored."""
        for job in list(self.jobs.values()):
            await self.cancel(job)
        await asyncio.to_thread(self.store.close)

    async def _run(self, job: BackgroundJob) -> None:
        """Read a stream to its end; the reply stores the answer."""
        try:
            if job.events is None:
                await job.reply.collect(job.stream, self.pool)
                await self.pool.run(job.reply.whole)
            else:
                await self._record(job, job.events)
        except Exception as error:
            await self._fail(job, explain(error, job.reply.fields))
        finally:
            job.stream.close()
            self.jobs.pop(job.reply.id, None)
            if job.events is not None:
                job.events.end()

    async def _record(self, job: BackgroundJob, events: Events) -> None:
        await self._add(events, job.reply.opening())
        async for item in job.stream:
            await job.reply.receive(item, self.pool)
            await self._add(events, job.reply.chunks(item))
            await asyncio.sleep(0)
        await self._add(events, await self.pool.run(lambda: [*job.reply.closing()]))

    async def _fail(self, job: BackgroundJob, error: ApiError) -> None:
        """Store a response that failed or was cancelled. The events of a cancelled one just end."""
        reply = job.reply
        if not job.is_cancelled and job.events is not None:
            await self._add(job.events, [reply.failed(error)])
        if reply.keep is not None:
            kept = reply.snapshot("cancelled") if job.is_cancelled else reply.failure(error)
            await self.pool.run(reply.keep, kept)

    async def _add(self, events: Events, chunks: Iterable[Chunk]) -> None:
        """Add events, and make room for them."""
        for chunk in chunks:
            self.num_event_bytes += await events.append(chunk, self.pool)
        while len(self.logs) > self.max_logs or self.num_event_bytes > self.max_event_bytes:
            self.num_event_bytes -= self.logs.popitem(last=False)[1].drop()

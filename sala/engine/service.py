"""The engine service: one thread owns the engine; requests go in, streams of events come out.

Nothing else steps the engine. `LLM`, `AsyncLLM`, the server, batch, evaluation and benchmarks all submit to a service.

    submission = inputs.submit(Call(None, sampling, prompt="Hello"))  # engine.requests: checks and encodes
    with service.submit(submission) as stream:                        # queues it; from any thread
        for item in stream: ...                                       # or: async for item in stream
    stream = await service.open(prepare)                              # `prepare() -> Submission` runs in a thread pool

**A stream** yields `Event`s (a piece of answer `index`; the last event of each answer carries its `completion`), and on
request `PromptProgress` and `PromptScores`. It ends when all answers are complete, or raises what the request failed
with: the error of this request alone, or EngineClosed, EngineDead, SlowReader. `read(timeout)` and `aread(timeout)`
return the next item, None at the end, and raise TimeoutError. One reader per stream. `close()` must be called when the
stream is no longer read, also at its end (`with` does): it cancels what is left of the request.

**Delivery** happens once per step, not per token; a reader that is behind is not woken again. Answers are computed
whether or not they are read. A stream opened with `max_pending` bytes is cancelled when more than that is unread
(`overflowed` is set, reading raises SlowReader); the other streams are unaffected.

**Admission**: with `max_queue`, a request of a client for whom that many answers wait raises QueueFull; what others
wait for does not count. Requests are counted (`num_requests`) from acceptance until their stream is closed. They are
prepared in threads that clients take in turn.

**The engine thread** starts with the first request (or `start()`), does all work on the device (steps, scoring,
`execute`), and ends when the service is closed or garbage-collected; at interpreter exit it is stopped after its step.
A failing step ends only the request that caused it; if the device is lost (`engine.probe()` raises), or on an error
outside of requests, the engine is dead: every open stream and every later request raises EngineDead.

**Hooks**: `observer` counts requests (any thread; cheap), `log` receives the errors of failed requests, `on_step` is
called on the engine thread after each step. Set them with `observe` before the first request.
"""

import asyncio
import atexit
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

from sala.engine.engine import Engine
from sala.engine.loop import EngineLoop, EngineTask, RequestHandle, RequestStatistics
from sala.engine.requests import Client, Submission
from sala.engine.sessions import TierUse
from sala.engine.stream import WAIT_S, Completion, Event, Inbox, StreamItem, call_soon, weigh
from sala.errors import EngineClosed, EngineDead, QueueFull, ShareFull, SlowReader
from sala.text.workers import FairPool

CLOSE_S = 60.0  # longest wait for the step in progress when a service is closed
EXIT_S = 10.0  # the same when the interpreter exits
NUM_PREPARERS = 4
MAX_PREPARERS = 2  # threads that prepare requests of one client at a time
T = TypeVar("T")
K = TypeVar("K")
Keyed = tuple[K, int, Completion | Exception]  # key of a submission, index of the answer, what became of it
_running: "weakref.WeakSet[EngineService]" = weakref.WeakSet()


@dataclass(frozen=True)
class PrefixUse:
    """Tokens of prompts found in the cache by tier, the others by the reason why not, and how full each tier is."""

    hit: Mapping[str, int] = field(default_factory=dict)
    missed: Mapping[str, int] = field(default_factory=dict)
    num_evicted: int = 0
    tiers: Mapping[str, TierUse] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float | None:
        found = sum(self.hit.values())
        return found / total if (total := found + sum(self.missed.values())) else None


@dataclass(frozen=True)
class ServiceStatus:
    waiting: int
    running: int
    pages_used: int
    num_pages: int
    slots_used: int
    num_slots: int
    num_snapshots: int
    num_preemptions: int
    heartbeat_s: float  # seconds since the engine thread last went round its loop
    is_alive: bool
    prefix: PrefixUse = PrefixUse()
    preparing: int = 0
    preparing_s: float = 0.0  # how long the oldest request has been prepared; its wait for a thread does not count
    answers_waiting: int = 0
    answers_running: int = 0


class Stream:
    """The answers to one request. See the module's docstring."""

    def __init__(
        self,
        service: "EngineService",
        max_pending: int | None = None,
        event_loop: asyncio.AbstractEventLoop | None = None,
        is_background: bool = False,
    ) -> None:
        self._service = service
        self._max_pending = max_pending
        self._event_loop = event_loop
        self._inbox: Inbox[StreamItem] = Inbox()
        self._num_in = self._num_out = 0  # bytes, written by the engine thread and by the reader
        self._error: BaseException | None = None
        self._is_over = False
        self.overflowed = asyncio.Event()  # set on the event loop that opened the stream
        self.handle = RequestHandle(self._push, is_background)

    def read(self, timeout: float | None = None) -> StreamItem | None:
        """Return the next item; None at the end. Raises what the request failed with, and TimeoutError."""
        self._inbox.wait(self._is_ready, timeout)
        return self._take()

    async def aread(self, timeout: float | None = None) -> StreamItem | None:
        """Like `read`, without blocking the event loop."""
        await self._inbox.await_(self._is_ready, timeout)
        return self._take()

    def __iter__(self) -> Iterator[StreamItem]:
        while (item := self.read()) is not None:
            yield item

    async def __aiter__(self) -> AsyncIterator[StreamItem]:
        while (item := await self.aread()) is not None:
            yield item

    def close(self, wait: bool = False) -> None:
        """Cancel what is left of the request. With `wait`, return only when the engine has dropped it."""
        self._is_over, self._error = True, None  # the error's traceback refers to this stream
        self._inbox.notify()
        self._service.release(self.handle, wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(wait=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _is_ready(self) -> bool:
        return len(self._inbox) > 0 or self._is_over

    def _take(self) -> StreamItem | None:
        item = self._inbox.take()
        if item is not None:
            self._num_out += weigh(item)
        elif self._error is not None:
            raise self._error
        return item

    def _push(self, items: Sequence[StreamItem], is_over: bool, error: BaseException | None) -> None:
        """Add items; called on the engine thread."""
        if self._is_over:
            return
        self._inbox.put(*items)
        self._num_in += sum(weigh(item) for item in items)
        if self._max_pending is not None and self._num_in - self._num_out > self._max_pending:
            self._inbox.clear()
            self.handle.is_cancelled = True
            error = SlowReader()
            if self._event_loop is not None:
                call_soon(self._event_loop, self.overflowed.set)
        self._error = error
        self._is_over = is_over or error is not None
        if self._is_over:
            self._inbox.notify()


class EngineService:
    """Runs one engine for any number of readers. See the module's docstring."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.max_queue: int | None = None
        self._loop = EngineLoop(engine)
        self._handles: set[RequestHandle] = set()  # from acceptance until the reader has closed its stream
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pool = FairPool(NUM_PREPARERS, MAX_PREPARERS, "sala-prepare")
        self._is_closing = False

    def __reduce__(self) -> Any:
        raise TypeError("a loaded model cannot be pickled; load it in the process that uses it")

    def observe(
        self,
        observer: RequestStatistics | None = None,
        log: logging.Logger | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> None:
        """Set the hooks; see the module's docstring."""
        self._loop.observer, self._loop.log, self._loop.on_step = observer, log, on_step

    def limit_time(self, seconds: float) -> None:
        """End requests after this many seconds: answers are cut, missing scores are an error. 0: never."""
        self._loop.max_request_s = seconds

    def start(self) -> None:
        """Start the engine thread, if it does not run yet."""
        with self._lock:
            if self._thread is None:
                self._thread = self._loop.start()
                _running.add(self)
                atexit.unregister(_stop_all)
                atexit.register(_stop_all)  # the last one to be registered is called first

    @property
    def num_requests(self) -> int:
        """How many requests have been accepted and not been closed by their readers."""
        return len(self._handles)

    @property
    def num_background(self) -> int:
        """How many of them are background requests."""
        return sum(handle.is_background for handle in list(self._handles))

    @property
    def is_alive(self) -> bool:
        return self._loop.failure is None and (self._thread is None or self._thread.is_alive())

    def status(self) -> ServiceStatus:
        engine, handles = self.engine, list(self._handles)
        hybrid, capacity = engine.hybrid, engine.capacity
        running = sum(handle.is_started for handle in handles)
        return ServiceStatus(
            waiting=len(handles) - running,
            running=running,
            pages_used=capacity.num_pages - hybrid.pages.num_free,
            num_pages=capacity.num_pages,
            slots_used=capacity.num_slots - hybrid.slots.num_free,
            num_slots=capacity.num_slots,
            num_snapshots=len(hybrid.prefix),
            num_preemptions=engine.scheduler.num_preemptions,
            heartbeat_s=0.0 if self._thread is None else time.monotonic() - self._loop.beat,
            is_alive=self.is_alive,
            prefix=self._prefix_use(),
            preparing=self._pool.num_waiting + self._pool.num_running,
            preparing_s=self._pool.age_s,
            answers_waiting=sum(handle.num_waiting for handle in handles),
            answers_running=sum(handle.num_running for handle in handles),
        )

    def _prefix_use(self) -> PrefixUse:
        hybrid, capacity = self.engine.hybrid, self.engine.capacity
        pages, slots = hybrid.pages, hybrid.slots
        used = (pages.size - pages.num_free) * capacity.page_bytes + (slots.size - slots.num_free) * capacity.slot_bytes
        size = pages.size * capacity.page_bytes + slots.size * capacity.slot_bytes
        counts = hybrid.statistics
        lower = {} if self.engine.tiers is None else self.engine.tiers.uses
        tiers = {"device": TierUse(len(hybrid.prefix), used, size), **lower}
        return PrefixUse(dict(counts.hit), dict(counts.missed), counts.num_evicted, tiers)

    def jobs_waiting(self) -> dict[str, int]:
        """Return how many requests wait for a thread that prepares them, and how many prompts to be scored."""
        scores = sum(len(handle.scores) - (handle.scoring is not None) for handle in list(self._handles))
        return {"prepare": self._pool.num_waiting, "scores": max(0, scores)}

    def submit(self, submission: Submission, is_background: bool = False) -> Stream:
        """Queue a request and return its stream. Raises QueueFull, EngineClosed and EngineDead.

        A background request runs behind all others, and takes no place in their queue.
        """
        stream = Stream(self, is_background=is_background)
        stream.handle.num_waiting = submission.num_answers or 1
        self._accept(stream.handle)
        self._queue(stream.handle, submission)
        return stream

    async def open(
        self, prepare: Callable[[], Submission], max_pending: int | None = None, client: Client | None = None
    ) -> Stream:
        """Prepare a request of a client in the thread pool, queue it and return its stream.

        Raises what `prepare` raises, and like `submit`, before anything is queued. Meanwhile it counts as one answer
        that waits.
        """
        stream = Stream(self, max_pending, asyncio.get_running_loop())
        stream.handle.owner = "" if client is None else client.owner
        self._accept(stream.handle)
        try:
            submission = await self.call(prepare, owner=stream.handle.owner)
            self._check_alive()
            if client is not None:
                submission.belong_to(client)
                self._claim(stream.handle, submission, client)
        except BaseException:
            self.release(stream.handle)
            raise
        self._queue(stream.handle, submission)
        return stream

    async def call(self, work: Callable[..., T], *arguments: Any, owner: str = "") -> T:
        """Run what does not need the engine, such as encoding, in a thread at the owner's turn. Raises EngineClosed."""
        if self._is_closing:
            raise EngineClosed
        try:
            return await self._pool.run(owner, work, *arguments)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise EngineClosed from None  # before the work began

    def execute(self, work: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Run something on the engine thread, between two steps: what needs the engine or the device for itself."""
        self._check_alive()
        future: Future[T] = Future()
        self._order(EngineTask(lambda: work(*arguments), future))
        return future

    def run_all(self, source: Iterable[tuple[K, Submission | Exception]], max_waiting: int) -> Iterator[Keyed[K]]:
        """Answer (key, submission) pairs, at most `max_waiting` answers at a time, taking them only as there is room.

        Yields (key, index of the answer, completion) in order of completion; instead of a completion the error of a
        submission that failed, or that was given as an error.
        """
        batch: _Batch[K] = _Batch(self, max_waiting)
        pairs = iter(source)
        try:
            while True:
                while batch.can_add() and (pair := next(pairs, None)) is not None:
                    batch.add(*pair)
                if batch.is_done:
                    return
                yield from batch.take(*batch.inbox.get())
        finally:
            batch.close()

    async def arun_all(
        self, source: AsyncIterator[tuple[K, Submission | Exception]], max_waiting: int
    ) -> AsyncIterator[Keyed[K]]:
        """Like `run_all`, without blocking the event loop."""
        batch: _Batch[K] = _Batch(self, max_waiting)
        try:
            while True:
                while batch.can_add() and (pair := await anext(source, None)) is not None:
                    batch.add(*pair)
                if batch.is_done:
                    return
                for found in batch.take(*await batch.inbox.aget()):
                    yield found
        finally:
            batch.close(wait=False)

    def release(self, handle: RequestHandle, wait: bool = False) -> None:
        """Cancel what is left of a request. May be called from a finalizer on any thread, so it takes no lock."""
        handle.is_cancelled = True
        handle.push = lambda *_: None  # what it still sends has no reader
        is_known = handle in self._handles
        self._handles.discard(handle)
        if is_known and not handle.ended.is_set():
            self._loop.orders.put(None)
            is_own_thread = threading.current_thread() is self._thread
            while wait and not is_own_thread and self.is_alive and not handle.ended.wait(WAIT_S):
                continue

    def refuse(self) -> None:
        """Accept no more requests: they raise EngineClosed. Those that are open go on."""
        self._is_closing = True

    def close(self, drain_s: float = 0.0) -> bool:
        """Accept no more requests, give the open ones `drain_s` to end, then stop the engine thread.

        Return whether it has stopped: only then may the model's memory be freed.
        """
        self.refuse()
        deadline = time.monotonic() + drain_s
        while self._handles and time.monotonic() < deadline and self.is_alive:
            time.sleep(0.05)
        self.stop(CLOSE_S)
        self._pool.close()
        return self._thread is None or not self._thread.is_alive()

    def stop(self, timeout: float) -> None:
        """End the engine thread after the step in progress; open streams raise EngineClosed."""
        self._is_closing = self._loop.is_stopping = True
        thread = self._thread
        if thread is None:
            self._loop.failure = self._loop.failure or EngineClosed()
        elif thread is not threading.current_thread():
            self._loop.orders.put(None)
            thread.join(timeout)

    def _check_alive(self) -> None:
        if self._is_closing:
            raise EngineClosed
        if not self.is_alive:
            raise EngineDead from self._loop.failure

    def _accept(self, handle: RequestHandle) -> None:
        """Count a request. Raises QueueFull if too many answers wait for its owner already."""
        self._check_alive()
        if self.max_queue is not None and not handle.is_background:
            waiting, room = handle.find_place(list(self._handles), self.engine.scheduler.max_batch)
            if waiting >= self.max_queue + room:
                if self._loop.observer is not None:
                    self._loop.observer.rejected()
                raise QueueFull(waiting, "answers")
        self._handles.add(handle)

    def _claim(self, handle: RequestHandle, submission: Submission, client: Client) -> None:
        """Count the answers that a client waits for, and their tokens. Raises if they are too many."""
        handle.num_answers = submission.num_answers
        total = sum(each.num_answers for each in list(self._handles) if each.owner == client.owner)
        try:
            if 0 < client.max_sequences < total:
                raise ShareFull(total - submission.num_answers, client.max_sequences)
            submission.limit_tokens(client.token_limit, self.engine.capacity.max_tokens)
        except Exception:
            if self._loop.observer is not None:
                self._loop.observer.rejected()
            raise

    def _queue(self, handle: RequestHandle, submission: Submission) -> None:
        handle.submission = submission
        handle.num_waiting = submission.num_answers or 1
        if self._loop.observer is not None:
            self._loop.observer.accepted()
        self._order(handle)

    def _order(self, order: RequestHandle | EngineTask) -> None:
        self.start()
        self._loop.orders.put(order)
        if self._loop.failure is not None:
            self._loop.reject_orders()


class _Batch(Generic[K]):
    """Requests of which only the completions are wanted, many at a time."""

    def __init__(self, service: EngineService, max_waiting: int) -> None:
        self.inbox: Inbox[tuple[RequestHandle | None, list[Keyed[K]]]] = Inbox()  # a handle that is over
        self._service = service
        self._max_waiting = max_waiting
        self._active: dict[RequestHandle, int] = {}  # how many answers each is to give
        self._next: tuple[K, Submission] | None = None  # does not fit alongside the active ones

    def can_add(self) -> bool:
        """Submit what had to wait, if it fits by now. Return whether another submission may be added."""
        if self._next is not None:
            pair, self._next = self._next, None
            self.add(*pair)
        return self._next is None and sum(self._active.values()) + len(self.inbox) < self._max_waiting

    @property
    def is_done(self) -> bool:
        return not self._active and not self.inbox and self._next is None

    def add(self, key: K, submission: Submission | Exception) -> None:
        if isinstance(submission, Exception):
            self.inbox.put((None, [(key, 0, submission)]))
        elif self._active and sum(self._active.values()) + submission.num_answers > self._max_waiting:
            self._next = key, submission
        else:
            submission.is_streamed = False
            self._submit(key, submission)

    def _submit(self, key: K, submission: Submission) -> None:
        def push(items: Sequence[StreamItem], is_over: bool, error: BaseException | None) -> None:
            events = (item for item in items if isinstance(item, Event))
            found: list[Keyed[K]] = [(key, event.index, event.completion) for event in events if event.completion]
            if error is not None:
                found.append((key, 0, error if isinstance(error, Exception) else EngineDead()))
            self.inbox.put((handle if is_over else None, found))

        handle = RequestHandle(push)
        self._active[handle] = submission.num_answers
        self._service._accept(handle)
        self._service._queue(handle, submission)

    def take(self, handle: RequestHandle | None, found: list[Keyed[K]]) -> list[Keyed[K]]:
        """Drop a handle that has ended and return its answers."""
        if handle is not None:
            self._active.pop(handle, None)
            self._service.release(handle)
        return found

    def close(self, wait: bool = True) -> None:
        for handle in self._active:
            self._service.release(handle, wait)


def _stop_all() -> None:
    """Stop the engine threads before the interpreter unloads the libraries they run in."""
    for service in list(_running):
        service.stop(EXIT_S)

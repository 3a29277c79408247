"""The thread that owns one model's engine, and the streams that carry its answers to those who wait.

Everything that may take long happens elsewhere than on the event loop: prompts are rendered and encoded in a pool of
threads, tokens are computed in the engine's thread. What comes out is handed to the loop; nobody's slowness is
anybody else's.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from sala.engine.stream import Completion, Event, Run, Usage
from sala.errors import InputError
from sala.llm import LLM
from sala.protocol import SampledToken
from sala.server.http.errors import ApiError

MAX_PENDING = 1 << 20  # bytes of an answer that wait for a slow reader
EVENT_BYTES = 64  # what an event weighs beside its text
IDLE_S = 1.0  # the longest sleep of an idle engine: its heart beats at least so often
SCORE_CHUNK = 256  # tokens scored between two steps of the others
RETRY_S = 2
NUM_PREPARERS = 2
T = TypeVar("T")
_log = logging.getLogger("sala.server")


class Observer(Protocol):
    """Counts what happens. Called from the engine's thread and from the loop: cheap and thread-safe."""

    def accepted(self) -> None: ...

    def rejected(self) -> None: ...

    def finished(self, reason: str, usage: Usage, first_token_s: float, decode_s: float) -> None: ...


class Silent:
    """Counts nothing."""

    def accepted(self) -> None:
        return

    def rejected(self) -> None:
        return

    def finished(self, reason: str, usage: Usage, first_token_s: float, decode_s: float) -> None:
        return


@dataclass(frozen=True)
class Status:
    waiting: int
    running: int
    pages_used: int
    num_pages: int
    slots_used: int
    num_slots: int
    num_snapshots: int
    num_preemptions: int
    heartbeat_s: float  # seconds since the engine's thread last went round its loop
    is_alive: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """Something of answer number `index`: an event and the tokens that it shows, sampled as they were."""

    index: int
    event: Event
    sampled: tuple[SampledToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """How far the prompt is read."""

    total: int
    cached: int
    done: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Scored:
    """The log-probabilities of prompt number `index`, of every token but the first."""

    index: int
    sampled: list[SampledToken]


Item = Piece | Reading | Scored


@dataclass(slots=True)
class Scoring:
    """A prompt whose own tokens are to be scored."""

    index: int
    ids: list[int]
    top: int
    sampled: list[SampledToken] = field(default_factory=list)
    pieces: Iterator[list[SampledToken]] | None = None


@dataclass(slots=True)
class Work:
    """What a request needs, checked and encoded: prompts to score, then answers to prompts, each a group of runs."""

    groups: list[list[Run]] = field(default_factory=list)
    scores: list[Scoring] = field(default_factory=list)


Prepare = Callable[[LLM, Callable[[int, int], None]], Work]


class Overflow(Exception):
    """The reader is too slow: its answer has been given up."""


class Stream:
    """The way of one request: the engine's thread puts items in, one coroutine takes them out."""

    def __init__(self, loop: asyncio.AbstractEventLoop, accepted_at: float) -> None:
        self._loop = loop
        self._items: deque[Item] = deque()
        self._wake = asyncio.Event()
        self._pending = 0
        self._error: BaseException | None = None
        self._is_over = False
        self.overflowed = asyncio.Event()
        self.accepted_at = accepted_at
        self.is_cancelled = False  # read by the engine's thread
        self.is_started = False  # written by the engine's thread
        # the engine's thread alone:
        self.work = Work()
        self.left: dict[int, Run] = {}
        self.scores: deque[Scoring] = deque()
        self.shown: dict[int, int] = {}
        self.outbox: list[Item] = []
        self.completions: list[Completion] = []
        self.first_token_at: float | None = None

    async def next(self, timeout: float | None = None) -> Item | None:
        """The next item; None at the end. Raises what the request failed with, and TimeoutError."""
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._is_over:
                return None
            self._wake.clear()
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        item = self._items.popleft()
        self._pending -= _weight(item)
        return item

    def _push(self, items: Sequence[Item], is_over: bool, error: BaseException | None) -> None:
        """On the loop."""
        if self.is_cancelled and error is None:
            return
        self._items.extend(items)
        self._pending += sum(_weight(item) for item in items)
        self._is_over, self._error = is_over, error
        if self._pending > MAX_PENDING:
            self._items.clear()
            self._error = Overflow()
            self.is_cancelled = True
            self.overflowed.set()
        self._wake.set()

    def send(self, items: Sequence[Item], is_over: bool = False, error: BaseException | None = None) -> None:
        """From any thread."""
        try:
            self._loop.call_soon_threadsafe(self._push, items, is_over, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self.is_cancelled = True


def _weight(item: Item) -> int:
    if not isinstance(item, Piece) or item.event.completion is not None:
        return 0  # there are few of them
    delta = item.event.delta
    num_rivals = sum(len(sampled.top_logprobs) for sampled in item.sampled)
    return EVENT_BYTES * (1 + num_rivals) + len(delta.text) + len(delta.reasoning)


class Worker:
    """Runs one model for many. `open` a stream, read it to its end, or `cancel` it."""

    def __init__(self, llm: LLM, max_queue: int = 64, observer: Observer | None = None) -> None:
        self._llm = llm
        self._capacity = llm.capacity
        self._max_queue = max_queue
        self._observer: Observer = observer or Silent()
        self._orders: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._streams: set[Stream] = set()  # on the loop: from acceptance to the end
        self._active: list[Stream] = []  # the engine's thread
        self._pool = ThreadPoolExecutor(NUM_PREPARERS, "sala-prepare")
        self._beat = time.monotonic()
        self._is_closing = False
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="sala-engine", daemon=True)
        self._thread.start()

    @property
    def num_requests(self) -> int:
        """Requests that wait or run."""
        return len(self._streams)

    def status(self) -> Status:
        hybrid, capacity, streams = self._llm.engine.hybrid, self._capacity, list(self._streams)
        running = sum(stream.is_started for stream in streams)
        return Status(
            waiting=len(streams) - running,
            running=running,
            pages_used=capacity.num_pages - hybrid.pages.num_free,
            num_pages=capacity.num_pages,
            slots_used=capacity.num_slots - hybrid.slots.num_free,
            num_slots=capacity.num_slots,
            num_snapshots=len(hybrid.prefix),
            num_preemptions=self._llm.engine.scheduler.num_preemptions,
            heartbeat_s=time.monotonic() - self._beat,
            is_alive=self._thread.is_alive() and not self._is_stopped,
        )

    async def open(self, prepare: Prepare) -> Stream:
        """Queue a request. `prepare` runs in the pool; what it raises is raised here, before anything is queued.

        Whoever opens a stream must end it with `cancel`, also after it was read to its end.
        """
        self._check_state()
        self._check_queue()
        loop = asyncio.get_running_loop()
        stream = Stream(loop, time.monotonic())
        self._streams.add(stream)
        try:
            stream.work = await loop.run_in_executor(self._pool, prepare, self._llm, self._teller(stream))
            self._check_state()
        except BaseException:
            self._streams.discard(stream)
            raise
        self._observer.accepted()
        self._orders.put(stream)
        return stream

    async def call(self, work: Callable[[LLM], T]) -> T:
        """Something short for the pool that needs no engine: encoding, counting."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, self._llm)

    def cancel(self, stream: Stream) -> None:
        """Nobody reads this stream any more."""
        stream.is_cancelled = True
        self._streams.discard(stream)
        self._orders.put(None)

    async def close(self, drain_s: float = 0.0) -> None:
        """Take no more requests, let the running ones end for a while, then stop the thread and free the model."""
        self._is_closing = True
        deadline = time.monotonic() + drain_s
        while self._streams and time.monotonic() < deadline and self.status().is_alive:
            await asyncio.sleep(0.05)
        self._is_stopped = True
        self._orders.put(None)
        await asyncio.to_thread(self._thread.join, 60)
        self._pool.shutdown(wait=False, cancel_futures=True)
        if not self._thread.is_alive():
            await asyncio.to_thread(self._llm.close)

    def _check_state(self) -> None:
        if self._is_closing:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "30"})
        if not self.status().is_alive:
            raise engine_is_dead()

    def _check_queue(self) -> None:
        status = self.status()
        room = self._max_queue + max(0, self._llm.max_batch - status.running)
        if status.waiting >= room:
            self._observer.rejected()
            raise ApiError(
                429,
                f"{status.waiting} requests wait already; try again later",
                code="queue_full",
                headers={"Retry-After": str(RETRY_S)},
            )

    @staticmethod
    def _teller(stream: Stream) -> Callable[[int, int], None]:
        """Called by the engine's thread whenever more of the prompt is read."""

        def tell(done: int, total: int) -> None:
            run = next(iter(stream.left.values()), None)
            cached = 0 if run is None else run.sequence.num_cached or 0
            stream.outbox.append(Reading(total, cached, done, time.monotonic() - stream.accepted_at))

        return tell

    # From here on all is the engine's thread.

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                self._beat = time.monotonic()
                self._take_orders()
                self._drop_cancelled()
                if self._active:
                    self._step()
            self._give_up(ApiError(503, "the server has shut down", code="shutting_down"))
        except BaseException:
            _log.exception("the engine has stopped")
            self._is_stopped = True
            self._give_up(engine_is_dead())

    def _take_orders(self) -> None:
        """Everything that has arrived; if there is nothing to do, wait for it."""
        block = not self._active
        while True:
            try:
                stream = self._orders.get(block, IDLE_S) if block else self._orders.get_nowait()
            except queue.Empty:
                return
            block = False
            if stream is not None:
                self._begin(stream)

    def _begin(self, stream: Stream) -> None:
        stream.scores = deque(stream.work.scores)
        self._active.append(stream)
        if not stream.scores:
            self._submit(stream)

    def _submit(self, stream: Stream) -> None:
        try:
            for group in stream.work.groups:
                self._llm.submit(group)
            stream.left = dict(enumerate(run for group in stream.work.groups for run in group))
        except Exception as error:
            self._fail(stream, error)

    def _drop_cancelled(self) -> None:
        for stream in [stream for stream in self._active if stream.is_cancelled]:
            self._end(stream, "cancelled")

    def _step(self) -> None:
        self._llm.step()
        has_scored = self._score()
        if self._llm.engine.is_stuck and not has_scored:
            stuck = next((stream for stream in self._active if stream.left), self._active[0])
            self._fail(stuck, RuntimeError("no request can be admitted"))
        for stream in list(self._active):
            self._deliver(stream)

    def _score(self) -> bool:
        """A chunk of the first prompt that is to be scored; whether somebody got on."""
        for stream in list(self._active):
            if not stream.scores:
                continue
            scoring = stream.scores[0]
            try:
                if scoring.pieces is None:
                    scoring.pieces = self._llm.scoring(scoring.ids, scoring.top, SCORE_CHUNK)
                scoring.sampled += next(scoring.pieces)
                stream.is_started = True
                if len(scoring.sampled) == len(scoring.ids) - 1:
                    scoring.pieces.close()  # type: ignore[attr-defined]
                    stream.outbox.append(Scored(scoring.index, scoring.sampled))
                    stream.scores.popleft()
                    if not stream.scores:
                        self._submit(stream)
            except InputError as error:
                scoring.pieces = None
                if self._llm.engine.scheduler.running:  # no room beside them: later
                    return False
                self._fail(stream, error)
            except Exception as error:
                self._fail(stream, error)
            return True
        return False

    def _deliver(self, stream: Stream) -> None:
        """Hand over what the last step brought."""
        try:
            for index, run in list(stream.left.items()):
                stream.is_started = stream.is_started or run.sequence.slot is not None
                self._collect(stream, index, run)
        except Exception as error:
            self._fail(stream, error)
            return
        is_over = not stream.left and not stream.scores
        if stream.outbox or is_over:
            items, stream.outbox = stream.outbox, []
            if is_over:
                self._end(stream, _reason(stream.completions))
            stream.send(items, is_over)

    def _collect(self, stream: Stream, index: int, run: Run) -> None:
        for event in self._llm.take(run):
            at = stream.shown.get(index, 0)
            sampled = tuple(run.sequence.sampled[at : at + len(event.token_ids)])
            stream.shown[index] = at + len(sampled)
            if sampled and stream.first_token_at is None:
                stream.first_token_at = time.monotonic()
            if event.completion is not None:
                stream.completions.append(event.completion)
                del stream.left[index]
            stream.outbox.append(Piece(index, event, sampled))

    def _fail(self, stream: Stream, error: BaseException) -> None:
        if not isinstance(error, InputError | ApiError):
            _log.error("a request failed: %s", type(error).__name__, exc_info=error)
            self._llm.engine.probe()  # a device that is lost is the end of the engine, not of one request
        items, stream.outbox = stream.outbox, []
        self._end(stream, "error")
        stream.send(items, error=error)

    def _end(self, stream: Stream, reason: str) -> None:
        """Whatever is left of a request goes; its place is free."""
        if stream not in self._active:
            return
        self._active.remove(stream)
        self._llm.drop([run for group in stream.work.groups for run in group])
        for scoring in stream.scores:
            if scoring.pieces is not None:
                scoring.pieces.close()  # type: ignore[attr-defined]
        now = time.monotonic()
        first = stream.first_token_at or now
        self._observer.finished(reason, _usage(stream), first - stream.accepted_at, now - first)
        stream.work, stream.left, stream.scores = Work(), {}, deque()

    def _give_up(self, error: ApiError) -> None:
        """The end of the thread: nobody is left waiting."""
        while True:
            try:
                stream = self._orders.get_nowait()
            except queue.Empty:
                break
            if stream is not None:
                self._active.append(stream)
        for stream in list(self._active):
            stream.send((), error=error)
            try:
                self._end(stream, "error")
            except Exception:
                _log.exception("a request could not be ended")


def engine_is_dead() -> ApiError:
    return ApiError(500, "the engine has stopped; restart the server", code="engine_dead")


def _reason(completions: Sequence[Completion]) -> str:
    return completions[0].finish_reason if completions else "stop"


def _usage(stream: Stream) -> Usage:
    """Of all answers together; a prompt counts once however many answers it gets."""
    prompt = cached = sampled = 0
    for group in stream.work.groups:
        prompt += len(group[0].request.prompt)
        for run in group:
            if run.is_begun:
                sampled += len(run.sequence.sampled)
        cached += group[0].sequence.num_cached or 0 if group[0].is_begun else 0
    prompt += sum(len(scoring.ids) for scoring in stream.work.scores)
    return Usage(prompt, sampled, cached)

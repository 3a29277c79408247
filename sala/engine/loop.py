"""What the engine thread does: take orders, step the engine, turn tokens into events, hand them over, once per step.

Only `engine.service` uses this module. Between steps the thread scores prompts, a chunk at a time, of clients in turn,
and runs tasks that need the engine for themselves. An error that belongs to one request ends that request.
"""

import logging
import queue
import threading
import time
import weakref
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from sala.engine.engine import Engine, Update
from sala.engine.requests import PromptScoring, Submission
from sala.engine.stream import AnswerState, Completion, PromptProgress, PromptScores, StreamItem, Usage
from sala.errors import CacheTooSmall, EngineClosed, EngineDead, InputError, SalaError, ScoringTooSlow

_numbers = count(1)
IDLE_S = 1.0  # longest sleep of an idle engine thread, so that its heartbeat stays recent
_log = logging.getLogger("sala.engine")


class Histogram:
    """Counts values in buckets: `counts[i]` of those up to `bounds[i]`, the last of all that are larger."""

    def __init__(self, *bounds: float) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class RequestStatistics:
    """The observer of any number of services: adds up. Called from engine threads and readers; readable from any."""

    def __init__(self) -> None:
        self.num_accepted = self.num_rejected = 0
        self.reasons: Counter[str] = Counter()
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.first_token_s = Histogram(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
        self.inter_token_s = Histogram(0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
        self._lock = threading.Lock()

    def accepted(self) -> None:
        with self._lock:
            self.num_accepted += 1

    def rejected(self) -> None:
        with self._lock:
            self.num_rejected += 1

    def finished(self, reason: str, usage: Usage, first_token_s: float, decode_s: float) -> None:
        with self._lock:
            self.reasons[reason] += 1
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens
            self.completion_tokens += usage.completion_tokens
            if usage.completion_tokens > 0:
                self.first_token_s.add(first_token_s)
            if usage.completion_tokens > 1:
                self.inter_token_s.add(decode_s / (usage.completion_tokens - 1))


class RequestHandle:
    """A request between acceptance and its end. `push` gets (items, is_over, error) on the engine thread."""

    def __init__(
        self, push: Callable[[Sequence[StreamItem], bool, BaseException | None], None], is_background: bool = False
    ) -> None:
        self.push = push
        self.is_background = is_background
        self.number = next(_numbers)
        self.accepted_at = time.monotonic()
        self.is_cancelled = False
        self.is_started = False
        self.owner = ""
        self.num_answers = 0
        self.num_waiting = 1  # answers, as of the last step; one until it is known how many are asked for
        self.num_running = 0
        self.ended = threading.Event()
        self.submission = Submission()
        # for the engine thread alone:
        self.left: dict[int, AnswerState] = {}
        self.scores: deque[PromptScoring] = deque()
        self.scoring: Generator[None] | None = None  # in progress: scores the first of `scores`
        self.turn = 0  # the last time that a prompt of it was scored, or that it arrived
        self.events: list[StreamItem] = []
        self.completions: list[Completion] = []
        self.first_token_at: float | None = None

    def count(self, num_running: int) -> None:
        """Note how many answers run, and how many wait. A prompt that is being scored does not wait."""
        self.num_running = num_running
        if self.scores:
            self.num_waiting = self.submission.num_answers or int(not self.is_started)
        else:
            self.num_waiting = len(self.left) - num_running

    def find_place(self, others: "list[RequestHandle]", max_batch: int) -> tuple[int, int]:
        """Return how many answers wait for the owner already, and for how many the batch has places: free or its share.

        Background requests give way.
        """
        running = Counter({self.owner: 0})
        waiting = 0
        for one in others:
            if not one.is_background:
                running[one.owner] += one.num_running
                waiting += one.num_waiting if one.owner == self.owner else 0
        share = max_batch // len(running) - running[self.owner]
        return waiting, max(0, max_batch - running.total(), share)

    def settle(self) -> None:
        """Say how many tokens this request took: those of prompts that were begun, and all that were sampled."""
        settle, self.submission.settle = self.submission.settle, None
        if settle is None:
            return
        scored = sum(len(scoring.ids) for scoring in self.submission.scores) if self.is_started else 0
        prompts = sampled = 0
        for group in self.submission.groups:
            begun = [state.sequence for state in group if state.is_begun and state.sequence.num_cached is not None]
            prompts += begun[0].prompt_len if begun else 0
            sampled += sum(len(sequence.sampled) for sequence in begun)
        settle(max(prompts, scored) + sampled)

    def usage(self) -> Usage:
        """Count the tokens of all answers together; a prompt counts once, however many answers it gets."""
        prompt = cached = sampled = 0
        for group in self.submission.groups:
            prompt += len(group[0].request.prompt)
            sampled += sum(len(state.sequence.sampled) for state in group if state.is_begun)
            cached += (group[0].sequence.num_cached or 0) if group[0].is_begun else 0
        prompt += sum(len(scoring.ids) for scoring in self.submission.scores)
        return Usage(prompt, sampled, cached)


class ScoringTurns:
    """Whose prompts are scored next: clients take turns, a chunk each, and the requests of a client, a prompt each.

    A client has at most one prompt in progress, and one in the background: a prompt that is scored keeps its memory.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._last: dict[tuple[bool, str], int] = {}  # turns of the clients that have prompts to score

    def arrive(self, handle: RequestHandle) -> None:
        """Let a new request wait behind all others."""
        handle.turn = next(self._numbers)

    def order(self, handles: Iterable[RequestHandle]) -> list[RequestHandle]:
        """Return the next request of each client that has prompts to score, in turn, and last of all the background."""
        first: dict[tuple[bool, str], RequestHandle] = {}
        for handle in sorted((one for one in handles if one.scores), key=lambda one: (one.scoring is None, one.turn)):
            first.setdefault(_client(handle), handle)
        self._last = {client: self._last.get(client, handle.turn) for client, handle in first.items()}
        return [first[client] for client in sorted(first, key=lambda one: (one[0], self._last[one]))]

    def took(self, handle: RequestHandle) -> None:
        """Note that a chunk is being scored."""
        handle.turn = self._last[_client(handle)] = next(self._numbers)


def _client(handle: RequestHandle) -> tuple[bool, str]:
    return handle.is_background, handle.scores[0].owner


@dataclass(frozen=True)
class EngineTask:
    """Something to run on the engine thread between two steps."""

    work: Callable[[], Any]
    future: "Future[Any]"

    def run(self) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.work())
            except Exception as error:
                self.future.set_exception(error)


Order = RequestHandle | EngineTask | None  # None: only wake up


class EngineLoop:
    """The state of the engine thread. `orders` and `is_stopping` are the only ways in from other threads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.observer: RequestStatistics | None = None
        self.log: logging.Logger | None = None
        self.on_step: Callable[[], None] | None = None
        self.beat = time.monotonic()
        self.is_stopping = False
        self.max_request_s = 0.0  # after which requests are cut; 0: never
        self.failure: SalaError | None = None  # why the loop has ended
        self._active: list[RequestHandle] = []
        self._turns = ScoringTurns()
        self._owners: dict[int, tuple[RequestHandle, AnswerState]] = {}  # by the id of the sequence

    def start(self) -> threading.Thread:
        """Start a thread that runs until the loop is stopped or no longer referenced."""
        arguments = (weakref.ref(self), self.orders)
        thread = threading.Thread(target=_run, args=arguments, name="sala-engine", daemon=True)
        thread.start()
        return thread

    def run(self, order: Order) -> bool:
        """Work until there is nothing to do. Return False if the loop has ended."""
        try:
            self._take_orders(order)
            while self._active and not self.is_stopping:
                for handle in [handle for handle in self._active if handle.is_cancelled]:
                    self._finish(handle, "cancelled")
                self._cut_late_requests()
                if self._active:
                    self._step()
                self._take_orders()
            if not self.is_stopping:
                return True
            self._end(EngineClosed())
        except BaseException as error:
            _log.exception("the engine has stopped")
            dead = EngineDead()
            dead.__cause__ = error
            self._end(dead)
        return False

    def _cut_late_requests(self) -> None:
        """Cut the answers of requests whose time is up; incomplete scores are an error, since they would mislead."""
        began = time.monotonic() - self.max_request_s
        for handle in list(self._active) if self.max_request_s else ():
            if handle.accepted_at < began and not handle.is_background:  # which waits for all others
                for state in handle.left.values():
                    self.engine.cancel(state.sequence, "length")
                if handle.scores:
                    self._fail(handle, ScoringTooSlow(self.max_request_s))

    def reject_orders(self) -> None:
        """Fail the orders that arrived after the loop had ended."""
        for order in self._waiting_orders():
            if isinstance(order, EngineTask):
                order.future.set_exception(self.failure)
            elif isinstance(order, RequestHandle):
                order.push((), True, self.failure)
                self._finish(order, "error")

    def _waiting_orders(self) -> Iterator[Order]:
        with suppress(queue.Empty):
            while True:
                yield self.orders.get_nowait()

    def _take_orders(self, *first: Order) -> None:
        for order in chain(first, self._waiting_orders()):
            self.beat = time.monotonic()
            if isinstance(order, EngineTask):
                order.run()
            elif isinstance(order, RequestHandle):
                order.scores = deque(order.submission.scores)
                self._turns.arrive(order)
                self._active.append(order)
                if not order.scores:
                    self._submit(order)
        self.beat = time.monotonic()

    def _submit(self, handle: RequestHandle) -> None:
        """Queue all answers of a request in the engine; the first of a group computes the prompt for all of it."""
        try:
            for group in handle.submission.groups:
                first = None
                for number, state in enumerate(group):
                    state.request.group = handle.number
                    state.request.is_background = handle.is_background
                    state.index = len(handle.left)
                    state.begin(self.engine.submit(state.request, first, number))
                    first = first or state.sequence
                    self._owners[state.sequence.id] = handle, state
                    handle.left[state.index] = state
        except Exception as error:
            self._fail(handle, error)

    def _step(self) -> None:
        updates = self.engine.step()
        if self.on_step is not None:
            self.on_step()
        self._receive(updates)
        has_scored = self._score()
        if self.engine.is_stuck and not has_scored:
            self._fail(next((handle for handle in self._active if handle.left), self._active[0]), CacheTooSmall())
        running = Counter(self._owners[one.id][0] for one in self.engine.scheduler.running if one.id in self._owners)
        for handle in list(self._active):
            self._deliver(handle, running[handle])

    def _receive(self, updates: list[Update]) -> None:
        """Turn the tokens of a step into events."""
        for update in updates:
            handle, state = self._owners.get(update.sequence.id, (None, None))
            if handle is None or state is None:
                continue
            if update.sampled and handle.first_token_at is None:
                handle.first_token_at = time.monotonic()
            try:
                events = state.receive(update)
            except Exception as error:
                self._fail(handle, error)
                continue
            if handle.submission.is_streamed:
                handle.events += events
            if state.is_stopped:
                self.engine.cancel(update.sequence, "stop")

    def _score(self) -> bool:
        """Score a chunk of the prompt whose turn it is. Return whether any request got further."""
        refused: list[tuple[RequestHandle, InputError]] = []
        for handle in self._turns.order(self._active):
            try:
                self._score_chunk(handle)
            except InputError as error:  # there is no space next to what runs: try again later
                handle.scoring = None
                refused.append((handle, error))
                continue
            except Exception as error:
                self._fail(handle, error)
            return True
        if not refused or self.engine.scheduler.running:
            return False
        self._fail(*refused[0])
        return True

    def _score_chunk(self, handle: RequestHandle) -> None:
        """Score a chunk of a request. Raises InputError if there is no space to begin a prompt."""
        handle.scoring = handle.scoring or self._score_prompt(handle, handle.scores[0])
        is_done = next(handle.scoring, "done")
        self._turns.took(handle)
        if is_done:
            handle.scoring = None
            handle.scores.popleft()
            if not handle.scores:
                self._submit(handle)

    def _score_prompt(self, handle: RequestHandle, scoring: PromptScoring) -> Generator[None]:
        """Score one prompt, pausing between its chunks."""
        length = len(scoring.ids) if scoring.prompt_len is None else scoring.prompt_len
        done, parts = 0, []
        with closing(self.engine.score(scoring.ids, length, scoring.chunk, scoring.adapter)) as pieces:
            for piece in pieces:
                handle.is_started = True
                parts.append(scoring.reduce(piece, done))
                done += len(piece)
                if handle.submission.wants_progress:
                    seconds = time.monotonic() - handle.accepted_at
                    handle.events.append(PromptProgress(scoring.index, len(scoring.ids), 0, done, seconds))
                if done < len(scoring.ids):
                    yield
        handle.events.append(PromptScores(scoring.index, parts))

    def _deliver(self, handle: RequestHandle, num_running: int) -> None:
        """Deliver the events of the last step."""
        items = self._progress(handle) if handle.submission.wants_progress else []
        items += handle.events
        handle.events = []
        try:
            handle.is_started = handle.is_started or num_running > 0
            for index, state in [pair for pair in handle.left.items() if pair[1].sequence.finish_reason is not None]:
                items += self._complete(handle, state)
                del handle.left[index]
        except Exception as error:
            handle.events = items
            self._fail(handle, error)
            return
        handle.count(num_running)
        is_over = not handle.left and not handle.scores
        if is_over:
            self._finish(handle, handle.completions[0].finish_reason if handle.completions else "stop")
        if items or is_over:
            handle.push(items, is_over, None)

    def _progress(self, handle: RequestHandle) -> list[StreamItem]:
        """Report prefill, of the first answer of each group."""
        items: list[StreamItem] = []
        for group in handle.submission.groups:
            state = group[0]
            for done in state.progress() if state.index in handle.left and state.is_begun else ():
                sequence, seconds = state.sequence, time.monotonic() - handle.accepted_at
                items.append(PromptProgress(state.index, sequence.prompt_len, sequence.num_cached or 0, done, seconds))
        return items

    def _complete(self, handle: RequestHandle, state: AnswerState) -> list[StreamItem]:
        self._owners.pop(state.sequence.id, None)
        events = state.finish()
        completion = events[-1].completion
        assert completion is not None
        handle.completions.append(completion)
        return [*events] if handle.submission.is_streamed else [events[-1]]

    def _fail(self, handle: RequestHandle, error: BaseException) -> None:
        if not isinstance(error, SalaError):
            if self.log is not None:
                self.log.error("a request failed: %s", type(error).__name__, exc_info=error)
            self.engine.probe()  # a device that is lost is the end of the engine, not of one request
        items, handle.events = handle.events, []
        self._finish(handle, "error")
        handle.push(items, True, error)

    def _finish(self, handle: RequestHandle, reason: str) -> None:
        """Drop what is left of a request."""
        if handle in self._active:
            self._active.remove(handle)
        if handle.scoring is not None:
            handle.scoring.close()
        for group in handle.submission.groups:
            for state in group:
                if state.is_begun:
                    self.engine.cancel(state.sequence)
                    self._owners.pop(state.sequence.id, None)
        usage = handle.usage()
        handle.settle()
        handle.left, handle.scores, handle.submission = {}, deque(), Submission()
        handle.num_waiting = handle.num_running = 0
        now = time.monotonic()
        first = handle.first_token_at or now
        handle.ended.set()
        if self.observer is not None:
            self.observer.finished(reason, usage, first - handle.accepted_at, now - first)

    def _end(self, failure: SalaError) -> None:
        """Fail every request: the loop has ended."""
        self.failure = failure
        for handle in list(self._active):
            handle.push((), True, failure)
            try:
                self._finish(handle, "error")
            except Exception:
                _log.exception("a request could not be ended")
                handle.ended.set()
        self._active.clear()
        self.reject_orders()


def _run(loop_ref: "weakref.ref[EngineLoop]", orders: "queue.SimpleQueue[Order]") -> None:
    """Run the engine thread. While idle it holds no reference to the model, so that a dropped model is freed."""
    while True:
        try:
            order = orders.get(timeout=IDLE_S)
        except queue.Empty:
            order = None
        loop = loop_ref()
        if loop is None or not loop.run(order):
            return
        del loop, order

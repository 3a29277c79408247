"""What comes out of a request: events while it runs, a completion at its end.

`AnswerState` is the one place where sampled tokens become events; `text.answer` turns them into text for it.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sala.engine.engine import Update
from sala.engine.scheduler import Request, SequenceState
from sala.protocol import SampledToken
from sala.text.answer import Answer, Delta
from sala.text.sources import PromptText, Sources, find_sources
from sala.text.tools import ToolCall

EVENT_BYTES = 64  # size of an event besides its text
WAIT_S = 1.0  # longest uninterruptible wait of a synchronous reader
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds for the tokens that were computed: those of the prompt that were not cached, then the answer's."""

    prompt_n: int
    prompt_s: float
    predicted_n: int
    predicted_s: float

    @property
    def prompt_per_second(self) -> float:
        return self.prompt_n / self.prompt_s if self.prompt_s > 0 else 0.0

    @property
    def predicted_per_second(self) -> float:
        return self.predicted_n / self.predicted_s if self.predicted_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer. `text` is what to show; in a chat, `reasoning` and `tool_calls` are taken out of it.

    `cut_call` is a call in which the answer was cut: its arguments are not complete.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    usage: Usage
    timings: Timings
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    cut_call: ToolCall | None = None
    logprobs: list[SampledToken] | None = None
    is_whole: bool = True  # `text` shows all tokens: nothing was cut at a stop string or taken out
    stop_token: int | None = None  # the last of `token_ids`, if it ended the answer
    sources: Sources | None = None  # where the answer comes from, with `return_sources`

    def as_message(self) -> dict[str, Any]:
        """Return the answer as a message of the conversation.

        Where possible the message carries the sampled tokens, so that the next turn finds all of them in the cache.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            calls = [{"name": call.name, "arguments": call.arguments} for call in self.tool_calls]
            message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        if self.is_whole:
            message["token_ids"] = self.token_ids if self.stop_token is None else self.token_ids[:-1]
        return message


@dataclass(frozen=True, slots=True)
class Event:
    """A piece of answer number `index` and the tokens it shows; the last event carries the whole `completion`."""

    delta: Delta
    sampled: tuple[SampledToken, ...] = ()
    completion: Completion | None = None
    index: int = 0

    @property
    def text(self) -> str:
        return self.delta.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(one.token for one in self.sampled)


OnProgress = Callable[[int, int], None]  # (tokens of the prompt that are done, all of them)


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How far the prompt of answer number `index` has been computed, `seconds` after the request was accepted."""

    index: int
    total: int
    cached: int
    done: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What scoring prompt number `index` gave: one part for every chunk, in order."""

    index: int
    parts: list[Any]


StreamItem = Event | PromptProgress | PromptScores


def weigh(item: StreamItem) -> int:
    """Return about how many bytes an item takes until it is read."""
    if not isinstance(item, Event) or item.completion is not None:
        return 0  # there are few of them
    num_rivals = sum(len(sampled.top_logprobs) for sampled in item.sampled)
    return EVENT_BYTES * (1 + num_rivals) + len(item.delta.text) + len(item.delta.reasoning)


class Inbox(Generic[T]):
    """A queue from the engine thread to one reader, synchronous or asynchronous. A reader is woken only if it waits."""

    def __init__(self) -> None:
        self._entries: deque[T] = deque()
        self._wake: Callable[[], object] | None = None  # set by a reader that waits

    def put(self, *entries: T) -> None:
        self._entries.extend(entries)
        self.notify()

    def notify(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def wait(self, is_ready: Callable[[], object], timeout: float | None = None) -> None:
        """Block until `is_ready`, which a `put` or `notify` must bring about. Raises TimeoutError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not is_ready():
            lock = threading.Lock()
            lock.acquire()
            self._wake = lock.release
            if is_ready():  # it happened before the writer could know of us
                return
            left = WAIT_S if deadline is None else min(WAIT_S, deadline - time.monotonic())
            if left <= 0:
                raise TimeoutError
            lock.acquire(timeout=left)

    async def await_(self, is_ready: Callable[[], object], timeout: float | None = None) -> None:
        """Like `wait`, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        while not is_ready():
            event = asyncio.Event()
            self._wake = lambda event=event: call_soon(loop, event.set)
            if is_ready():
                return
            async with asyncio.timeout(timeout):
                await event.wait()

    def __len__(self) -> int:
        return len(self._entries)

    def take(self) -> T | None:
        return self._entries.popleft() if self._entries else None

    def clear(self) -> None:
        self._entries.clear()

    def get(self) -> T:
        self.wait(lambda: self._entries)
        return self._entries.popleft()

    async def aget(self) -> T:
        await self.await_(lambda: self._entries)
        return self._entries.popleft()


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Call a function on an event loop, from any thread."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:  # the loop is closed: nothing waits on it any more
        return


class AnswerState:
    """One answer on its way through the engine, and the text that has been shown of it so far.

    Without `answer` tokens are not turned into text. All methods belong to the engine thread.
    """

    def __init__(self, request: Request, answer: Answer | None = None, prompt: PromptText | None = None) -> None:
        """`prompt` is where sources are looked up."""
        self.request = request
        self._prompt = prompt
        self.index = 0  # among the answers of its submission
        self.began_at = self.first_token_at = self.last_token_at = 0.0
        self._sequence: SequenceState | None = None
        self._answer = answer
        self._reported = -1
        self._sampled: list[SampledToken] = []
        self._text = ""
        self._reasoning = ""
        self._calls: list[ToolCall] = []
        self._cut_call: ToolCall | None = None

    def begin(self, sequence: SequenceState) -> None:
        self._sequence = sequence
        self.began_at = self.first_token_at = self.last_token_at = time.perf_counter()

    @property
    def is_begun(self) -> bool:
        return self._sequence is not None

    @property
    def sequence(self) -> SequenceState:
        assert self._sequence is not None, "the request has not been submitted"
        return self._sequence

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string or a repeated call has been found."""
        return self._answer is not None and self._answer.is_stopped

    def receive(self, update: Update) -> list[Event]:
        """Turn the tokens of a step into events."""
        self.last_token_at = time.perf_counter()
        events: list[Event] = []
        for sampled in update.sampled:
            if self.is_stopped:
                break
            if not self._sampled:
                self.first_token_at = self.last_token_at
            self._sampled.append(sampled)
            is_end = self._ends_with(sampled.token)
            deltas = [] if self._answer is None or is_end else self._answer.push(sampled.token)
            events += self._show(deltas or [Delta()], (sampled,))
        return events

    def progress(self) -> list[int]:
        """Return how many tokens of the prompt are done, at first those that were cached; empty if nothing changed."""
        cached, total = self.sequence.num_cached, self.sequence.prompt_len
        if cached is None:  # it waits
            return []
        done = total if self._sampled else min(self.sequence.num_computed, total - 1)
        news = [count for count in sorted({cached, done}) if count > self._reported]
        self._reported = max(self._reported, done)
        return news

    def finish(self) -> list[Event]:
        """Return the text that was held back, then the completion. Raises what the request failed with."""
        if self.sequence.error is not None and not self.is_stopped:
            raise self.sequence.take_error()
        is_cut = self.is_stopped or self.sequence.finish_reason != "stop"
        events = list(self._show(self._answer.finish(is_cut) if self._answer is not None else [], ()))
        return [*events, Event(Delta(), (), self._completion(), self.index)]

    def _ends_with(self, token: int) -> bool:
        """Whether this is the stop token at the very end, which is not shown."""
        sequence = self.sequence
        is_last = sequence.is_finished and len(self._sampled) == len(sequence.sampled)
        return is_last and sequence.finish_reason == "stop" and token in sequence.request.stop_ids

    def _show(self, deltas: Sequence[Delta], sampled: tuple[SampledToken, ...]) -> Iterator[Event]:
        for number, delta in enumerate(deltas, 1):
            self._text += delta.text
            self._reasoning += delta.reasoning
            if delta.tool_call is not None:
                self._calls.append(delta.tool_call)
            self._cut_call = delta.cut_call or self._cut_call
            yield Event(delta, sampled if number == len(deltas) else (), None, self.index)

    def _completion(self) -> Completion:
        sequence, sampled = self.sequence, self._sampled
        cached = sequence.num_cached or 0
        reason = "stop" if self.is_stopped else sequence.finish_reason or "stop"
        if self._cut_call is not None and not self.is_stopped and reason == "stop":
            reason = "length"  # the model ended the answer inside a call
        if self._cut_call is not None and not self.is_stopped and reason == "stop":
            reason = "length"  # the model ended the answer inside a call
        has_calls = bool(self._calls or self._cut_call)
        is_shown = self._answer is not None and not self._answer.has_dropped
        text = self._text.rstrip("\n") if has_calls else self._text
        sources = None
        if sequence.sampling.return_sources:
            sources = find_sources(self._prompt, sequence.prompt_len, sequence.gathered, text)
        return Completion(
            text=text,
            token_ids=[one.token for one in sampled],
            finish_reason="tool_calls" if self._calls and reason == "stop" else reason,
            usage=Usage(sequence.prompt_len, len(sampled), cached),
            timings=Timings(
                prompt_n=sequence.prompt_len - cached,
                prompt_s=self.first_token_at - self.began_at,
                predicted_n=max(0, len(sampled) - 1),
                predicted_s=self.last_token_at - self.first_token_at,
            ),
            reasoning=self._reasoning,
            tool_calls=self._calls,
            cut_call=self._cut_call,
            logprobs=sampled if sequence.sampling.logprobs is not None else None,
            is_whole=is_shown and not self.is_stopped and not self._reasoning and not has_calls,
            stop_token=sampled[-1].token if sampled and self._ends_with(sampled[-1].token) else None,
            sources=sources,
        )


def last_completion(events: Iterator[Event]) -> Completion:
    """Read a stream of one answer to its end and return its completion."""
    completion = None
    for event in events:
        completion = event.completion or completion
    if completion is None:
        raise RuntimeError("the stream ended without a completion")
    return completion

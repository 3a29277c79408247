"""What comes out of a request: pieces while it runs, a completion at its end."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sala.engine.engine import Update
from sala.engine.sequence import Request, SequenceState
from sala.protocol import SampledToken
from sala.text.answer import Answer, Delta
from sala.text.tools import ToolCall

Progress = Callable[[int, int], None]  # tokens of the prompt done, tokens in all


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
    """Seconds for the tokens that were really computed: the prompt's new ones, then the answer's."""

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
    """An answer. `text` is what to show; in a chat, `reasoning` and `tool_calls` are taken out of it."""

    text: str
    token_ids: list[int]
    finish_reason: str
    usage: Usage
    timings: Timings
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[SampledToken] | None = None
    is_whole: bool = True  # all tokens are shown in `text`: nothing was cut at a stop string or taken out
    stop_token: int | None = None  # the last of `token_ids`, if it ended the answer

    def as_message(self) -> dict[str, Any]:
        """The answer as a message of the conversation; where possible with its very tokens, so that nothing of it
        needs computing again."""
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
    """A step of a stream: a piece of the answer, or at the very end the whole `completion`."""

    delta: Delta
    token_ids: tuple[int, ...] = ()
    completion: Completion | None = None

    @property
    def text(self) -> str:
        return self.delta.text


class Run:
    """A request on its way through the engine, and what its reader has been shown so far."""

    sequence: SequenceState

    def __init__(self, request: Request, answer: Answer | None, on_progress: Progress | None) -> None:
        self.request = request
        self.inbox: deque[Event] = deque()
        self.failure: BaseException | None = None  # what the reader's own callback raised
        self._answer = answer
        self._on_progress = on_progress
        self._reported = -1
        self._sampled: list[SampledToken] = []
        self._text = ""
        self._reasoning = ""
        self._calls: list[ToolCall] = []

    def begin(self, sequence: SequenceState) -> None:
        self.sequence = sequence
        self._began = self._first_token = self._last_token = time.perf_counter()

    @property
    def is_begun(self) -> bool:
        return hasattr(self, "sequence")

    @property
    def is_over(self) -> bool:
        return self.sequence.is_finished and not self.inbox

    @property
    def is_stopped(self) -> bool:
        return self._answer is not None and self._answer.is_stopped

    def receive(self, update: Update) -> None:
        """Turn tokens into events as they come, whether or not somebody is reading."""
        self._last_token = time.perf_counter()
        self.inbox.extend(self._take(update))

    def progress(self, done: int) -> None:
        """Tell how much of the prompt is read, whenever that changes; the reader may raise to stop itself."""
        try:
            self._tell(done)
        except BaseException as error:
            self.failure = error

    def _tell(self, done: int) -> None:
        total = self.sequence.prompt_len
        done = total if self._sampled else min(done, total - 1)
        if self._on_progress is not None and done > self._reported:
            self._reported = done
            self._on_progress(done, total)

    def _take(self, update: Update) -> Iterator[Event]:
        for sampled in update.sampled:
            if self.is_stopped:
                return
            if not self._sampled:
                self._first_token = self._last_token
            self._sampled.append(sampled)
            self.progress(0)
            is_end = self._ends_with(sampled.token)
            deltas = [] if self._answer is None or is_end else self._answer.push(sampled.token)
            yield from self._show(deltas or [Delta()], (sampled.token,))

    def _ends_with(self, token: int) -> bool:
        """Whether this is the stop token at the very end, which is not shown."""
        sequence = self.sequence
        is_last = sequence.is_finished and len(self._sampled) == len(sequence.sampled)
        return is_last and sequence.finish_reason == "stop" and token in sequence.request.stop_ids

    def finish(self) -> Iterator[Event]:
        yield from self._show(self._answer.finish() if self._answer is not None else [], ())
        yield Event(Delta(), (), self._completion())

    def _show(self, deltas: Sequence[Delta], tokens: tuple[int, ...]) -> Iterator[Event]:
        for index, delta in enumerate(deltas):
            self._text += delta.text
            self._reasoning += delta.reasoning
            if delta.tool_call is not None:
                self._calls.append(delta.tool_call)
            yield Event(delta, tokens if index == len(deltas) - 1 else ())

    def _completion(self) -> Completion:
        sequence, sampled = self.sequence, self._sampled
        cached = sequence.num_cached or 0
        reason = "stop" if self.is_stopped else sequence.finish_reason or "stop"
        is_cut = self._answer is None or self.is_stopped
        return Completion(
            text=self._text.rstrip("\n") if self._calls else self._text,
            token_ids=[one.token for one in sampled],
            finish_reason="tool_calls" if self._calls and reason == "stop" else reason,
            usage=Usage(sequence.prompt_len, len(sampled), cached),
            timings=Timings(
                prompt_n=sequence.prompt_len - cached,
                prompt_s=self._first_token - self._began,
                predicted_n=max(0, len(sampled) - 1),
                predicted_s=self._last_token - self._first_token,
            ),
            reasoning=self._reasoning,
            tool_calls=self._calls,
            logprobs=sampled if sequence.sampling.logprobs is not None else None,
            is_whole=not is_cut and not self._reasoning and not self._calls,
            stop_token=sampled[-1].token if sampled and self._ends_with(sampled[-1].token) else None,
        )


def last_completion(events: Iterator[Event]) -> Completion:
    """Run a stream to its end."""
    completion = None
    for event in events:
        completion = event.completion or completion
    if completion is None:
        raise RuntimeError("the stream ended without a completion")
    return completion

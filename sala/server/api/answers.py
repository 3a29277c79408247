"""The one path of all generating routes, and what their answers have in common.

`answer` finds the model, prepares the request in the service's thread pool, and sends what the engine generates, as a
whole or as server-sent events. A `Reply` says what that looks like in one API.
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from sala.engine.requests import InputProcessor, Submission
from sala.engine.service import Stream
from sala.engine.stream import Completion, Event, PromptProgress, StreamItem
from sala.errors import ContextTooLong, InputError, SlowReader
from sala.llm import LLM
from sala.options import Sampling
from sala.protocol import SampledToken
from sala.server.http.errors import ApiError, from_exception
from sala.server.http.sse import DONE, PING, EventStream, dump, encode, until_gone
from sala.server.runtime import LoadedModel
from sala.server.settings import Settings

MAX_PENDING = 1 << 20  # bytes of an answer that may wait for a slow client
NO_LOGPROB = -9999.0  # JSON has no infinity
Chunk = Mapping[str, Any]


class Body(Protocol):
    """What the body of every generating route has."""

    model: str | None
    stream: bool | None


B = TypeVar("B", bound=Body)


class Reply(ABC, Generic[B]):
    """The answer to one request in the form of one API.

    `prepare` runs in a thread. Then every item of the stream goes to `take`, and when streaming to `chunks`.
    """

    fields: ClassVar[Mapping[str, str]] = {}  # the client's names of fields that the engine's errors name differently
    ping: ClassVar[bytes] = PING
    done: ClassVar[bytes] = DONE

    def __init__(self, model: LoadedModel, body: B, settings: Settings) -> None:
        self.model = model
        self.body = body
        self.settings = settings

    @abstractmethod
    def prepare(self, inputs: InputProcessor) -> Submission:
        """Return the work for the engine. Raises for everything that is wrong with the request."""

    @abstractmethod
    def take(self, item: StreamItem) -> None:
        """Record an item."""

    @abstractmethod
    def whole(self) -> Chunk:
        """Return the whole answer."""

    def opening(self) -> Iterable[Chunk]:
        """Return what is sent before the first token."""
        return ()

    @abstractmethod
    def chunks(self, item: StreamItem) -> Iterable[Chunk]:
        """Return what is sent for an item that has been taken."""

    def closing(self) -> Iterable[Chunk]:
        """Return what is sent at the end of a complete answer."""
        return ()

    def failed(self, error: ApiError) -> Chunk:
        return error.envelope()

    def encode(self, chunk: Chunk) -> bytes:
        return encode(chunk)


async def answer(request: Request, body: B, kind: type[Reply[B]]) -> Response:
    """Answer a request; a client that disconnects cancels it."""
    settings: Settings = request.app.state.settings
    model: LoadedModel = await until_gone(request, request.app.state.runtime.get(body.model))
    reply = kind(model, body, settings)
    with naming(kind.fields):
        work = model.service.open(partial(reply.prepare, model.llm.inputs), MAX_PENDING)
        stream = await until_gone(request, work, Stream.close)
    if body.stream:
        return EventStream(send_events(stream, reply, settings.ping_s), stream.overflowed, stream.close)
    try:
        whole = await until_gone(request, _collect(stream, reply))
    finally:
        stream.close()
    return Response(dump(whole), media_type="application/json")


async def _collect(stream: Stream, reply: Reply[Any]) -> Chunk:
    async for item in stream:
        reply.take(item)
    return reply.whole()


async def send_events(stream: Stream, reply: Reply[Any], ping_s: float) -> AsyncIterator[bytes]:
    """Yield a stream as server-sent events, with a ping whenever nothing else was sent for `ping_s` seconds.

    An error is the last event; `done` follows only a complete answer.
    """
    sent_at = time.monotonic()
    try:
        for chunk in reply.opening():
            yield reply.encode(chunk)
        while True:
            try:
                item = await stream.aread(max(0.001, ping_s - (time.monotonic() - sent_at)))
            except TimeoutError:
                yield reply.ping
                sent_at = time.monotonic()
                continue
            if item is None:
                break
            reply.take(item)
            for chunk in reply.chunks(item):
                yield reply.encode(chunk)
                sent_at = time.monotonic()
        for chunk in reply.closing():
            yield reply.encode(chunk)
        if reply.done:
            yield reply.done
    except SlowReader:
        return
    except Exception as error:
        yield reply.encode(reply.failed(from_exception(error)))


@contextmanager
def naming(fields: Mapping[str, str]) -> Iterator[None]:
    """Name, in errors of the engine, the field that the client knows."""
    try:
        yield
    except (InputError, ContextTooLong) as error:
        found = from_exception(error)
        param = fields.get(found.param or "prompt", found.param)
        raise ApiError(found.status_code, found.message, param=param, code=found.code, extra=found.extra) from None


def build_sampling(settings: Settings, **values: Any) -> Sampling:
    """Return the sampling parameters of a request: its own, except for Nones, over the server's."""
    defaults = {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k", "max_tokens", "loop_guard")}
    given = {name: value for name, value in values.items() if value is not None}
    return Sampling(**{**defaults, "min_tokens": 0, **given})


@dataclass
class AnswerProgress:
    """One answer while it grows."""

    num_reasoning: int = 0
    num_calls: int = 0
    held: str = ""  # line ends that are left out if a call follows
    sampled: list[SampledToken] = field(default_factory=list)
    num_told: int = 0  # tokens whose log-probabilities have been sent
    completion: Completion | None = None

    def take(self, event: Event) -> None:
        self.sampled += event.sampled
        if event.delta.reasoning:
            self.num_reasoning = len(self.sampled)
        if event.completion is not None:
            self.completion = event.completion
            if self.completion.stop_token is not None and len(self.sampled) > self.num_told:
                self.sampled.pop()  # the end token is not part of the answer

    @property
    def result(self) -> Completion:
        if self.completion is None:
            raise ApiError(500, "the answer is not complete", code="server_error")
        return self.completion


def head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """Return the fields that every chunk of an answer begins with."""
    number = f"{prefix}-{secrets.token_hex(12)}"
    return {"id": number, "object": kind, "created": int(time.time()), "model": model}


def finish(completion: Completion) -> dict[str, Any]:
    """Return OpenAI's finish reason; one that OpenAI does not have goes into `stop_reason`."""
    if completion.finish_reason == "repetition":
        return {"finish_reason": "length", "stop_reason": "repetition"}
    return {"finish_reason": completion.finish_reason}


def usage(prompt_tokens: int, cached: int, completion_tokens: int, reasoning_tokens: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def timings(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the timings of answers to one prompt that were generated together."""
    first = completions[0].timings
    predicted_n = sum(one.timings.predicted_n for one in completions)
    predicted_s = max(one.timings.predicted_s for one in completions)
    return {
        "cache_n": completions[0].usage.cached_tokens,
        "prompt_n": first.prompt_n,
        "prompt_ms": round(first.prompt_s * 1000, 3),
        "prompt_per_second": round(first.prompt_per_second, 3),
        "predicted_n": predicted_n,
        "predicted_ms": round(predicted_s * 1000, 3),
        "predicted_per_second": round(predicted_n / predicted_s, 3) if predicted_s > 0 else 0.0,
    }


def prompt_progress(progress: PromptProgress) -> dict[str, Any]:
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.done,
        "time_ms": round(progress.seconds * 1000),
    }


class TokenSpeller:
    """Spells single tokens, including the space that a tokenizer hides when a token is decoded alone."""

    def __init__(self, llm: LLM) -> None:
        self._tokenizer = llm.tokenizer
        self._before = self._tokenizer.encode("a", bos=False)[-1:]
        self._skip = len(self._tokenizer.decode(self._before, skip_special=False))
        self._known: dict[int, str] = {}

    def text(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._tokenizer.decode([*self._before, token], skip_special=False)[self._skip :]
        return self._known[token]

    def entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        """Return a token in OpenAI's form; bytes are null for a token that is only a part of a character."""
        text = self.text(token)
        is_part = "\N{REPLACEMENT CHARACTER}" in text
        return {"token": text, "logprob": finite(logprob), "bytes": None if is_part else list(text.encode())}

    def sampled(self, sampled: SampledToken) -> dict[str, Any]:
        rivals = [self.entry(token, logprob) for token, logprob in sampled.top_logprobs]
        return {**self.entry(sampled.token, sampled.logprob), "top_logprobs": rivals}


def finite(logprob: float | None) -> float:
    """Return a log-probability that JSON can hold; a forced token, which was not sampled, has probability 1."""
    if logprob is None:
        return 0.0
    return max(logprob, NO_LOGPROB)

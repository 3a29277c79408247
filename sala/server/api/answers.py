"""What all generating routes have in common, whatever carries them: HTTP or a batch file.

A `Reply` turns the body of a request into work for the engine, and what the engine generates into the form of one API.
"""

import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import Field, Tag, field_validator, model_validator

from sala.engine.requests import InputProcessor, Submission
from sala.engine.service import Stream
from sala.engine.stream import Completion, Event, PromptProgress, StreamItem
from sala.errors import ContextTooLong, InputError
from sala.llm import LLM
from sala.options import Sampling
from sala.protocol import SampledToken
from sala.server.http.body import FIRST_ONLY, Strict, dump, problem, union
from sala.server.http.errors import ApiError, from_exception
from sala.server.settings import Settings
from sala.text.answer import Delta

NO_LOGPROB = -9999.0  # JSON has no infinity
MAX_ANSWERS = 8
MAX_BIASES = 1024
MAX_INT = (1 << 31) - 1
MIN_SEED, MAX_SEED = -(1 << 63), (1 << 63) - 1
Chunk = Mapping[str, Any]
StopText = Annotated[str, MinLen(1), MaxLen(256)]
Stop = Annotated[
    Annotated[StopText, Tag("~str")] | Annotated[list[StopText], MaxLen(4), FIRST_ONLY, Tag("~list")],
    union("a string or a list of strings"),
]
Count = Annotated[int, Ge(1), Le(MAX_INT)]


class StreamOptions(Strict, ignored={"include_obfuscation"}):
    include_usage: bool = False


class AnswerRequest(Strict):
    """The fields that all requests to generate an answer share."""

    model: str | None = Field(None, description="The model to use; by default the server's default model.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it is generated.")
    temperature: float | None = Field(None, ge=0, le=100, description="0 selects the most probable token.")
    top_p: float | None = Field(None, gt=0, le=1)


class GenerationRequest(
    AnswerRequest, ignored={"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
):
    """The fields that chats and plain completions share."""

    sampling_fields: ClassVar[tuple[str, ...]] = (
        "temperature", "top_p", "top_k", "min_p", "min_tokens", "seed", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "ignore_eos",
    )  # fmt: skip

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS, description="Number of answers; the prompt is processed once.")
    stop: Stop | None = Field(None, description="End the answer before any of these strings.")
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED, description="The same seed samples the same tokens.")
    top_k: int | None = Field(None, ge=0, le=MAX_INT, description="0: no limit.")
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_BIASES, description="Token ids, as strings, and what to add to their logits."
    )
    ignore_eos: bool | None = Field(None, description="Continue after the end token.")
    return_progress: bool | None = Field(
        None, description="In a stream, report prefill progress in chunks with `prompt_progress`."
    )

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or ():
            if not re.fullmatch(r"[0-9]{1,10}", key):
                raise problem("holds a key that is not a token id")
        return value

    @model_validator(mode="after")
    def _check_stream(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise problem("needs stream to be true", "stream_options")
        if self.return_progress and not self.stream:
            raise problem("needs stream to be true", "return_progress")
        return self


B = TypeVar("B", bound=AnswerRequest)
G = TypeVar("G", bound=GenerationRequest)


@dataclass(eq=False)
class Reply(ABC, Generic[B]):
    """The answer to one request in the form of one API.

    `prepare` runs in a thread. Then every item of the stream goes to `take`, and when streaming to `chunks`.
    """

    fields: ClassVar[Mapping[str, str]] = {}  # the client's names of fields that the engine's errors name differently
    ping: ClassVar[bytes] = b": ping\n\n"
    done: ClassVar[bytes] = b"data: [DONE]\n\n"

    model_id: str
    llm: LLM
    body: B
    settings: Settings

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

    async def collect(self, stream: Stream) -> Chunk:
        """Read a stream to its end and return the whole answer."""
        async for item in stream:
            self.take(item)
        return self.whole()

    def encode(self, chunk: Chunk) -> bytes:
        """Return a chunk as a server-sent event."""
        return b"data: " + dump(chunk) + b"\n\n"


@contextmanager
def naming(fields: Mapping[str, str]) -> Iterator[None]:
    """Name, in errors of the engine, the field that the client knows."""
    try:
        yield
    except (InputError, ContextTooLong) as error:
        found = from_exception(error)
        found.param = fields.get(found.param or "prompt", found.param)
        raise found from None


def build_sampling(settings: Settings, values: Mapping[str, Any]) -> Sampling:
    """Return the sampling parameters of a request: its own, except for Nones, over the server's."""
    defaults = {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k", "max_tokens", "loop_guard")}
    given = {name: value for name, value in values.items() if value is not None}
    return Sampling(**{**defaults, "min_tokens": 0, **given})


@dataclass
class AnswerProgress:
    """One answer while it grows, and what of it is to be sent."""

    has_tools: bool = False
    is_single: bool = False  # at most one call is sent
    shows_reasoning: bool = True
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

    def show(self, event: Event) -> Delta:
        """Return what to send for an event that has been taken."""
        delta, call = event.delta, event.delta.tool_call
        if self.is_single and self.num_calls:
            call = None
        self.num_calls += call is not None
        text = self.held + delta.text
        is_last = self.completion is not None and not self.num_calls
        shown = text.rstrip("\n") if self.has_tools and not is_last else text
        self.held = text[len(shown) :]
        return Delta(shown, delta.reasoning if self.shows_reasoning else "", call)

    @property
    def result(self) -> Completion:
        if self.completion is None:
            raise ApiError(500, "the answer is not complete", code="server_error")
        return self.completion


class ChoicesReply(Reply[G]):
    """The answers to a chat or a completion: OpenAI's older form, a list of choices."""

    kind: ClassVar[str]
    prefix: ClassVar[str]

    @cached_property
    def head(self) -> dict[str, Any]:
        """The fields that every chunk begins with."""
        number = f"{self.prefix}-{secrets.token_hex(12)}"
        return {"id": number, "object": self.kind, "created": int(time.time()), "model": self.model_id}

    answers: Sequence[Any]  # each has a `completion` once it is complete

    @property
    def completions(self) -> list[Completion]:
        """The complete answers so far."""
        return [one.completion for one in self.answers if one.completion is not None]

    @abstractmethod
    def usage(self) -> dict[str, Any]: ...

    def summary(self) -> dict[str, Any]:
        return {"usage": self.usage(), "timings": timings(self.completions)}

    @property
    def wants_usage(self) -> bool:
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    def chunk(self, choice: Chunk, **more: Any) -> dict[str, Any]:
        usage = {"usage": None} if self.wants_usage else {}
        return {**self.head, "choices": [{"logprobs": None, "finish_reason": None, **choice}], **usage, **more}

    def closing(self) -> Iterator[dict[str, Any]]:
        if self.wants_usage:
            yield {**self.head, "choices": [], **self.summary()}


def read_sampling(body: GenerationRequest) -> dict[str, Any]:
    """Return the sampling parameters that a body sets."""
    values: dict[str, Any] = {name: getattr(body, name) for name in body.sampling_fields}
    if body.stop is not None:
        values["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.logit_bias:
        values["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    return {name: value for name, value in values.items() if value is not None}


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

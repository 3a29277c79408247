"""What all generating routes have in common, whatever carries them: HTTP or a batch file.

A `Reply` turns the body of a request into work for the engine, and what the engine generates into the form of one API.
"""

import asyncio
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import Field, Tag, field_validator

from sala.engine.requests import MAX_ANSWERS, InputProcessor, Submission
from sala.engine.service import Stream
from sala.engine.stream import Completion, Event, PromptProgress, PromptScores, StreamItem
from sala.errors import ContextTooLong, InputError
from sala.llm import LLM
from sala.options import ATTENTION_FIELDS, LOOP_GUARD, MOST, MOST_BLOCKS, Attention, Sampling
from sala.options.schema import short
from sala.protocol import SampledToken
from sala.server.http.body import FIRST_ONLY, LazyList, Strict, dump, is_small, problem, union
from sala.server.http.encoding import encode
from sala.server.http.errors import ApiError, from_exception
from sala.server.settings import Settings
from sala.text.answer import Delta
from sala.text.tools import CallPiece, ToolCall
from sala.text.workers import MonitoredPool

NO_LOGPROB = -9999.0  # JSON has no infinity
MAX_BIASES = 1024
MAX_STOPS = 16  # OpenAI takes 4; programs for several servers send more
MAX_NAMED = 5  # faulty keys in a message
MAX_INT = (1 << 31) - 1
MAX_MODEL_NAME = 4096  # characters
TURN = 64  # items of a stream that one reader takes before others on the event loop have a turn
ENTRY_BYTES = 80  # about the JSON of a token with its log-probability
MIN_SEED, MAX_SEED = -(1 << 63), (1 << 63) - 1
Chunk = Mapping[str, Any]
StopText = Annotated[str, MinLen(1), MaxLen(256)]
Stop = Annotated[
    Annotated[StopText, Tag("~str")] | Annotated[list[StopText], MaxLen(MAX_STOPS), FIRST_ONLY, Tag("~list")],
    union("a string or a list of strings"),
]
Count = Annotated[int, Ge(1), Le(MAX_INT)]
TopK = Annotated[int, Ge(-1), Le(MAX_INT)]
UNUSED = (
    "user", "store", "metadata", "service_tier", "safety_identifier", "moderation", "cache_control",
    "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
)  # fmt: skip


class StreamOptions(Strict, ignored={"include_obfuscation"}):
    include_usage: bool = False


class AnswerRequest(Strict, ignored=UNUSED):
    """The fields that all requests to generate an answer share. Those of `UNUSED` are accepted and not used."""

    model: str | None = Field(
        None, max_length=MAX_MODEL_NAME, description="The model to use; by default the server's default model."
    )
    cache_salt: str | None = Field(
        None, max_length=256, description="Only requests with the same salt share cached prefixes."
    )
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it is generated.")
    temperature: float | None = Field(None, ge=0, le=100, description="0 selects the most probable token.")
    top_p: float | None = Field(None, ge=0, le=1, description="0 selects the most probable token.")
    attention: Literal["auto", "dense", "sparse"] | None = Field(
        None, description="How the sparse layers attend; only where the server allows it, as the next two fields."
    )
    dense_below: int | None = Field(
        None, ge=0, le=MOST, description="Attend to everything if the prompt has fewer tokens."
    )
    topk: int | None = Field(None, ge=1, le=MOST_BLOCKS, description="Blocks of text that a query selects.")


class SamplingRequest(AnswerRequest):
    """How tokens are sampled, in all APIs of OpenAI's."""

    sampling_fields: ClassVar[tuple[str, ...]] = (
        "temperature", "top_p", "top_k", "min_p", "min_tokens", "seed", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "ignore_eos",
    )  # fmt: skip

    stop: Stop | None = Field(None, description="End the answer before any of these strings.")
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED, description="The same seed samples the same tokens.")
    top_k: TopK | None = Field(None, description="0 or -1: no limit.")
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_BIASES, description="Token ids, as strings, and what to add to their logits."
    )
    ignore_eos: bool | None = Field(None, description="Continue after the end token.")

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        unknown = [short(key) for key in value or () if not re.fullmatch(r"[0-9]{1,10}", key)]
        if unknown:
            more = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
            raise problem(f"holds keys that are not token ids: {', '.join(unknown[:MAX_NAMED])}{more}")
        return value


class GenerationRequest(SamplingRequest, switches={"stream_options": "stream", "return_progress": "stream"}):
    """The fields that chats and plain completions share."""

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS, description="Number of answers; the prompt is processed once.")
    return_progress: bool | None = Field(
        None, description="In a stream, report prefill progress in chunks with `prompt_progress`."
    )


B = TypeVar("B", bound=AnswerRequest)
C = TypeVar("C", CallPiece, ToolCall)
G = TypeVar("G", bound=GenerationRequest)


@dataclass(eq=False)
class Reply(ABC, Generic[B]):
    """The answer to one request in the form of one API.

    `prepare` runs in a thread. Then every item of the stream goes to `take`, and when streaming to `chunks`. These run
    on the event loop and take little time, except for the scores of a prompt. What takes longer is made in a pool:
    `whole`, `closing`, and the JSON of everything that may be large.
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

    def checked(self, inputs: InputProcessor) -> Submission:
        """Return the work for the engine, unless it is more than one request may ask for."""
        submission = self.prepare(inputs)
        if submission.num_answers > self.settings.max_sequences:
            problem = f"asks for {submission.num_answers:,} answers in all"
            raise InputError("n", problem, f"at most {self.settings.max_sequences:,} are allowed (max_sequences)")
        if self.settings.max_request_tokens:
            self._limit_tokens(submission, self.settings.max_request_tokens)
        return submission

    def _limit_tokens(self, submission: Submission, limit: int) -> None:
        """Cut the answers where prompts and answers together have so many tokens."""
        num_prompt, _ = submission.count_tokens(self.llm.ctx)
        left = limit - num_prompt
        if left < submission.num_answers:
            problem = f"has {num_prompt:,} tokens and asks for {submission.num_answers:,} answers"
            remedy = f"a request may have {limit:,} tokens together with its answers (max_request_tokens)"
            raise InputError("prompt", problem, remedy)
        if submission.num_answers:
            submission.limit_answers(left // submission.num_answers)

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

    async def receive(self, item: StreamItem, pool: MonitoredPool) -> None:
        """Record an item; if that takes long, in the pool."""
        if isinstance(item, PromptScores):
            await pool.run(self.take, item)
        else:
            self.take(item)

    async def collect(self, stream: Stream, pool: MonitoredPool) -> None:
        """Record all items of a stream."""
        count = 0
        async for item in stream:
            await self.receive(item, pool)
            count += 1
            if count % TURN == 0:
                await asyncio.sleep(0)

    def event_head(self, chunk: Chunk) -> bytes:
        """Return what stands before the JSON of a chunk in its server-sent event."""
        return b"data: "

    async def encode(self, chunk: Chunk, pool: MonitoredPool) -> list[bytes]:
        """Return a chunk as a server-sent event, in blocks."""
        blocks = [dump(chunk)] if is_small(chunk) else await encode(pool, lambda: chunk)
        blocks[0] = self.event_head(chunk) + blocks[0]
        blocks[-1] += b"\n\n"
        return blocks


@contextmanager
def naming(fields: Mapping[str, str]) -> Iterator[None]:
    """Name, in errors of the engine, the field that the client knows."""
    try:
        yield
    except (InputError, ContextTooLong) as error:
        raise explain(error, fields) from None


def explain(error: BaseException, fields: Mapping[str, str]) -> ApiError:
    """Return what a client may know about an error; fields have the names that the client knows."""
    found = from_exception(error)
    if isinstance(error, InputError | ContextTooLong):
        name = fields.get(found.param or "prompt", found.param)
        if found.param == "grammar" != name:  # which the client has not written
            found.message = found.message.replace("grammar", f"the grammar of {name}", 1)
        found.param = name
    return found


def build_sampling(model: Sampling, settings: Settings, values: Mapping[str, Any]) -> Sampling:
    """Return the sampling parameters of a request: its own, except for Nones, over the server's over the model's."""
    own = {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k", "max_tokens", "loop_guard")}
    own["loop_guard"] = own["loop_guard"] if own["loop_guard"] is not None else model.loop_guard or LOOP_GUARD
    given = {name: value for name, value in [*own.items(), *values.items()] if value is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    if given.get("top_p") == 0:
        given |= {"top_p": 1.0, "temperature": 0.0}
    return model.with_request(**given)


@dataclass
class AnswerProgress:
    """One answer while it grows, and what of it is to be sent."""

    has_tools: bool = False
    is_single: bool = False  # at most one call is sent
    shows_reasoning: bool = True
    num_reasoning: int = 0
    num_calls: int = 0
    call_id: str = ""  # of the last call that is sent
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
        """Return what to send for an event that has been taken; a call in which the answer was cut is one as well."""
        delta = event.delta
        piece, call = self._admit(delta.call_piece), self._admit(delta.tool_call or delta.cut_call)
        text = self.held + delta.text
        is_last = self.completion is not None and not self.num_calls
        shown = text.rstrip("\n") if self.has_tools and not is_last else text
        self.held = text[len(shown) :]
        return Delta(shown, delta.reasoning if self.shows_reasoning else "", piece, call)

    def _admit(self, part: C | None) -> C | None:
        """Return a call, or a piece of one, if it is sent."""
        if part is None or part.id == self.call_id:
            return part
        if self.is_single and self.num_calls:
            return None
        self.call_id, self.num_calls = part.id, self.num_calls + 1
        return part

    @property
    def calls(self) -> list[ToolCall]:
        """The calls of the complete answer."""
        cut = [] if self.result.cut_call is None else [self.result.cut_call]
        calls = [*self.result.tool_calls, *cut]
        return calls[:1] if self.is_single else calls

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


def read_attention(body: AnswerRequest) -> Attention | None:
    """Return what a body says about attention; None if it says nothing. Raises InputError for contradictions."""
    chosen = Attention(**{name: getattr(body, name) for name in ATTENTION_FIELDS})
    return None if chosen == Attention() else chosen


def allow_attention(chosen: Attention | None, settings: Settings) -> Attention | None:
    """Return what a request says about attention. Raises InputError where the server does not let it."""
    if chosen is not None and not settings.attention_per_request:
        name = next(name for name in ATTENTION_FIELDS if getattr(chosen, name) is not None)
        remedy = "leave it out, or start the server with --attention-per-request"
        raise InputError(name, "may not be chosen by requests of this server", remedy)
    return chosen


def read_sampling(body: SamplingRequest) -> dict[str, Any]:
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


def sources(completion: Completion) -> dict[str, Any]:
    """Return where the answer comes from, if that was asked for."""
    return {} if completion.sources is None else {"sources": completion.sources.as_json()}


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
    num_timed = sum(one.timings.predicted_n for one in completions)  # all but the first token, which prefill gives
    predicted_s = max(one.timings.predicted_s for one in completions)
    return {
        "cache_n": completions[0].usage.cached_tokens,
        "prompt_n": first.prompt_n,
        "prompt_ms": round(first.prompt_s * 1000, 3),
        "prompt_per_second": round(first.prompt_per_second, 3),
        "predicted_n": sum(one.usage.completion_tokens for one in completions),
        "predicted_ms": round(predicted_s * 1000, 3),
        "predicted_per_second": round(num_timed / predicted_s, 3) if predicted_s > 0 else 0.0,
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

    def rivals(self, sampled: SampledToken) -> dict[str, float]:
        """Return the alternatives of a token, and the token itself, in the older form: by their texts."""
        found: dict[str, float] = {}
        for token, logprob in (*sampled.top_logprobs, (sampled.token, finite(sampled.logprob))):
            found.setdefault(self.text(token), finite(logprob))
        return found

    def spell(self, sampled: Sequence[SampledToken], make: Callable[[SampledToken], Any] | None = None) -> Any:
        """Return tokens with their alternatives for an answer; they are spelt when it is encoded."""
        return LazyList(make or self.sampled, sampled, entry_bytes(sampled))


def entry_bytes(sampled: Sequence[SampledToken]) -> int:
    """Return about how long the JSON of one of these tokens with its alternatives is."""
    return ENTRY_BYTES * (1 + max((len(one.top_logprobs) for one in sampled[:2]), default=0))


def finite(logprob: float | None) -> float:
    """Return a log-probability that JSON can hold; a forced token, which was not sampled, has probability 1."""
    if logprob is None:
        return 0.0
    return max(logprob, NO_LOGPROB)

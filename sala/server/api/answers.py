"""What chats and plain completions have in common: how a request becomes Sampling, and the parts of an answer."""

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sala.engine.service import Stream
from sala.engine.stream import Completion, PromptProgress, StreamItem
from sala.errors import ContextTooLong, InputError, SlowReader
from sala.llm import LLM
from sala.protocol import SampledToken, Sampling
from sala.server.api.chat_schema import Common
from sala.server.http.errors import ApiError, from_exception
from sala.server.http.sse import DONE, PING, encode
from sala.server.settings import Settings

SAME = (
    "temperature", "top_p", "top_k", "min_p", "min_tokens", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "ignore_eos",
)  # fmt: skip
NO_LOGPROB = -9999.0  # JSON knows no infinity


def build_sampling(body: Common, settings: Settings, **more: Any) -> Sampling:
    """What the request says, else what the settings say. `more` without the Nones goes over both."""
    values: dict[str, Any] = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "max_tokens": settings.max_tokens,
        "loop_guard": settings.loop_guard,
    }
    values |= {name: value for name in SAME if (value := getattr(body, name)) is not None}
    if body.stop is not None:
        values["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.logit_bias:
        values["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    values |= {name: value for name, value in more.items() if value is not None}
    values["min_tokens"] = values.get("min_tokens", 0)
    return Sampling(**values)


@contextmanager
def naming(fields: Mapping[str, str]) -> Iterator[None]:
    """Errors about what the engine calls one way name the field that the client calls another."""
    try:
        yield
    except (InputError, ContextTooLong) as error:
        found = from_exception(error)
        param = fields.get(found.param or "prompt", found.param)
        raise ApiError(found.status_code, found.message, param=param, code=found.code, extra=found.extra) from None


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"


def head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """What every chunk of an answer begins with."""
    return {"id": new_id(prefix), "object": kind, "created": int(time.time()), "model": model}


def finish(completion: Completion) -> dict[str, Any]:
    """OpenAI's finish reasons; what they have no word for is said beside."""
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
    """Of answers to one prompt, sampled together."""
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


async def send_events(
    stream: Stream,
    ping_s: float,
    opening: Iterable[Mapping[str, Any]],
    chunks: Callable[[StreamItem], Iterable[Mapping[str, Any]]],
    closing: Callable[[], Iterable[Mapping[str, Any]]],
    *,
    failing: Callable[[ApiError], Mapping[str, Any]] = ApiError.envelope,
    write: Callable[[Mapping[str, Any]], bytes] = encode,
    ping: bytes = PING,
    done: bytes = DONE,
) -> AsyncIterator[bytes]:
    """A stream as server-sent events, `ping` when nothing else is sent. An error ends it, and then it is not `done`."""
    spoke = time.monotonic()
    try:
        for chunk in opening:
            yield write(chunk)
        while True:
            try:
                item = await stream.aread(max(0.001, ping_s - (time.monotonic() - spoke)))
            except TimeoutError:
                yield ping
                spoke = time.monotonic()
                continue
            if item is None:
                break
            for chunk in chunks(item):
                yield write(chunk)
                spoke = time.monotonic()
        for chunk in closing():
            yield write(chunk)
        if done:
            yield done
    except SlowReader:
        return
    except Exception as error:
        yield write(failing(from_exception(error)))


def progress(reading: PromptProgress) -> dict[str, Any]:
    return {
        "total": reading.total,
        "cache": reading.cached,
        "processed": reading.done,
        "time_ms": round(reading.seconds * 1000),
    }


class Speller:
    """Single tokens as text, with the space that a tokenizer hides when a token stands alone."""

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
        """OpenAI's form; bytes are null for a token that is only a part of a character."""
        text = self.text(token)
        is_part = "\N{REPLACEMENT CHARACTER}" in text
        return {"token": text, "logprob": finite(logprob), "bytes": None if is_part else list(text.encode())}

    def sampled(self, sampled: SampledToken) -> dict[str, Any]:
        rivals = [self.entry(token, logprob) for token, logprob in sampled.top_logprobs]
        return {**self.entry(sampled.token, sampled.logprob), "top_logprobs": rivals}


def finite(logprob: float | None) -> float:
    """A token that was put there without being sampled was certain."""
    if logprob is None:
        return 0.0
    return logprob if logprob >= NO_LOGPROB else NO_LOGPROB

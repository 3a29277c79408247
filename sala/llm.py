"""LLM: a checkpoint, ready to answer. The place where tokenizer, engine and executor meet."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from sala.backends import open_executor
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig, read_json_object
from sala.engine.live import LiveSequence, Progress
from sala.errors import ConfigError, InputError, NoTokenizer
from sala.protocol import Drawn, Options, Sampling
from sala.text.answer import Answer, Delta, Plain, Structured
from sala.text.detokenize import Detokenizer
from sala.text.reasoning import OPEN
from sala.text.tokenizer import Tokenizer
from sala.text.tools import ToolCall

if TYPE_CHECKING:
    import numpy

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


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
    logprobs: list[Drawn] | None = None
    is_whole: bool = True  # all tokens are shown in `text`: nothing was cut at a stop string or taken out

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
            message["token_ids"] = self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids
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


class LLM:
    """Loads a checkpoint directory and answers prompts, one at a time, on a live cache.

    >>> llm = LLM("path/to/MiniCPM-SALA")
    >>> llm.chat([{"role": "user", "content": "Hello"}]).text

    - backend: `auto` or `torch`
    - device: `auto`, `cpu`, `cuda`, `cuda:N`, `mps`
    - dtype: `auto` (the checkpoint's own), `bfloat16`, `float16`, `float32`
    - ctx: longest sequence in tokens; by default what half of the free memory holds, up to the model's own limit
    - prefill_chunk: tokens computed at a time; it bounds memory and changes no result
    """

    def __init__(
        self,
        model: str | Path,
        backend: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        ctx: int | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        self.path = Path(model).expanduser()
        self.config = SalaConfig.load(self.path)
        self._tokenizer = Tokenizer.load(self.path) if (self.path / "tokenizer.json").is_file() else None
        self._check_vocabulary()
        self.stop_ids = read_stop_ids(self.path, self.config)
        self._checkpoint = Checkpoint(self.path)
        options = Options(device=device, dtype=dtype, ctx=ctx, prefill_chunk=prefill_chunk)
        self._executor = open_executor(backend, self._checkpoint, self.config, options)
        self._live = LiveSequence(self._executor, self.config.sparse_config)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise NoTokenizer(str(self.path))
        return self._tokenizer

    @property
    def ctx(self) -> int:
        """Longest sequence, prompt and answer together, in tokens."""
        return self._executor.capacity.max_tokens

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        on_progress: Progress | None = None,
        **settings: Any,
    ) -> Any:
        """Continue a text or token ids; for a list of prompts, a list of completions.

        `settings` are fields of Sampling, such as `temperature=0`. A string is encoded with BOS as the model wants it;
        special tokens that it spells out stay text (encode with `tokenizer.encode(..., parse_special=True)` otherwise).
        """
        if _is_batch(prompt):
            return [self.generate(one, sampling, on_progress=on_progress, **settings) for one in prompt]
        return last_completion(self.stream(prompt, sampling, on_progress=on_progress, **settings))  # type: ignore[arg-type]

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        on_progress: Progress | None = None,
        **settings: Any,
    ) -> Iterator[Event]:
        """Like `generate` for one prompt, piece by piece; the last event carries the completion."""
        return self._answer(self._to_ids(prompt), _merge(sampling, settings), Plain(), on_progress)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        on_progress: Progress | None = None,
        **settings: Any,
    ) -> Completion:
        """Answer a conversation in the form `[{"role": "user", "content": "..."}, …]`.

        A conversation that continues the last one computes only what is new.
        """
        return last_completion(self.stream_chat(messages, sampling, tools=tools, on_progress=on_progress, **settings))

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        on_progress: Progress | None = None,
        **settings: Any,
    ) -> Iterator[Event]:
        """Like `chat`, piece by piece; the last event carries the completion."""
        check_messages(messages)
        ids = self.tokenizer.encode_chat(messages, tools=tools)
        is_open = self.tokenizer.decode(ids[-16:]).rstrip().endswith(OPEN)
        return self._answer(ids, _merge(sampling, settings), Structured(tools or (), is_open), on_progress)

    def logits(
        self, token_ids: Sequence[int], chunk: int | None = None, prompt_len: int | None = None
    ) -> "numpy.ndarray[Any, Any]":
        """Scores of the next token after every token: float32 array [len(token_ids), vocab_size].

        `chunk` tokens are computed at a time. Tokens from `prompt_len` on are treated as decoded ones (they matter only
        around the switch from dense to sparse attention); by default all belong to the prompt.
        """
        import numpy as np

        return np.concatenate(list(self._logit_pieces(token_ids, chunk, prompt_len)))

    def perplexity(self, text: str | Sequence[int], chunk: int | None = None) -> float:
        """exp of the mean negative log-likelihood of every token after the first; holds one chunk of logits."""
        import numpy as np

        ids = self._to_ids(text)
        if len(ids) < 2:
            raise InputError("text", f"has {len(ids)} tokens", "perplexity needs at least two")
        total, at = 0.0, 0
        for piece in self._logit_pieces(ids, chunk, None):
            targets = ids[at + 1 : at + 1 + len(piece)]
            scores = piece[: len(targets)].astype(np.float64)
            peak = scores.max(-1, keepdims=True)
            lse = np.log(np.exp(scores - peak).sum(-1)) + peak[:, 0]
            total += float((lse - scores[np.arange(len(targets)), targets]).sum())
            at += len(piece)
        return math.exp(total / (len(ids) - 1))

    def reset(self) -> None:
        """Forget the live sequence: the next prompt is computed from its first token."""
        self._live.reset()

    def close(self) -> None:
        """Give the memory back. The object cannot be used afterwards."""
        self._live.reset()
        self._executor.close()

    def _logit_pieces(self, token_ids: Sequence[int], chunk: int | None, prompt_len: int | None) -> Iterator[Any]:
        ids = self._checked(token_ids)
        size = self._executor.capacity.prefill_chunk if chunk is None else chunk
        if size < 1:
            raise InputError("chunk", f"is {chunk}", "it must be at least 1")
        return self._live.logits(ids, len(ids) if prompt_len is None else prompt_len, size)

    def _answer(
        self, ids: Sequence[int], sampling: Sampling, form: Plain | Structured, on_progress: Progress | None
    ) -> Iterator[Event]:
        """Checks at once, computes when iterated."""
        ids = self._checked(ids)
        if self._tokenizer is None and sampling.stop:
            raise InputError("stop", "needs a tokenizer, and the checkpoint has none", "leave it out")
        for token in sampling.logit_bias:
            if token >= self.config.vocab_size:
                raise InputError("logit_bias", f"names token {token}", f"ids go to {self.config.vocab_size - 1}")
        answer = None if self._tokenizer is None else Answer(Detokenizer(self._tokenizer, ids), sampling.stop, form)
        return self._events(ids, sampling, answer, on_progress)

    def _events(
        self, ids: list[int], sampling: Sampling, answer: Answer | None, on_progress: Progress | None
    ) -> Iterator[Event]:
        record = _Record()
        began = time.perf_counter()
        cached = self._live.prefill(ids, on_progress)
        prefilled = time.perf_counter()
        source = self._live.draw(ids, sampling, self.stop_ids)
        while True:
            try:
                drawn = next(source)
            except StopIteration as end:
                finish_reason = end.value
                break
            if not record.drawn:
                prefilled = time.perf_counter()  # the first token ends the prefill
                if on_progress is not None:
                    on_progress(len(ids), len(ids))
            record.drawn.append(drawn)
            is_stop = drawn.token in self.stop_ids and not sampling.ignore_eos
            deltas = [] if answer is None or is_stop else answer.push(drawn.token)
            yield from record.events(deltas or [Delta()], (drawn.token,))
            if answer is not None and answer.is_stopped:
                finish_reason = "stop"
                break
        yield from record.events(answer.finish() if answer is not None else [], ())
        is_cut = answer is None or answer.is_stopped
        timings = Timings(
            len(ids) - cached,
            prefilled - began,
            max(0, len(record.drawn) - 1),
            time.perf_counter() - prefilled,
        )
        usage = Usage(len(ids), len(record.drawn), cached)
        yield Event(Delta(), (), record.completion(finish_reason, usage, timings, sampling, is_cut))

    def _to_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not hasattr(prompt, "__len__"):
            raise InputError("prompt", f"is {prompt!r}", "give text or a list of token ids")
        return list(prompt)

    def _checked(self, ids: Sequence[int]) -> list[int]:
        if not len(ids):
            raise InputError("prompt", "is empty", "give at least one token")
        for token in ids:
            if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= token < self.config.vocab_size:
                raise InputError("prompt", f"holds {token!r}", f"token ids go from 0 to {self.config.vocab_size - 1}")
        return [int(token) for token in ids]

    def _check_vocabulary(self) -> None:
        if self._tokenizer is not None and self._tokenizer.vocab_size > self.config.vocab_size:
            raise ConfigError(
                f"{self.path}: the tokenizer has {self._tokenizer.vocab_size} ids, the model {self.config.vocab_size}",
                "they do not belong together",
            )


class _Record:
    """Collects what a stream has shown, so that its end can carry the whole."""

    def __init__(self) -> None:
        self.drawn: list[Drawn] = []
        self._text = ""
        self._reasoning = ""
        self._calls: list[ToolCall] = []

    def events(self, deltas: Sequence[Delta], tokens: tuple[int, ...]) -> Iterator[Event]:
        for index, delta in enumerate(deltas):
            self._text += delta.text
            self._reasoning += delta.reasoning
            if delta.tool_call is not None:
                self._calls.append(delta.tool_call)
            if delta.was_reasoning:
                self._reasoning, self._text = (self._reasoning + self._text).strip(), ""
            yield Event(delta, tokens if index == len(deltas) - 1 else ())

    def completion(
        self, finish_reason: str, usage: Usage, timings: Timings, sampling: Sampling, is_cut: bool
    ) -> Completion:
        return Completion(
            text=self._text.rstrip("\n") if self._calls else self._text,
            token_ids=[drawn.token for drawn in self.drawn],
            finish_reason="tool_calls" if self._calls and finish_reason == "stop" else finish_reason,
            usage=usage,
            timings=timings,
            reasoning=self._reasoning,
            tool_calls=self._calls,
            logprobs=self.drawn if sampling.logprobs is not None else None,
            is_whole=not is_cut and not self._reasoning and not self._calls,
        )


def last_completion(events: Iterator[Event]) -> Completion:
    """Run a stream to its end."""
    completion = None
    for event in events:
        completion = event.completion or completion
    if completion is None:
        raise RuntimeError("the stream ended without a completion")
    return completion


def read_stop_ids(directory: Path, config: SalaConfig) -> frozenset[int]:
    """generation_config.json decides, else config.json."""
    file = directory / "generation_config.json"
    ids: Any = read_json_object(file).get("eos_token_id") if file.is_file() else None
    if ids is None:
        return frozenset(config.eos_token_id)
    ids = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(item, int) for item in ids):
        raise ConfigError(f"{file}: eos_token_id is {ids!r}", "it must be a token id or a list of them")
    return frozenset(ids)


def check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InputError(
            "messages",
            "must be a list with at least one message",
            'e.g. [{"role": "user", "content": "Hello"}]',
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"messages[{index}]", "has no role", 'use {"role": "user", "content": "..."}')
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            raise InputError(f"messages[{index}].content", f"is of type {type(content).__name__}", "give text")


def _merge(sampling: Sampling | None, settings: Mapping[str, Any]) -> Sampling:
    return replace(sampling or Sampling(), **settings)


def _is_batch(prompt: object) -> TypeGuard[Sequence[Prompt]]:
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return False
    return bool(prompt) and hasattr(prompt[0], "__len__")

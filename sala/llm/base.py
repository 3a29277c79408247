"""LLM: answers prompts and conversations from synchronous code; and BaseLLM, what it shares with AsyncLLM."""

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeGuard, TypeVar

from sala.backends import open_executor
from sala.checkpoint.lora import open_checkpoint
from sala.config import SalaConfig, read_json_object
from sala.engine.cache import as_bytes, as_tokens
from sala.engine.engine import Engine
from sala.engine.requests import Call, InputProcessor, Prompt, PromptScoring, Submission, Tools
from sala.engine.service import EngineService
from sala.engine.sessions import DiskTier, SessionStore
from sala.engine.stream import Completion, Event, PromptProgress, PromptScores, StreamItem
from sala.errors import ConfigError, InputError
from sala.models.embedded import find_base, find_model
from sala.options.sources import resolve
from sala.protocol import Capacity, Options, SampledToken, Sampling
from sala.text.control import GrammarCompiler
from sala.text.template import Message
from sala.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy

Events = TypeVar("Events")
Answer = TypeVar("Answer")
OnProgress = Callable[[int, int], None]  # (tokens of the prompt that are done, all of them)
Prepare = Callable[[], Submission]
Finish = Callable[[Iterable[StreamItem]], Any]
MAX_WAITING = 64  # calls of `many` that are queued at a time


class BaseLLM(Generic[Events, Answer]):
    """What LLM and AsyncLLM share: a loaded checkpoint, how its requests are prepared, and the service that runs them.

    `Events` is the kind of iterator that streams return, `Answer` a completion or its coroutine.

    `options` are the fields of `sala.options.Options`, such as `ctx="128K"` or `kv="fp8"`; each that is not given is
    read from its variable (`SALA_CTX`, `SALA_KV`). Alternatively pass `options=Options(…)`, which is taken as it is.
    """

    def __init__(self, model: str | Path | None = None, *, options: Options | None = None, **arguments: Any) -> None:
        if model is not None:
            arguments["model"] = model
        self.options = options = resolve(options, arguments)
        self.max_batch = options.max_batch
        self.path, self.adapter = find_base(find_model(options.model), options.adapter)
        self._checkpoint, self.config = open_checkpoint(self.path, SalaConfig.load(self.path), self.adapter)
        self._tokenizer = Tokenizer.load(self.path) if (self.path / "tokenizer.json").is_file() else None
        self._check_vocabulary()
        self.stop_ids = read_stop_ids(self.path, self.config)
        self._executor = open_executor(options.backend, self._checkpoint, self.config, options)
        self.engine = Engine(self._executor, self.config.sparse_config, options)
        self.service = EngineService(self.engine)
        grammars = GrammarCompiler(self.path / "tokenizer.json", self.config.vocab_size, self.stop_ids)
        self.inputs = InputProcessor(
            self._tokenizer,
            grammars,
            self.stop_ids,
            self.config.vocab_size,
            self.ctx,
            self.engine.check,
            str(self.path),
        )
        if options.cache_dir is not None:
            store = self.open_store(options.cache_dir)
            tier = DiskTier(store, self.engine.hybrid, self._executor, options.cache_disk)
            self.engine.before, self.engine.after = tier.fetch, tier.keep

    def __reduce__(self) -> Any:
        return self.service.__reduce__()  # raises: a loaded model cannot be pickled

    def open_store(self, directory: str | Path) -> SessionStore:
        """Return the sessions in a directory, as far as they belong to this model."""
        return SessionStore(Path(directory).expanduser(), self.fingerprint(), warnings.warn)

    def fingerprint(self) -> str:
        """Identify weights, configuration and precision: what a saved KV cache depends on."""
        text = f"{self._checkpoint.fingerprint()} {self.config} {self._executor.capacity.dtype}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.inputs.tokenizer

    @property
    def ctx(self) -> int:
        """Longest sequence, prompt and answer together, in tokens."""
        return self._executor.capacity.max_tokens

    @property
    def capacity(self) -> Capacity:
        """What the cache holds."""
        return self._executor.capacity

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, with BOS where the model wants it; ids are only checked."""
        return self.inputs.encode(prompt)

    def encode_chat(self, messages: Sequence[Message], *, tools: Tools | None = None, **variables: Any) -> list[int]:
        """Return the token ids of a conversation, up to where the answer begins. `variables` reach the template."""
        return self.inputs.encode_chat(messages, tools=tools, **variables)

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> Any:
        """Continue a text or token ids → Completion; a list for several prompts, and for several answers (`n` > 1).

        `settings` are fields of Sampling, such as `temperature=0`. A string is encoded with BOS as the model wants it;
        special tokens that it spells out stay text (encode with `tokenizer.encode(..., parse_special=True)` otherwise).
        Several prompts run together; several answers share the prefill of their prompt.
        """
        merged, is_batch = replace(sampling or Sampling(), **settings), _is_batch(prompt)
        prompts: Any = prompt if is_batch else [prompt]
        calls = [Call(None, merged, prompt=one, n=n) for one in prompts]

        def arrange(items: Iterable[StreamItem]) -> Any:
            found = {item.index: item.completion for item in items if isinstance(item, Event) and item.completion}
            groups = [[found[at + number] for number in range(n)] for at in range(0, len(found), n)]
            answers = groups if n > 1 else [group[0] for group in groups]
            return answers if is_batch else answers[0]

        return self._collect(lambda: self._prepare(*calls, on_progress=on_progress), arrange, on_progress)

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        is_chat: bool = False,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> Events:
        """Like `generate` for one prompt, piece by piece; the last event carries the completion.

        With `is_chat` the prompt is a rendered conversation: reasoning is taken out of the answer.
        """
        merged = replace(sampling or Sampling(), **settings)
        return self._stream(Call(None, merged, prompt=prompt, is_chat=is_chat), on_progress)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        tools: Tools | None = None,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> Answer:
        """Answer a conversation in the form `[{"role": "user", "content": "..."}, …]`.

        A conversation that continues an earlier one computes only what is new. Only with `tools` are tool calls taken
        out of the answer.
        """
        merged = replace(sampling or Sampling(), **settings)
        return self.answer(Call(None, merged, messages=messages, tools=tools), on_progress)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        tools: Tools | None = None,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> Events:
        """Like `chat`, piece by piece; the last event carries the completion."""
        merged = replace(sampling or Sampling(), **settings)
        return self._stream(Call(None, merged, messages=messages, tools=tools), on_progress)

    def answer(self, call: Call, on_progress: OnProgress | None = None) -> Answer:
        """Answer one call, whatever it asks for; of several answers (`n` > 1) return the first."""
        prepare = partial(self._prepare, call, on_progress=on_progress)
        found: Answer = self._collect(prepare, first_completion, on_progress)
        return found

    def _collect(self, prepare: Prepare, finish: Finish, on_progress: Any) -> Any:
        """Run a submission and return what `finish` makes of its items, or a coroutine that does."""
        raise NotImplementedError

    def _stream(self, call: Call, on_progress: OnProgress | None) -> Events:
        """Run a call and return an iterator of its events; leaving it early cancels the request."""
        raise NotImplementedError

    def _prepare(self, *calls: Call, on_progress: OnProgress | None, is_streamed: bool = False) -> Submission:
        return self.inputs.submit(*calls, is_streamed=is_streamed, wants_progress=on_progress is not None)

    def scoring(
        self,
        ids: Sequence[int],
        reduce: Callable[[Any, int], Any],
        chunk: int | None = None,
        prompt_len: int | None = None,
        index: int = 0,
    ) -> PromptScoring:
        """Prepare the scoring of a prompt: `reduce(logits, start)` is called for chunks of logits [t, V] in float32."""
        checked = self.inputs.check_ids(ids)
        self.engine.check(checked)
        size = self.capacity.prefill_chunk if chunk is None else chunk
        if size < 1:
            raise InputError("chunk", f"is {chunk}", "it must be at least 1")
        return PromptScoring(index, checked, reduce, size, prompt_len)

    def token_scoring(self, prompt: Prompt, top: int = 0, chunk: int | None = None, index: int = 0) -> PromptScoring:
        """Prepare the scoring of a prompt whose parts are lists of SampledToken, for every token but the first."""
        ids = self.inputs.encode(prompt)
        return self.scoring(ids, lambda logits, start: _score_tokens(logits, ids[start + 1 :], top), chunk, index=index)

    def _submission(self, call: Call) -> Submission | Exception:
        """Prepare one of many calls: a bad call is a bad answer, and no more than that."""
        try:
            return self.inputs.submit(call, is_streamed=False)
        except Exception as error:
            return error

    def _session_call(self, ids: list[int]) -> Call:
        """Return a request that leaves a snapshot of a prompt in the cache."""
        return Call(None, Sampling(max_tokens=1, temperature=0), prompt=[*ids, ids[-1]])

    def _save(self, store: SessionStore, name: str, ids: list[int]) -> int:
        sparse_from = self.config.sparse_config.sparse_from(len(ids) + 1)
        snapshot = self.engine.hybrid.prefix.has(as_bytes(ids), len(ids), sparse_from, "")
        if snapshot is None:
            raise InputError("session", "does not fit in the cache", "free some memory")
        store.save(name, snapshot, self._executor)
        return len(ids)

    def _load(self, store: SessionStore, name: str) -> list[int]:
        snapshot = store.load(store.find(name), self.engine.hybrid, self._executor)
        if snapshot is None:
            raise InputError("session", "does not fit in the cache", "free some memory")
        return as_tokens(snapshot.tokens)

    def _close(self, drain_s: float) -> None:
        is_stopped = self.service.close(drain_s)
        if self._tokenizer is not None:
            self._tokenizer.close()
        if is_stopped:
            self._executor.close()

    def _check_vocabulary(self) -> None:
        if self._tokenizer is not None and self._tokenizer.vocab_size > self.config.vocab_size:
            raise ConfigError(
                f"{self.path}: the tokenizer has {self._tokenizer.vocab_size} ids, the model {self.config.vocab_size}",
                "they do not belong together",
            )


class LLM(BaseLLM[Iterator[Event], Completion]):
    """Loads a checkpoint directory, or without one the embedded model, and answers prompts, one or many at a time.

    >>> llm = LLM("path/to/MiniCPM-SALA")
    >>> llm.chat([{"role": "user", "content": "Hello"}]).text

    See BaseLLM for the options. Methods may be called from several threads; their requests run together.
    """

    def many(
        self, calls: Iterable[Call], max_waiting: int = MAX_WAITING
    ) -> Iterator[tuple[Any, Completion | Exception]]:
        """Answer a stream of calls, as many at a time as fit; yields (key, completion or error) as they complete.

        Calls are taken from the iterable only as there is room for them, so it may be endless. A call with `n` > 1
        yields its key `n` times.
        """
        source = ((call.key, self._submission(call)) for call in calls)
        for key, _, result in self.service.run_all(source, max_waiting):
            yield key, result

    def logits(
        self, token_ids: Sequence[int], chunk: int | None = None, prompt_len: int | None = None
    ) -> "numpy.ndarray[Any, Any]":
        """Return the logits after every token: float32 array [len(token_ids), vocab_size].

        `chunk` tokens are computed at a time. Tokens from `prompt_len` on are treated as decoded ones (they matter only
        around the switch from dense to sparse attention); by default all belong to the prompt.
        """
        import numpy as np

        return np.concatenate(self.score_parts(self.scoring(token_ids, lambda logits, _: logits, chunk, prompt_len)))

    def score(self, prompt: Prompt, top: int = 0, chunk: int | None = None) -> list[SampledToken]:
        """Return the log-probability of every token of the prompt after the first, with `top` alternatives."""
        return [token for part in self.score_parts(self.token_scoring(prompt, top, chunk)) for token in part]

    def score_parts(self, scoring: PromptScoring, on_progress: OnProgress | None = None) -> list[Any]:
        """Score a prompt and return what its `reduce` made of every chunk."""
        submission = Submission(scores=[scoring], wants_progress=on_progress is not None)
        return parts_of(self._read(submission, on_progress))

    def perplexity(self, text: Prompt, chunk: int | None = None) -> float:
        """Return exp of the mean negative log-likelihood of every token after the first."""
        return perplexity(self.score(text, chunk=chunk))

    def save_session(
        self, store: SessionStore, name: str, prompt: Prompt, on_progress: OnProgress | None = None
    ) -> int:
        """Compute a prompt and save its KV cache under a name; returns its number of tokens."""
        store.check_new(name)
        ids = self.encode(prompt)
        first_completion(self._stream(self._session_call(ids), on_progress))
        return self.service.execute(self._save, store, name, ids).result()

    def load_session(self, store: SessionStore, name: str) -> list[int]:
        """Load a saved KV cache; returns its tokens, to be continued."""
        return self.service.execute(self._load, store, name).result()

    def reset(self) -> None:
        """Drop everything that is cached: the next prompt is computed from its first token."""
        self.service.execute(self.engine.forget).result()

    def close(self, drain_s: float = 0.0) -> None:
        """Let what runs end for `drain_s`, then cancel it and free the memory. The object cannot be used afterwards."""
        self._close(drain_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, prepare: Prepare, finish: Finish, on_progress: Any) -> Any:
        return finish(self._read(prepare(), on_progress))

    def _stream(self, call: Call, on_progress: OnProgress | None) -> Iterator[Event]:
        submission = self._prepare(call, on_progress=on_progress, is_streamed=True)
        return (item for item in self._read(submission, on_progress) if isinstance(item, Event))

    def _read(self, submission: Submission, on_progress: OnProgress | None) -> Iterator[StreamItem]:
        """Queue the request when the first item is asked for; leaving early cancels it."""
        with self.service.submit(submission) as stream:
            report_start(submission, on_progress)
            for item in stream:
                if not report(item, on_progress):
                    yield item


def read_stop_ids(directory: Path, config: SalaConfig) -> frozenset[int]:
    """Return the tokens that end an answer, from generation_config.json or else from config.json."""
    file = directory / "generation_config.json"
    ids: Any = read_json_object(file).get("eos_token_id") if file.is_file() else None
    if ids is None:
        return frozenset(config.eos_token_id)
    ids = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(item, int) for item in ids):
        raise ConfigError(f"{file}: eos_token_id is {ids!r}", "it must be a token id or a list of them")
    return frozenset(ids)


def report_start(submission: Submission, on_progress: OnProgress | None) -> None:
    if on_progress is not None:
        for group in submission.groups:
            on_progress(0, len(group[0].request.prompt))


def report(item: StreamItem, on_progress: OnProgress | None) -> bool:
    """Report progress. Return whether the item was nothing else."""
    if not isinstance(item, PromptProgress):
        return False
    if on_progress is not None and item.done:
        on_progress(item.done, item.total)
    return True


def first_completion(items: Iterable[StreamItem]) -> Completion:
    found = {item.index: item.completion for item in items if isinstance(item, Event) and item.completion}
    return found[0]


def parts_of(items: Iterable[StreamItem]) -> list[Any]:
    """Return what the scoring of a prompt made of its chunks."""
    return [part for item in items if isinstance(item, PromptScores) for part in item.parts]


def _score_tokens(logits: "numpy.ndarray[Any, Any]", targets: Sequence[int], top: int) -> list[SampledToken]:
    """Return the scores of the tokens that follow those whose logits [t, V] are given."""
    import numpy as np

    targets = targets[: len(logits)]
    scores = logits[: len(targets)].astype(np.float64)
    peak = scores.max(-1, keepdims=True)
    logprobs = scores - peak - np.log(np.exp(scores - peak).sum(-1, keepdims=True))
    return [_sampled(row, token, top) for row, token in zip(logprobs, targets, strict=True)]


def _sampled(logprobs: "numpy.ndarray[Any, Any]", token: int, top: int) -> SampledToken:
    """Return a token with its alternatives, the most probable first; equals in order of their ids."""
    import numpy as np

    best: Any = ()
    if top:
        near = np.flatnonzero(logprobs >= np.partition(logprobs, -top)[-top])
        best = near[np.argsort(-logprobs[near], kind="stable")][:top]
    return SampledToken(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best))


def perplexity(scores: Sequence[SampledToken]) -> float:
    if not scores:
        raise InputError("text", "has one token", "perplexity needs at least two")
    return math.exp(-sum(sampled.logprob or 0.0 for sampled in scores) / len(scores))


def _is_batch(prompt: object) -> TypeGuard[Sequence[Prompt]]:
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return False
    return bool(prompt) and hasattr(prompt[0], "__len__")

"""LLM: a checkpoint, ready to answer. The place where tokenizer, engine and executor meet."""

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from sala.backends import open_executor
from sala.checkpoint.lora import open_checkpoint
from sala.config import SalaConfig, read_json_object
from sala.engine.cache.prefix import as_bytes, as_tokens
from sala.engine.engine import Engine
from sala.engine.sequence import Request, SequenceState
from sala.engine.store.sessions import SessionStore
from sala.engine.store.tier import DiskTier
from sala.engine.stream import Completion, Event, Progress, Run, last_completion
from sala.errors import ConfigError, InputError, NoTokenizer, TemplateError
from sala.models.embedded import find_base, find_model
from sala.options.sources import resolve
from sala.protocol import Capacity, Control, Options, SampledToken, Sampling
from sala.text.answer import Answer, Plain, Structured, Untooled
from sala.text.control import GrammarCompiler, LoopGuard, ThinkBudget
from sala.text.detokenize import Detokenizer
from sala.text.messages import Message, check_messages, check_tools
from sala.text.reasoning import OPEN
from sala.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy

Prompt = str | Sequence[int]

MAX_ANSWERS = 128
PATIENCE = 8  # contexts: what is only to be counted may be so long


@dataclass(frozen=True, slots=True)
class Call:
    """One of many requests: a conversation or a prompt, and a key to know its answer by."""

    key: Any
    sampling: Sampling
    prompt: Prompt = ()
    messages: Sequence[Message] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None


class LLM:
    """Loads a checkpoint directory, or without one the embedded model, and answers prompts, one or many at a time.

    >>> llm = LLM("path/to/MiniCPM-SALA")
    >>> llm.chat([{"role": "user", "content": "Hello"}]).text

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
        self._grammars = GrammarCompiler(self.path / "tokenizer.json", self.config.vocab_size, self.stop_ids)
        self._runs: dict[int, Run] = {}
        if options.cache_dir is not None:
            store = self.open_store(options.cache_dir, options.cache_disk)
            tier = DiskTier(store, self.engine.hybrid, self._executor, self.config.sparse_config.agreement_len)
            self.engine.before, self.engine.after = tier.fetch, tier.keep

    def open_store(self, directory: Path, max_bytes: int | None = None) -> SessionStore:
        """The sessions of a directory, as far as they belong to this model."""
        return SessionStore(directory, self.fingerprint(), max_bytes, warnings.warn)

    def fingerprint(self) -> str:
        """Identifies weights, configuration and precision: what a saved past depends on."""
        text = f"{self._checkpoint.fingerprint()} {self.config} {self._executor.capacity.dtype}"
        return hashlib.sha256(text.encode()).hexdigest()

    def save_session(self, store: SessionStore, name: str, prompt: Prompt, on_progress: Progress | None = None) -> int:
        """Read a prompt and keep its past under a name; returns its number of tokens."""
        store.check_new(name)
        ids = self.encode(prompt)
        list(self.stream([*ids, ids[-1]], max_tokens=1, temperature=0, on_progress=on_progress))
        sparse_from = self.config.sparse_config.sparse_from(len(ids) + 1)
        snapshot = self.engine.hybrid.prefix.has(as_bytes(ids), len(ids), sparse_from, "")
        if snapshot is None:
            raise InputError("session", "does not fit in the cache", "free some memory")
        store.save(name, snapshot, self._executor)
        return len(ids)

    def load_session(self, store: SessionStore, name: str) -> list[int]:
        """Bring a saved past into the cache; returns its tokens, to be continued."""
        snapshot = store.load(store.find(name), self.engine.hybrid, self._executor)
        if snapshot is None:
            raise InputError("session", "does not fit in the cache", "free some memory")
        return as_tokens(snapshot.tokens)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise NoTokenizer(str(self.path))
        return self._tokenizer

    @property
    def ctx(self) -> int:
        """Longest sequence, prompt and answer together, in tokens."""
        return self._executor.capacity.max_tokens

    @property
    def capacity(self) -> Capacity:
        """What the cache holds."""
        return self._executor.capacity

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        on_progress: Progress | None = None,
        **settings: Any,
    ) -> Any:
        """Continue a text or token ids → Completion; a list for several prompts, and for several answers (`n` > 1).

        `settings` are fields of Sampling, such as `temperature=0`. A string is encoded with BOS as the model wants it;
        special tokens that it spells out stay text (encode with `tokenizer.encode(..., parse_special=True)` otherwise).
        Several prompts run together, several answers share one reading of their prompt.
        """
        if not 1 <= n <= MAX_ANSWERS:
            raise InputError("n", f"is {n}", f"it must be from 1 to {MAX_ANSWERS}")
        merged = _merge(sampling, settings)
        prompts = list(prompt) if _is_batch(prompt) else [prompt]
        all_ids = [self.encode(one) for one in prompts]  # type: ignore[arg-type]
        groups = [self._prepare(ids, merged, Plain, False, n, on_progress) for ids in all_ids]
        try:
            for group in groups:
                self.submit(group)
            answers = [[last_completion(self._events(run)) for run in group] for group in groups]
        finally:
            for group in groups:
                self.drop(group)
        if _is_batch(prompt):
            return answers if n > 1 else [group[0] for group in answers]
        return answers[0] if n > 1 else answers[0][0]

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        is_chat: bool = False,
        on_progress: Progress | None = None,
        **settings: Any,
    ) -> Iterator[Event]:
        """Like `generate` for one prompt, piece by piece; the last event carries the completion.

        With `is_chat` the prompt is a rendered conversation: reasoning and tool calls are taken out of the answer.
        """
        ids = self.encode(prompt)
        is_open = is_chat and self._is_open(ids)
        form = partial(Structured, (), is_open) if is_chat else Plain
        return self._stream(self._prepare(ids, _merge(sampling, settings), form, is_open, 1, on_progress))

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

        A conversation that continues an earlier one computes only what is new.
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
        ids = self.encode_chat(messages, tools=tools)
        is_open = self._is_open(ids)
        merged = _merge(sampling, settings)
        form = partial(Structured, tools or (), is_open)
        boundary = self._last_message(messages, ids, tools)
        return self._stream(self._prepare(ids, merged, form, is_open, 1, on_progress, (boundary,)))

    def many(self, calls: Iterable[Call], max_waiting: int = 64) -> Iterator[tuple[Any, Completion | Exception]]:
        """Answer a stream of calls, as many at a time as fit; yields (key, completion or error) in order of completion.

        Calls are taken from the iterable only as there is room for them, so it may be endless.
        """
        source = iter(calls)
        active: dict[int, tuple[Any, Run]] = {}
        is_dry = False
        try:
            while active or not is_dry:
                while not is_dry and len(active) < max_waiting:
                    call = next(source, None)
                    if call is None:
                        is_dry = True
                        break
                    try:
                        run = self._prepare_call(call)
                        self.submit([run])
                        active[run.sequence.id] = (call.key, run)
                    except Exception as error:  # one bad call is one bad answer
                        yield call.key, error
                if active:
                    self._step()
                for number, (key, run) in list(active.items()):
                    done = self._drain(run)
                    if done is not None:
                        del active[number]
                        yield key, done
        finally:
            self.drop([run for _, run in active.values()])

    # For those who run the engine themselves: `prepare`, `prepare_chat` and `encode_chat` may be called from any thread
    # and check all that can be wrong with a request; `submit`, `step`, `take`, `drop` and `scoring` belong to the
    # thread that owns the engine.

    def prepare(
        self, prompt: Prompt, sampling: Sampling, *, n: int = 1, on_progress: Progress | None = None
    ) -> list[Run]:
        """`n` answers to one prompt, ready to be submitted."""
        return self._prepare(self.encode(prompt), sampling, Plain, False, n, on_progress)

    def prepare_chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        n: int = 1,
        on_progress: Progress | None = None,
        **variables: Any,
    ) -> list[Run]:
        """`n` answers to a conversation, ready to be submitted. `variables` reach the chat template.

        Without tools nothing in the answer is taken for a tool call.
        """
        ids = self.encode_chat(messages, tools=tools, patience=1, **variables)
        self.engine.check(ids)
        is_open = self._is_open(ids)
        form = partial(Structured, tools, is_open) if tools else partial(Untooled, (), is_open)
        boundary = self._last_message(messages, ids, tools, **variables)
        return self._prepare(ids, sampling, form, is_open, n, on_progress, (boundary,))

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, with BOS where the model wants it; ids are only checked."""
        return self._checked(self._to_ids(prompt))

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        patience: int = PATIENCE,
        **variables: Any,
    ) -> list[int]:
        """The token ids of a conversation, up to where the answer begins.

        One that is longer than `patience` contexts by far is refused and not encoded to its end.
        """
        check_messages(messages)
        check_tools(tools)
        limits = {"max_tokens": self.ctx, "patience": patience}
        return self._checked(self.tokenizer.encode_chat(messages, tools=tools, **limits, **variables))

    def take(self, run: Run) -> list[Event]:
        """What has arrived for one of them since the last time; the completion is the last event.

        Raises what the request failed with.
        """
        events = list(run.inbox)
        run.inbox.clear()
        if run.is_over:
            self.drop([run])
            if run.sequence.error is not None and not run.is_stopped:
                raise run.sequence.error
            events += run.finish()
        return events

    def _prepare_call(self, call: Call) -> Run:
        if call.messages is None:
            return self._prepare(self.encode(call.prompt), call.sampling, Plain, False, 1, None)[0]
        ids = self.encode_chat(call.messages, tools=call.tools)
        is_open = self._is_open(ids)
        form = partial(Structured, call.tools or (), is_open)
        return self._prepare(ids, call.sampling, form, is_open, 1, None)[0]

    def _drain(self, run: Run) -> Completion | Exception | None:
        """Take what has arrived; the completion when it is over."""
        run.inbox.clear()
        if not run.is_over:
            return None
        self.drop([run])
        if run.sequence.error is not None and not run.is_stopped:
            return run.sequence.error
        return last_completion(run.finish())

    def _is_open(self, ids: Sequence[int]) -> bool:
        """Whether the template itself begins the reasoning."""
        return self.tokenizer.decode(ids[-16:], skip_special=False).rstrip().endswith(OPEN)

    def logits(
        self, token_ids: Sequence[int], chunk: int | None = None, prompt_len: int | None = None
    ) -> "numpy.ndarray[Any, Any]":
        """Scores of the next token after every token: float32 array [len(token_ids), vocab_size].

        `chunk` tokens are computed at a time. Tokens from `prompt_len` on are treated as decoded ones (they matter only
        around the switch from dense to sparse attention); by default all belong to the prompt.
        """
        import numpy as np

        return np.concatenate(list(self._logit_pieces(token_ids, chunk, prompt_len)))

    def score(self, prompt: Prompt, top: int = 0, chunk: int | None = None) -> list[SampledToken]:
        """Log-probability of every token of the prompt after the first, given those before it, with `top` rivals."""
        ids = self.encode(prompt)
        return [sampled for piece in self.scoring(ids, top, chunk) for sampled in piece]

    def scoring(self, ids: Sequence[int], top: int = 0, chunk: int | None = None) -> Iterator[list[SampledToken]]:
        """Like `score`, a chunk at a time: others may take their steps in between."""
        import numpy as np

        ids, at = self._checked(ids), 1
        for piece in self._logit_pieces(ids, chunk, None):
            targets = ids[at : at + len(piece)]
            at += len(piece)
            scores = piece[: len(targets)].astype(np.float64)
            peak = scores.max(-1, keepdims=True)
            logprobs = scores - peak - np.log(np.exp(scores - peak).sum(-1, keepdims=True))
            yield [_sampled(row, token, top) for row, token in zip(logprobs, targets, strict=True)]

    def perplexity(self, text: Prompt, chunk: int | None = None) -> float:
        """exp of the mean negative log-likelihood of every token after the first."""
        scores = self.score(text, chunk=chunk)
        if not scores:
            raise InputError("text", "has one token", "perplexity needs at least two")
        return math.exp(-sum(sampled.logprob or 0.0 for sampled in scores) / len(scores))

    def reset(self) -> None:
        """Forget all that is cached: the next prompt is computed from its first token."""
        self.engine.forget()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back. The object cannot be used afterwards."""
        if self._tokenizer is not None:
            self._tokenizer.close()
        for run in list(self._runs.values()):
            self.engine.cancel(run.sequence)
        self._runs = {}
        self._executor.close()

    def _prepare(
        self,
        ids: list[int],
        sampling: Sampling,
        form: Callable[[], Plain | Structured],
        is_open: bool,
        count: int,
        on_progress: Progress | None,
        boundaries: tuple[int, ...] = (),
    ) -> list[Run]:
        """Check everything that can be wrong with a request; nothing is queued yet."""
        if self._tokenizer is None and (sampling.stop or sampling.think_budget is not None):
            raise InputError("stop", "needs a tokenizer, and the checkpoint has none", "leave it out")
        for token in sampling.logit_bias:
            if token >= self.config.vocab_size:
                raise InputError("logit_bias", f"names token {token}", f"ids go to {self.config.vocab_size - 1}")
        self.engine.check(ids)
        runs = []
        for index in range(count):
            controls, forced = self._controls(sampling, is_open)
            request = Request(ids, sampling, self.stop_ids, "", boundaries, controls, forced)
            detokenizer = None if self._tokenizer is None else Detokenizer(self._tokenizer, ids)
            answer = None if detokenizer is None else Answer(detokenizer, sampling.stop, form())
            runs.append(Run(request, answer, on_progress if index == 0 else None))
        return runs

    def submit(self, runs: Sequence[Run]) -> None:
        """Queue the answers to one prompt; the first reads it for all."""
        first: SequenceState | None = None
        for index, run in enumerate(runs):
            sequence = self.engine.submit(run.request, first, index)
            run.begin(sequence)
            first = first or sequence
            self._runs[sequence.id] = run

    def _stream(self, runs: Sequence[Run]) -> Iterator[Event]:
        """Queued when the first event is asked for, and not before."""
        self.submit(runs)
        yield from self._events(runs[0])

    def _controls(self, sampling: Sampling, is_open: bool) -> tuple[tuple[Control, ...], tuple[int, ...]]:
        controls: list[Control] = []
        forced: tuple[int, ...] = ()
        if sampling.think_budget is not None:
            budget = ThinkBudget(self.tokenizer, sampling.think_budget, is_open)
            controls.append(budget)
            forced = budget.opening
        if sampling.loop_guard:
            controls.append(LoopGuard(sampling.loop_guard))
        grammar = self._grammars.compile(sampling, self.tokenizer if is_open else None)
        if grammar is not None:
            controls.append(grammar)
        return tuple(controls), forced

    def _last_message(
        self,
        messages: Sequence[Message],
        ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None,
        **variables: Any,
    ) -> int:
        """Where the last message begins: the place where a conversation is most likely to be continued differently."""
        if len(messages) < 2:
            return 0
        try:
            before = self.tokenizer.encode_chat(messages[:-1], tools=tools, add_generation_prompt=False, **variables)
        except TemplateError:
            return 0  # this template wants whole conversations only
        return next((at for at, pair in enumerate(zip(before, ids, strict=False)) if pair[0] != pair[1]), len(before))

    def _events(self, run: Run) -> Iterator[Event]:
        """Run the engine until this request has ended; leaving early cancels it."""
        try:
            run.progress(0)
            while not run.is_over:
                if run.failure is not None:
                    raise run.failure
                if not run.inbox:
                    self._step()
                while run.inbox:
                    yield run.inbox.popleft()
            if run.sequence.error is not None and not run.is_stopped:
                raise run.sequence.error
            yield from run.finish()
        finally:
            self.drop([run])

    def drop(self, runs: Sequence[Run]) -> None:
        """These requests are over, or nobody waits for them any more."""
        for run in runs:
            if run.is_begun:
                self.engine.cancel(run.sequence)
                self._runs.pop(run.sequence.id, None)

    def _step(self) -> None:
        """One step for everybody; each request finds its tokens in its inbox."""
        self.step()
        if self.engine.is_stuck:
            raise RuntimeError("no request can be admitted")

    def step(self) -> None:
        for update in self.engine.step():
            run = self._runs.get(update.sequence.id)
            if run is not None:
                run.receive(update)
                if run.is_stopped:
                    self.engine.cancel(run.sequence, "stop")
        for run in list(self._runs.values()):
            run.progress(run.sequence.num_computed)

    def _logit_pieces(self, token_ids: Sequence[int], chunk: int | None, prompt_len: int | None) -> Iterator[Any]:
        ids = self._checked(token_ids)
        size = self._executor.capacity.prefill_chunk if chunk is None else chunk
        if size < 1:
            raise InputError("chunk", f"is {chunk}", "it must be at least 1")
        return self.engine.score(ids, len(ids) if prompt_len is None else prompt_len, size)

    def _to_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, max_tokens=self.ctx)
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


def _sampled(logprobs: "numpy.ndarray[Any, Any]", token: int, top: int) -> SampledToken:
    """A token with its rivals, the best first; equals in order of their ids."""
    import numpy as np

    best: Any = ()
    if top:
        near = np.flatnonzero(logprobs >= np.partition(logprobs, -top)[-top])
        best = near[np.argsort(-logprobs[near], kind="stable")][:top]
    return SampledToken(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best))


def _merge(sampling: Sampling | None, settings: Mapping[str, Any]) -> Sampling:
    return replace(sampling or Sampling(), **settings)


def _is_batch(prompt: object) -> TypeGuard[Sequence[Prompt]]:
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return False
    return bool(prompt) and hasattr(prompt[0], "__len__")

"""LLM: answers prompts and conversations from synchronous code; and BaseLLM, what it shares with AsyncLLM."""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeGuard, TypeVar

from sala.backends import open_executor
from sala.checkpoint.draft_head import find_draft_head
from sala.checkpoint.finite import check_finite
from sala.checkpoint.lora import open_checkpoint, read_adapter
from sala.config import SalaConfig
from sala.engine.engine import Engine
from sala.engine.requests import Call, InputProcessor, Prompt, PromptScoring, Submission, Tools
from sala.engine.scheduler import as_bytes, as_tokens
from sala.engine.service import EngineService
from sala.engine.sessions import DiskTier, SessionStore
from sala.engine.stream import Completion, Event, OnProgress, PromptProgress, PromptScores, StreamItem
from sala.engine.tiers import TieredHybrid
from sala.errors import ConfigError, InputError
from sala.generation_config import read_stop_ids, recommended_sampling
from sala.head_weights import read_head_weights
from sala.llm.scores import perplexity, score_tokens
from sala.models.embedded import find_base, find_model
from sala.options import ATTENTION_FIELDS, Attention
from sala.options.sources import resolve
from sala.protocol import Capacity, Options, SampledToken, Sampling
from sala.text.control import GrammarCompiler
from sala.text.tokenizer import Message, Tokenizer

if TYPE_CHECKING:
    import numpy

    from sala.llm.documents import DocumentAnswer, Documents, Paths

Events = TypeVar("Events")
Answer = TypeVar("Answer")
Prepare = Callable[[], Submission]
Finish = Callable[[Iterable[StreamItem]], Any]
MAX_WAITING = 64  # calls of `many` that are queued at a time


class BaseLLM(Generic[Events, Answer]):
    """What LLM and AsyncLLM share: a loaded checkpoint, how its requests are prepared, and the service that runs them.

    `Events` is the kind of iterator that streams return, `Answer` a completion or its coroutine.

    `options` are the fields of `sala.options.Options`, such as `ctx="128K"` or `kv="fp8"`; each that is not given is
    read from its variable (`SALA_CTX`, `SALA_KV`). Alternatively pass `options=Options(…)`, which is taken as it is.

    `adapter` is the directory of a LoRA adapter that is merged into the model. `adapters` are directories by name;
    requests choose one of them with `adapter="name"`, and those of different adapters run together.
    """

    @property
    def max_batch(self) -> int:
        """How many sequences run at a time."""
        return self.engine.scheduler.max_batch

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        options: Options | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **arguments: Any,
    ) -> None:
        if model is not None:
            arguments["model"] = model
        options = resolve(options, arguments)
        if adapters:
            named = (f"{name}={path}" for name, path in adapters.items())
            options = replace(options, adapter=(*options.adapter, *named))
            _check_names(adapters, options)
        self.options = options
        self.path, self.adapter = find_base(find_model(options.model), options.merged_adapter)
        self._checkpoint, self._own_config = open_checkpoint(self.path, SalaConfig.load(self.path), self.adapter)
        self.config = self._own_config.attending(options.attention_choice)
        self._tokenizer = Tokenizer.load(self.path) if (self.path / "tokenizer.json").is_file() else None
        self._check_vocabulary()
        self.stop_ids = read_stop_ids(self.path, self.config)
        self.default_sampling = Sampling(**recommended_sampling(self.path, self.config))
        check_finite(self._checkpoint)
        self.adapters = {name: read_adapter(path, self.config) for name, path in options.named_adapters.items()}
        found = {adapter.fingerprint: adapter for adapter in self.adapters.values()}
        options = replace(options, draft_head=find_draft_head(self.path, options))
        self._executor = open_executor(options.backend, self._checkpoint, self.config, options, [*found.values()])
        if (weights := read_head_weights(self.path, self.config)) is not None:
            self._executor.weigh_heads(weights)
        self.tiers = self._open_tiers(options)
        self.engine = Engine(self._executor, self._own_config.sparse_config, options, tiers=self.tiers)
        self.service = EngineService(self.engine)
        stop_ids, vocab_size = self.stop_ids, self.config.vocab_size
        grammars = GrammarCompiler(self.path / "tokenizer.json", vocab_size, stop_ids)
        self.inputs = InputProcessor(
            self._tokenizer, grammars, stop_ids, vocab_size, self.ctx, self.engine.check, str(self.path)
        )

    def _open_tiers(self, options: Options) -> TieredHybrid | None:
        """Return the bookkeeping of a cache with tiers below the device, if the options want any."""
        if options.cache_dir is None and options.cache_ram is None:
            return None
        sparse, disk = self.config.sparse_config, None
        if options.cache_dir is not None:
            disk = DiskTier(self.open_store(options.cache_dir), sparse, options.cache_disk)
        host_bytes = options.cache_ram or 0
        return TieredHybrid(self._executor, sparse, options.snapshots, host_bytes, disk, warnings.warn)

    def __reduce__(self) -> Any:
        return self.service.__reduce__()  # raises: a loaded model cannot be pickled

    def open_store(self, directory: str | Path) -> SessionStore:
        """Return the sessions in a directory, as far as they belong to this model."""
        topk = self._own_config.sparse_config.topk
        return SessionStore(Path(directory).expanduser(), self.fingerprint(), warnings.warn, topk)

    def fingerprint(self) -> str:
        """Identify weights, configuration and precision: what a saved KV cache depends on, besides its regime."""
        text = f"{self._checkpoint.fingerprint()} {self._own_config} {self._executor.capacity.dtype}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.inputs.tokenizer

    @property
    def ctx(self) -> int:
        """Longest sequence, prompt and answer together, in tokens."""
        return self._executor.capacity.max_tokens

    @property
    def attention_changes(self) -> str:
        """How the options change the attention of the checkpoint, in a line; empty if they do not."""
        return self.config.sparse_config.describe_changes(self._own_config.sparse_config)

    @property
    def capacity(self) -> Capacity:
        """What the cache holds."""
        return self._executor.capacity

    def adapt(self, submission: Submission, adapter: str | None) -> Submission:
        """Let an adapter, or if it is None the model alone, answer. Raises InputError for an unknown name."""
        if adapter is None:
            return submission
        if adapter not in self.adapters:
            known = ", ".join(self.adapters) or "none; name them when the model is loaded"
            raise InputError("adapter", f"is {adapter!r}, which is not loaded", f"known: {known}")
        submission.use_adapter(self.adapters[adapter].fingerprint)
        return submission

    def _warm_up(self, on_progress: OnProgress | None) -> Future[None]:
        return self.service.execute(self.engine.warm_up, on_progress or (lambda done, total: None))

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, with BOS if the model uses it; ids are only checked."""
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
        adapter: str | None = None,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> Any:
        """Continue a text or token ids → Completion; a list for several prompts, and for several answers (`n` > 1).

        `settings` are fields of Sampling, such as `temperature=0`; the others are the model's own, `default_sampling`,
        unless `sampling` is given; and fields of Attention, such as `attention="dense"`. A string is encoded with BOS
        if the model uses it; special tokens that it spells out stay text (encode with
        `tokenizer.encode(..., parse_special=True)` otherwise).
        Several prompts run together; several answers share the prefill of their prompt.
        """
        call, is_batch = self._call(sampling, settings, n=n, adapter=adapter), _is_batch(prompt)
        prompts: Any = prompt if is_batch else [prompt]
        calls = [replace(call, prompt=one) for one in prompts]

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
        adapter: str | None = None,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> Events:
        """Like `generate` for one prompt, piece by piece; the last event carries the completion.

        With `is_chat` the prompt is a rendered conversation: reasoning is taken out of the answer.
        """
        call = self._call(sampling, settings, prompt=prompt, is_chat=is_chat, adapter=adapter)
        return self._stream(call, on_progress)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        tools: Tools | None = None,
        continue_final: bool = False,
        adapter: str | None = None,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> Answer:
        """Answer a conversation in the form `[{"role": "user", "content": "..."}, …]`.

        A conversation that continues an earlier one computes only what is new. Only with `tools` are tool calls taken
        out of the answer. With `continue_final` the last message is an answer of the assistant that has been begun, and
        the new answer continues it: it holds only what is new.
        """
        fields = {"messages": messages, "tools": tools, "continue_final": continue_final, "adapter": adapter}
        call = self._call(sampling, settings, **fields)
        return self.answer(call, on_progress)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        tools: Tools | None = None,
        continue_final: bool = False,
        adapter: str | None = None,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> Events:
        """Like `chat`, piece by piece; the last event carries the completion."""
        fields = {"messages": messages, "tools": tools, "continue_final": continue_final, "adapter": adapter}
        call = self._call(sampling, settings, **fields)
        return self._stream(call, on_progress)

    def _call(self, sampling: Sampling | None, settings: dict[str, Any], **fields: Any) -> Call:
        """Return a call; `settings` are fields of Sampling and of Attention, `fields` its own."""
        attention = Attention(**{name: settings.pop(name) for name in ATTENTION_FIELDS if name in settings})
        merged = self.merge_sampling(sampling, settings)
        return Call(None, merged, attention=None if attention == Attention() else attention, **fields)

    def merge_sampling(self, sampling: Sampling | None, settings: dict[str, Any]) -> Sampling:
        """Return the sampling parameters of a request: `settings` over `sampling` or, if there is none, the model's."""
        return self.default_sampling.with_request(**settings) if sampling is None else replace(sampling, **settings)

    def answer(self, call: Call, on_progress: OnProgress | None = None) -> Answer:
        """Answer one call, whatever it asks for; of several answers (`n` > 1) return the first."""
        prepare = partial(self._prepare, call, on_progress=on_progress)
        found: Answer = self._collect(prepare, first_completion, on_progress)
        return found

    def stream_answer(self, call: Call, on_progress: OnProgress | None = None) -> Events:
        """Like `answer`, piece by piece; the last event carries the completion."""
        return self._stream(call, on_progress)

    def _collect(self, prepare: Prepare, finish: Finish, on_progress: Any) -> Any:
        """Run a submission and return what `finish` makes of its items, or a coroutine that does."""
        raise NotImplementedError

    def _stream(self, call: Call, on_progress: OnProgress | None) -> Events:
        """Run a call and return an iterator of its events; leaving it early cancels the request."""
        raise NotImplementedError

    def _prepare(self, *calls: Call, on_progress: OnProgress | None, is_streamed: bool = False) -> Submission:
        submission = self.inputs.submit(*calls, is_streamed=is_streamed, wants_progress=on_progress is not None)
        return self.adapt(submission, calls[0].adapter)  # callers give the same one to all calls

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
        return self.scoring(ids, lambda logits, start: score_tokens(logits, ids[start + 1 :], top), chunk, index=index)

    def _submission(self, call: Call) -> Submission | Exception:
        """Prepare one of many calls; an invalid call fails only its own answer."""
        try:
            return self.adapt(self.inputs.submit(call, is_streamed=False), call.adapter)
        except Exception as error:
            return error

    def _session_call(self, ids: list[int], adapter: str | None) -> Call:
        """Return a request that leaves a snapshot of a prompt in the cache."""
        return Call(None, Sampling(max_tokens=1, temperature=0), prompt=[*ids, ids[-1]], adapter=adapter)

    def _save(self, store: SessionStore, name: str, ids: list[int], adapter: str | None) -> int:
        salt = "" if adapter is None else self.adapters[adapter].fingerprint
        regime = self.config.sparse_config.regime(len(ids) + 1)
        snapshot = self.engine.hybrid.prefix.has(as_bytes(ids), len(ids), regime, salt)
        if snapshot is None:
            raise InputError("session", "does not fit in the cache", "free some memory")
        store.save(name, snapshot, self._executor)
        return len(ids)

    def _load(self, store: SessionStore, name: str) -> list[int]:
        snapshot = store.load(store.find(name), self.engine.hybrid, self._executor)
        if snapshot is None:
            raise InputError("session", "does not fit in the cache", "free some memory")
        if snapshot.regime.topk != self.config.sparse_config.topk:
            how = f"--topk {snapshot.regime.topk}"
            warnings.warn(
                f"the session was computed with {how}; without it, most of it is computed again", stacklevel=2
            )
        return as_tokens(snapshot.tokens)

    def _close(self, drain_s: float) -> None:
        is_stopped = self.service.close(drain_s)
        self.inputs.close()
        if self.tiers is not None and self.tiers.disk is not None:
            self.tiers.disk.close()
        if is_stopped:
            self._executor.close()
            self._checkpoint.close()  # the mapped files would stay in memory until the garbage is collected

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

    def read(self, paths: "Paths") -> "Documents":
        """Read files, directories and globs, ready for questions; `left_out` says what could not be read, and why."""
        from sala.llm.documents import Documents

        return Documents.read(self, paths)

    def ask(self, paths: "Paths", question: str, sampling: Sampling | None = None, **more: Any) -> "DocumentAnswer":
        """Answer a question about files; `more` are arguments of `Documents.ask`. Long ones are summarised by parts."""
        return self.read(paths).ask(question, sampling, **more)

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
        self,
        store: SessionStore,
        name: str,
        prompt: Prompt,
        on_progress: OnProgress | None = None,
        adapter: str | None = None,
    ) -> int:
        """Compute a prompt and save its KV cache under a name; returns its number of tokens.

        A session that an adapter has computed is continued with the same adapter.
        """
        store.check_new(name)
        ids = self.encode(prompt)
        first_completion(self._stream(self._session_call(ids, adapter), on_progress))
        return self.service.execute(self._save, store, name, ids, adapter).result()

    def load_session(self, store: SessionStore, name: str) -> list[int]:
        """Load a saved KV cache; returns its tokens, to be continued."""
        return self.service.execute(self._load, store, name).result()

    def warm_up(self, on_progress: OnProgress | None = None) -> None:
        """Compile kernels and capture graphs for the usual requests now; without a GPU there is nothing to do."""
        self._warm_up(on_progress).result()

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


def _check_names(adapters: Mapping[str, str | Path], options: Options) -> None:
    wrong = [name for name in adapters if name not in options.named_adapters]
    if wrong:
        raise InputError("adapters", f"hold the name {wrong[0]!r}", "use letters, digits, '.', '_' and '-'")


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


def _is_batch(prompt: object) -> TypeGuard[Sequence[Prompt]]:
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return False
    return bool(prompt) and hasattr(prompt[0], "__len__")

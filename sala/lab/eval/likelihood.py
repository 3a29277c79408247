"""Log-probabilities of continuations after contexts: many pairs at a time, each shared prefix computed once.

`HarnessModel` scores and continues texts as lm-eval asks for it, without depending on lm-eval.

Short continuations are dictated: the engine decodes them with all other tokens masked, and their log-probabilities
come with the sampled tokens. They run as a batch, and pairs with a common prefix share its KV cache and state. Long
continuations are prefilled as a prompt.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from sala.engine.requests import Call, Submission
from sala.engine.scheduler import as_bytes, as_tokens
from sala.engine.stream import Completion
from sala.errors import InputError
from sala.lab.eval.runner import facts_of
from sala.lab.eval.tasks.case import count_shared
from sala.lab.report.record import Log, ResultRow, key_of
from sala.llm import LLM
from sala.protocol import Sampling, Verdict

MAX_DICTATED = 64  # tokens of a continuation that are dictated however short its context is
MIN_SHARED = 64  # tokens of a common prefix for which one request waits until another has computed it
MAX_WAITING = 64  # queued requests
CHUNK = 1024  # tokens whose logits are in memory at a time
ROWS = 64  # rows of logits that are turned into probabilities at a time
SEED = 1234  # of answers that are sampled
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # synonyms
IGNORED = ("do_sample", "until", "use_cache", "num_beams", "num_return_sequences")  # read elsewhere, or of no effect
Tokens = Sequence[int]
Pair = tuple[list[int], list[int]]
Note = Callable[[int, int], None]  # done, total


class Likelihood(NamedTuple):
    """The log-probability of a continuation, and whether greedy decoding would have produced it."""

    logprob: float
    is_greedy: bool


class Dictation:
    """Masks sampling so that the given tokens are sampled one after another."""

    allows_drafts = False

    def __init__(self, tokens: Tokens, vocab_size: int) -> None:
        self._tokens = tokens
        self._size = -(-vocab_size // 8)
        self._at = 0

    def mask(self) -> bytes | None:
        if self._at >= len(self._tokens):
            return None
        bits, token = bytearray(self._size), self._tokens[self._at]
        bits[token // 8] = 1 << token % 8
        return bytes(bits)

    def observe(self, token: int) -> Verdict | None:
        self._at += 1
        return None


@dataclass(frozen=True, slots=True)
class Query:
    """A future request: its prompt, and how to ask once the boundaries of shared prefixes are known.

    Prompts are stored as bytes, because there may be very many.
    """

    key: int
    prompt: bytes
    call: Callable[[list[int], tuple[int, ...]], Call]  # from its tokens and the boundaries


def score_pairs(llm: LLM, pairs: Sequence[tuple[Tokens, Tokens]]) -> Iterator[tuple[int, Likelihood]]:
    """Yield (index, likelihood) of (context, continuation) pairs in the order of completion.

    The result is that of reading context and continuation as one prompt.
    """
    dictated, whole = [], []
    for index, (context, continuation) in enumerate(pairs):
        if not len(context):
            raise InputError("context", "is empty", "begin with BOS, or another token")
        if not len(continuation):
            yield index, Likelihood(0.0, True)
        elif _is_dictated(llm, context, continuation):
            dictated.append(_dictate(llm, index, context, continuation))
        else:
            whole.append(index)
    for index, done in answer_all(llm, dictated):
        assert done.logprobs is not None
        firsts = [one.top_logprobs[0][0] == one.token for one in done.logprobs]
        yield index, Likelihood(sum(one.logprob or 0.0 for one in done.logprobs), all(firsts))
    for index in whole:
        context, continuation = pairs[index]
        parts = list(read_scores(llm, [*context, *continuation], len(context)))
        yield index, Likelihood(sum(float(part[0].sum()) for part in parts), all(part[1].all() for part in parts))


def _is_dictated(llm: LLM, context: Tokens, continuation: Tokens) -> bool:
    """Whether to dictate; not where the whole has another attention regime than the context alone."""
    sparse, length = llm.config.sparse_config, len(context) + len(continuation)
    is_same = sparse.sparse_from(len(context)) == sparse.sparse_from(length)
    return is_same and len(continuation) <= max(MAX_DICTATED, len(context))


def _dictate(llm: LLM, index: int, context: Tokens, continuation: Tokens) -> Query:
    sampling = Sampling(temperature=0, max_tokens=len(continuation), logprobs=1, ignore_eos=True, seed=0)
    prompt, tokens = llm.encode(context), llm.encode(continuation)  # token ids are only checked
    if len(prompt) + len(tokens) > llm.ctx:
        raise InputError("pair", f"has {len(prompt) + len(tokens):,} tokens", f"the context holds {llm.ctx:,}")

    def call(ids: list[int], boundaries: tuple[int, ...]) -> Call:
        return Call(index, sampling, ids, boundaries=boundaries, controls=(Dictation(tokens, llm.config.vocab_size),))

    return Query(index, as_bytes(prompt), call)


def answer_all(llm: LLM, queries: Iterable[Query]) -> Iterator[tuple[int, Completion]]:
    """Run all requests, those that begin alike one after the other, and yield (key, completion) as they complete."""

    def submissions() -> Iterator[tuple[Sequence[Query], Submission]]:
        for family in families(queries):
            calls = [one.call(as_tokens(one.prompt), boundaries) for one, boundaries in family]
            group = [llm.inputs.prepare(call)[0] for call in calls]
            yield [one for one, _ in family], Submission([group])

    for family, index, completion in llm.service.run_all(submissions(), MAX_WAITING):
        if isinstance(completion, Exception):
            raise completion
        yield family[index].key, completion


def families(queries: Iterable[Query]) -> list[list[tuple[Query, tuple[int, ...]]]]:
    """Return groups of requests with a common prefix: the first computes it, up to a boundary, while the others wait.

    No group exceeds the waiting limit; later groups find the shared prefix in the cache.
    """
    found: list[list[Query]] = []
    for one in sorted(queries, key=lambda one: one.prompt):
        near = shared_len(found[-1][0].prompt, one.prompt) if found else 0
        if near >= MIN_SHARED and len(found[-1]) < MAX_WAITING:
            found[-1].append(one)
        else:
            found.append([one])
    groups: list[list[tuple[Query, tuple[int, ...]]]] = []
    for family in found:
        common = min((shared_len(family[0].prompt, one.prompt) for one in family[1:]), default=0)
        groups.append([(one, (common,) if common else ()) for one in family])
    return groups


def shared_len(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix of two prompts, in tokens."""
    return count_shared(np.frombuffer(one, np.int32), np.frombuffer(other, np.int32))


def read_scores(
    llm: LLM, ids: Tokens, start: int = 1, on_progress: Note = lambda *_: None
) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Yield, chunk by chunk, the log-probabilities of the tokens from `start` on, and whether each was the argmax.

    Tokens before `start` are context and not scored.
    """
    ids = llm.encode(ids)

    def reduce(logits: Any, at: int) -> tuple[Any, Any] | None:
        first, last = max(at + 1, start), min(at + 1 + len(logits), len(ids))
        return _to_logprobs(logits[first - at - 1 : last - at - 1], ids[first:last]) if first < last else None

    chunk = min(CHUNK, llm.capacity.prefill_chunk)
    yield from (part for part in llm.score_parts(llm.scoring(ids, reduce, chunk), on_progress) if part is not None)


def _to_logprobs(logits: np.ndarray[Any, Any], targets: Tokens) -> tuple[Any, Any]:
    """Return log-probabilities in float64 of n tokens by logits [n, V], and whether each is the argmax."""
    logprobs, firsts = np.empty(len(targets)), np.empty(len(targets), bool)
    for at in range(0, len(targets), ROWS):
        block, wanted = logits[at : at + ROWS], np.asarray(targets[at : at + ROWS])
        best = block.argmax(-1)
        rows = np.arange(len(block))
        peak = block[rows, best]
        total = np.exp(block - peak[:, None]).sum(-1, dtype=np.float64)
        logprobs[at : at + ROWS] = block[rows, wanted].astype(np.float64) - peak - np.log(total)
        firsts[at : at + ROWS] = best == wanted
    return logprobs, firsts


@dataclass(frozen=True, slots=True)
class Generation:
    """A prompt to continue, and how to sample."""

    prompt: str
    sampling: Sampling


class HarnessModel:
    """The model under test: encodes, scores and generates. Results in `log` are not computed again.

    - max_length: tokens of context and continuation together; longer inputs are cut on the left
    - bos: whether texts begin with BOS; by default as the tokenizer is configured
    """

    def __init__(
        self, llm: LLM, max_length: int | None = None, bos: bool | None = None, log: Log | None = None
    ) -> None:
        if max_length is not None and not 2 <= max_length <= llm.ctx:
            raise InputError("max_length", f"is {max_length}", f"it must be from 2 to {llm.ctx}, the context")
        self.llm = llm
        self.max_length = max_length or llm.ctx
        self.num_cut = 0  # requests that were cut
        self.is_chat = False  # texts are rendered conversations, whose special tokens are parsed
        self._bos = bos
        self._facts = facts_of(llm)
        self._log = log or Log()

    @property
    def prefix_id(self) -> int:
        """The token before a text without context: BOS, or else EOS."""
        bos, ends = self.llm.tokenizer.bos_id, self.llm.config.eos_token_id
        if bos is None and not ends:
            raise InputError("context", "is empty, and the model has neither BOS nor EOS", "give a context")
        return ends[0] if bos is None else bos

    def encode(self, text: str, bos: bool | None = None) -> list[int]:
        """Return the tokens of a text; `bos` None means the setting of this model. Chats are encoded as rendered."""
        tokenizer, wanted = self.llm.tokenizer, self._bos if bos is None else bos
        if self.is_chat:
            return tokenizer.encode(text, bos=False, parse_special=True)
        ids = tokenizer.encode(text, bos=wanted is not False)
        is_lacking = bool(wanted) and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]
        return [self.prefix_id, *ids] if is_lacking else ids

    def split(self, context: str, continuation: str) -> Pair:
        """Return context and continuation as tokens. White space at the end of the context moves to the continuation.

        The continuation is the whole text without the tokens of the context. Where a token spans the border, so that
        the whole does not begin with the context's tokens, both are encoded separately: nothing of the continuation
        is lost, and nothing of the context is scored. An empty context is replaced by `prefix_id`.
        """
        kept = context.rstrip()
        moved = context[len(kept) :] + continuation
        if not kept:
            ids = self.encode(moved, bos=False)
            return [self.prefix_id], ids[1:] if ids[:1] == [self.prefix_id] else ids
        head, whole = self.encode(kept), self.encode(kept + moved)
        if len(whole) > len(head) and whole[: len(head)] == head:
            return head, whole[len(head) :]
        return head, self.encode(moved, bos=False)

    def score(self, pairs: Sequence[Pair], note: Note = lambda *_: None) -> list[Likelihood]:
        """Return the likelihood of each continuation after its context."""
        cut = [self._cut(*pair) for pair in pairs]

        def compute(left: list[int]) -> Iterator[tuple[int, ResultRow]]:
            for at, likelihood in score_pairs(self.llm, [cut[index] for index in left]):
                yield left[at], likelihood._asdict()

        rows = self._logged([self._key("score", pair) for pair in cut], compute, note)
        return [Likelihood(**row) for row in rows]

    def score_texts(self, texts: Sequence[str], note: Note = lambda *_: None) -> list[float]:
        """Return the log-probability of whole texts, beginning after `prefix_id`; long texts are cut into windows."""
        cut = [list(windows(self.encode(text, bos=False), self.prefix_id, self.max_length)) for text in texts]
        scores = iter(self.score([window for group in cut for window in group], note))
        return [sum(next(scores).logprob for _ in group) for group in cut]

    def generate(self, generations: Sequence[Generation], note: Note = lambda *_: None) -> list[str]:
        """Return the generated text of each prompt, up to a stop string; in a chat without its reasoning."""
        prompts = []
        for one in generations:
            count = one.sampling.max_tokens
            error = InputError("max_gen_toks", f"is {count:,}", f"the context holds {self.max_length:,}")
            prompts.append(self._fit(self.encode(one.prompt), count, error))
        keys = [self._key("write", ids, repr(one.sampling)) for ids, one in zip(prompts, generations, strict=True)]

        def compute(left: list[int]) -> Iterator[tuple[int, ResultRow]]:
            queries = (self._query(index, prompts[index], generations[index].sampling) for index in left)
            for index, done in answer_all(self.llm, queries):
                yield index, {"text": done.text}

        return [row["text"] for row in self._logged(keys, compute, note)]

    def _query(self, index: int, ids: list[int], sampling: Sampling) -> Query:
        """Prepare a generation. In a chat, stop strings do not count inside the reasoning."""

        def call(ids: list[int], boundaries: tuple[int, ...]) -> Call:
            is_chat = self.is_chat
            return Call(index, sampling, ids, is_chat=is_chat, boundaries=boundaries, stops_when_shown=is_chat)

        return Query(index, as_bytes(ids), call)

    def _key(self, kind: str, *asked: Any) -> str:
        return key_of(self._facts, {"kind": kind, "asked": asked, "chat": self.is_chat})

    def _logged(
        self, keys: Sequence[str], compute: Callable[[list[int]], Iterator[tuple[int, ResultRow]]], note: Note
    ) -> list[ResultRow]:
        """Return the row of each key: from the log, else computed and logged."""
        rows = {index: row for index, key in enumerate(keys) if (row := self._log.find(key)) is not None}
        note(len(rows), len(keys))
        for index, row in compute([index for index in range(len(keys)) if index not in rows]):
            rows[index] = row
            self._log.append(keys[index], row)
            note(len(rows), len(keys))
        return [rows[index] for index in range(len(keys))]

    def _cut(self, context: list[int], continuation: list[int]) -> Pair:
        size = len(continuation)
        remedy = f"with a context they must be {self.max_length:,}"
        return self._fit(context, size, InputError("continuation", f"has {size:,} tokens", remedy)), continuation

    def _fit(self, ids: list[int], num_after: int, error: InputError) -> list[int]:
        """Return the end of a prompt that leaves `num_after` tokens; raise the error if nothing would be left."""
        spare = self.max_length - num_after
        if spare < 1:
            raise error
        self.num_cut += len(ids) > spare
        return ids[-spare:]


def windows(ids: list[int], prefix_id: int, size: int) -> Iterator[Pair]:
    """Yield a text as (context, continuation) pairs of at most `size` tokens; every token is predicted once.

    The first window begins with `prefix_id`, the others with a token of the text; the last one is filled up with
    tokens before it.
    """
    if ids:
        yield [prefix_id], ids[: size - 1]
    for at in range(size - 1, len(ids), size - 1):
        end = min(at + size - 1, len(ids))
        yield ids[max(0, end - size) : at], ids[at:end]


def to_sampling(settings: Mapping[str, Any], max_new_tokens: int = 256) -> Sampling:
    """Return lm-eval's generation settings as Sampling; greedy unless `do_sample` or a temperature is given."""
    left = dict(settings)
    counts = [left.pop(name) for name in LENGTHS if name in left]
    until = left.get("until") or []
    is_sampled = left.get("do_sample")
    temperature = left.pop("temperature", None)
    if is_sampled is False or (not is_sampled and temperature is None):
        temperature = 0.0
    known = {one.name for one in fields(Sampling)}
    for name, value in left.items():
        is_single = name not in ("num_beams", "num_return_sequences") or value == 1
        if name not in known and not (name in IGNORED and is_single):
            raise InputError("gen_kwargs", f"hold {name}={value!r}", "it is not supported; leave it out")
    return Sampling(
        **{"seed": SEED, **{name: value for name, value in left.items() if name in known}},
        temperature=1.0 if temperature is None else float(temperature),
        stop=tuple(one for one in ([until] if isinstance(until, str) else until) if one),
        max_tokens=int(next((count for count in counts if count is not None), max_new_tokens)),
    )

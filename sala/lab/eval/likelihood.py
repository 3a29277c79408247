"""Log-probabilities of continuations after contexts: many pairs at a time, each shared prefix computed once.

Short continuations are dictated: the engine decodes them with all other tokens masked, and their log-probabilities
come with the sampled tokens. They run as a batch, and pairs with a common prefix share its KV cache and state. Long
continuations are prefilled as a prompt.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sala.engine.cache import TOKEN_BYTES, Request, as_bytes, as_tokens
from sala.engine.requests import Submission
from sala.engine.stream import AnswerState, Completion
from sala.errors import InputError
from sala.protocol import Sampling, Verdict

if TYPE_CHECKING:
    import numpy as np

    from sala.llm import LLM

MAX_DICTATED = 64  # tokens of a continuation that are dictated however short its context is
MIN_SHARED = 64  # tokens of a common prefix for which one request waits until another has computed it
MAX_WAITING = 64  # queued requests
CHUNK = 1024  # tokens whose logits are in memory at a time
ROWS = 64  # rows of logits that are turned into probabilities at a time
Tokens = Sequence[int]


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
    """A future request: its prompt, and how to make it once the boundaries of shared prefixes are known.

    Prompts are stored as bytes, because there may be very many.
    """

    key: int
    prompt: bytes
    make: Callable[[list[int], tuple[int, ...]], AnswerState]  # from its tokens and the boundaries


def score_pairs(llm: "LLM", pairs: Sequence[tuple[Tokens, Tokens]]) -> Iterator[tuple[int, Likelihood]]:
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


def _is_dictated(llm: "LLM", context: Tokens, continuation: Tokens) -> bool:
    """Whether to dictate; not where the whole has another attention regime than the context alone."""
    sparse, length = llm.config.sparse_config, len(context) + len(continuation)
    is_same = sparse.sparse_from(len(context)) == sparse.sparse_from(length)
    return is_same and len(continuation) <= max(MAX_DICTATED, len(context))


def _dictate(llm: "LLM", index: int, context: Tokens, continuation: Tokens) -> Query:
    sampling = Sampling(temperature=0, max_tokens=len(continuation), logprobs=1, ignore_eos=True, seed=0)
    prompt, tokens = llm.encode(context), llm.encode(continuation)  # token ids are only checked
    if len(prompt) + len(tokens) > llm.ctx:
        raise InputError("pair", f"has {len(prompt) + len(tokens):,} tokens", f"the context holds {llm.ctx:,}")

    def make(ids: list[int], boundaries: tuple[int, ...]) -> AnswerState:
        controls = (Dictation(tokens, llm.config.vocab_size),)
        return AnswerState(Request(ids, sampling, boundaries=boundaries, controls=controls))

    return Query(index, as_bytes(prompt), make)


def answer_all(llm: "LLM", queries: Iterable[Query]) -> Iterator[tuple[int, Completion]]:
    """Run all requests, those that begin alike one after the other, and yield (key, completion) as they complete."""

    def submissions() -> Iterator[tuple[Sequence[Query], Submission]]:
        for family in families(queries):
            group = [one.make(as_tokens(one.prompt), boundaries) for one, boundaries in family]
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
        if found and near >= MIN_SHARED and len(found[-1]) < MAX_WAITING:
            found[-1].append(one)
        else:
            found.append([one])
    return [_with_boundary(family) for family in found]


def _with_boundary(family: Sequence[Query]) -> list[tuple[Query, tuple[int, ...]]]:
    common = min((shared_len(family[0].prompt, one.prompt) for one in family[1:]), default=0)
    boundaries: tuple[int, ...] = (common,) if common else ()
    return [(one, boundaries) for one in family]


def shared_len(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix of two prompts, in tokens."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        size = middle * TOKEN_BYTES
        low, high = (middle, high) if one[:size] == other[:size] else (low, middle - 1)
    return low


def read_scores(
    llm: "LLM", ids: Tokens, start: int = 1, on_progress: Callable[[int, int], None] = lambda *_: None
) -> Iterator[tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]]:
    """Yield, chunk by chunk, the log-probabilities of the tokens from `start` on, and whether each was the argmax.

    Tokens before `start` are context and not scored.
    """
    ids = llm.encode(ids)

    def reduce(logits: Any, at: int) -> tuple[Any, Any] | None:
        first, last = max(at + 1, start), min(at + 1 + len(logits), len(ids))
        return _to_logprobs(logits[first - at - 1 : last - at - 1], ids[first:last]) if first < last else None

    chunk = min(CHUNK, llm.capacity.prefill_chunk)
    yield from (part for part in llm.score_parts(llm.scoring(ids, reduce, chunk), on_progress) if part is not None)


def _to_logprobs(logits: "np.ndarray[Any, Any]", targets: Tokens) -> tuple[Any, Any]:
    """Return log-probabilities in float64 of n tokens by logits [n, V], and whether each is the argmax."""
    import numpy as np

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

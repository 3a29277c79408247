"""How likely a model finds given tokens after given tokens: many such pairs at a time, each past read once.

Short continuations are dictated: the engine decodes them as if the model wrote them, only that nothing else may be
sampled; their log-probabilities come with the tokens. They run side by side, and pairs that begin alike share what is
computed of their beginnings. Long ones are read as a prompt.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sala.engine.cache.prefix import TOKEN_BYTES, as_bytes, as_tokens
from sala.engine.sequence import Request
from sala.engine.stream import Completion, Run
from sala.errors import InputError, SalaError
from sala.protocol import Sampling, Verdict

if TYPE_CHECKING:
    import numpy as np

    from sala.llm import LLM

DICTATED = 64  # tokens of a continuation that are dictated however short its past is
SHARED = 64  # tokens that must be the same for one to wait until another has read them
QUEUED = 64  # requests that wait at a time
CHUNK = 1024  # tokens whose logits are in memory at a time
ROWS = 64  # of them that are turned into probabilities at a time
Tokens = Sequence[int]


class Likelihood(NamedTuple):
    """Of one continuation: the sum of its log-probabilities, and whether greedy decoding would have written it."""

    logprob: float
    is_greedy: bool


class Dictation:
    """Lets the given tokens be sampled, one after another, and no others."""

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
class Asked:
    """A request to come: its prompt, and how to make it once it is known where its past may be shared.

    There may be very many of them: prompts are kept as bytes.
    """

    key: int
    prompt: bytes
    make: Callable[[list[int], tuple[int, ...]], Run]  # from its tokens, and the boundaries


def score_pairs(llm: "LLM", pairs: Sequence[tuple[Tokens, Tokens]]) -> Iterator[tuple[int, Likelihood]]:
    """(context, continuation) pairs → (index, its likelihood), in the order in which they are done.

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
    """Where the whole would be read by another rule than the context alone, the whole must be read."""
    sparse, length = llm.config.sparse_config, len(context) + len(continuation)
    is_same = sparse.sparse_from(len(context)) == sparse.sparse_from(length)
    return is_same and len(continuation) <= max(DICTATED, len(context))


def _dictate(llm: "LLM", index: int, context: Tokens, continuation: Tokens) -> Asked:
    sampling = Sampling(temperature=0, max_tokens=len(continuation), logprobs=1, ignore_eos=True, seed=0)
    prompt, tokens = llm.encode(context), llm.encode(continuation)  # only checked
    if len(prompt) + len(tokens) > llm.ctx:
        raise InputError("pair", f"has {len(prompt) + len(tokens):,} tokens", f"the context holds {llm.ctx:,}")

    def make(ids: list[int], boundaries: tuple[int, ...]) -> Run:
        controls = (Dictation(tokens, llm.config.vocab_size),)
        return Run(Request(ids, sampling, boundaries=boundaries, controls=controls), None, None)

    return Asked(index, as_bytes(prompt), make)


def answer_all(
    llm: "LLM", asked: Iterable[Asked], is_enough: Callable[[int, str], bool] = lambda *_: False
) -> Iterator[tuple[int, Completion]]:
    """Run all requests, those that begin alike one after the other, and yield (key, completion) as they end.

    `is_enough` is told the key and the text so far; an answer of which it says so ends there.
    """
    queue = families(asked)
    active: dict[int, tuple[int, Run]] = {}
    texts: dict[int, str] = {}
    try:
        for family in [*queue, None]:
            while active and (family is None or len(active) + len(family) > QUEUED):
                _step(llm)
                yield from _collect(llm, active, texts, is_enough)
            if family is not None:
                runs = [one.make(as_tokens(one.prompt), boundaries) for one, boundaries in family]
                llm.submit(runs)
                active |= {run.sequence.id: (one.key, run) for (one, _), run in zip(family, runs, strict=True)}
    finally:
        llm.drop([run for _, run in active.values()])


def _step(llm: "LLM") -> None:
    llm.step()
    if llm.engine.is_stuck:
        raise SalaError("a request does not fit into the cache", "give it more memory (cache_memory)")


def _collect(
    llm: "LLM",
    active: dict[int, tuple[int, Run]],
    texts: dict[int, str],
    is_enough: Callable[[int, str], bool],
) -> Iterator[tuple[int, Completion]]:
    for number, (key, run) in list(active.items()):
        events = llm.take(run)
        text = "".join(event.text for event in events)
        if text:
            texts[number] = texts.get(number, "") + text
            if not run.sequence.is_finished and is_enough(key, texts[number]):
                llm.engine.cancel(run.sequence, "stop")
                events = llm.take(run)
        done = events[-1].completion if events else None
        if done is not None:
            del active[number]
            texts.pop(number, None)
            yield key, done


def families(asked: Iterable[Asked]) -> list[list[tuple[Asked, tuple[int, ...]]]]:
    """Requests that begin alike, together: the first reads what they share, up to a boundary, and the others wait.

    None is larger than what may wait; the rest of one finds the shared past in the cache.
    """
    found: list[list[Asked]] = []
    for one in sorted(asked, key=lambda one: one.prompt):
        near = shared_len(found[-1][0].prompt, one.prompt) if found else 0
        if found and near >= SHARED and len(found[-1]) < QUEUED:
            found[-1].append(one)
        else:
            found.append([one])
    return [_with_boundary(family) for family in found]


def _with_boundary(family: Sequence[Asked]) -> list[tuple[Asked, tuple[int, ...]]]:
    common = min((shared_len(family[0].prompt, one.prompt) for one in family[1:]), default=0)
    boundaries: tuple[int, ...] = (common,) if common else ()
    return [(one, boundaries) for one in family]


def shared_len(one: bytes, other: bytes) -> int:
    """How many tokens two prompts have in common at their beginnings."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        size = middle * TOKEN_BYTES
        low, high = (middle, high) if one[:size] == other[:size] else (low, middle - 1)
    return low


def read_scores(
    llm: "LLM", ids: Tokens, start: int = 1, on_progress: Callable[[int, int], None] = lambda *_: None
) -> Iterator[tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]]:
    """Log-probabilities of the tokens from `start` on, given those before, and whether each was the first choice.

    They come a chunk at a time; what comes before `start` is read but not scored.
    """
    ids = llm.encode(ids)
    at = 1  # the token that the next row of logits is about
    for piece in llm.engine.score(ids, len(ids), min(CHUNK, llm.capacity.prefill_chunk)):
        first, last = max(at, start), min(at + len(piece), len(ids))
        if first < last:
            yield _to_logprobs(piece[first - at : last - at], ids[first:last])
        at += len(piece)
        on_progress(min(at - 1, len(ids)), len(ids))


def _to_logprobs(logits: "np.ndarray[Any, Any]", targets: Tokens) -> tuple[Any, Any]:
    """logits [n, V] in float32 and n tokens → their log-probabilities in float64, and whether they are the largest."""
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

"""What all backends share: the place of a plan's rows in the cache, the decay of states, the rule of sampling.

The sampling rule is written once, so that the same seed gives the same tokens on every backend. A sampled token depends
on the logits, the seed and the position only, not on the batch. That is also why speculation is lossless: every
position is sampled as without drafts, and a draft is accepted if it is the token that was sampled.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from sala.config import SalaConfig
from sala.protocol import Blob, Plan, Row, SampledToken, Sampling

# Block scores that differ from the last selected one by at most so many units in the last place (2^-16 of the score)
# are tied with it, and ties go to the lowest block. Blocks of repeated text have equal scores, which differ after
# rounding: sums have another order in a chunk than in a whole prompt. Measured from the last selected score, the tied
# ones are the same whatever the rounding. Scores that are first rounded to a grid would not be: the border of two
# cells may lie between equal scores.
TIE_ULPS = 128


@dataclass(frozen=True)
class RowSpan:
    """One row: `length` tokens at positions `start`…, its pages and its slot."""

    start: int
    length: int
    slot: int
    sparse_from: int  # first position in the sparse regime
    num_drafts: int
    pages: tuple[int, ...]
    is_prompt: bool = field(default=False, kw_only=True)  # begins in the prompt
    snapshots: tuple[tuple[int, int], ...] = field(default=(), kw_only=True)  # (length, slot), see `Row`
    adapter: str = field(default="", kw_only=True)
    topk: int | None = field(default=None, kw_only=True)  # blocks to select, see `Row`

    @classmethod
    def of(cls, row: Row, *more: Any) -> Self:
        """Return the span of a row; `more` are the fields of a subclass."""
        numbers = (row.start, len(row.tokens), row.slot, row.sparse_from, row.num_drafts)
        shared: dict[str, Any] = {"snapshots": row.snapshots, "adapter": row.adapter, "topk": row.topk}
        return cls(*numbers, row.pages, *more, is_prompt=row.start < row.prompt_len, **shared)

    @property
    def end(self) -> int:
        return self.start + self.length

    @cached_property
    def first_page(self) -> int | None:
        """The first page if the pages are consecutive, which allows views instead of gathers; else None."""
        is_run = all(after == before + 1 for before, after in pairwise(self.pages))
        return self.pages[0] if self.pages and is_run else None


SpanT = TypeVar("SpanT", bound=RowSpan)


class Pending(NamedTuple):
    """Keys and values [n, H, D] of a span with drafts, whose state advances once the accepted tokens are known."""

    span: int
    states: Any  # of a layer, by slot
    slopes: Any
    k: Any
    v: Any


@dataclass(frozen=True)
class PackedRows(Generic[SpanT]):
    """The rows of a plan, packed one after another."""

    ids: tuple[int, ...]  # tokens of all spans
    spans: tuple[SpanT, ...]
    pending: list[Pending] = field(default_factory=list, kw_only=True)  # filled by the lightning layers
    angles: dict[tuple[int, float], Any] = field(default_factory=dict, kw_only=True)  # RoPE, by dimension and theta

    @property
    def lengths(self) -> list[int]:
        return [span.length for span in self.spans]

    @property
    def slots(self) -> list[int]:
        return [span.slot for span in self.spans]

    def sampled_rows(self, plan: Plan) -> list[int]:
        """Return the rows whose logits the plan needs: the last token of a span, and those before its drafts."""
        spans = zip(plan.rows, self.spans, accumulate(self.lengths), strict=True)
        ends = [(end, span.num_drafts) for row, span, end in spans if row.sampling is not None]
        return [row for end, num_drafts in ends for row in range(end - 1 - num_drafts, end)]

    def advance(self, states: Any, after: Iterable[Any], slopes: Any, k: Iterable[Any], v: Iterable[Any]) -> None:
        """Replace the states of a layer by those after the spans; keep k and v of spans with drafts until `fold`."""
        for index, (span, state, k_row, v_row) in enumerate(zip(self.spans, after, k, v, strict=True)):
            if span.num_drafts:
                self.pending.append(Pending(index, states, slopes, k_row, v_row))
            else:
                states[span.slot] = state

    def fold(self, num_accepted: Sequence[int], fold: Callable[..., Any]) -> None:
        """Advance the states of spans with drafts by the tokens that were accepted, by `lightning_fold`."""
        for wait in self.pending:
            slot, count = self.spans[wait.span].slot, num_accepted[wait.span]
            wait.states[slot] = fold(wait.k[:count], wait.v[:count], wait.states[slot], wait.slopes)


def token_ids(plan: Plan) -> tuple[int, ...]:
    """Return the tokens of all rows, one after another."""
    return tuple(token for row in plan.rows for token in row.tokens)


def as_slice(rows: Sequence[int]) -> slice | None:
    """Return the rows as a slice if they are consecutive: taking them needs no index on the device."""
    first = rows[0] if rows else 0
    end = first + len(rows)
    return slice(first, end) if list(rows) == list(range(first, end)) else None


class CachedTensor(NamedTuple):
    """One tensor that a sequence has in the cache: its layer, the pool (or "state"), and the shape of its numbers."""

    layer: int
    pool: str
    shape: tuple[int, ...]


DRAFT_PREFIX = "draft."  # of what a draft head has in the cache; a prefix may be used without it
POOLS = ("k", "v", "k1", "k2")  # of a sparse layer: keys, values, and keys pooled over windows of two sizes


def rows_per_page(config: SalaConfig) -> dict[str, int]:
    """Return how many rows a page has in each pool."""
    block, stride = config.sparse_config.block_size, config.sparse_config.kernel_stride
    return dict(zip(POOLS, (block, block, block // stride, block // (4 * stride)), strict=True))


def cached_tensors(config: SalaConfig, num_tokens: int, has_exponents: bool = False) -> dict[str, CachedTensor]:
    """Return everything that a sequence of so many tokens has in the cache, by name.

    Where keys and values are FP8, each token and head also has two exponents.
    """
    block, per_page = config.sparse_config.block_size, rows_per_page(config)
    pages = {
        f"{pool}.{layer}": CachedTensor(
            layer, pool, (config.num_key_value_heads, num_tokens * per_page[pool] // block, config.head_dim)
        )
        for layer in config.sparse_layers
        for pool in POOLS
    }
    if has_exponents:
        shape = (config.num_key_value_heads, num_tokens, 2)
        pages |= {f"exponents.{layer}": CachedTensor(layer, "exponents", shape) for layer in config.sparse_layers}
    state = (config.lightning_nh, config.lightning_head_dim, config.lightning_head_dim)
    return pages | {f"state.{layer}": CachedTensor(layer, "state", state) for layer in config.lightning_layers}


def check_blobs(
    blobs: Mapping[str, Blob], tensors: Mapping[str, CachedTensor], dtype_of: Callable[[CachedTensor], str]
) -> None:
    """Raise ValueError unless the blobs are these tensors, in these precisions; those of a draft head do not count."""
    if set(tensors) != {name for name in blobs if not name.startswith(DRAFT_PREFIX)}:
        raise ValueError("other layers")
    for name, tensor in tensors.items():
        if (blobs[name].dtype, blobs[name].shape) != (dtype_of(tensor), tensor.shape):
            raise ValueError(f"{name} is {blobs[name].dtype} {blobs[name].shape}")


def decay_rates(num_heads: int) -> list[float]:
    """Return the ALiBi slope of each lightning head: powers of 2^(-8/H).

    They are interleaved with those of 2H when H is not a power of two.
    """
    if math.log2(num_heads).is_integer():
        return [2.0 ** (-8.0 * (head + 1) / num_heads) for head in range(num_heads)]
    below = 1 << int(math.log2(num_heads))
    return decay_rates(below) + decay_rates(2 * below)[0::2][: num_heads - below]


_MASK = (1 << 64) - 1
GREEDY_BELOW = 1e-5  # smaller temperatures are greedy: fp32 cannot tell them from 0


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on the arguments only (splitmix64, top 53 bits)."""
    state = (seed * 0x9E3779B97F4A7C15 + position * 0xD1342543DE82EF95 + 0x632BE59BD9B4E019) & _MASK
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        state = ((state ^ (state >> shift)) * multiplier) & _MASK
    state ^= state >> 31
    return (state >> 11) / (1 << 53)


def sampling_of(row: Row) -> Sampling:
    """Return the sampling parameters of a row that has them."""
    assert row.sampling is not None
    return row.sampling


def point_of(row: Row, num_accepted: int) -> float:
    """Return the point of the cumulative distribution at which the token after so many drafts is sampled."""
    position = row.start + len(row.tokens) - row.num_drafts + num_accepted
    return uniform(sampling_of(row).seed or 0, position)


def is_adjusted(row: Row) -> bool:
    """Return whether a bias, penalty, ban or mask changes the logits before the temperature is applied."""
    sampling = sampling_of(row)
    return bool(sampling.logit_bias or sampling.has_penalty or row.banned or row.mask)


def places_of(plan: Plan) -> list[tuple[Row, int]]:
    """Return what is to be sampled: rows, each with the number of drafts before the token (none, one, … all)."""
    rows = (row for row in plan.rows if row.sampling is not None)
    return [(row, count) for row in rows for count in range(row.num_drafts + 1)]


def allowed_tokens(row: Row, vocab: int) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Return which of the tokens the mask and the bans of a row allow, [vocab]."""
    bits = np.frombuffer(row.mask, np.uint8) if row.mask is not None else np.full(-(-vocab // 8), 255, np.uint8)
    allowed = np.zeros(vocab, np.bool_)
    known = np.unpackbits(bits, bitorder="little")[:vocab]
    allowed[: len(known)] = known
    allowed[list(row.banned)] = False
    return allowed


def penalties(row: Row, num_accepted: int, vocab: int) -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]":
    """Return the tokens of prompt and answer, each once, and what is subtracted from their logits, [n] each.

    Repetition counts prompt and answer, presence and frequency the answer only.
    """
    history = np.asarray(row.history[: len(row.history) - row.num_drafts + num_accepted], np.int64)
    frequency, presence = (
        np.float32(x) for x in (sampling_of(row).frequency_penalty, sampling_of(row).presence_penalty)
    )
    tokens = np.flatnonzero(np.bincount(history, minlength=vocab))
    counts = np.bincount(history[row.prompt_len :], minlength=vocab)[tokens].astype(np.float32)
    return tokens, frequency * counts + presence * (counts > 0)


def keep_agreed(plan: Plan, sampled: Sequence[SampledToken]) -> tuple[tuple[SampledToken, ...], ...]:
    """Keep for each row the accepted tokens: drafts that equal the sampled tokens, and one more.

    `sampled` are the tokens of `places_of(plan)`. A row that samples nothing gets no token.
    """
    found = iter(sampled)
    return tuple(() if row.sampling is None else _agreed(found, row) for row in plan.rows)


def guess_tokens(
    plan: Plan, count: int, sample: Callable[[Plan], Sequence[SampledToken]]
) -> tuple[tuple[int, ...], ...]:
    """Return `count` drafts for each row: `sample` runs a step, in which slots are the numbers of the rows."""
    rows = [replace(row, slot=index) for index, row in enumerate(plan.rows)]
    guesses: list[list[int]] = [[] for _ in rows]
    for _ in range(count):
        for index, (row, sampled) in enumerate(zip(rows, sample(Plan(tuple(rows))), strict=True)):
            guesses[index].append(sampled.token)
            history = (*row.history, sampled.token) if row.history else ()
            start = row.start + len(row.tokens)
            rows[index] = replace(row, tokens=(sampled.token,), start=start, history=history)
    return tuple(tuple(tokens) for tokens in guesses)


def _agreed(found: Iterator[SampledToken], row: Row) -> tuple[SampledToken, ...]:
    tokens = [next(found) for _ in range(row.num_drafts + 1)]
    drafts = row.tokens[len(row.tokens) - row.num_drafts :]
    is_same = [token.token == draft for token, draft in zip(tokens, drafts, strict=False)]
    return tuple(tokens[: 1 + [*is_same, False].index(False)])

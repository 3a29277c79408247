"""What all backends share about the rows of a plan: their place in the cache, and the rule by which they are sampled.

The sampling rule is written once, so that the same seed gives the same tokens on every backend.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sala.protocol import Row, SampledToken, Sampling


@dataclass(frozen=True)
class RowSpan:
    """One row: `length` tokens at positions `start`…, its pages and its slot."""

    start: int
    length: int
    slot: int
    sparse_from: int  # first position in the sparse regime
    num_drafts: int
    pages: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + self.length


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


def keep_agreed(sampled: Sequence[SampledToken], rows: Sequence[Row]) -> list[tuple[SampledToken, ...]]:
    """Keep for each row the accepted tokens: drafts that equal the sampled tokens, and one more.

    `sampled` are the tokens after each row's last certain token and after each of its drafts.
    """
    found = iter(sampled)
    return [_agreed(found, row) for row in rows]


def _agreed(found: Iterator[SampledToken], row: Row) -> tuple[SampledToken, ...]:
    tokens = [next(found) for _ in range(row.num_drafts + 1)]
    drafts = row.tokens[len(row.tokens) - row.num_drafts :]
    is_same = [token.token == draft for token, draft in zip(tokens, drafts, strict=False)]
    return tuple(tokens[: 1 + [*is_same, False].index(False)])

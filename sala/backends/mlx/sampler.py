"""From logits to tokens, by the rule of `backends/rows.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from sala.backends.rows import GREEDY_BELOW, allowed_tokens, is_adjusted, penalties, point_of, sampling_of
from sala.errors import ModelBroken
from sala.protocol import Row, SampledToken, Sampling

_ID_BITS = 32  # of a sorting key; the rest is the probability


@dataclass(frozen=True, slots=True)
class Samples:
    """Tokens [n] that are not computed yet and, where requested, log-probabilities: own, best ids, best values.

    A token is -1 if its logits are not numbers.
    """

    tokens: mx.array
    logprobs: Sequence[tuple[mx.array, mx.array, mx.array] | None]

    @property
    def arrays(self) -> list[Any]:
        return [self.tokens, [found for found in self.logprobs if found is not None]]

    def read(self) -> list[SampledToken]:
        """Wait for the tokens and return them. Raise ModelBroken if there was nothing to sample from."""
        tokens: list[int] = np.array(self.tokens).tolist()
        if min(tokens, default=0) < 0:
            raise ModelBroken
        pairs = zip(tokens, self.logprobs, strict=True)
        return [SampledToken(token) if found is None else _with_logprobs(token, *found) for token, found in pairs]


def sample_all(logits: mx.array, places: Sequence[tuple[Row, int]]) -> Samples:
    """Sample a token for each row of logits [n, V]; `places` are its row of the plan and the drafts before it."""
    samplings = [sampling_of(row) for row, _ in places]
    adjusted = logits
    if any(is_adjusted(row) for row, _ in places):
        adjusted = mx.stack([adjust(logits[at], samplings[at], *place) for at, place in enumerate(places)])
    tokens = mx.argmax(adjusted, axis=-1).astype(mx.int32)
    warm = [at for at, sampling in enumerate(samplings) if sampling.temperature >= GREEDY_BELOW]
    if warm:
        points = [point_of(*places[at]) for at in warm]
        index = mx.array(np.asarray(warm, np.int32))
        tokens[index] = _sample_at(adjusted[index], [samplings[at] for at in warm], points)
    tokens = mx.where(mx.isnan(logits).any(axis=-1), -1, tokens)
    scored = enumerate(zip(logits, samplings, strict=True)) if any(s.logprobs is not None for s in samplings) else ()
    found = {at: _logprobs(scores, tokens[at], sampling.logprobs) for at, (scores, sampling) in scored}
    return Samples(tokens, [found.get(at) for at in range(len(samplings))])


def adjust(logits: mx.array, sampling: Sampling, row: Row, num_accepted: int = 0) -> mx.array:
    """Return logits [V] with bias, penalties and bans, before temperature."""
    vocab = logits.shape[0]
    if sampling.has_penalty:
        tokens, subtracted = penalties(row, num_accepted, vocab)
        is_seen, all_less = np.zeros(vocab, np.bool_), np.zeros(vocab, np.float32)
        is_seen[tokens], all_less[tokens] = True, subtracted
        seen, less, penalty = mx.array(is_seen), mx.array(all_less), sampling.repetition_penalty
        logits = mx.where(seen, mx.where(logits > 0, logits / penalty, logits * penalty), logits) - less
    if sampling.logit_bias:
        bias = np.zeros(vocab, np.float32)
        bias[list(sampling.logit_bias)] = list(sampling.logit_bias.values())
        logits = logits + mx.array(bias)
    if row.mask is not None or row.banned:
        logits = mx.where(mx.array(allowed_tokens(row, vocab)), logits, -mx.inf)
    return logits


def _sample_at(logits: mx.array, samplings: Sequence[Sampling], points: Sequence[float]) -> mx.array:
    """logits [n, V] → the token at each point of its cumulative distribution, most probable first, filters applied."""
    heat = mx.array([sampling.temperature for sampling in samplings], dtype=mx.float32)[:, None]
    scaled = (logits - logits.max(-1, keepdims=True)) / heat  # the largest is 0, whatever the temperature
    probs, ids = _descending(mx.softmax(scaled, axis=-1, precise=True))
    keep = filters(probs, samplings)
    index = _search(mx.where(keep, probs, 0.0), points)
    last = keep.sum(-1, keepdims=True).astype(mx.int32) - 1  # kept tokens come first
    return mx.take_along_axis(ids, mx.minimum(index, last), axis=-1)[:, 0]


def _descending(probs: mx.array) -> tuple[mx.array, mx.array]:
    """Return probs [n, V] in descending order and their ids; equal ones in the order of their ids."""
    vocab = probs.shape[-1]
    keys = probs.view(mx.int32).astype(mx.int64) << _ID_BITS | (vocab - 1 - mx.arange(vocab)).astype(mx.int64)
    keys = -mx.sort(-keys, axis=-1)
    ids = vocab - 1 - (keys & ((1 << _ID_BITS) - 1))
    return (keys >> _ID_BITS).astype(mx.int32).view(mx.float32), ids.astype(mx.int32)


def _search(probs: mx.array, points: Sequence[float]) -> mx.array:
    """Return how many numbers of each row are at most its point, [n, 1]; in fp64, which MLX has on the CPU only."""
    cpu = mx.cpu
    cumulative = mx.cumsum(probs.astype(mx.float64, stream=cpu), axis=-1, stream=cpu)
    whole = mx.take(cumulative, mx.array([probs.shape[-1] - 1]), axis=-1, stream=cpu)
    at = mx.multiply(mx.array(np.asarray(points, np.float64)[:, None], dtype=mx.float64), whole, stream=cpu)
    below = mx.less_equal(cumulative, at, stream=cpu)
    return mx.sum(below, axis=-1, keepdims=True, stream=cpu).astype(mx.int32, stream=cpu)


def filters(probs: mx.array, samplings: Sequence[Sampling]) -> mx.array:
    """Return which of the sorted probabilities [n, V] may be sampled; the first always may."""
    vocab = probs.shape[-1]
    rank = mx.arange(vocab)
    top_k = mx.array([sampling.top_k or vocab for sampling in samplings])[:, None]
    keep = (rank < top_k) & (probs > 0)
    if any(sampling.top_p < 1.0 for sampling in samplings):
        top_p = mx.array([sampling.top_p if sampling.top_p < 1.0 else np.inf for sampling in samplings])[:, None]
        keep = keep & (mx.cumsum(probs, axis=-1) - probs < top_p)
    if any(sampling.min_p > 0.0 for sampling in samplings):
        min_p = mx.array([sampling.min_p for sampling in samplings])[:, None]
        keep = keep & (probs >= min_p * probs[:, :1])
    return keep | (rank == 0)


def _logprobs(logits: mx.array, token: mx.array, count: int | None) -> tuple[mx.array, mx.array, mx.array] | None:
    if count is None:
        return None
    logprobs = logits - mx.logsumexp(logits)
    best = mx.argsort(-logprobs)[: min(count, logprobs.shape[0])]
    return logprobs[token], best, logprobs[best]


def _with_logprobs(token: int, own: mx.array, ids: mx.array, values: mx.array) -> SampledToken:
    top = zip(np.array(ids).tolist(), np.array(values).tolist(), strict=True)
    return SampledToken(token, float(np.array(own)), tuple(top))

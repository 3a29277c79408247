"""From logits to tokens, by the rule of `backends/rows.py`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sala.backends.rows import GREEDY_BELOW, allowed_tokens, is_adjusted, penalties, point_of, sampling_of
from sala.errors import ModelBroken
from sala.protocol import Row, SampledToken, Sampling


def sample(logits: Tensor, row: Row, num_accepted: int = 0) -> SampledToken:
    """Sample from logits [V] in fp32 as `row.sampling` says; the first `num_accepted` drafts count as accepted."""
    return sample_all(logits[None], [(row, num_accepted)])[0]


def sample_all(logits: Tensor, places: Sequence[tuple[Row, int]]) -> list[SampledToken]:
    """Sample a token for each row of logits [n, V]; `places` are its row of the plan and the drafts before it.

    Raise ModelBroken if a logit is not a number: the host learns that with the tokens, so that it waits only once.
    """
    samplings = [sampling_of(row) for row, _ in places]
    if any(is_adjusted(row) for row, _ in places):
        rows = zip(logits, samplings, places, strict=True)
        adjusted = torch.stack([adjust(scores, sampling, *place) for scores, sampling, place in rows])
    else:
        adjusted = logits
    tokens = adjusted.argmax(-1)
    warm = [index for index, sampling in enumerate(samplings) if sampling.temperature >= GREEDY_BELOW]
    if warm:
        points = [point_of(*places[index]) for index in warm]
        index = torch.tensor(warm, device=logits.device)
        tokens[index] = sample_at(adjusted[index], [samplings[i] for i in warm], points)
    numbers = torch.where(logits.amax(-1).isnan(), -1, tokens).tolist()
    if -1 in numbers:
        raise ModelBroken
    found = zip(numbers, logits, samplings, strict=True)
    return [_with_logprobs(token, scores, sampling.logprobs) for token, scores, sampling in found]


def adjust(logits: Tensor, sampling: Sampling, row: Row, num_accepted: int = 0) -> Tensor:
    """Return logits with bias, penalties and bans, before temperature; the given logits are not changed."""
    logits, device, vocab = logits.clone(), logits.device, logits.shape[0]
    if sampling.has_penalty:
        tokens, less = (torch.from_numpy(x).to(device) for x in penalties(row, num_accepted, vocab))
        scores, penalty = logits[tokens], sampling.repetition_penalty
        logits[tokens] = torch.where(scores > 0, scores / penalty, scores * penalty) - less
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if row.mask is not None or row.banned:
        logits[~torch.from_numpy(allowed_tokens(row, vocab)).to(device)] = float("-inf")
    return logits


def sample_at(logits: Tensor, samplings: Sequence[Sampling], points: Sequence[float]) -> Tensor:
    """logits [n, V] → the token at each point of its cumulative distribution, most probable first, filters applied."""
    heat = torch.tensor([sampling.temperature for sampling in samplings], device=logits.device)[:, None]
    scaled = (logits - logits.amax(-1, keepdim=True)) / heat  # the largest is 0, whatever the temperature
    probs, ids = scaled.softmax(-1).sort(dim=-1, descending=True, stable=True)
    keep = torch.stack([filters(row, sampling) for row, sampling in zip(probs, samplings, strict=True)])
    cumulative = torch.where(keep, probs, 0.0).double().cumsum(-1)
    at = torch.tensor(points, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, at, right=True)
    return ids.gather(1, torch.minimum(index, keep.sum(-1, keepdim=True) - 1))[:, 0]  # kept tokens come first


def filters(probs: Tensor, sampling: Sampling) -> Tensor:
    """Return which of the sorted probabilities may be sampled; the first always may."""
    keep = torch.ones_like(probs, dtype=torch.bool)
    if sampling.top_k:
        keep[sampling.top_k :] = False
    if sampling.top_p < 1.0:
        keep &= probs.cumsum(0) - probs < sampling.top_p
    if sampling.min_p > 0.0:
        keep &= probs >= sampling.min_p * probs[0]
    keep &= probs > 0
    keep[0] = True
    return keep


def _with_logprobs(token: int, logits: Tensor, count: int | None) -> SampledToken:
    if count is None:
        return SampledToken(token)
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(count, logprobs.shape[0]))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return SampledToken(token, float(logprobs[token]), top)

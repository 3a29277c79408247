"""From logits to tokens. A draw depends on the logits, the seed and the position alone, never on the neighbours.

That is also why speculation loses nothing: every position is drawn as it would have been without drafts, and a draft is
accepted if it is the token that was drawn.
"""

import torch
from torch import Tensor

from sala.protocol import Drawn, Row, Sampling

_MASK = (1 << 64) - 1
GREEDY_BELOW = 1e-5  # fp32 cannot tell such a temperature from 0


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a pure function of its arguments (splitmix64, top 53 bits)."""
    state = (seed * 0x9E3779B97F4A7C15 + position * 0xD1342543DE82EF95 + 0x632BE59BD9B4E019) & _MASK
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        state = ((state ^ (state >> shift)) * multiplier) & _MASK
    state ^= state >> 31
    return (state >> 11) / (1 << 53)


def verify(logits: Tensor, row: Row) -> tuple[Drawn, ...]:
    """logits [num_drafts + 1, V] after the last certain token and after each draft → accepted drafts and one more."""
    drafts = row.tokens[len(row.tokens) - row.num_drafts :]
    out = []
    for index, scores in enumerate(logits):
        out.append(draw(scores, row, index))
        if index < len(drafts) and out[-1].token != drafts[index]:
            break
    return tuple(out)


def draw(logits: Tensor, row: Row, num_accepted: int = 0) -> Drawn:
    """logits [V] in fp32, before any change; `row.sampling` says how to draw. The first drafts are taken as certain."""
    sampling = row.sampling
    assert sampling is not None
    adjusted = adjust(logits, sampling, row, num_accepted)
    if sampling.temperature < GREEDY_BELOW:
        token = int(adjusted.argmax())
    else:
        position = row.start + len(row.tokens) - row.num_drafts + num_accepted
        scaled = (adjusted - adjusted.max()) / sampling.temperature  # the largest is 0, whatever the temperature
        token = _draw_at(scaled, sampling, uniform(sampling.seed or 0, position))
    return _with_logprobs(token, logits, sampling.logprobs)


def adjust(logits: Tensor, sampling: Sampling, row: Row, num_accepted: int = 0) -> Tensor:
    """Bias, penalties and bans, before temperature; the given logits stay as they are."""
    if not (sampling.logit_bias or sampling.has_penalty or row.banned or row.mask):
        return logits
    logits = logits.clone()
    if sampling.has_penalty:
        history = row.history[: len(row.history) - row.num_drafts + num_accepted]
        _penalise(logits, sampling, torch.tensor(history, device=logits.device, dtype=torch.long), row.prompt_len)
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if row.mask is not None:
        logits[~_allowed(row.mask, logits)] = float("-inf")
    if row.banned:
        logits[list(row.banned)] = float("-inf")
    return logits


def _allowed(mask: bytes, logits: Tensor) -> Tensor:
    packed = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    allowed = torch.zeros(logits.shape[0], dtype=torch.bool)
    bits = bits.flatten()[: logits.shape[0]].bool()
    allowed[: bits.shape[0]] = bits
    return allowed.to(logits.device)


def _penalise(logits: Tensor, sampling: Sampling, history: Tensor, prompt_len: int) -> None:
    """Repetition counts prompt and answer, presence and frequency the answer alone."""
    vocab = logits.shape[0]
    seen = torch.bincount(history, minlength=vocab) > 0
    penalty = sampling.repetition_penalty
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    counts = torch.bincount(history[prompt_len:], minlength=vocab)
    logits -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)


def _draw_at(scaled: Tensor, sampling: Sampling, point: float) -> int:
    """The token at `point` of the cumulative distribution, most probable first, after the filters."""
    probs, ids = scaled.softmax(-1).sort(descending=True, stable=True)
    keep = filters(probs, sampling)
    cumulative = torch.where(keep, probs, 0.0).double().cumsum(0)
    index = int(torch.searchsorted(cumulative, point * cumulative[-1], right=True))
    last = int(keep.nonzero()[-1])
    return int(ids[min(index, last)])


def filters(probs: Tensor, sampling: Sampling) -> Tensor:
    """Which of the sorted probabilities may be drawn; the first always."""
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


def _with_logprobs(token: int, logits: Tensor, count: int | None) -> Drawn:
    if count is None:
        return Drawn(token)
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(count, logprobs.shape[0]))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Drawn(token, float(logprobs[token]), top)

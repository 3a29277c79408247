"""Scores of given tokens, from the logits before them."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sala.errors import InputError
from sala.protocol import SampledToken

if TYPE_CHECKING:
    import numpy


def score_tokens(logits: "numpy.ndarray[Any, Any]", targets: Sequence[int], top: int) -> list[SampledToken]:
    """Return the scores of the tokens that follow those whose logits [t, V] are given."""
    import numpy as np

    targets = targets[: len(logits)]
    scores = logits[: len(targets)].astype(np.float64)
    peak = scores.max(-1, keepdims=True)
    logprobs = scores - peak - np.log(np.exp(scores - peak).sum(-1, keepdims=True))
    return [_sampled(row, token, top) for row, token in zip(logprobs, targets, strict=True)]


def _sampled(logprobs: "numpy.ndarray[Any, Any]", token: int, top: int) -> SampledToken:
    """Return a token with its alternatives, the most probable first; equals in order of their ids."""
    import numpy as np

    best: Any = ()
    if top:
        near = np.flatnonzero(logprobs >= np.partition(logprobs, -top)[-top])
        best = near[np.argsort(-logprobs[near], kind="stable")][:top]
    return SampledToken(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best))


def perplexity(scores: Sequence[SampledToken]) -> float:
    if not scores:
        raise InputError("text", "has one token", "perplexity needs at least two")
    return math.exp(-sum(sampled.logprob or 0.0 for sampled in scores) / len(scores))

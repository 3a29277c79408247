"""Batched log-probabilities and perplexity, for layer selection and reports."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sala.backends.torch.model import SalaModel
from sala.lab.eval.tasks.choice import Accuracy, ChoiceTask, accuracy, requests
from sala.lab.train.models import hidden_states

_TOKENS_AT_ONCE = 1 << 16


class Score(NamedTuple):
    """The log-probability of a continuation, and which of its tokens are the model's top-1 prediction."""

    logprob: float
    is_first: tuple[bool, ...]


@torch.inference_mode()
def score_rows(model: SalaModel, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
    """Return the scores of (context, continuation) pairs of token ids."""
    scores: dict[int, Score] = {}
    dense_len = model.config.sparse_config.dense_len
    lengths = [_padded(len(context) + len(continuation), dense_len) for context, continuation in rows]
    for same in _batches(sorted(range(len(rows)), key=lambda i: lengths[i]), lengths):
        scores |= zip(same, _score_batch(model, [rows[i] for i in same], lengths[same[0]]), strict=True)
    return [scores[index] for index in range(len(rows))]


def choice_accuracy(model: SalaModel, tasks: Sequence[ChoiceTask], encode: Callable[[str], list[int]]) -> Accuracy:
    """Return the accuracy on multiple-choice questions, by the likelihood of their answers."""
    groups = [requests(task, encode) for task in tasks]
    scores = iter(score_rows(model, [(r.context_ids, r.continuation_ids) for group in groups for r in group]))
    return accuracy(tasks, [[next(scores).logprob for _ in group] for group in groups])


def _batches(order: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield batches of indices of rows with the same padded length, of bounded size."""
    while order:
        length = lengths[order[0]]
        same = [i for i in order[: max(1, _TOKENS_AT_ONCE // length)] if lengths[i] == length]
        order = order[len(same) :]
        yield same


def _padded(length: int, dense_len: int) -> int:
    """Return the length to pad a row to: at most an eighth more, so that few shapes occur; dense rows stay dense."""
    step = max(64, 1 << max(0, length.bit_length() - 4))
    padded = -(-length // step) * step
    return dense_len - 1 if length < dense_len <= padded else padded


def _score_batch(model: SalaModel, rows: Sequence[tuple[Sequence[int], Sequence[int]]], length: int) -> list[Score]:
    hidden = _hidden_states(model, [[*context, *continuation] for context, continuation in rows], length)
    out = []
    for at, (context, continuation) in enumerate(rows):
        end = len(context) + len(continuation)
        logits = model.logits(hidden[at, len(context) - 1 : end - 1])
        labels = torch.tensor(continuation, device=logits.device)
        logprob = logits.log_softmax(-1).gather(1, labels[:, None]).sum()
        out.append(Score(float(logprob), tuple((logits.argmax(-1) == labels).tolist())))
    return out


def _hidden_states(model: SalaModel, rows: Sequence[Sequence[int]], length: int) -> Tensor:
    """Return the hidden states [B, length, hidden] of rows padded on the right."""
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    for at, row in enumerate(rows):
        tokens[at, : len(row)] = torch.tensor(row)
    return hidden_states(model, tokens.to(model.model.norm.weight.device)).view(len(rows), length, -1)


@torch.inference_mode()
def perplexity(model: SalaModel, tokens: Sequence[int], length: int, rows_at_once: int = 16) -> float:
    """Return the perplexity over pieces of `length` tokens; the first token of each and the remainder do not count."""
    device = model.model.norm.weight.device
    count = len(tokens) // length
    pieces = torch.tensor(tokens[: count * length]).view(count, length)
    total = 0.0
    for batch in pieces.split(max(1, min(rows_at_once, _TOKENS_AT_ONCE // length))):
        hidden = hidden_states(model, batch.to(device)).view(*batch.shape, -1)
        for row, ids in zip(hidden, batch.to(device), strict=True):
            for begin in range(0, length - 1, 1024):
                end = min(begin + 1024, length - 1)
                logp = model.logits(row[begin:end]).log_softmax(-1)
                total -= float(logp.gather(1, ids[begin + 1 : end + 1, None]).double().sum())
    return float(torch.tensor(total / (count * (length - 1))).exp())

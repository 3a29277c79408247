"""Multiple choice by likelihood, with the conventions of lm-eval: the likeliest choice is the answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import StringConstraints

from sala.errors import InputError
from sala.lab.eval.documents import read_lines

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class ChoiceTask:
    """A context, its possible continuations (without the space before them), and the index of the right one."""

    context: str
    choices: tuple[Annotated[str, StringConstraints(min_length=1)], ...]
    gold: int

    def __post_init__(self) -> None:
        if not 0 <= self.gold < len(self.choices):
            raise ValueError("gold is not the index of a choice")


class ChoiceRequest(NamedTuple):
    """A continuation to score: the sum of its log-probabilities after the context."""

    context_ids: tuple[int, ...]
    continuation_ids: tuple[int, ...]


class Accuracy(NamedTuple):
    """The share of tasks won by the largest sum of log-probabilities, and by the largest sum per character."""

    acc: float
    acc_norm: float


def read_tasks(file: Path) -> list[ChoiceTask]:
    """Return the tasks of a JSONL file: an object with context, choices and gold per line; blank lines are skipped."""
    remedy = 'each line is {"context": text, "choices": [texts], "gold": index}'
    return read_lines(file, ChoiceTask, "tasks", remedy)


def requests(task: ChoiceTask, encode: Encode, delimiter: str = " ") -> list[ChoiceRequest]:
    """Return one request per choice, which follows the context and the delimiter. `encode` adds BOS if needed.

    Spaces at the end of the context move to the continuation, and the continuation is the whole text without the
    tokens of the context, so that its tokens are those of running text.
    """
    context = task.context.rstrip()
    moved = task.context[len(context) :] + delimiter
    context_ids = tuple(encode(context))
    if not context_ids:
        raise InputError("context", "is empty", "let encode add a BOS, or give a context")
    wholes = [tuple(encode(context + moved + choice)) for choice in task.choices]
    return [ChoiceRequest(context_ids, whole[len(context_ids) :]) for whole in wholes]


def accuracy(tasks: Sequence[ChoiceTask], scores: Sequence[Sequence[float]]) -> Accuracy:
    """Return the accuracy; `scores[i][j]` is the log-probability of choice j of task i. The first of equals wins."""
    if not tasks:
        raise InputError("tasks", "are none", "give at least one")
    won = won_norm = 0
    for task, sums in zip(tasks, scores, strict=True):
        per_character = [one / len(choice) for one, choice in zip(sums, task.choices, strict=True)]
        won += sums.index(max(sums)) == task.gold
        won_norm += per_character.index(max(per_character)) == task.gold
    return Accuracy(won / len(tasks), won_norm / len(tasks))

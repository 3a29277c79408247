"""Simple questions that any working model answers: a quick check after a conversion or quantization."""

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Question(NamedTuple):
    """A question and every spelling of its answer that is accepted."""

    text: str
    accepted: tuple[str, ...]


@cache
def questions() -> tuple[Question, ...]:
    listed = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return tuple(Question(text, tuple(accepted)) for text, accepted in listed.items())


def score(question: Question, text: str) -> float:
    """Return 1 if the text contains an accepted answer as whole words, in any case; else 0."""
    return float(any(_contains(text, answer) for answer in question.accepted))


def accuracy(questions: Sequence[Question], texts: Sequence[str]) -> float:
    """Return the share of questions answered correctly; `texts[i]` is the answer to `questions[i]`."""
    hits = [score(question, text) for question, text in zip(questions, texts, strict=True)]
    return sum(hits) / max(1, len(hits))


def _contains(text: str, answer: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None

"""How needles are worded, and how text and question are put to the model.

Train and test share no wording. Training wordings are also composed from parts, tens of thousands of them, so that
none is learnt by heart: an attribute ("badge number") takes any statement, question and opening; a relation ("moors
the boat at") has phrases of its own. No word of theirs is in a test wording.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from sala.lab.eval.data import read_data
from sala.lab.eval.tasks.words import KeyKind, Split, ValueKind


@dataclass(frozen=True)
class Wording:
    """One way to state a fact and to ask for it: `{key}` and `{value}` are filled in, the value follows the opening."""

    statement: str
    question: str
    opening: str
    key: KeyKind
    values: tuple[ValueKind, ...]
    category: str = "common"  # of word values


@cache
def wordings(split: Split) -> tuple[Wording, ...]:
    return tuple(_wording(**entry) for entry in read_data("wordings")[split])


@cache
def aurora() -> Wording:
    """Return the wording of many demos."""
    return _wording(**read_data("wordings")["aurora"])


def frames(split: Split) -> list[str]:
    """Return the user messages around `{text}`; only training frames may put the question first."""
    found: list[str] = read_data("wordings")["frames"][split]
    return found


def filler() -> str:
    return " ".join(read_data("wordings")["filler"].split())


@cache
def attributes() -> tuple[dict[str, Any], ...]:
    """Return what a person, thing or place can have: noun, key, values and category of each."""
    groups = [dict(group) for group in read_data("phrases")["attributes"]]
    return tuple({**group, "noun": noun} for group in groups for noun in group.pop("nouns"))


def relations() -> list[dict[str, Any]]:
    """Return statements, questions and openings that go together, with their key, values and category."""
    found: list[dict[str, Any]] = read_data("phrases")["relations"]
    return found


def patterns(part: str) -> list[str]:
    """Return the "statements", "questions" or "openings" that any attribute takes."""
    found: list[str] = read_data("phrases")[part]
    return found


PARTS = ("statements", "questions", "openings")


def compose(rng: np.random.Generator) -> Wording:
    """Return a random training wording made of parts."""
    related, owned = relations(), attributes()
    if rng.random() < len(related) / (len(related) + len(owned)):
        source = related[int(rng.integers(len(related)))]
        phrases = [_pick(source[part], rng) for part in PARTS]
    else:
        source = owned[int(rng.integers(len(owned)))]
        phrases = [fill(_pick(patterns(part), rng), source["noun"], source["key"]) for part in PARTS]
    statement, question, opening = phrases
    return _wording(statement, question, opening, source["key"], source["values"], source.get("category", "common"))


def fill(pattern: str, noun: str, key: KeyKind) -> str:
    """Return the pattern for an attribute, with `{key}` and `{value}` left open."""
    owner = "the {key}" if key == "thing" else "{key}"
    text = pattern.replace("{noun}", noun).replace("{owner}", owner)
    return text if text.startswith("{") else text[0].upper() + text[1:]


def _wording(
    statement: str, question: str, opening: str, key: KeyKind, values: Sequence[ValueKind], category: str = "common"
) -> Wording:
    return Wording(statement, question, opening, key, tuple(values), category)


def _pick(options: Sequence[str], rng: np.random.Generator) -> str:
    return options[int(rng.integers(len(options)))]

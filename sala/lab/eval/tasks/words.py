"""Vocabulary of the tasks: what is asked about (keys), what is hidden (values), made-up names, and their wordings.

Key words are split by their hash: no adjective, noun, given name, surname or place of a train key occurs in a test key.
Train and test share no wording. Training wordings are also composed from parts, tens of thousands of them, so that
none is learnt by heart: an attribute ("badge number") takes any statement, question and opening; a relation ("moors
the boat at") has phrases of its own. No word of theirs is in a test wording.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar

import numpy as np

from sala.lab.eval.data import read_data

Split = Literal["train", "test"]
KeyKind = Literal["person", "thing", "place"]
ValueKind = Literal["number", "word", "uuid"]
T = TypeVar("T")

KEY_PARTS: dict[KeyKind, tuple[str, str]] = {
    "person": ("given_names", "surnames"),
    "thing": ("adjectives", "nouns"),
    "place": ("place_stems", "place_endings"),
}


def pick(options: Sequence[T], rng: np.random.Generator) -> T:
    return options[int(rng.integers(len(options)))]


@cache
def words_of(name: str) -> tuple[str, ...]:
    """Return a list of words.toml: a category of values ("common", "fruit", "city" …) or a part of keys or names."""
    lists = read_data("words")
    text: str = lists["categories"].get(name) or lists[name]
    return tuple(text.split())


def categories() -> tuple[str, ...]:
    """Return the names of the value categories besides "common"."""
    return tuple(read_data("words")["categories"])


def in_split(word: str, split: Split) -> bool:
    """Whether the hash of a word (or text) puts it into `split`: about one in four belongs to the tests."""
    return (zlib.crc32(word.encode()) % 4 == 0) == (split == "test")


@cache
def key_words(kind: KeyKind, split: Split) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the first and second halves of keys; the splits share only the endings of place names."""
    first, second = map(words_of, KEY_PARTS[kind])
    firsts = tuple(word for word in first if in_split(word, split))
    seconds = tuple(word for word in second if kind == "place" or in_split(word, split))
    return firsts, seconds


def count_keys(kind: KeyKind, split: Split) -> int:
    first, second = key_words(kind, split)
    return len(first) * len(second)


def sample_keys(kind: KeyKind, split: Split, count: int, rng: np.random.Generator) -> list[str]:
    """Return `count` different keys: "Maria Lindholm", "amber lantern", "Thornwick"."""
    first, second = key_words(kind, split)
    joint = "" if kind == "place" else " "
    chosen = rng.choice(len(first) * len(second), size=count, replace=False)
    return [first[pair // len(second)] + joint + second[pair % len(second)] for pair in chosen.tolist()]


def sample_values(kind: ValueKind, category: str, count: int, rng: np.random.Generator) -> list[str]:
    """Return `count` different values; words come from `category`."""
    if kind == "word":
        words = words_of(category)
        return [words[index] for index in rng.choice(len(words), size=count, replace=False).tolist()]
    sample = SAMPLERS[kind]
    values: dict[str, None] = {}
    while len(values) < count:
        values[sample(rng)] = None
    return list(values)


def sample_names(count: int, rng: np.random.Generator) -> list[str]:
    """Return `count` different made-up names of three syllables, such as "kelomon"."""
    parts = [words_of(f"{part}_syllables") for part in ("first", "middle", "last")]
    sizes = tuple(map(len, parts))
    chosen = rng.choice(sizes[0] * sizes[1] * sizes[2], size=count, replace=False)
    places = zip(*np.unravel_index(chosen, sizes), strict=True)
    return ["".join(part[at] for part, at in zip(parts, place, strict=True)) for place in places]


def _sample_number(rng: np.random.Generator) -> str:
    num_digits = int(rng.integers(4, 9))
    return str(rng.integers(10 ** (num_digits - 1), 10**num_digits))


def _sample_uuid(rng: np.random.Generator) -> str:
    """Return a short code: 6 or 8 hex digits, or two groups as in a UUID."""
    digits = rng.bytes(6).hex()
    shapes = (digits[:6], digits[:8], f"{digits[:4]}-{digits[4:8]}", f"{digits[:8]}-{digits[8:]}")
    return pick(shapes, rng)


SAMPLERS: dict[ValueKind, Callable[[np.random.Generator], str]] = {"number": _sample_number, "uuid": _sample_uuid}


# How needles are worded, and how text and question are put to the model.

PARTS = ("statements", "questions", "openings")


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
    return tuple(_wording(entry) for entry in read_data("wordings")[split])


@cache
def aurora() -> Wording:
    """Return the wording of many demos."""
    return _wording(read_data("wordings")["aurora"])


def frames(split: Split) -> list[str]:
    """Return the user messages around `{text}`; only training frames may put the question first."""
    found: list[str] = read_data("wordings")["frames"][split]
    return found


@cache
def attributes() -> tuple[dict[str, Any], ...]:
    """Return what a person, thing or place can have: noun, key, values and category of each."""
    groups = [dict(group) for group in phrases("attributes")]
    return tuple({**group, "noun": noun} for group in groups for noun in group.pop("nouns"))


def phrases(part: str) -> Any:
    """Return the "statements", "questions" or "openings" that any attribute takes.

    "attributes" are groups of nouns; "relations" are phrases that go together, with their key, values and category.
    """
    return read_data("phrases")[part]


def compose(rng: np.random.Generator) -> Wording:
    """Return a random training wording made of parts."""
    relations, owned = phrases("relations"), attributes()
    if rng.random() < len(relations) / (len(relations) + len(owned)):
        source = pick(relations, rng)
        statement, question, opening = (pick(source[part], rng) for part in PARTS)
    else:
        source = pick(owned, rng)
        statement, question, opening = (fill(pick(phrases(part), rng), source["noun"], source["key"]) for part in PARTS)
    category = source.get("category", "common")
    return Wording(statement, question, opening, source["key"], tuple(source["values"]), category)


def fill(pattern: str, noun: str, key: KeyKind) -> str:
    """Return the pattern for an attribute, with `{key}` and `{value}` left open."""
    owner = "the {key}" if key == "thing" else "{key}"
    text = pattern.replace("{noun}", noun).replace("{owner}", owner)
    return text if text.startswith("{") else text[0].upper() + text[1:]


def _wording(entry: dict[str, Any]) -> Wording:
    return Wording(**{**entry, "values": tuple(entry["values"])})

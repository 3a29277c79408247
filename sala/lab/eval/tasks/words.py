"""Vocabulary of the tasks: what is asked about (keys), what is hidden (values), and made-up names.

Key words are split by their hash: no adjective, noun, given name, surname or place of a train key occurs in a test key.
"""

import zlib
from collections.abc import Callable
from functools import cache
from typing import Literal

import numpy as np

from sala.lab.eval.data import read_data

Split = Literal["train", "test"]
KeyKind = Literal["person", "thing", "place"]
ValueKind = Literal["number", "word", "uuid"]

KEY_PARTS: dict[KeyKind, tuple[str, str]] = {
    "person": ("given_names", "surnames"),
    "thing": ("adjectives", "nouns"),
    "place": ("place_stems", "place_endings"),
}


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
    return shapes[int(rng.integers(len(shapes)))]


SAMPLERS: dict[ValueKind, Callable[[np.random.Generator], str]] = {"number": _sample_number, "uuid": _sample_uuid}

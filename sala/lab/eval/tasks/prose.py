"""Made-up readable prose of any length: the default haystack.

A document walks through scenes; a scene has sentences, a sentence has gaps, and a gap takes one of many words
(data/prose.toml). The prose has no digits and no full names, so that no needle is in it by chance.
"""

import math
import re
from collections.abc import Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

from sala.lab.eval.data import read_data

MAX_DICE = 1024  # random numbers that one document needs at most
NUM_DOCUMENTS = 640  # some 400 thousand words
PARAGRAPHS = (5, 12)  # per document, the end excluded
SENTENCES = (3, 8)  # per paragraph, the end excluded
MAX_WEIGHT = 100  # variants beyond which a sentence is not taken more often


def write_documents(count: int = NUM_DOCUMENTS) -> list[str]:
    """Return `count` documents, always the same ones."""
    return [write_document(np.random.default_rng([0, index])) for index in range(count)]


def write_document(rng: np.random.Generator) -> str:
    """Return some paragraphs of one scene each; a sentence with more variants is taken more often."""
    dice = iter(rng.integers(1 << 30, size=MAX_DICE).tolist())
    scenes, weights = _scenes()
    paragraphs = []
    for _ in range(_throw(dice, *PARAGRAPHS)):
        at = _throw(dice, 0, len(scenes))
        order = np.argsort(rng.exponential(size=len(scenes[at])) / weights[at])
        chosen = order[: _throw(dice, *SENTENCES)].tolist()
        paragraphs.append(" ".join(_fill(scenes[at][one], dice) for one in chosen))
    return "\n\n".join(paragraphs)


@cache
def _scenes() -> tuple[list[list[list[str]]], list[NDArray[np.float64]]]:
    """Return the sentences of each scene, split at their gaps, and how often each is taken against the others."""
    scenes = [[re.split(r"\{(\w+)\}", line) for line in scene] for scene in read_data("prose")["scenes"].values()]
    sizes = [[[len(_words(gap.partition("_")[0])) for gap in parts[1::2]] for parts in scene] for scene in scenes]
    variants = [[math.prod(one) for one in scene] for scene in sizes]
    return scenes, [np.minimum(scene, MAX_WEIGHT).astype(np.float64) for scene in variants]


def _words(name: str) -> list[str]:
    found: list[str] = read_data("prose")["gaps"][name]
    return found


def _throw(dice: Iterator[int], start: int, stop: int) -> int:
    return start + next(dice) % (stop - start)


def _fill(parts: list[str], dice: Iterator[int]) -> str:
    """Return a sentence; gaps are the odd parts."""
    text = "".join(_choose(part, dice) if at % 2 else part for at, part in enumerate(parts))
    return text[0].upper() + text[1:]


def _choose(gap: str, dice: Iterator[int]) -> str:
    name, _, form = gap.partition("_")
    words = _words(name)
    word = words[next(dice) % len(words)]
    if form == "low":
        return word[0].lower() + word[1:]
    return word[0].upper() + word[1:] if form == "cap" else word

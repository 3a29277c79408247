"""Counting: a long text of nothing but words, and the question which of them occur most often.

`common`: some words occur ten times as often as all the others. `frequent`: the n-th word occurs n² times less often
than the first, so that only the top of the list stands out. Every word is encoded once; a text is their ids, shuffled.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from sala.lab.eval.data import read_data
from sala.lab.eval.tasks.case import Case, Frame, PromptWriter, Solution, join_ids, random, remaining
from sala.lab.eval.tasks.haystack import Ids
from sala.lab.eval.tasks.words import categories, sample_names, words_of

NUM_COMMON, NUM_FREQUENT = 5, 3
COMMON_RATIO = 10  # occurrences of a common word for each of a rare one
MIN_ROUNDS = 2  # occurrences of the rare words at least
NUM_NAMES = 400  # different words of a coded text
Counts = NDArray[np.int64]
Spread = Callable[[Counts, int], Counts]  # lengths of the words in tokens, tokens in all → occurrences of each word


class CountingMaker:
    """Makes cases, each determined by seed, task, length and number."""

    def __init__(self, writer: PromptWriter, task: str, seed: int = 0) -> None:
        self._writer = writer
        self._task = task
        self._seed = seed
        self._words = real_words() if task == "common" else sample_names(NUM_NAMES, random(seed, "words"))
        self._ids: list[Ids] = []

    def make(self, num_tokens: int, number: int, question: int = 0) -> Case:
        """Return a case of `num_tokens`, answer included; `question` is ignored, as there is only one."""
        self._ids = self._ids or [self._writer.ids(f" {word}") for word in self._words]
        rng = random(self._seed, self._task, num_tokens, number)
        spread, count = SPREADS[self._task]
        frame = Frame(*(part.format(count=count) for part in read_data("counting")[self._task]))
        order = rng.permutation(len(self._words))
        wanted = tuple(self._words[at] for at in order[:count])
        name = f"{self._task} words"
        prompt = self._writer.prompt([frame], [f" {', '.join(wanted)}."])
        ids = [self._ids[at] for at in order]
        counts = spread(np.array([len(one) for one in ids]), prompt.remaining(num_tokens, (), name))
        if counts[count - 1] <= counts[count:].max(initial=0):  # nothing stands out
            remaining(num_tokens, num_tokens, name)
        shuffled = rng.permutation(np.repeat(np.arange(len(ids)), counts)).tolist()
        solution = Solution(wanted, candidates=tuple(self._words))
        text = join_ids(ids[at] for at in shuffled)
        return prompt.case(text, solution, question=frame.after.strip(), num_words=len(shuffled))


@cache
def real_words() -> list[str]:
    """Return the plain lower-case words of all lists, sorted."""
    grouped = {word for name in categories() for word in words_of(name)}
    every = grouped.union(*map(words_of, ("common", "nouns", "adjectives")))
    return sorted(every - {word for word in grouped if not word.isalpha() or word[0].isupper()})


def spread_common(lengths: Counts, budget: int) -> Counts:
    """Return counts with as many different rare words as fit twice; then all words as often as they fit."""
    rare = lengths[NUM_COMMON:]
    round_sizes = COMMON_RATIO * int(lengths[:NUM_COMMON].sum()) + np.cumsum(rare)
    num_rare = int(np.searchsorted(MIN_ROUNDS * round_sizes, budget, side="right"))
    if not num_rare:
        return np.zeros_like(lengths)
    rounds, left = divmod(budget, int(round_sizes[num_rare - 1]))
    counts = np.zeros_like(lengths)
    counts[:NUM_COMMON] = COMMON_RATIO * rounds
    counts[NUM_COMMON : NUM_COMMON + num_rare] = rounds
    num_more = int(np.searchsorted(np.cumsum(rare[:num_rare]), left, side="right"))
    counts[NUM_COMMON : NUM_COMMON + num_more] += 1
    return counts


def spread_frequent(lengths: Counts, budget: int) -> Counts:
    """Return counts that fall by n²; tokens left over go to words that would not occur at all."""
    ranks = np.arange(1, len(lengths) + 1)
    counts = (budget / float((lengths / ranks**2).sum()) / ranks**2).astype(np.int64)
    left = budget - int((counts * lengths).sum())
    absent = np.flatnonzero(counts == 0)
    num_more = int(np.searchsorted(np.cumsum(lengths[absent]), left, side="right"))
    counts[absent[:num_more]] = 1
    return counts


SPREADS: dict[str, tuple[Spread, int]] = {
    "common": (spread_common, NUM_COMMON),
    "frequent": (spread_frequent, NUM_FREQUENT),
}

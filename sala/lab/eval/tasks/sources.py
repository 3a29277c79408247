"""Sources: long texts with facts at known places, and questions whose answers stand in one of them.

All questions about a text come after it, so that it is read once. Facts are needles of several kinds (`KINDS`), or
passages of real text with questions of the user's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sala.lab.eval.tasks import words
from sala.lab.eval.tasks.case import Frame, PromptWriter, Solution, insert, random, remaining
from sala.lab.eval.tasks.haystack import PARAGRAPH, Haystack, Ids
from sala.lab.eval.tasks.needle import NeedleQuestion, Story, fitting_wordings
from sala.lab.eval.tasks.reading import UserPassage
from sala.lab.eval.tasks.words import Split, ValueKind, Wording, pick

ONE, SEVERAL, DISTRACTORS, PASSAGE = "one", "several", "distractors", "passage"
NUM_VALUES, NUM_KEYS = 3, 4  # values of a key that has several; keys alike, of which one is asked for
VALUE_KINDS: tuple[ValueKind, ...] = ("number", "word")
FRAME = "{text}\n\n{question}"


@dataclass(frozen=True)
class SourceQuestion:
    """A question: the tokens after the text, the tokens of the facts that answer it, and what is right."""

    kind: str
    text: str
    tail: Ids
    facts: list[range]
    solution: Solution
    max_tokens: int


@dataclass(frozen=True)
class SourceText:
    """A text as the beginning of prompts, and the questions about it."""

    ids: Ids
    questions: list[SourceQuestion]


@dataclass
class SourceMaker:
    """Makes texts, each determined by seed, split, length and number."""

    writer: PromptWriter
    haystack: Haystack
    seed: int = 0
    split: Split = "test"

    def make(self, num_tokens: int, number: int, num_ones: int = 5, num_others: int = 1) -> SourceText:
        """Return a text with facts of `num_ones` wordings, and one of each other kind for every one of `num_others`."""
        rng = random(self.seed, "sources", self.split, num_tokens, number)
        stories = self._stories(num_ones, num_others, rng)
        asked = [(kind, story, story.ask(at)) for kind, story, at in stories]
        statements = [story.statements for story in {id(story): story for _, story, _ in stories}.values()]
        pieces = [self.writer.ids(f" {statement}") for some in statements for statement in some]
        owners = [id(story) for story in {id(s): s for _, s, _ in stories}.values() for _ in story.statements]
        head, tails = self._around([question for _, _, question in asked])
        room = max(map(len, tails)) + max(self._most_tokens(question) for _, _, question in asked)
        stretch = self.haystack.cut(remaining(num_tokens, len(head) + room + sum(map(len, pieces)), "sources"), rng)
        body, places = scatter(pieces, stretch.tokens, stretch.boundaries, rng)
        questions = []
        for (kind, story, question), tail in zip(asked, tails, strict=True):
            own = [places[at] for at, owner in enumerate(owners) if owner == id(story)]
            per_key = len(story.values[0])
            key = question.keys[0]
            facts = [moved(place, len(head)) for place in own[key * per_key : (key + 1) * per_key]]
            solution = Solution(tuple(story.values[key]))
            most = self._most_tokens(question)
            questions.append(SourceQuestion(kind, question.question, tail, facts, solution, most))
        return SourceText(np.concatenate([head, body]), questions)

    def _stories(self, num_ones: int, num_others: int, rng: np.random.Generator) -> list[tuple[str, Story, int]]:
        """Return stories of different wordings, each with the index of the key that is asked for."""
        found = list(fitting_wordings(words.wordings(self.split), self.split, VALUE_KINDS, NUM_KEYS, NUM_KEYS).items())
        order = [found[at] for at in rng.permutation(len(found)).tolist()]
        sizes = [(ONE, 1, 1)] * num_ones + [(SEVERAL, 1, NUM_VALUES), (DISTRACTORS, NUM_KEYS, 1)] * num_others
        stories = []
        for (kind, num_keys, num_values), (wording, kinds) in zip(sizes, order, strict=False):
            story = self._story(wording, pick(kinds, rng), num_keys, num_values, rng)
            stories.append((kind, story, int(rng.integers(num_keys))))
        return stories

    def _story(
        self, wording: Wording, kind: ValueKind, num_keys: int, num_values: int, rng: np.random.Generator
    ) -> Story:
        keys = words.sample_keys(wording.key, self.split, num_keys, rng)
        flat = words.sample_values(kind, wording.category, num_keys * num_values, rng)
        values = [flat[at : at + num_values] for at in range(0, len(flat), num_values)]
        return Story(wording, keys, values, FRAME, is_opened=False)

    def _around(self, questions: Sequence[NeedleQuestion]) -> tuple[Ids, list[Ids]]:
        around = [self.writer.around(Frame("", f"\n\n{question.question}")) for question in questions]
        return around[0][0], [tail for _, tail in around]

    def _most_tokens(self, question: NeedleQuestion) -> int:
        return 2 * len(self.writer.encode(question.opening + question.answer)) + 16


def passages(
    writer: PromptWriter, known: Sequence[UserPassage], haystack: Haystack, num_tokens: int, number: int, seed: int = 0
) -> SourceText:
    """Return a text in which passages of the user's stand among other text, with the question about each of them."""
    rng = random(seed, "passages", num_tokens, number)
    pieces = [writer.ids(PARAGRAPH + passage.text.strip() + PARAGRAPH) for passage in known]
    around = [writer.around(Frame("", f"\n\n{passage.question}")) for passage in known]
    head, most = around[0][0], [2 * max(len(writer.encode(one)) for one in each.answers) + 32 for each in known]
    room = max(map(len, (tail for _, tail in around))) + max(most)
    stretch = haystack.cut(remaining(num_tokens, len(head) + room + sum(map(len, pieces)), "the passages"), rng)
    body, places = scatter(pieces, stretch.tokens, stretch.boundaries, rng)
    questions = [
        SourceQuestion(PASSAGE, one.question, tail, [moved(place, len(head))], Solution(one.answers, is_any=True), size)
        for one, (_, tail), place, size in zip(known, around, places, most, strict=True)
    ]
    return SourceText(np.concatenate([head, body]), questions)


def scatter(
    pieces: Sequence[Ids], text: Ids, boundaries: "np.ndarray[tuple[int], np.dtype[np.int64]]", rng: np.random.Generator
) -> tuple[Ids, list[range]]:
    """Insert pieces between sentences, spread over the whole text in random order; return where they lie."""
    order = rng.permutation(len(pieces)).tolist()
    places = [0] * len(pieces)
    for at, index in enumerate(order):
        wanted = (at + rng.random()) / len(pieces) * len(text)
        places[index] = int(boundaries[int(np.argmin(np.abs(boundaries - wanted)))])
    found = [range(0)] * len(pieces)
    shift = 0
    for index in sorted(range(len(pieces)), key=lambda index: places[index]):
        start = places[index] + shift
        found[index] = range(start, start + len(pieces[index]))
        shift += len(pieces[index])
    return insert(pieces, places, text), found


def moved(place: range, by: int) -> range:
    return range(place.start + by, place.stop + by)

"""Reading: many short made-up lives and a question about one of them, sometimes by way of another; or the user's texts.

The lives that are asked about have surnames that no other life has.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from sala.errors import InputError
from sala.lab.eval.data import read_data
from sala.lab.eval.documents import NotBlank, read_lines
from sala.lab.eval.tasks.case import Case, Frame, PromptWriter, Solution, insert, join_ids, random
from sala.lab.eval.tasks.haystack import PARAGRAPH, Haystack, Ids
from sala.lab.eval.tasks.words import Split, key_words, pick, words_of

NUM_LIVES = 8000  # of the pool to hide others in; only as many as needed are made
MAX_KNOWN = 1 << 18  # sentences whose ids are cached
NUM_ASKED = 4  # lives that are asked about in one text
FIELDS = ("town", "trade", "city", "animal", "instrument")


def _frame(question: str) -> Frame:
    before, after, opening = read_data("reading")["frame"]
    return Frame(before, after.replace("{question}", question), opening)


@dataclass(frozen=True)
class Life:
    name: str
    facts: dict[str, str]


@dataclass(frozen=True)
class UserPassage:
    """A text of the user, a question about it, and every answer that is accepted."""

    text: NotBlank
    question: NotBlank
    answers: Annotated[tuple[NotBlank, ...], Field(min_length=1)]


class ReadingMaker:
    """Makes cases, each determined by seed, length and number."""

    def __init__(self, writer: PromptWriter, seed: int = 0) -> None:
        self._writer = writer
        self._seed = seed
        self._pool: list[Ids] = []
        self._random = random(seed, "lives")

    def make(self, num_tokens: int, number: int, question: int = 0) -> Case:
        """Return a case; `question` selects the life of the text; every second question takes two steps."""
        rng = random(self._seed, "reading", num_tokens, number)
        lives = _sample_asked(rng)
        pairs = zip(lives[::2], lives[1::2], strict=True)
        askings = [_ask(pupil, teacher if at % 2 else None, rng) for at, (pupil, teacher) in enumerate(pairs)]
        selected = (number + question) % NUM_ASKED
        frames, answers = [_frame(one) for one, _ in askings], [f" {answer}." for _, answer in askings]
        prompt = self._writer.prompt(frames, answers, selected)
        pieces = [self._writer.ids(_tell(life, rng) + PARAGRAPH) for life in lives]
        passages = [*self._fill(prompt.remaining(num_tokens, pieces, "reading"), rng), *pieces]
        body = join_ids(passages[at] for at in rng.permutation(len(passages)).tolist())
        text, answer = askings[selected]
        return prompt.case(body, Solution((answer,)), question=text, num_passages=len(passages))

    def _fill(self, budget: int, rng: np.random.Generator) -> list[Ids]:
        """Return other lives in random order, as many as fit; the pool is repeated when it is used up."""
        size = sum(map(len, self._pool))
        while len(self._pool) < NUM_LIVES and size < budget:
            self._pool.append(self._writer.ids(_tell(_sample_life(self._random, "train"), self._random) + PARAGRAPH))
            size += len(self._pool[-1])
        chosen: list[Ids] = []
        while True:
            for at in rng.permutation(len(self._pool)).tolist():
                if len(self._pool[at]) > budget:
                    return chosen
                chosen.append(self._pool[at])
                budget -= len(self._pool[at])


class PassageMaker:
    """Makes cases from the user's texts, each hidden among the others or, if it is the only one, in a haystack."""

    def __init__(self, writer: PromptWriter, passages: list[UserPassage], haystack: Haystack, seed: int = 0) -> None:
        self._writer = writer
        self._passages = passages
        self._haystack = haystack
        self._seed = seed
        self._encode = lru_cache(MAX_KNOWN)(writer.encode)  # every text is encoded again for each of the others

    def make(self, num_tokens: int, number: int, question: int = 0) -> Case:
        """Return a case about passage `number`; `question` is ignored, as each passage has one."""
        rng = random(self._seed, "passages", num_tokens, number)
        passage = self._passages[number % len(self._passages)]
        prompt = self._writer.prompt([_frame(passage.question)], [f" {one}." for one in passage.answers])
        piece = self._writer.ids(PARAGRAPH + passage.text.strip() + PARAGRAPH)
        budget = prompt.remaining(num_tokens, [piece], "the text of a question")
        stretch = self._others(passage).cut(budget, rng)
        place = int(rng.choice(stretch.boundaries))
        depth = round(place / max(1, len(stretch.tokens)), 4)
        solution = Solution(passage.answers, is_any=True)
        body = insert([piece], [place], stretch.tokens)
        return prompt.case(body, solution, question=passage.question, depth_found=depth)

    def _others(self, passage: UserPassage) -> Haystack:
        others = [one.text for one in self._passages if one.text != passage.text]
        return Haystack(others, self._encode) if others else self._haystack


def read_passages(file: Path) -> list[UserPassage]:
    """Return the passages of a JSONL file: an object with text, question and answers per line."""
    remedy = 'each line is {"text": "…", "question": "…", "answers": ["…"]}'
    passages = read_lines(file, UserPassage, "questions", remedy)
    if not passages:
        raise InputError("questions", f"{file} has none", "give at least one line")
    return passages


def _sample_asked(rng: np.random.Generator) -> list[Life]:
    """Return pairs of pupil and teacher with different names."""
    lives: list[Life] = []
    while len(lives) < 2 * NUM_ASKED:
        teacher, pupil = _sample_life(rng, "test"), _sample_life(rng, "test")
        if len({teacher.name, pupil.name, *(life.name for life in lives)}) == len(lives) + 2:
            lives += [Life(pupil.name, {**pupil.facts, "teacher": teacher.name}), teacher]
    return lives


def _sample_life(rng: np.random.Generator, split: Split) -> Life:
    given, surname = pick(words_of("given_names"), rng), pick(key_words("person", split)[1], rng)
    values = {
        "town": pick(words_of("place_stems"), rng) + pick(words_of("place_endings"), rng),
        **{name: pick(words_of(name), rng) for name in ("trade", "city", "animal", "instrument")},
    }
    return Life(f"{given} {surname}", values)


def _tell(life: Life, rng: np.random.Generator) -> str:
    """Return a life as text: the birthplace with the full name first, then the other facts in random order."""
    rest = [name for name in life.facts if name != "town"]
    names = ["town", *(rest[at] for at in rng.permutation(len(rest)).tolist())]
    given = life.name.split()[0]
    out = []
    for at, name in enumerate(names):
        pattern: str = pick(read_data("reading")["sentences"][name], rng)
        out.append(pattern.format(name=life.name, who=life.name if at == 0 else given, value=life.facts[name]))
    return " ".join(out)


def _ask(life: Life, teacher: Life | None, rng: np.random.Generator) -> tuple[str, str]:
    """Return a question and its answer; with a teacher it is about the teacher of that life."""
    field = pick(FIELDS, rng)
    question: str = read_data("reading")["questions"][field]
    if teacher is None:
        return question.format(name=life.name), life.facts[field]
    return question.format(name=f"the teacher of {life.name}"), teacher.facts[field]

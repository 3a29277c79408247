"""Reading: many short made-up lives and a question about one of them, sometimes by way of another; or the user's texts.

The lives that are asked about have surnames that no other life has.
"""

import json
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from sala.errors import InputError
from sala.lab.eval.data import read_data
from sala.lab.eval.tasks.case import Case, Frame, PromptWriter, Solution, join_ids, random, remaining
from sala.lab.eval.tasks.haystack import PARAGRAPH, Haystack, Ids
from sala.lab.eval.tasks.words import Split, in_split, words_of

NUM_LIVES = 8000  # of the pool to hide others in; only as many as needed are made
MAX_KNOWN = 1 << 18  # sentences whose ids are cached
NUM_ASKED = 4  # lives that are asked about in one text
FRAME = (
    "Below are many short passages.\n\n",
    "\n\nAnswer in a few words, from the passages only. {question}",
    "Answer:",
)
FIELDS = ("town", "trade", "city", "animal", "instrument")


@dataclass(frozen=True)
class Life:
    name: str
    facts: dict[str, str]

    @property
    def teacher(self) -> str | None:
        return self.facts.get("teacher")


@dataclass(frozen=True)
class UserPassage:
    """A text of the user, a question about it, and every answer that is accepted."""

    text: str
    question: str
    answers: tuple[str, ...]


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
        asked = [lives[2 * at] for at in range(NUM_ASKED)]
        askings = [_ask(life, lives, at % 2 == 1, rng) for at, life in enumerate(asked)]
        text, answer = askings[(number + question) % NUM_ASKED]
        before, after, opening = FRAME
        ends = [self._writer.around(Frame(before, after.replace("{question}", one), opening))[1] for one, _ in askings]
        head, tail = self._writer.around(Frame(before, after.replace("{question}", text), opening))
        pieces = [self._writer.ids(_tell(life, rng) + PARAGRAPH) for life in lives]
        max_tokens = max(self._writer.max_answer_tokens(f" {one}.") for _, one in askings)
        used = len(head) + max(map(len, ends)) + max_tokens + sum(map(len, pieces))
        others = self._fill(remaining(num_tokens, used, "reading"), rng)
        order = rng.permutation(len(others) + len(pieces)).tolist()
        both = [*others, *pieces]
        return Case(
            token_ids=np.concatenate([head, join_ids(both[at] for at in order), tail]),
            answer=f" {answer}.",
            max_tokens=max_tokens,
            solution=Solution((answer,)),
            facts={"question": text, "num_passages": len(both)},
        )

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
        before, after, opening = FRAME
        head, tail = self._writer.around(Frame(before, after.replace("{question}", passage.question), opening))
        piece = self._writer.ids(PARAGRAPH + passage.text.strip() + PARAGRAPH)
        max_tokens = max(self._writer.max_answer_tokens(f" {one}.") for one in passage.answers)
        used = len(head) + len(tail) + len(piece) + max_tokens
        stretch = self._others(passage).cut(remaining(num_tokens, used, "the text of a question"), rng)
        place = int(rng.choice(stretch.boundaries))
        body = np.concatenate([stretch.tokens[:place], piece, stretch.tokens[place:]])
        return Case(
            token_ids=np.concatenate([head, body, tail]),
            answer=f" {passage.answers[0]}.",
            max_tokens=max_tokens,
            solution=Solution(passage.answers, is_any=True),
            facts={"question": passage.question, "depth_found": round(place / max(1, len(stretch.tokens)), 4)},
        )

    def _others(self, passage: UserPassage) -> Haystack:
        others = [one.text for one in self._passages if one.text != passage.text]
        return Haystack(others, self._encode) if others else self._haystack


def read_passages(file: Path) -> list[UserPassage]:
    """Return the passages of a JSONL file: an object with text, question and answers per line."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("questions", f"{file} cannot be read: {error}", "give a JSONL file") from None
    passages = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            passages.append(UserPassage(entry["text"], entry["question"], tuple(entry["answers"])))
            texts = (passages[-1].text, passages[-1].question, *passages[-1].answers)
            if not passages[-1].answers or not all(isinstance(one, str) and one.strip() for one in texts):
                raise ValueError("a text is missing")
        except (ValueError, KeyError, TypeError) as error:
            remedy = 'each line is {"text": "…", "question": "…", "answers": ["…"]}'
            raise InputError("questions", f"{file}:{number} cannot be used: {error}", remedy) from None
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
    given, surname = _pick(words_of("given_names"), rng), _pick(_surnames(split), rng)
    values = {
        "town": _pick(words_of("place_stems"), rng) + _pick(words_of("place_endings"), rng),
        **{name: _pick(words_of(name), rng) for name in ("trade", "city", "animal", "instrument")},
    }
    return Life(f"{given} {surname}", values)


def _tell(life: Life, rng: np.random.Generator) -> str:
    """Return a life as text: the birthplace with the full name first, then the other facts in random order."""
    rest = [name for name in life.facts if name != "town"]
    names = ["town", *(rest[at] for at in rng.permutation(len(rest)).tolist())]
    given = life.name.split()[0]
    out = []
    for at, name in enumerate(names):
        choices = read_data("reading")["sentences"][name]
        pattern = choices[int(rng.integers(len(choices)))]
        out.append(pattern.format(name=life.name, who=life.name if at == 0 else given, value=life.facts[name]))
    return " ".join(out)


def _ask(life: Life, lives: list[Life], is_indirect: bool, rng: np.random.Generator) -> tuple[str, str]:
    """Return a question and its answer."""
    field = FIELDS[int(rng.integers(len(FIELDS)))]
    question: str = read_data("reading")["questions"][field]
    if not is_indirect:
        return question.format(name=life.name), life.facts[field]
    teacher = next(one for one in lives if one.name == life.teacher)
    return question.format(name=f"the teacher of {life.name}"), teacher.facts[field]


def _pick(words: tuple[str, ...], rng: np.random.Generator) -> str:
    return words[int(rng.integers(len(words)))]


@cache
def _surnames(split: Split) -> tuple[str, ...]:
    return tuple(one for one in words_of("surnames") if in_split(one, split))

"""Reading: many short lives, and a question about one of them, sometimes by way of another. Or texts of one's own.

The lives are made up. Those that are asked about have surnames that no other has.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from sala.errors import InputError
from sala.lab.eval.tasks.case import Case, Frame, Solution, Writer, join_ids, random, room
from sala.lab.eval.tasks.haystack import PARAGRAPH, Haystack, Ids
from sala.lab.eval.tasks.words import GIVEN_NAMES, PLACE_ENDINGS, PLACE_STEMS, SURNAMES, in_split, words_of

NUM_LIVES = 8000  # that others are hidden among; as many are made as are needed
MAX_KNOWN = 1 << 18  # sentences of which the ids are kept
NUM_ASKED = 4  # lives that are asked about, in one text
FRAME = (
    "Below are many short passages.\n\n",
    "\n\nAnswer in a few words, from the passages only. {question}",
    "Answer:",
)
FIELDS = ("town", "trade", "city", "animal", "instrument")
TRADES = """
baker cooper glazier weaver mason printer saddler potter tailor joiner brewer tinsmith cobbler miller binder gilder
roofer fuller dyer farrier
"""

# One sentence per fact, in several wordings; {who} is a short form of the name, {name} always all of it.
SENTENCES = {
    "town": (
        "{name} was born in {value}.",
        "The birthplace of {name} is {value}.",
        "{name} came into the world in {value}.",
    ),
    "trade": (
        "By trade {who} was a {value}.",
        "For many years {who} worked as a {value}.",
        "{who} earned a living as a {value}.",
    ),
    "city": (
        "Later {who} moved to {value}.",
        "In the end {who} settled in {value}.",
        "The last home of {name} was in {value}.",
    ),
    "animal": (
        "In the yard {who} kept one animal, the {value}.",
        "Of all animals, {who} had only the {value} at home.",
        "Neighbours remember the {value} of {name}.",
    ),
    "instrument": (
        "On feast days {who} played the {value}.",
        "{who} was often heard on the {value}.",
        "Of all instruments {who} had chosen the {value}.",
    ),
    "teacher": (
        "Everything {who} knew was learnt from {value}.",
        "{who} was a pupil of {value}.",
        "The teacher of {name} was {value}.",
    ),
}
QUESTIONS = {
    "town": "In which town was {name} born?",
    "trade": "What was the trade of {name}?",
    "city": "To which city did {name} move?",
    "animal": "Which animal did {name} have at home?",
    "instrument": "Which instrument did {name} play?",
}


@dataclass(frozen=True)
class Life:
    name: str
    facts: dict[str, str]

    @property
    def teacher(self) -> str | None:
        return self.facts.get("teacher")


@dataclass(frozen=True)
class Passage:
    """A text of somebody's own, a question about it, and every answer that is accepted."""

    text: str
    question: str
    answers: tuple[str, ...]


class ReadingMaker:
    """Makes cases, each determined by seed, length and number."""

    def __init__(self, writer: Writer, seed: int = 0) -> None:
        self._writer = writer
        self._seed = seed
        self._pool: list[Ids] = []
        self._random = random(seed, "lives")

    def make(self, num_tokens: int, number: int, question: int = 0) -> Case:
        """Over one text, `question` chooses the life that is asked about; every second question takes two steps."""
        rng = random(self._seed, "reading", num_tokens, number)
        lives = _draw_asked(rng)
        asked = [lives[2 * at] for at in range(NUM_ASKED)]
        askings = [_ask(life, lives, at % 2 == 1, rng) for at, life in enumerate(asked)]
        text, answer = askings[(number + question) % NUM_ASKED]
        before, after, opening = FRAME
        ends = [self._writer.around(Frame(before, after.replace("{question}", one), opening))[1] for one, _ in askings]
        head, tail = self._writer.around(Frame(before, after.replace("{question}", text), opening))
        pieces = [self._writer.ids(_tell(life, rng) + PARAGRAPH) for life in lives]
        max_tokens = max(self._writer.room_for_answer(f" {one}.") for _, one in askings)
        used = len(head) + max(map(len, ends)) + max_tokens + sum(map(len, pieces))
        others = self._fill(room(num_tokens, used, "reading"), rng)
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
        """Other lives, in any order, as many as fit; again from the beginning when there are no more."""
        size = sum(map(len, self._pool))
        while len(self._pool) < NUM_LIVES and size < budget:
            self._pool.append(self._writer.ids(_tell(_draw_life(self._random, "train"), self._random) + PARAGRAPH))
            size += len(self._pool[-1])
        chosen: list[Ids] = []
        while True:
            for at in rng.permutation(len(self._pool)).tolist():
                if len(self._pool[at]) > budget:
                    return chosen
                chosen.append(self._pool[at])
                budget -= len(self._pool[at])


class PassageMaker:
    """Questions about texts of somebody's own, each hidden among the others or, if there is one only, in a haystack."""

    def __init__(self, writer: Writer, passages: list[Passage], haystack: Haystack, seed: int = 0) -> None:
        self._writer = writer
        self._passages = passages
        self._haystack = haystack
        self._seed = seed
        self._encode = lru_cache(MAX_KNOWN)(writer.encode)  # every text is among the others of many

    def make(self, num_tokens: int, number: int, question: int = 0) -> Case:
        """Trial by trial the next of the passages; each has one `question`."""
        rng = random(self._seed, "passages", num_tokens, number)
        passage = self._passages[number % len(self._passages)]
        before, after, opening = FRAME
        head, tail = self._writer.around(Frame(before, after.replace("{question}", passage.question), opening))
        piece = self._writer.ids(PARAGRAPH + passage.text.strip() + PARAGRAPH)
        max_tokens = max(self._writer.room_for_answer(f" {one}.") for one in passage.answers)
        used = len(head) + len(tail) + len(piece) + max_tokens
        stretch = self._others(passage).cut(room(num_tokens, used, "the text of a question"), rng)
        place = int(rng.choice(stretch.boundaries))
        body = np.concatenate([stretch.tokens[:place], piece, stretch.tokens[place:]])
        return Case(
            token_ids=np.concatenate([head, body, tail]),
            answer=f" {passage.answers[0]}.",
            max_tokens=max_tokens,
            solution=Solution(passage.answers, is_any=True),
            facts={"question": passage.question, "depth_found": round(place / max(1, len(stretch.tokens)), 4)},
        )

    def _others(self, passage: Passage) -> Haystack:
        others = [one.text for one in self._passages if one.text != passage.text]
        return Haystack(others, self._encode) if others else self._haystack


def read_passages(file: Path) -> list[Passage]:
    """A JSONL file: an object with text, question and answers per line."""
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
            passages.append(Passage(entry["text"], entry["question"], tuple(entry["answers"])))
            texts = (passages[-1].text, passages[-1].question, *passages[-1].answers)
            if not passages[-1].answers or not all(isinstance(one, str) and one.strip() for one in texts):
                raise ValueError("a text is missing")
        except (ValueError, KeyError, TypeError) as error:
            remedy = 'each line is {"text": "…", "question": "…", "answers": ["…"]}'
            raise InputError("questions", f"{file}:{number} cannot be used: {error}", remedy) from None
    if not passages:
        raise InputError("questions", f"{file} has none", "give at least one line")
    return passages


def _draw_asked(rng: np.random.Generator) -> list[Life]:
    """Pairs of pupil and teacher; no two have the same name."""
    lives: list[Life] = []
    while len(lives) < 2 * NUM_ASKED:
        teacher, pupil = _draw_life(rng, "test"), _draw_life(rng, "test")
        if len({teacher.name, pupil.name, *(life.name for life in lives)}) == len(lives) + 2:
            lives += [Life(pupil.name, {**pupil.facts, "teacher": teacher.name}), teacher]
    return lives


def _draw_life(rng: np.random.Generator, split: str) -> Life:
    given, surname = _pick(GIVEN_NAMES.split(), rng), _pick(_SURNAMES[split], rng)
    values = {
        "town": _pick(PLACE_STEMS.split(), rng) + _pick(PLACE_ENDINGS.split(), rng),
        "trade": _pick(TRADES.split(), rng),
        **{name: _pick(words_of(name), rng) for name in ("city", "animal", "instrument")},
    }
    return Life(f"{given} {surname}", values)


def _tell(life: Life, rng: np.random.Generator) -> str:
    """The place of birth opens a life; then any order. Only the first sentence must name whom it is about."""
    rest = [name for name in life.facts if name != "town"]
    names = ["town", *(rest[at] for at in rng.permutation(len(rest)).tolist())]
    given = life.name.split()[0]
    out = []
    for at, name in enumerate(names):
        choices = SENTENCES[name]
        pattern = choices[int(rng.integers(len(choices)))]
        out.append(pattern.format(name=life.name, who=life.name if at == 0 else given, value=life.facts[name]))
    return " ".join(out)


def _ask(life: Life, lives: list[Life], is_indirect: bool, rng: np.random.Generator) -> tuple[str, str]:
    """A question and its answer."""
    field = FIELDS[int(rng.integers(len(FIELDS)))]
    if not is_indirect:
        return QUESTIONS[field].format(name=life.name), life.facts[field]
    teacher = next(one for one in lives if one.name == life.teacher)
    return QUESTIONS[field].format(name=f"the teacher of {life.name}"), teacher.facts[field]


def _pick(words: "list[str] | tuple[str, ...]", rng: np.random.Generator) -> str:
    return words[int(rng.integers(len(words)))]


_SURNAMES = {split: [one for one in SURNAMES.split() if in_split(one, split)] for split in ("train", "test")}

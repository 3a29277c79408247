"""Facts hidden in a text, and questions about them: one of one, one of many, many of one key, many keys at once."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sala.errors import InputError
from sala.lab.eval.tasks.case import Case, Frame, Solution, Writer, hide, random, room
from sala.lab.eval.tasks.haystack import PARAGRAPH, Haystack, Ids, Stretch
from sala.lab.eval.tasks.wordings import AURORA, FILLER, FRAMES, TEST, Wording
from sala.lab.eval.tasks.words import ValueKind, count_keys, draw_keys, draw_values, words_of

AURORA_KEY, AURORA_VALUE = "Project Aurora", "739258"
NUM_SAMPLES = 24  # needles that are looked at to know how much room one needs
REPEATS = 64  # of the filler, as one document: a long text then needs few of them
ANY_KIND: tuple[ValueKind, ...] = ("number", "word", "uuid")


@dataclass(frozen=True)
class KeySpec:
    """How many keys are in the text, how many of them are asked for at a time, and how many values each has."""

    num_keys: int = 1
    num_asked: int = 1
    num_values: int = 1
    kinds: tuple[ValueKind, ...] = ANY_KIND

    def __post_init__(self) -> None:
        if not 1 <= self.num_asked <= self.num_keys:
            raise InputError("keys", f"are {self.num_keys}, of which {self.num_asked} are asked for", "hide more")

    @property
    def num_statements(self) -> int:
        return self.num_keys * self.num_values

    @property
    def num_questions(self) -> int:
        """Different questions about one text."""
        return self.num_keys // self.num_asked


class _Asking(NamedTuple):
    """A question, the opening of its answer, what comes after it, and which keys it is about."""

    question: str
    opening: str
    answer: str
    asked: list[int]


@dataclass(frozen=True)
class _Story:
    wording: Wording
    keys: list[str]
    values: list[list[str]]
    frame: str

    @property
    def statements(self) -> list[str]:
        state = self.wording.statement.format
        pairs = zip(self.keys, self.values, strict=True)
        return [state(key=key, value=value) for key, values in pairs for value in values]

    def ask(self, asked: list[int]) -> _Asking:
        questions = [self.wording.question.format(key=self.keys[at]) for at in asked]
        if len(asked) > 1:
            lines = [f"{number}. {question}" for number, question in enumerate(questions, 1)]
            answers = [f"{number}. {', '.join(self.values[at])}" for number, at in enumerate(asked, 1)]
            question = "\n".join([f"Answer these {len(lines)} questions, one line each:", *lines])
            return _Asking(question, "1.", "\n".join(answers).removeprefix("1."), asked)
        opening = self.wording.opening.format(key=self.keys[asked[0]])
        values = self.values[asked[0]]
        if len(values) == 1:
            return _Asking(questions[0], opening, f" {values[0]}.", asked)
        hint = f"The text gives {len(values)} different answers. Write down all of them, separated by commas."
        return _Asking(f"{questions[0]} {hint}", f"{opening}:", f" {', '.join(values)}.", asked)


@dataclass(frozen=True)
class _Parts:
    """A story as token ids; `first` is the first needle, should it open the text."""

    head: Ids
    pieces: list[Ids]
    first: Ids
    askings: list[_Asking]
    tails: list[Ids]
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        """All but the head and the text, whatever is asked."""
        needles = sum(map(len, self.pieces)) + max(0, len(self.first) - len(self.pieces[0]))
        return needles + max(map(len, self.tails)) + self.max_tokens


class KeyMaker:
    """Makes cases, each determined by seed, spec, length and number. Over one text several questions may be asked."""

    def __init__(self, writer: Writer, haystack: Haystack, seed: int = 0, spec: KeySpec | None = None) -> None:
        self._writer = writer
        self._haystack = haystack
        self._seed = seed
        self._spec = spec or KeySpec()
        self._reserves: dict[str, int] = {}  # by frame

    def make(self, num_tokens: int, number: int, depth: float | None = None, question: int = 0) -> Case:
        """`num_tokens` hold prompt and answer. `depth` (0: the start, 1: the end) is that of the first needle.

        All depths and all questions of one number share their text, as far as needles do not move. A needle that is
        alone is another one at every depth.
        """
        rng = random(self._seed, self._spec, num_tokens, number)
        frame = FRAMES["test"][int(rng.integers(len(FRAMES["test"])))]
        own = depth if self._spec.num_keys == 1 else None
        story = self._draw(frame, random(self._seed, self._spec, num_tokens, number, own))
        return self._tell(story, num_tokens, depth, question, rng)

    def _draw(self, frame: str, rng: np.random.Generator) -> _Story:
        spec = self._spec
        wording, kind = self._draw_wording(rng)
        keys = draw_keys(wording.key, "test", spec.num_keys, rng)
        flat = draw_values(kind, wording.category, spec.num_statements, rng)
        values = [flat[at : at + spec.num_values] for at in range(0, len(flat), spec.num_values)]
        return _Story(wording, keys, values, frame)

    def _draw_wording(self, rng: np.random.Generator) -> tuple[Wording, ValueKind]:
        """A wording with a kind of value, rich enough for all the needles."""
        spec = self._spec
        choices = [
            (wording, kind)
            for wording in TEST
            for kind in wording.values
            if kind in spec.kinds and count_keys(wording.key, "test") >= spec.num_keys
            if kind != "word" or len(words_of(wording.category)) >= spec.num_statements
        ]
        if not choices:
            raise InputError("keys", f"are {spec.num_keys}, more than there are different needles", "hide fewer")
        return choices[int(rng.integers(len(choices)))]

    def _tell(
        self, story: _Story, num_tokens: int, depth: float | None, question: int, rng: np.random.Generator
    ) -> Case:
        parts = self._write(story)
        reserve = 0 if depth is None else self._reserve(story.frame)
        used = len(parts.head) + max(parts.num_tokens, reserve)
        stretch = self._haystack.cut(room(num_tokens, used, "needles"), rng)
        places = _choose_places(stretch, len(parts.pieces), depth, rng)
        pieces = [parts.first, *parts.pieces[1:]] if places[0] == 0 else parts.pieces
        asking, tail = parts.askings[question % len(parts.askings)], parts.tails[question % len(parts.askings)]
        at = places[asking.asked[0] * self._spec.num_values]
        return Case(
            token_ids=np.concatenate([parts.head, hide(pieces, places, stretch.tokens), tail]),
            answer=asking.answer,
            max_tokens=parts.max_tokens,
            solution=Solution(tuple(value for key in asking.asked for value in story.values[key])),
            facts={"question": asking.question, "depth_found": round(at / max(1, len(stretch.tokens)), 4)},
        )

    def _write(self, story: _Story) -> _Parts:
        writer, count = self._writer, self._spec.num_asked
        askings = [story.ask(list(range(at, at + count))) for at in range(0, len(story.keys) - count + 1, count)]
        before, after = story.frame.split("{text}")
        frames = [Frame(before, after.replace("{question}", one.question), one.opening) for one in askings]
        return _Parts(
            head=writer.around(frames[0])[0],
            pieces=[writer.ids(f" {statement}") for statement in story.statements],
            first=writer.ids(story.statements[0] + PARAGRAPH),
            askings=askings,
            tails=[writer.around(frame)[1] for frame in frames],
            max_tokens=max(writer.room_for_answer(one.answer) for one in askings),
        )

    def _reserve(self, frame: str) -> int:
        """What nearly every needle is content with: then the same text is left to all of them."""
        if frame not in self._reserves:
            stories = [self._draw(frame, random(self._seed, "reserve", number)) for number in range(NUM_SAMPLES)]
            self._reserves[frame] = max(self._write(story).num_tokens for story in stories)
        return self._reserves[frame]


class AuroraMaker(KeyMaker):
    """The needle of many demos: the code of Project Aurora in the same few sentences again and again."""

    def __init__(self, writer: Writer, seed: int = 0) -> None:
        super().__init__(writer, Haystack([PARAGRAPH.join([FILLER] * REPEATS)], writer.encode), seed)

    def _draw(self, frame: str, rng: np.random.Generator) -> _Story:
        return _Story(AURORA, [AURORA_KEY], [[AURORA_VALUE]], FRAMES["test"][0])


def _choose_places(stretch: Stretch, count: int, depth: float | None, rng: np.random.Generator) -> list[int]:
    """The first as near to the depth as sentences allow, the others anywhere but at the very start."""
    anywhere = stretch.boundaries[1:] if len(stretch.boundaries) > 1 else stretch.boundaries
    others = rng.choice(anywhere, size=count - 1).tolist()
    wanted = rng.random() if depth is None else depth
    nearest = int(np.argmin(np.abs(stretch.boundaries - wanted * len(stretch.tokens))))
    return [int(stretch.boundaries[nearest]), *others]

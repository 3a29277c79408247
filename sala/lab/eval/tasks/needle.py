"""A needle in a haystack: a fact hidden in a long text, and a question about it. For training and for tests.

What is made for training and for tests differs in every respect that could be learnt by heart: wordings, frames, the
words of the keys, and the documents of the haystack (each belongs to one split, by its hash).
"""

import hashlib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np

from sala.errors import InputError
from sala.lab.eval.tasks.haystack import PARAGRAPH, Encode, Haystack, Ids, Stretch, by_piece
from sala.lab.eval.tasks.phrases import compose
from sala.lab.eval.tasks.wordings import AURORA, FILLER, FRAMES, WORDINGS, Wording
from sala.lab.eval.tasks.words import Split, ValueKind, count_keys, draw_keys, draw_values, in_split, words_of

ValueChoice = Literal["number", "word", "uuid", "mixed"]
UNOPENED = 0.25  # share of the training cases in which the whole sentence is to be written
COMPOSED = 0.75  # share of the training cases whose wording is put together from parts


class Wrap(NamedTuple):
    """The text before the user's message, and the text after it, up to where the assistant speaks."""

    before: str
    after: str


def chatml(system: str | None = None) -> Wrap:
    head = "" if system is None else f"<|im_start|>system\n{system}<|im_end|>\n"
    return Wrap(f"{head}<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")


CHATML = chatml()


@dataclass(frozen=True)
class NeedleSpec:
    """What to make. `num_tokens` holds prompt and answer; `depth` is 0 at the start of the haystack, 1 at its end.

    Of `num_keys` needles, alike but for key and value, one is asked for.
    """

    num_tokens: int
    depth: float | None = None  # None: anywhere
    num_keys: int = 1
    value: ValueChoice = "mixed"
    split: Split = "test"

    def __post_init__(self) -> None:
        if self.depth is not None and not 0 <= self.depth <= 1:
            raise InputError("depth", f"is {self.depth}", "give a number from 0 to 1, or none")
        if self.num_keys < 1:
            raise InputError("num_keys", f"is {self.num_keys}", "hide at least one needle")
        for field, known in (("value", get_args(ValueChoice)), ("split", get_args(Split))):
            if getattr(self, field) not in known:
                raise InputError(field, f"is {getattr(self, field)!r}", f"choose one of {', '.join(known)}")


@dataclass(frozen=True)
class NeedleCase:
    """A prompt and its right continuation.

    token_ids    the whole prompt, up to and including the opening of the answer
    answer       what comes next: " 48213.", or a whole sentence where the answer is not opened
    answer_ids   the same as tokens, with the end of the turn if the maker knows its id
    value        what `score` looks for: "48213"
    depth        where the needle really is: the share of the haystack before it
    """

    token_ids: tuple[int, ...]
    answer: str
    answer_ids: tuple[int, ...]
    value: str
    depth: float
    question: str
    key: str


@dataclass(frozen=True)
class NeedleDialogue:
    """A whole conversation over one haystack, and which of its tokens are answers."""

    token_ids: tuple[int, ...]
    is_answer: tuple[bool, ...]


@dataclass(frozen=True)
class _Story:
    """What is hidden, and how it is asked for: the first key and value are the right ones."""

    wording: Wording
    keys: Sequence[str]
    values: Sequence[str]
    frame: str
    is_opened: bool = True

    @property
    def statements(self) -> list[str]:
        pairs = zip(self.keys, self.values, strict=True)
        return [self.wording.statement.format(key=key, value=value) for key, value in pairs]

    @property
    def question(self) -> str:
        return self.wording.question.format(key=self.keys[0])

    @property
    def opening(self) -> str:
        return self.wording.opening.format(key=self.keys[0]) if self.is_opened else ""

    @property
    def answer(self) -> str:
        end = f" {self.values[0]}."
        return end if self.is_opened else self.wording.opening.format(key=self.keys[0]) + end


class NeedleMaker:
    """Makes cases, each determined by seed, spec and index.

    `encode` adds no BOS and reads the special tokens that `wrap` spells. The documents of a plain `haystack` are dealt
    to the splits by their hash, one in four to the tests; a mapping says itself which split has which.
    """

    def __init__(
        self,
        encode: Encode,
        haystack: Sequence[str] | Mapping[Split, Sequence[str]],
        seed: int = 0,
        wrap: Wrap = CHATML,
        end_id: int | None = None,
    ) -> None:
        self._encode = by_piece(encode)
        self._documents = haystack if isinstance(haystack, Mapping) else deal(haystack)
        self._haystacks: dict[Split, Haystack] = {}
        self._seed = seed
        self._wrap = wrap
        self._end = () if end_id is None else (end_id,)

    def make(self, spec: NeedleSpec, index: int) -> NeedleCase:
        rng = _random(self._seed, spec, index)
        return self._tell(self._draw(spec, rng), self._haystack(spec.split), spec, rng)

    def _draw(self, spec: NeedleSpec, rng: np.random.Generator) -> _Story:
        wording, kind = _draw_wording(spec, rng)
        return _Story(
            wording,
            keys=draw_keys(wording.key, spec.split, spec.num_keys, rng),
            values=draw_values(kind, wording.category, spec.num_keys, rng),
            frame=FRAMES[spec.split][int(rng.integers(len(FRAMES[spec.split])))],
            is_opened=spec.split == "test" or rng.random() >= UNOPENED,
        )

    def dialogue(self, spec: NeedleSpec, index: int, num_questions: int, num_topics: int = 1) -> NeedleDialogue:
        """A case that goes on: after the first answer others of its needles are asked for, turn by turn.

        With several topics, needles of other wordings are hidden in the same text, `spec.num_keys` of each; so many
        questions are asked about each topic, all mixed.
        """
        rng = _random(self._seed, spec, index)
        story, *more = self._draw_topics(spec, num_topics, rng)
        others = [
            replace(topic, keys=topic.keys[at:], values=topic.values[at:], frame="")
            for topic in (story, *more)
            for at in range(topic is story, num_questions)
        ]
        if more:
            others = [others[at] for at in rng.permutation(len(others)).tolist()]
        turns = [(self._turn(other), self._answer(other)) for other in others]
        room = spec.num_tokens - sum(len(asked) + len(answered) for asked, answered in turns)
        extra = [statement for topic in more for statement in topic.statements]
        case = self._tell(story, self._haystack(spec.split), replace(spec, num_tokens=room), rng, extra)
        ids, is_answer = (
            [*case.token_ids, *case.answer_ids],
            [False] * len(case.token_ids) + [True] * len(case.answer_ids),
        )
        for asked, answered in turns:
            ids += [*asked.tolist(), *answered]
            is_answer += [False] * len(asked) + [True] * len(answered)
        return NeedleDialogue(tuple(ids), tuple(is_answer))

    def _draw_topics(self, spec: NeedleSpec, count: int, rng: np.random.Generator) -> list[_Story]:
        """Up to `count` stories, no two of which answer the same question differently."""
        drawn, asked = [], set[str]()
        for _ in range(count):
            story = self._draw(spec, rng)
            questions = {story.wording.question.format(key=key) for key in story.keys}
            if asked.isdisjoint(questions):
                drawn.append(story)
                asked |= questions
        return drawn

    def _turn(self, story: _Story) -> Ids:
        return self._ids("\n" + self._wrap.before + story.question + self._wrap.after + story.opening)

    def _answer(self, story: _Story) -> tuple[int, ...]:
        return (*self._encode(story.answer), *self._end)

    def aurora(self, num_tokens: int, depth: float | None = None, index: int = 0) -> NeedleCase:
        """The usual needle of demos: the code of Project Aurora in filler text."""
        spec = NeedleSpec(num_tokens, depth, value="number", split="test")
        story = _Story(AURORA, keys=["Project Aurora"], values=["739258"], frame=FRAMES["test"][0])
        return self._tell(story, Haystack([FILLER], self._encode), spec, _random(self._seed, spec, index))

    def _haystack(self, split: Split) -> Haystack:
        if split not in self._haystacks:
            self._haystacks[split] = Haystack(self._documents.get(split, ()), self._encode)
        return self._haystacks[split]

    def _tell(
        self,
        story: _Story,
        haystack: Haystack,
        spec: NeedleSpec,
        rng: np.random.Generator,
        extra: Sequence[str] = (),
    ) -> NeedleCase:
        """`extra` statements are hidden as well."""
        before, after = (part.replace("{question}", story.question) for part in story.frame.split("{text}"))
        head = self._ids(self._wrap.before + before)
        tail = self._ids(after + self._wrap.after + story.opening)
        answer_ids = self._answer(story)
        needles = [self._ids(f" {statement}") for statement in (*story.statements, *extra)]
        first = self._ids(story.statements[0] + PARAGRAPH)  # the asked needle, should it open the haystack
        used = len(head) + len(tail) + len(answer_ids) + sum(map(len, needles)) + max(0, len(first) - len(needles[0]))
        if used >= spec.num_tokens:
            message = f"is {spec.num_tokens}, and needles, question and answer alone take {used}"
            raise InputError("num_tokens", message, "raise it, or hide fewer needles (num_keys)")
        stretch = haystack.cut(spec.num_tokens - used, rng)
        places = _choose_places(stretch, spec.depth, len(needles), rng)
        if places[0] == 0:
            needles[0] = first
        token_ids = np.concatenate([head, _hide(needles, places, stretch, rng), tail])
        return NeedleCase(
            tuple(token_ids.tolist()),
            story.answer,
            answer_ids,
            story.values[0],
            places[0] / max(1, len(stretch.tokens)),
            story.question,
            story.keys[0],
        )

    def _ids(self, text: str) -> Ids:
        return np.array(self._encode(text), np.int32)


def deal(documents: Sequence[str]) -> dict[Split, list[str]]:
    """Every document to one split, by its hash."""
    splits: tuple[Split, ...] = get_args(Split)
    return {split: [document for document in documents if in_split(document, split)] for split in splits}


def score(value: str, text: str) -> float:
    """1 if the text contains the value as whole words; else the share of its first characters that some word has.

    Case, punctuation and thousands separators do not matter.
    """
    wanted, given = _normalise(value), _normalise(text)
    if f" {wanted} " in f" {given} ":
        return 1.0
    starts = [0, *(at + 1 for at, char in enumerate(given) if char == " ")]
    best = max(_count_common(wanted, given[start : start + len(wanted)]) for start in starts)
    return min(best, len(wanted) - 1) / len(wanted)  # 482137 is not 48213


def _normalise(text: str) -> str:
    text = unicodedata.normalize("NFKC", text).casefold()
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return " ".join(re.findall(r"[^\W_]+", text))


def _count_common(wanted: str, given: str) -> int:
    """The length of the common beginning."""
    pairs = zip(wanted, given, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(wanted), len(given)))


def _random(seed: int, spec: NeedleSpec, index: int) -> np.random.Generator:
    digest = hashlib.sha256(repr((seed, spec, index)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def _draw_wording(spec: NeedleSpec, rng: np.random.Generator) -> tuple[Wording, ValueKind]:
    """A wording and a kind of value that are rich enough for the number of needles."""
    if spec.split == "train" and rng.random() < COMPOSED:
        wording = compose(rng)
        kinds = _kinds(wording, spec)
        if kinds:
            return wording, kinds[int(rng.integers(len(kinds)))]
    choices = {wording: kinds for wording in WORDINGS[spec.split] if (kinds := _kinds(wording, spec))}
    if not choices:
        raise InputError("num_keys", f"is {spec.num_keys}, more than there are different needles", "lower it")
    wording = list(choices)[int(rng.integers(len(choices)))]
    return wording, choices[wording][int(rng.integers(len(choices[wording])))]


def _kinds(wording: Wording, spec: NeedleSpec) -> list[ValueKind]:
    """The kinds of values that this wording can have; none if it has too few keys."""
    if count_keys(wording.key, spec.split) < spec.num_keys:
        return []
    is_short = len(words_of(wording.category)) < spec.num_keys
    return [kind for kind in wording.values if spec.value in (kind, "mixed") and not (is_short and kind == "word")]


def _choose_places(stretch: Stretch, depth: float | None, count: int, rng: np.random.Generator) -> list[int]:
    """Where the needles go: the first as near to the depth as sentences allow, the others anywhere but the start."""
    depth = rng.random() if depth is None else depth
    nearest = int(np.argmin(np.abs(stretch.boundaries - depth * len(stretch.tokens))))
    anywhere = stretch.boundaries[1:] if len(stretch.boundaries) > 1 else stretch.boundaries
    others = rng.choice(anywhere, size=count - 1)
    return [int(stretch.boundaries[nearest]), *others.tolist()]


def _hide(needles: Sequence[Ids], places: Sequence[int], stretch: Stretch, rng: np.random.Generator) -> Ids:
    """The stretch with every needle at its place; needles at the same place come in any order."""
    ties = rng.permutation(len(needles))
    pieces: list[Ids] = []
    start = 0
    for index in sorted(range(len(needles)), key=lambda index: (places[index], ties[index])):
        pieces += [stretch.tokens[start : places[index]], needles[index]]
        start = places[index]
    return np.concatenate([*pieces, stretch.tokens[start:]])

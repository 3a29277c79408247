"""Needles in a haystack: facts hidden in a long text, and questions about them.

`KeyMaker` makes evaluation cases; `NeedleMaker` makes training dialogues and cases of either split. What is made for
training and for tests differs in everything that could be learnt by heart: wordings, frames, the words of the keys,
and the documents of the haystack (each belongs to one split, by its hash).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

import numpy as np

from sala.errors import InputError
from sala.lab.eval.data import read_data
from sala.lab.eval.tasks import words
from sala.lab.eval.tasks.case import Case, Frame, Prompt, PromptWriter, Solution, insert, random, remaining
from sala.lab.eval.tasks.haystack import PARAGRAPH, Encode, Haystack, Ids, Stretch, by_piece
from sala.lab.eval.tasks.words import Split, ValueKind, Wording, frames, pick, wordings

ValueChoice = Literal["number", "word", "uuid", "mixed"]
ANY_KIND: tuple[ValueKind, ...] = get_args(ValueKind)
AURORA_KEY, AURORA_VALUE = "Project Aurora", "739258"
NUM_SAMPLES = 24  # needles looked at to learn how many tokens one takes
REPEATS = 64  # of the filler in one document, so that a long text needs few documents
UNOPENED = 0.25  # share of the training cases in which the model must write the whole sentence
COMPOSED = 0.75  # share of the training cases whose wording is composed from parts


class NeedleQuestion(NamedTuple):
    """A question, the opening of its answer, the rest of the answer, and the indices of the keys asked for."""

    question: str
    opening: str
    answer: str
    keys: list[int]


@dataclass(frozen=True)
class Story:
    """What is hidden and how it is asked for: needles of one wording, with the values of each key."""

    wording: Wording
    keys: list[str]
    values: list[list[str]]
    frame: str
    is_opened: bool = True  # the answer begins with the wording's opening

    @property
    def statements(self) -> list[str]:
        state = self.wording.statement.format
        pairs = zip(self.keys, self.values, strict=True)
        return [state(key=key, value=value) for key, values in pairs for value in values]

    def ask(self, *keys: int) -> NeedleQuestion:
        """Return the query for all values of these keys."""
        asked = list(keys)
        questions = [self.wording.question.format(key=self.keys[at]) for at in asked]
        if len(asked) > 1:
            lines = [f"{number}. {question}" for number, question in enumerate(questions, 1)]
            answers = [f"{number}. {', '.join(self.values[at])}" for number, at in enumerate(asked, 1)]
            question = "\n".join([f"Answer these {len(lines)} questions, one line each:", *lines])
            return NeedleQuestion(question, "1.", "\n".join(answers).removeprefix("1."), asked)
        opening = self.wording.opening.format(key=self.keys[asked[0]])
        values = self.values[asked[0]]
        if len(values) > 1:
            hint = f"The text gives {len(values)} different answers. Write down all of them, separated by commas."
            return NeedleQuestion(f"{questions[0]} {hint}", f"{opening}:", f" {', '.join(values)}.", asked)
        if self.is_opened:
            return NeedleQuestion(questions[0], opening, f" {values[0]}.", asked)
        return NeedleQuestion(questions[0], "", f"{opening} {values[0]}.", asked)

    def framed(self, question: str) -> tuple[str, str]:
        """Return the user's message before and after the text."""
        before, after = (part.replace("{question}", question) for part in self.frame.split("{text}"))
        return before, after


def fitting_wordings(
    choices: Sequence[Wording], split: Split, kinds: Sequence[ValueKind], num_keys: int, num_values: int
) -> dict[Wording, list[ValueKind]]:
    """Return the wordings that have enough keys, with their value kinds that have enough values."""
    found = {}
    for wording in choices:
        has_words = len(words.words_of(wording.category)) >= num_values
        known = [kind for kind in wording.values if kind in kinds and (kind != "word" or has_words)]
        if known and words.count_keys(wording.key, split) >= num_keys:
            found[wording] = known
    return found


class Needles(NamedTuple):
    """Needles as token ids; `first` is the first needle as it reads when it opens the text."""

    pieces: list[Ids]
    first: Ids

    @classmethod
    def encode(cls, statements: Sequence[str], ids: Callable[[str], Ids]) -> "Needles":
        return cls([ids(f" {statement}") for statement in statements], ids(statements[0] + PARAGRAPH))

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.pieces)) + max(0, len(self.first) - len(self.pieces[0]))

    def hide(self, stretch: Stretch, depth: float | None, rng: np.random.Generator) -> tuple[Ids, list[float]]:
        """Return the text with the needles in it, and their depths.

        The first needle lies as near to `depth` as sentences allow, the others anywhere but at the very start.
        """
        anywhere = stretch.boundaries[1:] if len(stretch.boundaries) > 1 else stretch.boundaries
        others = rng.choice(anywhere, size=len(self.pieces) - 1).tolist()
        wanted = rng.random() if depth is None else depth
        nearest = int(np.argmin(np.abs(stretch.boundaries - wanted * len(stretch.tokens))))
        places = [int(stretch.boundaries[nearest]), *others]
        pieces = [self.first, *self.pieces[1:]] if places[0] == 0 else self.pieces
        return insert(pieces, places, stretch.tokens), [at / max(1, len(stretch.tokens)) for at in places]


# Evaluation: one or several questions about needles of one wording, in the model's own chat format.


@dataclass(frozen=True)
class KeySpec:
    """How many keys are in the text, how many of them are asked for at a time, and how many values each has.

    Its repr seeds the cases.
    """

    num_keys: int = 1
    num_asked: int = 1
    num_values: int = 1
    kinds: tuple[ValueKind, ...] = ANY_KIND

    def __post_init__(self) -> None:
        if not 1 <= self.num_asked <= self.num_keys:
            raise InputError("keys", f"are {self.num_keys}, of which {self.num_asked} are asked for", "hide more")


@dataclass
class KeyMaker:
    """Makes cases, each determined by seed, spec, length and number. One text may serve several queries."""

    writer: PromptWriter
    haystack: Haystack
    seed: int = 0
    spec: KeySpec = KeySpec()
    _reserves: dict[str, int] = field(default_factory=dict)  # by frame

    def make(self, num_tokens: int, number: int, depth: float | None = None, question: int = 0) -> Case:
        """Return a case of `num_tokens`, answer included. `depth` (0: the start, 1: the end) is the first needle's.

        All depths and questions of one number share their text, as far as needles do not move. A single needle is
        another one at every depth.
        """
        rng = random(self.seed, self.spec, num_tokens, number)
        frame = pick(frames("test"), rng)
        own = depth if self.spec.num_keys == 1 else None
        story = self._sample(frame, random(self.seed, self.spec, num_tokens, number, own))
        queries = self._queries(story)
        at = question % len(queries)
        prompt, needles = self._write(story, at)
        used = max(prompt.num_tokens + needles.num_tokens, 0 if depth is None else self._reserve(frame))
        stretch = self.haystack.cut(remaining(num_tokens, used, "needles"), rng)
        text, depths = needles.hide(stretch, depth, rng)
        keys = queries[at].keys
        solution = Solution(tuple(value for key in keys for value in story.values[key]))
        found_at = round(depths[keys[0] * self.spec.num_values], 4)
        return prompt.case(text, solution, question=queries[at].question, depth_found=found_at)

    def _sample(self, frame: str, rng: np.random.Generator) -> Story:
        spec, count = self.spec, self.spec.num_keys * self.spec.num_values
        found = fitting_wordings(wordings("test"), "test", spec.kinds, spec.num_keys, count)
        pairs = [(wording, kind) for wording, kinds in found.items() for kind in kinds]
        if not pairs:
            raise InputError("keys", f"are {spec.num_keys}, more than there are different needles", "hide fewer")
        wording, kind = pick(pairs, rng)
        keys = words.sample_keys(wording.key, "test", spec.num_keys, rng)
        flat = words.sample_values(kind, wording.category, count, rng)
        values = [flat[at : at + spec.num_values] for at in range(0, len(flat), spec.num_values)]
        return Story(wording, keys, values, frame)

    def _queries(self, story: Story) -> list[NeedleQuestion]:
        count = self.spec.num_asked
        return [story.ask(*range(at, at + count)) for at in range(0, len(story.keys) - count + 1, count)]

    def _write(self, story: Story, asked: int = 0) -> tuple[Prompt, Needles]:
        queries = self._queries(story)
        frames = [Frame(*story.framed(one.question), one.opening) for one in queries]
        prompt = self.writer.prompt(frames, [one.answer for one in queries], asked)
        return prompt, Needles.encode(story.statements, self.writer.ids)

    def _reserve(self, frame: str) -> int:
        """Return a number of tokens that suffices for nearly every needle, so that all are left the same text."""
        if frame not in self._reserves:
            stories = [self._sample(frame, random(self.seed, "reserve", number)) for number in range(NUM_SAMPLES)]
            written = map(self._write, stories)
            self._reserves[frame] = max(prompt.num_tokens + needles.num_tokens for prompt, needles in written)
        return self._reserves[frame]


class AuroraMaker(KeyMaker):
    """The needle of many demos: the code of Project Aurora in the same few sentences again and again."""

    def __init__(self, writer: PromptWriter, seed: int = 0) -> None:
        filler = " ".join(read_data("wordings")["filler"].split())
        super().__init__(writer, Haystack([PARAGRAPH.join([filler] * REPEATS)], writer.encode), seed)

    def _sample(self, frame: str, rng: np.random.Generator) -> Story:
        return Story(words.aurora(), [AURORA_KEY], [[AURORA_VALUE]], frames("test")[0])


# Training: dialogues about needles of one or several wordings, in a chat format given as text.


class Wrap(NamedTuple):
    """The text before the user's message, and the text after it, up to where the assistant speaks.

    `again` is the text before a further message of the user, where it differs from `before`.
    """

    before: str
    after: str
    again: str | None = None


def chatml(system: str | None = None) -> Wrap:
    head = "" if system is None else f"<|im_start|>system\n{system}<|im_end|>\n"
    return Wrap(f"{head}<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")


CHATML = chatml()


@dataclass(frozen=True)
class NeedleSpec:
    """What to make: `num_tokens` include the answer; `depth` is 0 at the start of the haystack, 1 at its end.

    Of `num_keys` needles, alike but for key and value, one is asked for. Its repr seeds the cases.
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
        for name, known in (("value", get_args(ValueChoice)), ("split", get_args(Split))):
            if getattr(self, name) not in known:
                raise InputError(name, f"is {getattr(self, name)!r}", f"choose one of {', '.join(known)}")


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


Turn = tuple[Sequence[int], Sequence[int]]  # what is asked, and the answer


def join_turns(turns: Iterable[Turn]) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and which of them are answers."""
    ids: list[int] = []
    is_answer: list[bool] = []
    for asked, answered in turns:
        ids += [*asked, *answered]
        is_answer += [False] * len(asked) + [True] * len(answered)
    return ids, is_answer


@dataclass
class NeedleMaker:
    """Makes cases and dialogues, each determined by seed, spec and index.

    `encode` adds no BOS and parses the special tokens in `wrap`. The documents of a plain `haystack` are dealt to the
    splits by their hash, one in four to the tests; a mapping assigns them itself.
    """

    encode: Encode
    haystack: Sequence[str] | Mapping[Split, Sequence[str]]
    seed: int = 0
    wrap: Wrap = CHATML
    end_id: int | None = None
    unopened: float | None = None  # share of answers that are not begun; None: a quarter in training, none in tests

    def __post_init__(self) -> None:
        self.encode = by_piece(self.encode)
        self._documents = self.haystack if isinstance(self.haystack, Mapping) else deal(self.haystack)
        self._haystacks: dict[Split, Haystack] = {}

    def make(self, spec: NeedleSpec, index: int) -> NeedleCase:
        rng = random(self.seed, spec, index)
        return self._case(self._sample(spec, rng), spec, rng)

    def dialogue(
        self, spec: NeedleSpec, index: int, num_questions: int, num_topics: int
    ) -> tuple[list[int], list[bool]]:
        """Return the tokens of a case that goes on, and which are answers: more needles are asked for, turn by turn.

        With several topics, needles of other wordings are hidden in the same text, `spec.num_keys` of each, and
        `num_questions` are asked about each topic in random order.
        """
        rng = random(self.seed, spec, index)
        story, *more = self._topics(spec, num_topics, rng)
        queries = [topic.ask(at) for topic in (story, *more) for at in range(topic is story, num_questions)]
        if more:
            queries = [queries[at] for at in rng.permutation(len(queries)).tolist()]
        turns = [(self._turn(query), self._answer(query)) for query in queries]
        num_tokens = spec.num_tokens - sum(len(asked) + len(answered) for asked, answered in turns)
        extra = [statement for topic in more for statement in topic.statements]
        case = self._case(story, replace(spec, num_tokens=num_tokens), rng, extra)
        return join_turns([(case.token_ids, case.answer_ids), *turns])

    def _sample(self, spec: NeedleSpec, rng: np.random.Generator) -> Story:
        wording, kind = _sample_wording(spec, rng)
        keys = words.sample_keys(wording.key, spec.split, spec.num_keys, rng)
        values = words.sample_values(kind, wording.category, spec.num_keys, rng)
        frame = pick(frames(spec.split), rng)
        share = UNOPENED if self.unopened is None else self.unopened
        is_opened = (spec.split == "test" and self.unopened is None) or rng.random() >= share
        return Story(wording, keys, [[value] for value in values], frame, is_opened)

    def _topics(self, spec: NeedleSpec, count: int, rng: np.random.Generator) -> list[Story]:
        """Return up to `count` stories, no two of which answer the same question differently."""
        topics, asked = [], set[str]()
        for _ in range(count):
            story = self._sample(spec, rng)
            questions = {story.wording.question.format(key=key) for key in story.keys}
            if asked.isdisjoint(questions):
                topics.append(story)
                asked |= questions
        return topics

    def _case(self, story: Story, spec: NeedleSpec, rng: np.random.Generator, extra: Sequence[str] = ()) -> NeedleCase:
        """Return the case of the story's first key, with `extra` statements hidden as well."""
        query = story.ask(0)
        before, after = story.framed(query.question)
        head, tail = self._ids(self.wrap.before + before), self._ids(after + self.wrap.after + query.opening)
        answer_ids = self._answer(query)
        needles = Needles.encode([*story.statements, *extra], self._ids)
        used = len(head) + len(tail) + len(answer_ids) + needles.num_tokens
        if used >= spec.num_tokens:
            message = f"is {spec.num_tokens}, and needles, question and answer alone take {used}"
            raise InputError("num_tokens", message, "raise it, or hide fewer needles (num_keys)")
        stretch = self._haystack(spec.split).cut(spec.num_tokens - used, rng)
        depth = rng.random() if spec.depth is None else spec.depth
        text, depths = needles.hide(stretch, depth, rng)
        token_ids = np.concatenate([head, text, tail]).tolist()
        value = story.values[0][0]
        return NeedleCase(tuple(token_ids), query.answer, answer_ids, value, depths[0], query.question, story.keys[0])

    def _haystack(self, split: Split) -> Haystack:
        if split not in self._haystacks:
            self._haystacks[split] = Haystack(self._documents.get(split, ()), self.encode)
        return self._haystacks[split]

    def _turn(self, query: NeedleQuestion) -> list[int]:
        before = "\n" + self.wrap.before if self.wrap.again is None else self.wrap.again
        return list(self.encode(before + query.question + self.wrap.after + query.opening))

    def _answer(self, query: NeedleQuestion) -> tuple[int, ...]:
        return (*self.encode(query.answer), *([] if self.end_id is None else [self.end_id]))

    def _ids(self, text: str) -> Ids:
        return np.array(self.encode(text), np.int32)


def deal(documents: Sequence[str]) -> dict[Split, list[str]]:
    """Return the documents by split; the hash of a document decides."""
    splits: tuple[Split, ...] = get_args(Split)
    return {split: [document for document in documents if words.in_split(document, split)] for split in splits}


def _sample_wording(spec: NeedleSpec, rng: np.random.Generator) -> tuple[Wording, ValueKind]:
    """Return a wording and a value kind that have enough keys and values."""
    kinds = ANY_KIND if spec.value == "mixed" else (spec.value,)
    choices: Sequence[Wording] = wordings(spec.split)
    if spec.split == "train" and rng.random() < COMPOSED:
        composed = words.compose(rng)
        if fitting_wordings([composed], spec.split, kinds, spec.num_keys, spec.num_keys):
            choices = [composed]
    found = fitting_wordings(choices, spec.split, kinds, spec.num_keys, spec.num_keys)
    if not found:
        raise InputError("num_keys", f"is {spec.num_keys}, more than there are different needles", "lower it")
    wording = choices[0] if len(choices) == 1 else pick(list(found), rng)
    return wording, pick(found[wording], rng)

"""Training rows that hide facts or composed passages in text and ask about them, padded to the row length."""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from sala.errors import ConfigError, InputError
from sala.lab.eval.tasks.needle import NeedleMaker, NeedleSpec, Wrap, join_turns
from sala.lab.train.data import TrainingRow
from sala.text.tokenizer import Tokenizer

PARAGRAPH = "\n\n"
MIN_PIECE = 40  # characters; shorter paragraphs of other text are left out
_SLOT = re.compile(r"\{(?:(\w+)=)?(?:(\d+)\*)?(\w+(?:\.\.\d+)?)\}")
_AN = re.compile(r"\b([Aa]) (?=[aeioAEIO])")  # "an apple"; words with u take either article


def chat_wrap(tokenizer: Tokenizer) -> Wrap:
    """Return what the tokenizer's chat template puts around a user's messages, including its system turn."""

    def text(*contents: str) -> str:
        messages = [{"role": ("user", "assistant")[at % 2], "content": one} for at, one in enumerate(contents)]
        return tokenizer.render_chat(messages, add_generation_prompt=True)

    before, _, after = text("QUESTION").partition("QUESTION")
    _, _, rest = text("FIRST", "ANSWER", "SECOND").partition("ANSWER")
    between = tokenizer.encode(rest.partition("SECOND")[0], bos=False, parse_special=True)
    return Wrap(before, after, tokenizer.decode(between[1:], skip_special=False))  # the answer includes its end token


def _padded_row(ids: Sequence[int], answer: Sequence[bool], length: int, pad: int) -> TrainingRow:
    """Return a row in which everything but the answers is learned from the teacher, who may be wrong about them."""
    size = min(len(ids), length)
    tokens = np.full(length, pad, np.int64)
    is_answer, loss_mask = np.zeros((2, length), np.bool_)
    tokens[:size], is_answer[:size], loss_mask[:size] = ids[:size], answer[:size], True
    return TrainingRow(tokens, loss_mask & ~is_answer, is_answer, (length,))


@dataclass(frozen=True, slots=True)
class NeedleRows:
    """Row i hides up to `max_keys` facts on each of up to `max_topics` topics in real text, and asks for some of them.

    Rows alternate between several makers, whose wraps may differ.
    """

    makers: Sequence[NeedleMaker]
    length: int
    max_keys: int
    max_topics: int
    pad: int
    seed: int

    def __post_init__(self) -> None:
        if self.length < 256:
            raise InputError("seq_len", f"is {self.length}", "needle rows need at least 256 tokens")

    def __call__(self, index: int) -> TrainingRow:
        rng = np.random.default_rng([self.seed, index])
        num_keys = int(rng.integers(1, self.max_keys + 1))
        num_questions = int(rng.integers(1, num_keys + 1))
        num_topics = int(rng.integers(1, self.max_topics + 1)) if self.max_topics > 1 else 1
        maker = self.makers[index % len(self.makers)]
        while True:
            spec = NeedleSpec(self.length, num_keys=num_keys, value="mixed", split="train")
            try:
                dialogue = maker.dialogue(spec, index, num_questions, num_topics)
                return _padded_row(*dialogue, self.length, self.pad)
            except InputError:  # fewer facts and questions may fit into the row
                if num_topics > 1:
                    num_topics //= 2
                elif num_keys > 1:
                    num_keys, num_questions = num_keys - 1, min(num_questions, num_keys - 1)
                else:
                    raise


class SlotLists:
    """Lists of words and phrases, which fill the slots of templates:

    {place}        an entry of the list `place`, whose own slots are filled
    {a=place}      the same, stored as `a` for the rest of the text; {a} repeats it
    {2..99}        a whole number; {n=2..99} stores it
    {3*fruit}      three different entries, separated by commas; {n=3*fruit} stores them
    """

    def __init__(self, lists: Mapping[str, Sequence[str]]) -> None:
        self.lists = dict(lists)

    @classmethod
    def load(cls, file: Path) -> "SlotLists":
        """Read the `[lists]` of a prompt table in TOML; raise ConfigError if a text of it names an unknown list."""
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        slots = cls(values.get("lists", {}))
        templates = [turn for kind in values.get("kind", []) for turn in kind["templates"]]
        slots.check((turn for turns in templates for turn in ([turns] if isinstance(turns, str) else turns)), str(file))
        return slots

    def check(self, templates: Iterable[str], where: str) -> None:
        texts = [*templates, *(entry for entries in self.lists.values() for entry in entries)]
        slots = [(text, match) for text in texts for match in _SLOT.finditer(text)]
        known = {*self.lists, *(match[1] for _, match in slots)}
        for text, match in slots:
            if match[3] not in known and ".." not in match[3]:
                raise ConfigError(f"{where}: {text!r} names the unknown list {match[3]!r}", "add it to [lists]")

    def fill(self, text: str, names: dict[str, str], rng: np.random.Generator) -> str:
        """Return the text with all slots filled; `names` holds the stored values and is updated."""
        return _AN.sub(r"\1n ", self._fill(text, names, rng))

    def _fill(self, text: str, names: dict[str, str], rng: np.random.Generator) -> str:
        def one(match: re.Match[str]) -> str:
            name, many, what = match.groups()
            if what in names and name is None:
                return names[what]
            value = self._value(what, int(many) if many else 0, names, rng)
            if name is not None:
                names[name] = value
            return value

        return _SLOT.sub(one, text)

    def _value(self, what: str, many: int, names: dict[str, str], rng: np.random.Generator) -> str:
        if ".." in what:
            low, _, high = what.partition("..")
            return str(int(rng.integers(int(low), int(high) + 1)))
        entries = self.lists[what]
        if many:
            chosen = rng.permutation(len(entries))[:many]
            return ", ".join(self._fill(entries[int(at)], names, rng) for at in chosen)
        return self._fill(entries[int(rng.integers(len(entries)))], names, rng)


@dataclass(frozen=True, slots=True)
class PassageTemplate:
    """A passage template with (question, answer) pairs; `keyed` questions identify one of several similar passages."""

    text: str
    ask: tuple[tuple[str, str], ...]
    keyed: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ReadingTable:
    passages: tuple[PassageTemplate, ...]
    slots: SlotLists

    @classmethod
    def load(cls, file: Path, lists: Path) -> "ReadingTable":
        """Read the passages, and the lists that fill their slots; raise ConfigError if there are no passages."""
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        passages = TypeAdapter(tuple[PassageTemplate, ...]).validate_python(values.get("passage", []))
        if not passages:
            raise ConfigError(f"{file} has no [[passage]]", "add at least one")
        return cls(passages, SlotLists.load(lists))

    def sample(self, count: int, alike: int, rng: np.random.Generator) -> tuple[list[str], list[tuple[str, str]]]:
        """Return up to `alike` passages from each of `count` templates, and (question, answer) pairs about them."""
        texts, questions = [], []
        for at in rng.permutation(len(self.passages))[:count]:
            passage = self.passages[int(at)]
            number = int(rng.integers(1, alike + 1))
            seen: set[str] = set()
            for _ in range(number):
                names: dict[str, str] = {}
                text = self.slots.fill(passage.text, names, rng)
                if names["who"] in seen:
                    continue
                seen.add(names["who"])
                texts.append(text)
                pairs = passage.keyed if number > 1 or rng.random() < 0.5 else passage.ask
                question, answer = pairs[int(rng.integers(len(pairs)))]
                questions.append((self.slots.fill(question, names, rng), self.slots.fill(answer, names, rng)))
        order = rng.permutation(len(questions)).tolist()
        return texts, [questions[at] for at in order]


@dataclass(frozen=True, slots=True)
class ReadingRows:
    """Row i holds passages in other text that fills the row, and questions about some of them."""

    table: ReadingTable
    documents: Sequence[str]
    encode: Callable[[str], list[int]]
    wrap: Wrap
    end: int
    length: int
    max_alike: int
    max_topics: int
    seed: int

    def __call__(self, index: int) -> TrainingRow:
        rng = np.random.default_rng([self.seed, index])
        num_topics = int(rng.integers(1, self.max_topics + 1))
        texts, questions = self.table.sample(num_topics, self.max_alike, rng)
        max_questions = max(1, min(6, self.length // 200))
        questions = questions[: int(rng.integers(1, max_questions + 1))]
        turns = [self._turn(at, *pair) for at, pair in enumerate(questions)]
        passages = [self.encode(text + PARAGRAPH) for text in texts]
        head = self.encode(self.wrap.before)
        room = self.length - len(head) - sum(map(len, passages)) - sum(len(a) + len(b) for a, b in turns)
        pieces = self._other(room, rng)
        for passage in passages:
            pieces.insert(int(rng.integers(len(pieces) + 1)), passage)
        return _padded_row(*join_turns([*((piece, ()) for piece in (head, *pieces)), *turns]), self.length, self.end)

    def _turn(self, at: int, question: str, answer: str) -> tuple[list[int], list[int]]:
        before = "" if at == 0 else self.wrap.again or PARAGRAPH
        return self.encode(before + question + self.wrap.after), [*self.encode(answer), self.end]

    def _other(self, room: int, rng: np.random.Generator) -> list[list[int]]:
        """Return paragraphs of other text of at most `room` tokens."""
        out: list[list[int]] = []
        # half of the short rows hold the passages alone
        if not self.documents or (self.length <= 1024 and rng.random() < 0.5):
            return out
        while room > 0:
            document = self.documents[int(rng.integers(len(self.documents)))]
            for piece in document.split(PARAGRAPH):
                if len(piece) < MIN_PIECE:
                    continue
                out.append(self.encode(piece + PARAGRAPH)[:room])
                room -= len(out[-1])
                if room <= 0:
                    break
        return out

"""A case: a prompt as token ids, and how its answer is scored; and what all makers of cases share."""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from os.path import commonprefix
from typing import Any

import numpy as np

from sala.errors import InputError, TemplateError
from sala.lab.eval.tasks.haystack import Encode, Ids, by_piece
from sala.text.answer import CLOSE, OPEN
from sala.text.tokenizer import Tokenizer

WORD = re.compile(r"[^\W_]+")
SPARE = 16  # tokens that an answer may have beyond twice what it needs


@dataclass(frozen=True)
class Solution:
    """What an answer must contain.

    Without `candidates` every wanted text is looked for, and a matching beginning scores in part. With them only the
    first candidates that the answer names count, as many as are wanted, so that naming all of them does not help.
    With `is_any` one of the wanted texts is enough.
    """

    wanted: tuple[str, ...]
    candidates: tuple[str, ...] = ()
    is_any: bool = False

    def score(self, text: str) -> float:
        """Return the share of what is wanted that an answer contains; 1 if it is exact."""
        if self.candidates:
            known = {one.casefold() for one in self.candidates}
            named = dict.fromkeys(word for word in WORD.findall(text.casefold()) if word in known)
            wanted = {one.casefold() for one in self.wanted}
            return len(wanted.intersection([*named][: len(self.wanted)])) / len(self.wanted)
        found = [score_value(one, text) for one in self.wanted]
        return max(found) if self.is_any else sum(found) / len(found)


@dataclass(frozen=True)
class Case:
    """A prompt, a right `answer`, and more `facts` about the case as plain values."""

    token_ids: Ids
    answer: str
    max_tokens: int
    solution: Solution
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Frame:
    """The user's message around the text, and how the answer is opened for the model."""

    before: str
    after: str
    opening: str = ""


@dataclass(frozen=True)
class Prompt:
    """Everything around a text, with a right answer; `num_tokens` suffice for any question about the same text."""

    head: Ids
    tail: Ids
    answer: str
    max_tokens: int  # of the model's answer
    num_tokens: int

    def remaining(self, num_tokens: int, pieces: Iterable[Ids], name: str) -> int:
        """Return the tokens of a case that are left for other text than these pieces."""
        return remaining(num_tokens, self.num_tokens + sum(map(len, pieces)), name)

    def case(self, text: Ids, solution: Solution, **facts: Any) -> Case:
        return Case(np.concatenate([self.head, text, self.tail]), self.answer, self.max_tokens, solution, facts)


class PromptWriter:
    """Writes prompts for one model: `before` and `after` are what its chat format puts around the user's message.

    `encode` adds no BOS and does not parse special tokens.
    """

    def __init__(self, encode: Encode, before: Sequence[int] = (), after: Sequence[int] = ()) -> None:
        self.encode = by_piece(encode)
        self._before, self._after = (np.array(ids, np.int32) for ids in (before, after))

    @classmethod
    def for_model(cls, tokenizer: Tokenizer) -> "PromptWriter":
        """Return a writer in the model's own chat format, without reasoning; a model without one continues the text."""
        encode = partial(tokenizer.encode, bos=False)
        options = {"add_generation_prompt": True, "enable_thinking": False}
        try:
            before, after = tokenizer.encode_around([{"role": "user", "content": ""}], **options)
        except TemplateError:
            return cls(encode, tokenizer.encode(""), encode("\n"))
        if tokenizer.decode(after[-16:], skip_special=False).rstrip().endswith(OPEN):
            after = [*after, *encode(f"\n{CLOSE}\n\n")]
        return cls(encode, before, after)

    def ids(self, text: str) -> Ids:
        return np.array(self.encode(text), np.int32)

    def around(self, frame: Frame) -> tuple[Ids, Ids]:
        """Return everything before the text, and everything after it."""
        head = np.concatenate([self._before, self.ids(frame.before)])
        return head, np.concatenate([self.ids(frame.after), self._after, self.ids(frame.opening)])

    def prompt(self, frames: Sequence[Frame], answers: Sequence[str], asked: int = 0) -> Prompt:
        """Return the prompt with frame and answer `asked`, and space for all the others.

        An answer may take twice as many tokens as the longest right one, and a few more.
        """
        around = [self.around(frame) for frame in frames]
        head, tail = around[asked]
        max_tokens = 2 * max(len(self.encode(answer)) for answer in answers) + SPARE
        used = len(head) + max(len(end) for _, end in around) + max_tokens
        return Prompt(head, tail, answers[asked], max_tokens, used)


def remaining(num_tokens: int, used: int, name: str) -> int:
    """Return the tokens left for the text; raise InputError if there are none."""
    if used >= num_tokens:
        message = f"are too short for {name}: {num_tokens:,} tokens, of which question and answer alone take {used:,}"
        raise InputError("lengths", message, f"begin with {2 * used:,} or more")
    return num_tokens - used


def random(*facts: object) -> np.random.Generator:
    """Return a generator seeded by the repr of all facts, and by nothing else."""
    digest = hashlib.sha256(repr(facts).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def insert(pieces: Sequence[Ids], places: Sequence[int], tokens: Ids) -> Ids:
    """Return the tokens with every piece at its place; pieces at the same place keep their order."""
    out: list[Ids] = []
    start = 0
    for index in sorted(range(len(pieces)), key=lambda index: places[index]):
        out += [tokens[start : places[index]], pieces[index]]
        start = places[index]
    return np.concatenate([*out, tokens[start:]])


def join_ids(pieces: Iterable[Ids]) -> Ids:
    return np.concatenate([np.zeros(0, np.int32), *pieces])


def count_shared(one: Ids, other: Ids) -> int:
    """Return the length of the common prefix."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size


def score_value(value: str, text: str) -> float:
    """Return 1 if the text contains the value as whole words; else the share of its beginning that some word has.

    Case, punctuation and thousands separators do not matter.
    """
    wanted, given = _normalise(value), _normalise(text)
    if f" {wanted} " in f" {given} ":
        return 1.0
    starts = [0, *(at + 1 for at, char in enumerate(given) if char == " ")]
    best = max(len(commonprefix([wanted, given[at : at + len(wanted)]])) for at in starts)  # noqa: RUF071 - no paths
    return min(best, len(wanted) - 1) / len(wanted)  # 482137 is not 48213


def _normalise(text: str) -> str:
    text = unicodedata.normalize("NFKC", text).casefold()
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return " ".join(WORD.findall(text))

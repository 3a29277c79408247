"""A case: a prompt as token ids, and how its answer is scored. And what all makers of cases share."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sala.errors import InputError, TemplateError
from sala.lab.eval.tasks.haystack import Encode, Ids, by_piece
from sala.lab.eval.tasks.needle import score as score_value
from sala.text.reasoning import CLOSE, OPEN

if TYPE_CHECKING:
    from sala.text.tokenizer import Tokenizer

SPARE = 16  # tokens that an answer may have beyond twice what it needs


class Score(NamedTuple):
    is_exact: bool
    partial: float


@dataclass(frozen=True)
class Solution:
    """What an answer must hold.

    Without `candidates` every wanted text is looked for, and its beginning counts in part. With them only the first
    of them that the answer names count, as many as are wanted: naming everything is no answer. `is_any`: one of the
    wanted texts is enough.
    """

    wanted: tuple[str, ...]
    candidates: tuple[str, ...] = ()
    is_any: bool = False

    def score(self, text: str) -> Score:
        if self.candidates:
            named = _first_named(self.candidates, text, len(self.wanted))
            share = len(named & {one.casefold() for one in self.wanted}) / len(self.wanted)
            return Score(share == 1, share)
        found = [score_value(one, text) for one in self.wanted]
        share = max(found) if self.is_any else sum(found) / len(found)
        return Score(share == 1, share)


@dataclass(frozen=True)
class Case:
    """`answer` is a right one. `facts` tell more about the case, in plain values."""

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


class Writer:
    """Writes prompts for one model: `before` and `after` are what its chat format puts around the user's message.

    `encode` adds no BOS and takes text for text, whatever special token it spells.
    """

    def __init__(self, encode: Encode, before: Sequence[int] = (), after: Sequence[int] = ()) -> None:
        self.encode = by_piece(encode)
        self._before, self._after = (np.array(ids, np.int32) for ids in (before, after))

    @classmethod
    def for_model(cls, tokenizer: "Tokenizer") -> "Writer":
        """In the model's own chat format, without thoughts; a model that has none just continues the text."""
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

    def room_for_answer(self, answer: str) -> int:
        """Tokens to grant: a right answer and as much again."""
        return 2 * len(self.encode(answer)) + SPARE

    def around(self, frame: Frame) -> tuple[Ids, Ids]:
        """All that comes before the text, and all that comes after it."""
        head = np.concatenate([self._before, self.ids(frame.before)])
        return head, np.concatenate([self._after_text(frame.after), self.ids(frame.opening)])

    def _after_text(self, text: str) -> Ids:
        return np.concatenate([self.ids(text), self._after])


def room(num_tokens: int, used: int, name: str) -> int:
    """Tokens left for the text."""
    if used >= num_tokens:
        message = f"are too short for {name}: {num_tokens:,} tokens, of which question and answer alone take {used:,}"
        raise InputError("lengths", message, f"begin with {2 * used:,} or more")
    return num_tokens - used


def random(*facts: object) -> np.random.Generator:
    """Determined by all that is given, and by nothing else."""
    digest = hashlib.sha256(repr(facts).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def hide(pieces: Sequence[Ids], places: Sequence[int], tokens: Ids) -> Ids:
    """The text with every piece at its place; at the same place they keep their order."""
    out: list[Ids] = []
    start = 0
    for index in sorted(range(len(pieces)), key=lambda index: places[index]):
        out += [tokens[start : places[index]], pieces[index]]
        start = places[index]
    return np.concatenate([*out, tokens[start:]])


def join_ids(pieces: Iterable[Ids]) -> Ids:
    return np.concatenate([np.zeros(0, np.int32), *pieces])


def _first_named(candidates: Sequence[str], text: str, count: int) -> set[str]:
    known = {one.casefold() for one in candidates}
    named: dict[str, None] = {}
    for word in re.findall(r"[^\W_]+", text.casefold()):
        if word in known:
            named[word] = None
    return set(list(named)[:count])

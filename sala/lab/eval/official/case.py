"""A question of a published benchmark, its prompt for a model, and how its answer is scored."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sala.lab.eval.tasks.case import Frame, PromptWriter
from sala.lab.eval.tasks.haystack import Ids
from sala.text.tokenizer import Tokenizer

Score = Callable[[str], float]  # of an answer, from 0 to 1


@dataclass(frozen=True)
class Question:
    """`text` is all that the user says, `opening` begins the answer, and `answers` are right ones, for the reader.

    `length` names the column of the result: tokens for most benchmarks. `joint` is between text and opening where no
    chat format is used. The answer ends before one of `stops`, if there are any.
    """

    task: str
    length: int
    number: int
    text: str
    answers: tuple[str, ...]
    score: Score
    max_tokens: int
    opening: str = ""
    joint: str = " "
    stops: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    messages: tuple[dict[str, str], ...] = ()  # of a conversation, in place of `text`

    @property
    def labels(self) -> dict[str, Any]:
        return {"task": self.task, "length": self.length, "number": self.number, **self.facts}


@dataclass(frozen=True)
class Prepared:
    """A question as tokens of one model."""

    question: Question
    token_ids: Ids

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the longest answer."""
        return len(self.token_ids) + self.question.max_tokens

    @property
    def key(self) -> str:
        """Return what the answer depends on, apart from the model."""
        rest = repr((self.question.labels, self.question.max_tokens, self.question.stops)).encode()
        return hashlib.sha256(self.token_ids.tobytes() + rest).hexdigest()


class QuestionWriter:
    """Writes prompts in a model's own chat format; with `is_plain`, or for a model without one, as a text to go on."""

    def __init__(self, tokenizer: Tokenizer, is_plain: bool = False) -> None:
        self._tokenizer = tokenizer
        self._writer = None if is_plain else PromptWriter.for_model(tokenizer)

    def prepare(self, question: Question) -> Prepared:
        return Prepared(question, self._encode(question))

    def _encode(self, question: Question) -> Ids:
        if question.messages and self._writer is not None:
            ids = self._tokenizer.encode_chat(question.messages, add_generation_prompt=True, enable_thinking=False)
            return np.array(ids, np.int32)
        text = question.text or transcript(question.messages)
        if self._writer is None:
            joint = question.joint if question.opening and not text[-1:].isspace() else ""
            return np.array(self._tokenizer.encode(f"{text}{joint}{question.opening}"), np.int32)
        return np.concatenate(self._writer.around(Frame(text, "", question.opening)))


def transcript(messages: Sequence[dict[str, str]]) -> str:
    """Return a conversation as text, for models without a chat format."""
    return "\n\n".join(f"{one['role'].capitalize()}: {one['content']}" for one in messages) + "\n\nAssistant:"

"""Training rows with reading comprehension: composed passages with questions and answers, alone or in other text."""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sala.errors import ConfigError
from sala.lab.eval.tasks.needle import Wrap
from sala.lab.train.data import TrainingRow
from sala.lab.train.halo.prompts import PromptTable

PARAGRAPH = "\n\n"
MIN_PIECE = 40  # characters; shorter paragraphs of other text are left out


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage template with (question, answer) pairs; `keyed` questions identify one of several similar passages."""

    text: str
    ask: tuple[tuple[str, str], ...]
    keyed: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ReadingTable:
    passages: tuple[Passage, ...]
    prompts: PromptTable  # its lists fill the slots

    @classmethod
    def load(cls, file: Path, lists: Path) -> "ReadingTable":
        """Read the passages and the lists of a prompt table; raise ConfigError if there are no passages."""
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        passages = [
            Passage(one["text"], tuple(map(tuple, one["ask"])), tuple(map(tuple, one["keyed"])))
            for one in values.get("passage", [])
        ]
        if not passages:
            raise ConfigError(f"{file} has no [[passage]]", "add at least one")
        return cls(tuple(passages), PromptTable.load(lists))

    def sample(self, count: int, alike: int, rng: np.random.Generator) -> tuple[list[str], list[tuple[str, str]]]:
        """Return up to `alike` passages from each of `count` templates, and (question, answer) pairs about them."""
        texts, questions = [], []
        for at in rng.permutation(len(self.passages))[:count]:
            passage = self.passages[int(at)]
            number = int(rng.integers(1, alike + 1))
            seen: set[str] = set()
            for _ in range(number):
                names: dict[str, str] = {}
                text = self.prompts.fill(passage.text, names, rng)
                if names["who"] in seen:
                    continue
                seen.add(names["who"])
                texts.append(text)
                pairs = passage.keyed if number > 1 or rng.random() < 0.5 else passage.ask
                question, answer = pairs[int(rng.integers(len(pairs)))]
                questions.append((self.prompts.fill(question, names, rng), self.prompts.fill(answer, names, rng)))
        order = rng.permutation(len(questions)).tolist()
        return texts, [questions[at] for at in order]


class ReadingRows:
    """Row i holds passages in other text that fills the row, and questions about some of them."""

    def __init__(
        self,
        table: ReadingTable,
        documents: Sequence[str],
        encode: Callable[[str], list[int]],
        wrap: Wrap,
        end: int,
        length: int,
        max_alike: int,
        max_topics: int,
        seed: int,
    ) -> None:
        self.table, self.documents, self.encode, self.wrap, self.end = table, documents, encode, wrap, end
        self.length, self.max_alike, self.max_topics, self.seed = length, max_alike, max_topics, seed
        self.max_questions = max(1, min(6, length // 200))

    def __call__(self, index: int) -> TrainingRow:
        rng = np.random.default_rng([self.seed, index])
        num_topics = int(rng.integers(1, self.max_topics + 1))
        texts, questions = self.table.sample(num_topics, self.max_alike, rng)
        questions = questions[: int(rng.integers(1, self.max_questions + 1))]
        turns = [self._turn(at, *pair) for at, pair in enumerate(questions)]
        passages = [self.encode(text + PARAGRAPH) for text in texts]
        head = self.encode(self.wrap.before)
        room = self.length - len(head) - sum(map(len, passages)) - sum(len(a) + len(b) for a, b in turns)
        ids = list(head)
        for piece in self._mixed(passages, self._other(room, rng), rng):
            ids += piece
        answer = [False] * len(ids)
        for question_ids, answer_ids in turns:
            ids += [*question_ids, *answer_ids]
            answer += [False] * len(question_ids) + [True] * len(answer_ids)
        return self._row(ids, answer)

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

    def _mixed(self, passages: list[list[int]], other: list[list[int]], rng: np.random.Generator) -> list[list[int]]:
        out = list(other)
        for passage in passages:
            out.insert(int(rng.integers(len(out) + 1)), passage)
        return out

    def _row(self, ids: list[int], answer: list[bool]) -> TrainingRow:
        size = min(len(ids), self.length)
        tokens, is_answer = np.full(self.length, self.end, np.int64), np.zeros(self.length, np.bool_)
        tokens[:size], is_answer[:size] = ids[:size], answer[:size]
        loss_mask = np.zeros(self.length, np.bool_)
        loss_mask[:size] = True
        loss_mask[is_answer] = False  # the teacher may be wrong about answers
        return TrainingRow(tokens, loss_mask, is_answer, (self.length,))

"""Documents that a teacher wrote, with a role for every token; filters for them, and training rows."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sala.errors import InputError
from sala.lab.train.data import Array, ArrayFile, Epochs, TokenStream, TrainingRow

GIVEN, ASKED, ANSWER, TEXT = range(4)  # roles: template or prompt, question by the teacher, answer, free text
NGRAM = 8
Document = tuple[Sequence[int] | Array, Sequence[int] | Array, bool]  # tokens, roles, whether it ended
MIN_TEXT = 64  # tokens; shorter free text is dropped


@dataclass(frozen=True, slots=True)
class Documents(ArrayFile):
    """Concatenated documents: tokens and roles, the end of each document, and whether it has an end token."""

    tokens: Array
    roles: Array
    ends: Array
    is_ended: Array

    @classmethod
    def of(cls, documents: Sequence[Document]) -> "Documents":
        """Return documents from (tokens, roles, is_ended) of each."""
        tokens = [np.array(ids, np.uint32) for ids, _, _ in documents]
        roles = [np.array(marks, np.uint8) for _, marks, _ in documents]
        return cls(
            np.concatenate([np.zeros(0, np.uint32), *tokens]),
            np.concatenate([np.zeros(0, np.uint8), *roles]),
            np.cumsum([len(ids) for ids in tokens], dtype=np.int64),
            np.array([ended for _, _, ended in documents], np.bool_),
        )

    def __len__(self) -> int:
        return len(self.ends)

    def document(self, index: int) -> tuple[Array, Array, bool]:
        begin = int(self.ends[index - 1]) if index else 0
        piece = slice(begin, int(self.ends[index]))
        return self.tokens[piece], self.roles[piece], bool(self.is_ended[index])

    def items(self) -> Iterator[tuple[Array, Array, bool]]:
        return map(self.document, range(len(self)))

    def is_text(self) -> Array:
        """Return for each document whether it is free text."""
        if not len(self):
            return np.zeros(0, np.bool_)
        return np.maximum.reduceat(self.roles, np.concatenate(([0], self.ends[:-1]))) == TEXT

    def rows(self) -> list[list[int]]:
        return [tokens.tolist() for tokens, _, _ in self.items()]

    def select(self, indices: Iterable[int]) -> "Documents":
        return Documents.of([self.document(index) for index in indices])


def has_loop(tokens: Sequence[int], size: int = NGRAM, times: int = 3) -> bool:
    """Return whether an n-gram of `size` tokens occurs at least `times` times."""
    return loop_start(tokens, size, times) < len(tokens)


def loop_start(tokens: Sequence[int], size: int = NGRAM, times: int = 2) -> int:
    """Return the position at which an n-gram of `size` tokens first occurs for the `times`-th time; else the length."""
    seen: Counter[tuple[int, ...]] = Counter()
    for at in range(len(tokens) - size + 1):
        gram = tuple(tokens[at : at + size])
        seen[gram] += 1
        if seen[gram] >= times:
            return at
    return len(tokens)


def filter_documents(documents: Documents, least: int = 5, most: int = 300) -> Documents:
    """Keep dialogues whose answers end, have `least` to `most` tokens and do not loop; cut free text at a loop."""
    is_text, loops = documents.is_text(), _loops(documents)
    shortest, longest = _answer_sizes(documents)
    is_good = documents.is_ended & (shortest >= least) & (longest <= most) & ~loops
    kept = []
    for index in np.flatnonzero(is_good | is_text).tolist():
        tokens, roles, is_ended = documents.document(index)
        if is_text[index] and loops[index]:
            stop = loop_start(tokens.tolist(), times=3)
            tokens, roles, is_ended = tokens[:stop], roles[:stop], False
        if not is_text[index] or len(tokens) >= MIN_TEXT:
            kept.append((tokens, roles, is_ended))
    return Documents.of(kept)


def _loops(documents: Documents, times: int = 3) -> Array:
    """Return for each document whether an n-gram that the teacher wrote occurs at least `times` times."""
    size = len(documents.tokens)
    if size < NGRAM:
        return np.zeros(len(documents), np.bool_)
    document = np.repeat(np.arange(len(documents)), np.diff(documents.ends, prepend=0))
    is_written = (documents.roles == ANSWER) | (documents.roles == TEXT)
    count = size - NGRAM + 1
    keys = document[:count].astype(np.uint64)
    is_whole = document[:count] == document[NGRAM - 1 :]
    for offset in range(NGRAM):  # a hash of the n-gram and its document; overflow is intended
        keys = keys * np.uint64(6364136223846793005) + documents.tokens[offset : offset + count].astype(np.uint64)
        is_whole &= is_written[offset : offset + count]
    starts = np.flatnonzero(is_whole)
    _, inverse, counts = np.unique(keys[starts], return_inverse=True, return_counts=True)
    out = np.zeros(len(documents), np.bool_)
    out[document[starts[counts[inverse] >= times]]] = True
    return out


def _answer_sizes(documents: Documents) -> tuple[Array, Array]:
    """Return the sizes of the shortest and the longest answer of each document; 0 without an answer."""
    is_answer = (documents.roles == ANSWER).astype(np.int8)
    begins = np.flatnonzero(np.diff(is_answer, prepend=0) == 1)
    ends = np.flatnonzero(np.diff(is_answer, append=0) == -1) + 1
    owner = np.searchsorted(documents.ends, begins, "right")
    shortest, longest = np.full(len(documents), np.iinfo(np.int64).max), np.zeros(len(documents), np.int64)
    np.minimum.at(shortest, owner, ends - begins)
    np.maximum.at(longest, owner, ends - begins)
    return np.where(longest == 0, 0, shortest), longest


def runs(tokens: Array, roles: Array, role: int) -> list[list[int]]:
    """Return the runs of consecutive tokens with a role."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (roles == role).astype(np.int8), [0]))))
    return [tokens[begin:end].tolist() for begin, end in edges.reshape(-1, 2)]


def words_in(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


class HeldOut:
    """Texts held out from training: `text in held_out` finds their word n-grams, or short ones as a whole.

    `avoid` holds the characteristic words of questions, including their values: a text with all of them and at most
    twice the length asks the same question.
    """

    def __init__(self, texts: Iterable[str], avoid: Iterable[tuple[Sequence[str], str]] = ()) -> None:
        self.grams: set[str] = set()
        self.whole: set[str] = set()
        self.avoid: dict[str, list[tuple[frozenset[str], int]]] = {}
        for text in texts:
            words = words_in(text)
            self.whole.add(_key(words))
            self.grams.update(self._grams(words))
        for keys, text in avoid:
            wanted = frozenset(word for key in keys for word in words_in(key))
            self.avoid.setdefault(max(wanted, key=len), []).append((wanted, 2 * len(words_in(text))))

    def _grams(self, words: Sequence[str]) -> Iterable[str]:
        return (_key(words[at : at + NGRAM]) for at in range(len(words) - NGRAM + 1))

    def __contains__(self, text: object) -> bool:
        words = words_in(str(text))
        if _key(words) in self.whole or any(gram in self.grams for gram in self._grams(words)):
            return True
        known = set(words)
        found = (entry for word in known for entry in self.avoid.get(word, ()))
        return any(len(words) <= limit and wanted <= known for wanted, limit in found)


def _key(words: Sequence[str]) -> str:
    return " ".join(words)


def read_held_out(files: Sequence[Path]) -> HeldOut:
    """Return the `turns` of JSONL files, and their `avoid` words, as texts held out from training."""
    texts: list[str] = []
    avoid: list[tuple[list[str], str]] = []
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            texts += record["turns"]
            if record.get("avoid"):
                avoid.append((record["avoid"], " ".join(record["turns"])))
    return HeldOut(texts, avoid)


def to_stream(documents: Documents, end: int) -> TokenStream:
    """Return free text as a token stream with `end` after every document.

    The end token has a loss only if the teacher wrote one.
    """
    pieces, loss_mask = [], []
    for tokens, _, is_ended in documents.items():
        body = tokens[:-1] if is_ended else tokens  # its end token may be that of a turn
        pieces.append(np.append(body, np.uint32(end)))
        loss_mask.append(np.append(np.ones(len(body), np.bool_), is_ended))
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    return TokenStream(np.concatenate(pieces).astype(np.uint32), np.concatenate(loss_mask), ends)


@dataclass(frozen=True, slots=True)
class DialogueWeights:
    """Loss weights of the tokens of a dialogue; `truth` is the share of the sampled token in an answer's target."""

    given: float = 0.1
    question: float = 0.3
    answer: float = 1.0
    truth: float = 0.25
    first: float = 2.0  # factor for the first tokens of an answer
    num_first: int = 8


class DialogueRows:
    """Dialogues of `shortest` + 1 to `length` tokens, one per row, in a new order every epoch."""

    def __init__(
        self,
        documents: Documents,
        length: int,
        pad: int,
        seed: int,
        shortest: int = 0,
        weights: DialogueWeights | None = None,
    ) -> None:
        sizes = np.diff(documents.ends, prepend=0)
        self.chosen = np.flatnonzero(~documents.is_text() & (sizes <= length) & (sizes > shortest))
        if not len(self.chosen):
            raise InputError("data", f"no dialogue has {shortest + 1} to {length} tokens", "change the rows' seq_len")
        self.documents, self.length, self.pad = documents, length, pad
        self.weights = weights or DialogueWeights()
        self.order = Epochs(self.chosen, seed)

    def __call__(self, index: int) -> TrainingRow:
        tokens, roles, is_ended = self.documents.document(self.order(index))
        return weigh_dialogue(tokens, roles, is_ended, self.length, self.pad, self.weights)


def weigh_dialogue(
    tokens: Array, roles: Array, is_ended: bool, length: int, pad: int, weights: DialogueWeights
) -> TrainingRow:
    """Return a padded dialogue with weights; an answer without an end token gets the teacher's loss only."""
    size = len(tokens)
    out = np.full(length, pad, np.int64)
    out[:size] = tokens
    teacher, truth = np.zeros(length, np.float32), np.zeros(length, np.float32)
    is_answer = np.zeros(length, np.bool_)
    is_answer[:size] = roles == ANSWER
    teacher[:size][roles == GIVEN] = weights.given
    teacher[:size][roles == ASKED] = weights.question
    teacher[:size][roles == TEXT] = 1.0
    begins = np.flatnonzero(np.diff(is_answer.astype(np.int8), prepend=0) == 1)
    share = weights.truth if is_ended else 0.0
    teacher[is_answer], truth[is_answer] = weights.answer * (1 - share), weights.answer * share
    for begin in begins:
        first = slice(begin, begin + weights.num_first)
        teacher[first] *= np.where(is_answer[first], weights.first, 1)
        truth[first] *= np.where(is_answer[first], weights.first, 1)
    teacher[0] = truth[0] = 0
    has_loss = teacher + truth > 0
    return TrainingRow(out, has_loss, is_answer, (length,), 0.0, "dialogue", teacher, truth)

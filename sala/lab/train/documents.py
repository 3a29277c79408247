"""Documents that a teacher wrote, with a role for every token; filters for them, and training rows."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from sala.errors import InputError
from sala.lab.eval.documents import read_lines
from sala.lab.train.data import Array, ArrayFile, Epochs, TokenStream, TrainingRow

GIVEN, ASKED, ANSWER, TEXT = range(4)  # roles: template or prompt, question by the teacher, answer, free text
NGRAM = 8
LOOP_TIMES = 3  # occurrences of an n-gram that make a loop
ANSWER_TOKENS = range(5, 301)  # lengths of answers that are kept
Document = tuple[Sequence[int] | Array, Sequence[int] | Array, bool]  # tokens, roles, whether it ended
MIN_TEXT = 64  # tokens; shorter free text is dropped


@dataclass(frozen=True, slots=True)
class TokenizedDocuments(ArrayFile):
    """Concatenated documents: tokens and roles, the end of each document, and whether it has an end token."""

    tokens: Array
    roles: Array
    ends: Array
    is_ended: Array

    @classmethod
    def of(cls, documents: Sequence[Document]) -> "TokenizedDocuments":
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

    def select(self, indices: Iterable[int]) -> "TokenizedDocuments":
        return TokenizedDocuments.of([self.document(index) for index in indices])


def has_loop(tokens: Sequence[int]) -> bool:
    """Return whether an n-gram occurs at least `LOOP_TIMES` times."""
    return loop_start(tokens, LOOP_TIMES) < len(tokens)


def loop_start(tokens: Sequence[int], times: int = 2) -> int:
    """Return the position at which an n-gram first occurs for the `times`-th time; else the length."""
    seen: Counter[tuple[int, ...]] = Counter()
    for at in range(len(tokens) - NGRAM + 1):
        gram = tuple(tokens[at : at + NGRAM])
        seen[gram] += 1
        if seen[gram] >= times:
            return at
    return len(tokens)


def filter_documents(documents: TokenizedDocuments) -> TokenizedDocuments:
    """Keep dialogues whose answers end, are neither short nor long, and do not loop; cut free text at a loop."""
    kept = []
    for tokens, roles, is_ended in documents.items():
        if TEXT in roles:
            if _loops(tokens, roles):
                stop = loop_start(tokens.tolist(), LOOP_TIMES)
                tokens, roles, is_ended = tokens[:stop], roles[:stop], False
            is_good = len(tokens) >= MIN_TEXT
        else:
            sizes = [len(answer) for answer in runs(tokens, roles, ANSWER)]
            is_sized = bool(sizes) and all(size in ANSWER_TOKENS for size in sizes)
            is_good = is_ended and is_sized and not _loops(tokens, roles)
        if is_good:
            kept.append((tokens, roles, is_ended))
    return TokenizedDocuments.of(kept)


def _loops(tokens: Array, roles: Array) -> bool:
    """Return whether an n-gram that the teacher wrote occurs at least `LOOP_TIMES` times."""
    if len(tokens) < NGRAM:
        return False
    is_written = sliding_window_view((roles == ANSWER) | (roles == TEXT), NGRAM).all(-1)
    grams = Counter(map(bytes, sliding_window_view(tokens, NGRAM)[is_written]))
    return max(grams.values(), default=0) >= LOOP_TIMES


def runs(tokens: Array, roles: Array, role: int) -> list[list[int]]:
    """Return the runs of consecutive tokens with a role."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (roles == role).astype(np.int8), [0]))))
    return [tokens[begin:end].tolist() for begin, end in edges.reshape(-1, 2)]


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
            words = _words(text)
            self.whole.add(" ".join(words))
            self.grams.update(self._grams(words))
        for keys, text in avoid:
            wanted = frozenset(word for key in keys for word in _words(key))
            self.avoid.setdefault(max(wanted, key=len), []).append((wanted, 2 * len(_words(text))))

    def _grams(self, words: Sequence[str]) -> set[str]:
        return {" ".join(words[at : at + NGRAM]) for at in range(len(words) - NGRAM + 1)}

    def __contains__(self, text: object) -> bool:
        words = _words(str(text))
        if " ".join(words) in self.whole or not self.grams.isdisjoint(self._grams(words)):
            return True
        known = set(words)
        found = (entry for word in known for entry in self.avoid.get(word, ()))
        return any(len(words) <= limit and wanted <= known for wanted, limit in found)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


@dataclass(frozen=True, slots=True)
class UserTurns:
    """What a user says in a dialogue, and words that together mark a question as held out."""

    turns: tuple[str, ...]
    avoid: tuple[str, ...] = ()


def read_turns(file: Path) -> list[UserTurns]:
    """Read user turns from JSONL; raise InputError about a bad line."""
    return read_lines(file, UserTurns, "turns", 'each line is {"turns": ["what the user says"]}')


def read_held_out(files: Sequence[Path]) -> HeldOut:
    """Return the `turns` of JSONL files, and their `avoid` words, as texts held out from training."""
    found = [one for file in files for one in read_turns(file)]
    texts = (text for one in found for text in one.turns)
    return HeldOut(texts, ((one.avoid, " ".join(one.turns)) for one in found if one.avoid))


def to_stream(documents: TokenizedDocuments, end: int) -> TokenStream:
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

    def __init__(self, documents: TokenizedDocuments, length: int, pad: int, seed: int, shortest: int = 0) -> None:
        sizes = np.diff(documents.ends, prepend=0)
        chosen = np.flatnonzero(~documents.is_text() & (sizes <= length) & (sizes > shortest))
        if not len(chosen):
            raise InputError("data", f"no dialogue has {shortest + 1} to {length} tokens", "change the rows' seq_len")
        self.documents, self.length, self.pad = documents, length, pad
        self.order = Epochs(chosen, seed)

    def __call__(self, index: int) -> TrainingRow:
        document = self.documents.document(self.order(index))
        return weigh_dialogue(*document, self.length, self.pad, DialogueWeights())


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
    share = weights.truth if is_ended else 0.0
    teacher[is_answer], truth[is_answer] = weights.answer * (1 - share), weights.answer * share
    for begin in np.flatnonzero(np.diff(is_answer.astype(np.int8), prepend=0) == 1):
        first = slice(begin, begin + weights.num_first)
        factor = np.where(is_answer[first], weights.first, 1)
        teacher[first], truth[first] = teacher[first] * factor, truth[first] * factor
    teacher[0] = truth[0] = 0
    return TrainingRow(out, teacher + truth > 0, is_answer, (length,), 0.0, "dialogue", teacher, truth)

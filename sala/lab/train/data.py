"""Rows of tokens for training, as a pure function of the step: any run can stop and go on with the same rows.

Documents become one long line of tokens per source, with an end mark after each, cut into rows. Which row comes
when is decided by seeded permutations, so nothing but the step's number must be remembered.
"""

import hashlib
import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sala.errors import InputError, MissingExtra
from sala.lab.train.recipe import Source
from sala.text.tokenizer import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]
_BATCH = 256  # documents tokenised at a time


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """tokens [n], and which of them are learnt and which belong to an answer; where documents end in it.

    `truth` is how much the text itself counts where a teacher's opinion is learnt too.
    """

    tokens: Array
    learn: Array
    answer: Array
    lengths: tuple[int, ...]
    truth: float = 0.0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one length that are computed at once: one dialogue, text or needle case per row, padded on the right.

    tokens           [B, T] int64
    teacher_weight   [B, T] float32, weight of KL(teacher || student) in the prediction of this token
    truth_weight     [B, T] float32, weight of this token's cross-entropy
    answer           [B, T] bool, tokens that an assistant wrote (the end of the turn included)
    kinds            of each row: "dialogue", "text" or "needle"
    is_sparse        whether attention is sparse from `dense_len` on, or dense at every length

    Weights belong to the token that is predicted: position t - 1 carries the loss of token t. The first token of a row
    and the padding have no weight. The loss of a step is Σ (teacher_weight · KL + truth_weight · cross-entropy) over
    all its micro-batches, divided by the sum of their `count`.
    """

    tokens: Array
    teacher_weight: Array
    truth_weight: Array
    answer: Array
    kinds: tuple[str, ...]
    is_sparse: bool = False

    @property
    def count(self) -> int:
        """Return how many tokens have a loss."""
        return int(np.count_nonzero((self.teacher_weight != 0) | (self.truth_weight != 0)))


# The micro-batches of a step, as a pure function of its number. Their shapes are the same in every step.
StepSource = Callable[[int], list[MicroBatch]]


@dataclass(frozen=True, slots=True)
class TokenStream:
    """All tokens of a source after each other; `learn` marks those with a loss, `ends` is where documents end."""

    tokens: Array
    learn: Array
    ends: Array

    def save(self, file: Path) -> None:
        draft = file.with_name(f".{file.name}.part")
        with draft.open("wb") as handle:
            np.savez(handle, tokens=self.tokens, learn=self.learn, ends=self.ends)
        draft.rename(file)

    @classmethod
    def load(cls, file: Path) -> "TokenStream":
        with np.load(file, allow_pickle=False) as arrays:
            return cls(arrays["tokens"], arrays["learn"], arrays["ends"])

    def row(self, index: int, length: int) -> TrainingRow:
        """The index-th piece of `length` tokens; what is left at the end of the line is never used."""
        begin = index * length
        piece = slice(begin, begin + length)
        inner = self.ends[np.searchsorted(self.ends, begin, "right") : np.searchsorted(self.ends, begin + length)]
        edges = [begin, *inner.tolist(), begin + length]
        lengths = tuple(after - before for before, after in pairwise(edges) if after > before)
        learn = self.learn[piece]
        return TrainingRow(self.tokens[piece].astype(np.int64), learn, np.zeros(length, np.bool_), lengths)


def read_documents(source: Source, base: Path) -> Iterator[Any]:
    """Texts, or lists of messages for a chat source; a bad line is named."""
    if source.dataset:
        yield from _from_hub(source)
        return
    path = base / source.path
    if not path.is_file():
        raise InputError("data", f"{path} does not exist", "paths in a recipe are relative to the recipe's directory")
    name = path.name.removesuffix(".xz")
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as handle:
        if not name.endswith((".jsonl", ".json")):
            yield handle.read()
            return
        for number, text in enumerate(handle, 1):
            if text.strip():
                yield _field(_parse(text, path, number), source, f"{path}, line {number}")


def _parse(text: str, path: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError("data", f"{path}, line {number}, is no JSON object", "each line must be one")
    return value


def _field(record: dict[str, Any], source: Source, where: str) -> Any:
    name = "messages" if source.kind == "chat" else source.field
    value = record.get(name)
    if not isinstance(value, list if source.kind == "chat" else str) or not value:
        raise InputError("data", f"{where} has no {name}", "name the right field, or mend the line")
    return value


def _from_hub(source: Source) -> Iterator[Any]:
    try:
        import datasets
    except ImportError:
        raise MissingExtra("datasets", "train") from None
    records = datasets.load_dataset(source.dataset, split=source.split, streaming=True)
    for number, record in enumerate(records):
        yield _field(record, source, f"{source.dataset}, record {number}")


def tokenize(
    source: Source, tokenizer: Tokenizer, eos: int, base: Path, note: Callable[[str, int], None]
) -> TokenStream:
    """A source as one line of tokens. `note` hears how many documents are done."""
    pieces: list[Array] = []
    learn: list[Array] = []
    pending: list[str] = []

    def flush() -> None:
        for ids in tokenizer.encode_many(pending):
            pieces.append(np.array([*ids, eos], np.uint32))
            learn.append(np.ones(len(ids) + 1, np.bool_))
        pending.clear()

    for number, document in enumerate(read_documents(source, base)):
        if source.max_documents is not None and number >= source.max_documents:
            break
        if source.kind == "chat":
            ids, mask = encode_dialogue(document, tokenizer)
            pieces.append(np.array(ids, np.uint32))
            learn.append(np.array(mask, np.bool_))
        else:
            pending.append(document)
            if len(pending) == _BATCH:
                flush()
        if number % _BATCH == 0:
            note(source.path or source.dataset, number)
    flush()
    if not pieces:
        raise InputError("data", f"{source.path or source.dataset} holds no documents")
    ends = np.cumsum([len(piece) for piece in pieces])
    return TokenStream(np.concatenate(pieces), np.concatenate(learn), ends)


def encode_dialogue(messages: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Ids of a conversation and which of them the assistant wrote, the end of each of its turns included."""
    conversations = tokenizer.encode_answers(messages)
    if not conversations or not any(conversations[0][1]):
        raise InputError("data", "holds a conversation without an answer of the assistant", "every one needs one")
    if len(conversations) > 1:
        raise InputError("data", "holds a conversation that the chat template rewrites", "split it into several")
    return conversations[0]


def load_stream(
    source: Source, tokenizer: Tokenizer, eos: int, base: Path, cache: Path, note: Callable[[str, int], None]
) -> TokenStream:
    """The tokenised source, from the cache where an earlier run left it."""
    stamp = (base / source.path).stat() if source.path and (base / source.path).is_file() else None
    key = repr((source, eos, tokenizer.fingerprint, stamp and (stamp.st_size, stamp.st_mtime_ns)))
    file = cache / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.npz"
    if file.is_file():
        return TokenStream.load(file)
    line = tokenize(source, tokenizer, eos, base, note)
    cache.mkdir(parents=True, exist_ok=True)
    line.save(file)
    return line


class StreamRows:
    """Rows of one line, each once per epoch, in an order that differs every time."""

    def __init__(self, line: TokenStream, length: int, seed: int, truth: float = 0.0) -> None:
        self.line, self.length, self.seed, self.truth = line, length, seed, truth
        self.count = len(line.tokens) // length
        if not self.count:
            raise InputError("data", f"{len(line.tokens):,} tokens make no row of {length:,}", "lower seq_len")
        self._epoch, self._order = -1, np.arange(0)

    def __call__(self, index: int) -> TrainingRow:
        epoch, place = divmod(index, self.count)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.count)
            self._epoch = epoch
        return replace(self.line.row(int(self._order[place]), self.length), truth=self.truth)


class Mixture:
    """Rows from several sources in given shares; row number i is the same whoever asks, and whenever."""

    def __init__(self, makers: Sequence[Callable[[int], TrainingRow]], weights: Sequence[float], seed: int) -> None:
        self.makers, self.seed = list(makers), seed
        self.shares = np.cumsum(np.asarray(weights, np.float64)) / np.sum(weights)
        self._drawn = [0] * len(self.makers)
        self._next = 0

    def seek(self, number: int) -> None:
        """Go to row `number`: how many rows each source has given before follows from the seed alone."""
        if number < self._next:
            self._drawn, self._next = [0] * len(self.makers), 0
        for at in range(self._next, number):
            self._drawn[self._source(at)] += 1
        self._next = max(self._next, number)

    def _source(self, number: int) -> int:
        spread = (number * 0.6180339887498949 + self.seed * 0.324717957) % 1.0  # even shares in every short stretch
        return min(int(np.searchsorted(self.shares, spread, "right")), len(self.makers) - 1)

    def rows(self, first: int, count: int, rank: int = 0, world: int = 1) -> list[TrainingRow]:
        """Rows first … first + count - 1, of which this process takes its part."""
        self.seek(first)
        out = []
        share = count // world
        for at in range(first, first + count):
            source = self._source(at)
            if rank * share <= at - first < (rank + 1) * share:
                out.append(self.makers[source](self._drawn[source]))
            self._drawn[source] += 1
        self._next = first + count
        return out

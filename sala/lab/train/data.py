"""Training rows as a pure function of the step number, so that a resumed run sees the same rows.

The documents of a source are concatenated into one token stream, with an end token after each, and cut into rows.
Seeded permutations order the rows, so the step number is the only state.
"""

import hashlib
import lzma
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np

from sala.checkpoint.writer import replacing
from sala.config import parse_object
from sala.errors import InputError, MissingExtra
from sala.lab.train.recipe import Source
from sala.text.tokenizer import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]
_BATCH = 256  # documents tokenized at a time


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """Tokens [n] with masks of those with a loss and of those in an answer; `lengths` of the documents in it.

    `truth` is the share of the text's own tokens against the teacher's distribution, and answers have a loss of their
    own. A row of a mixture has weights per token [n] instead: of KL(teacher || student) and of the cross-entropy where
    this token is predicted. The first token of a row and its padding have no weight.
    """

    tokens: Array
    loss_mask: Array
    answer: Array
    lengths: tuple[int, ...]
    truth: float = 0.0
    kind: str = "text"  # or "dialogue", "needle"
    teacher_weight: Array | None = None
    truth_weight: Array | None = None


RowMaker = Callable[[int], TrainingRow]  # returns row 0, 1, … as a pure function of its number


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """A dataclass of arrays that is stored as an .npz file."""

    def save(self, file: Path) -> None:
        """Write the file atomically."""
        with replacing(file) as draft, draft.open("wb") as handle:
            np.savez(handle, **{item.name: getattr(self, item.name) for item in fields(self)})

    @classmethod
    def load(cls, file: Path) -> Self:
        with np.load(file, allow_pickle=False) as arrays:
            return cls(**arrays)


@dataclass(frozen=True, slots=True)
class TokenStream(ArrayFile):
    """The concatenated documents of a source; `loss_mask` marks tokens with a loss, `ends` the ends of documents."""

    tokens: Array
    loss_mask: Array
    ends: Array

    def row(self, index: int, length: int) -> TrainingRow:
        """Return the index-th piece of `length` tokens; the remainder of the stream is not used."""
        begin = index * length
        piece = slice(begin, begin + length)
        inner = self.ends[np.searchsorted(self.ends, begin, "right") : np.searchsorted(self.ends, begin + length)]
        edges = [begin, *inner.tolist(), begin + length]
        lengths = tuple(after - before for before, after in pairwise(edges) if after > before)
        loss_mask = self.loss_mask[piece]
        return TrainingRow(self.tokens[piece].astype(np.int64), loss_mask, np.zeros(length, np.bool_), lengths)


def read_documents(source: Source, base: Path) -> Iterator[Any]:
    """Yield texts, or lists of messages for a chat source; raise InputError that names a bad line."""
    if source.dataset:
        try:
            import datasets
        except ImportError:
            raise MissingExtra("datasets", "train") from None
        records = datasets.load_dataset(source.dataset, split=source.split, streaming=True)
        for number, record in enumerate(records):
            yield _field(record, source, f"{source.dataset}, record {number}")
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
            if not text.strip():
                continue
            value = parse_object(text)
            if value is None:
                raise InputError("data", f"{path}, line {number}, is not a JSON object", "write one object per line")
            yield _field(value, source, f"{path}, line {number}")


def _field(record: dict[str, Any], source: Source, where: str) -> Any:
    name = "messages" if source.kind == "chat" else source.field
    value = record.get(name)
    if not isinstance(value, list if source.kind == "chat" else str) or not value:
        raise InputError("data", f"{where} has no {name}", "set field, or correct the line")
    return value


def tokenize(
    source: Source, tokenizer: Tokenizer, eos: int, base: Path, note: Callable[[str, int], None]
) -> TokenStream:
    """Return a source as a token stream; `note` is called with the number of documents done."""
    pieces: list[Array] = []
    loss_mask: list[Array] = []
    documents = islice(read_documents(source, base), source.max_documents)
    while batch := list(islice(documents, _BATCH)):
        note(source.path or source.dataset, len(pieces))
        if source.kind == "chat":
            encoded = [encode_dialogue(messages, tokenizer) for messages in batch]
        else:
            encoded = [([*ids, eos], [True] * (len(ids) + 1)) for ids in tokenizer.encode_many(batch)]
        pieces += [np.array(ids, np.uint32) for ids, _ in encoded]
        loss_mask += [np.array(mask, np.bool_) for _, mask in encoded]
    if not pieces:
        raise InputError("data", f"{source.path or source.dataset} has no documents", "give a source with text")
    ends = np.cumsum([len(piece) for piece in pieces])
    return TokenStream(np.concatenate(pieces), np.concatenate(loss_mask), ends)


def encode_dialogue(messages: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Return the ids of a conversation and the mask of the assistant's turns, their end tokens included.

    Raise InputError if the assistant says nothing, or if the chat template rewrites earlier turns.
    """
    conversations = tokenizer.encode_answers(messages)
    if not conversations or not any(conversations[0][1]):
        raise InputError("data", "has a conversation without an assistant message", "add an answer to each")
    if len(conversations) > 1:
        raise InputError("data", "has a conversation that the chat template rewrites", "split it into several")
    return conversations[0]


def load_stream(
    source: Source, tokenizer: Tokenizer, eos: int, base: Path, cache: Path, note: Callable[[str, int], None]
) -> TokenStream:
    """Return the tokenized source, from `cache` if an earlier run wrote it there."""
    stamp = (base / source.path).stat() if source.path and (base / source.path).is_file() else None
    key = repr((source, eos, tokenizer.fingerprint, stamp and (stamp.st_size, stamp.st_mtime_ns)))
    file = cache / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.npz"
    if file.is_file():
        return TokenStream.load(file)
    stream = tokenize(source, tokenizer, eos, base, note)
    cache.mkdir(parents=True, exist_ok=True)
    stream.save(file)
    return stream


class Epochs:
    """Items in random order, each once per epoch, in an order that differs between epochs."""

    def __init__(self, items: Array, seed: int) -> None:
        self.items, self.seed = items, seed
        self._epoch, self._order = -1, np.arange(0)

    def __call__(self, index: int) -> int:
        epoch, place = divmod(index, len(self.items))
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.items)
            self._epoch = epoch
        return int(self._order[place])


class StreamRows:
    """Rows of one token stream in random order."""

    def __init__(self, stream: TokenStream, length: int, seed: int, truth: float = 0.0) -> None:
        self.stream, self.length, self.truth = stream, length, truth
        size = len(stream.tokens)
        if size < length:
            raise InputError("data", f"has {size:,} tokens, fewer than a row's {length:,}", "lower seq_len")
        self.order = Epochs(np.arange(size // length), seed)

    def __call__(self, index: int) -> TrainingRow:
        return replace(self.stream.row(self.order(index), self.length), truth=self.truth)


class Mixture:
    """Rows from several sources in given shares; row i depends on the seed only."""

    def __init__(self, makers: Sequence[RowMaker], weights: Sequence[float], seed: int) -> None:
        self.makers, self.seed = list(makers), seed
        self.shares = np.cumsum(np.asarray(weights, np.float64)) / np.sum(weights)
        self._taken = [0] * len(self.makers)  # rows that each source has contributed before row `_next`
        self._next = 0

    def __call__(self, number: int) -> TrainingRow:
        if number < self._next:
            self._taken, self._next = [0] * len(self.makers), 0
        for at in range(self._next, number):
            self._taken[self._source(at)] += 1
        self._next = number
        source = self._source(number)
        return self.makers[source](self._taken[source])

    def _source(self, number: int) -> int:
        # a low-discrepancy sequence: the shares are even in short runs
        spread = (number * 0.6180339887498949 + self.seed * 0.324717957) % 1.0
        return min(int(np.searchsorted(self.shares, spread, "right")), len(self.makers) - 1)

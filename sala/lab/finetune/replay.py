"""Long rows that are mixed into a run so that the model goes on finding things in long texts.

Two kinds: conversations about facts hidden in a long text, of which the answers are learnt, and pieces of the user's
own long texts, of which every token is learnt.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from sala.config import SalaConfig
from sala.errors import InputError
from sala.lab.eval.documents import LINES, read_documents, read_source
from sala.lab.eval.tasks.needle import NeedleMaker, NeedleSpec
from sala.lab.finetune.dialogues import Example
from sala.lab.finetune.options import FinetuneOptions
from sala.lab.train.recall import needle_maker
from sala.text.tokenizer import Tokenizer

FACTS = 12  # topics in a row, with up to three similar facts each
LEAST = 1024  # tokens of a row; facts and questions leave little text in fewer
EXCESS = 3  # the rows of a small run may take so many times their share, so that they are long
_TRIES = 8


def row_length(
    options: FinetuneOptions, config: SalaConfig, num_tokens: int, fits: Callable[[int], bool]
) -> int | None:
    """Return the tokens of a long row; None if there are to be none.

    By default twice the length from which attention is sparse, halved until one row is at most three times the share,
    and fits into memory; rows as long as the examples' own always do. Rows in which attention is dense teach nothing
    about the selection of blocks: they are made only if long rows were asked for.
    """
    if options.keep_long_length is not None:
        return options.keep_long_length
    known, dense = config.trained_length or config.max_position_embeddings, config.sparse_config.dense_len
    length = min(2 * max(config.sparse_config.dense_len, LEAST), known)
    while length > LEAST and (
        length > EXCESS * options.long_share * num_tokens or (length > options.max_length and not fits(length))
    ):
        length //= 2
    is_wanted = options.keep_long is not None or options.long_texts is not None
    return max(length, min(LEAST, known)) if is_wanted or length > dense or dense >= known else None


def long_rows(options: FinetuneOptions, path: Path, end: int, num_tokens: int, length: int) -> list[Example]:
    """Return the long rows of a run over `num_tokens` of examples, at least one. They repeat with the examples."""
    count = max(1, round(options.long_share * num_tokens / length))
    tokenizer = Tokenizer.load(path)
    try:
        documents = _read(options.long_texts) if options.long_texts is not None else None
        maker = needle_maker(tokenizer, end, documents, options.seed)
        pieces = iter(()) if documents is None else _pieces(tokenizer, documents, length, end, options.seed)
        rows = []
        for index in range(count):
            piece = next(pieces, None) if index % 2 else None
            rows.append(_needles(maker, length, index, options.seed) if piece is None else piece)
        return rows
    finally:
        tokenizer.close()


def _read(path: Path) -> list[str]:
    is_lines = path.is_file() and path.suffix in LINES
    return read_documents(path, "long_texts") if is_lines else read_source(path).documents


def _needles(maker: NeedleMaker, length: int, index: int, seed: int) -> Example:
    """Return a conversation about as many facts as fit."""
    rng = np.random.default_rng([seed, index])
    topics, keys = FACTS, int(rng.integers(1, 4))
    for _ in range(_TRIES):
        try:
            spec = NeedleSpec(length, num_keys=keys, split="train")
            ids, is_answer = maker.dialogue(spec, index, int(rng.integers(1, keys + 1)), topics)
            return Example(np.array(ids, np.int64), np.array(is_answer, np.bool_), 0)
        except InputError:  # fewer facts may fit
            topics, keys = max(1, topics // 2), max(1, keys - 1)
    raise InputError("keep_long_length", f"is {length}, too short for a hidden fact", "raise it, or --keep-long 0")


def _pieces(tokenizer: Tokenizer, documents: list[str], length: int, end: int, seed: int) -> Iterator[Example]:
    """Yield pieces of the texts with at least half of `length` tokens, in random order."""
    order = np.random.default_rng(seed).permutation(len(documents))
    for at in order.tolist():
        ids = [*tokenizer.encode(documents[at]), end]
        for begin in range(0, len(ids), length):
            piece = ids[begin : begin + length]
            if 2 * len(piece) >= length:
                mask = np.ones(len(piece), np.bool_)
                mask[0] = False
                yield Example(np.array(piece, np.int64), mask, 0)

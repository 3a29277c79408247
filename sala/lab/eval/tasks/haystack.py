"""Real text of any length, as token ids that are cut at the ends of sentences.

Every sentence is encoded once, by itself, together with the white space before it, and the ids are concatenated: a
long text then costs one copy. Tokenizers start a new word at such joins, so the ids are those of the whole text, except
with tokenizers that merge across white space; even there the decoded text is the same.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sala.errors import InputError

Encode = Callable[[str], Sequence[int]]
Ids = NDArray[np.int32]

PARAGRAPH = "\n\n"  # between pieces of different documents
ANCHOR = "\x02"  # a character that merges with nothing
SLACK = 16  # tokens that may be missing before words are cut as well
SENTENCE_END = re.compile(
    r"""(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bSt)(?<!\b[A-Z])[.!?…]["'”’)\]]*(?=\s+["'“‘(\[]?[A-Z0-9])"""
    r"""|[。！？]["'”’）」]*(?=.)"""
    r"""|(?<=\S)(?=[ \t]*\n[ \t]*\n)"""
)
LINE_END = re.compile(r"(?<=\S)(?=[ \t]*\n)")
MAX_SENTENCE = 600  # characters; what is longer (a table, a program) is cut into lines


@dataclass(frozen=True)
class Stretch:
    """Token ids, and the places (0 and the end among them) where another sentence can be inserted."""

    tokens: Ids
    boundaries: NDArray[np.int64]


@dataclass(frozen=True)
class _Document:
    """`ends[i]` is the end of sentence i in `tokens`."""

    sentences: list[str]
    tokens: Ids
    ends: NDArray[np.int64]


class Haystack:
    """Documents, each encoded when it is first needed."""

    def __init__(self, documents: Sequence[str], encode: Encode) -> None:
        # text such as <|im_end|> must not become a special token
        texts = (document.replace("<|", "< |").strip() for document in documents)
        self._texts = [text for text in texts if text]
        if not self._texts:
            raise InputError("haystack", "has no text", "give more documents")
        self._encode = encode
        self._joint = np.array(encode(PARAGRAPH), np.int32)
        self._documents: dict[int, _Document] = {}

    def cut(self, num_tokens: int, rng: np.random.Generator) -> Stretch:
        """Return documents, each from a random sentence on, of `num_tokens` or a few words less.

        Where the next sentence does not fit, the gap is filled with the ending of that sentence, at the front.
        """
        pieces: list[Ids] = []
        boundaries: list[NDArray[np.int64]] = []
        length = 0
        for document in self._visit(rng):
            start = int(rng.integers(len(document.sentences)))
            head = np.array(self._encode(document.sentences[start].lstrip()), np.int32)
            if pieces:
                head = np.concatenate([self._joint, head])
            ends = document.ends[start:] - document.ends[start] + len(head)
            num_fit = int(np.searchsorted(ends, num_tokens - length, side="right"))
            if num_fit:
                body = document.tokens[document.ends[start] : document.ends[start + num_fit - 1]]
                pieces += [head, body]
                boundaries.append(length + ends[:num_fit])
                length += int(ends[num_fit - 1])
            if num_fit < len(ends):
                misfit = document.sentences[start + num_fit]
                break
        joint = self._joint if pieces else self._joint[:0]
        front = self._ending(misfit, num_tokens - length - len(joint))
        if len(front):
            pieces = [front, joint, *pieces]
            boundaries = [np.array([len(front)]), *(each + len(front) + len(joint) for each in boundaries)]
        tokens = np.concatenate([np.zeros(0, np.int32), *pieces])
        return Stretch(tokens, np.concatenate([np.zeros(1, np.int64), *boundaries]))

    def _visit(self, rng: np.random.Generator) -> Iterator[_Document]:
        """Yield all documents in random order, again and again."""
        while True:
            for index in rng.permutation(len(self._texts)).tolist():
                if index not in self._documents:
                    self._documents[index] = self._read(self._texts[index])
                yield self._documents[index]

    def _read(self, text: str) -> _Document:
        sentences = split_sentences(text)
        ids = [self._encode(sentence) for sentence in sentences]
        ends = np.cumsum([len(each) for each in ids])
        return _Document(sentences, np.concatenate([np.array(each, np.int32) for each in ids]), ends)

    def _ending(self, sentence: str, max_tokens: int) -> Ids:
        """Return the last words of a sentence that fit, or its last characters where words are too long."""
        ids: Sequence[int] = ()
        for starts in ([match.start() for match in re.finditer(r"\S+", sentence)], range(len(sentence))):
            at = bisect_left(starts, True, key=lambda start: len(self._encode(sentence[start:])) <= max_tokens)
            ids = self._encode(sentence[starts[at] :]) if at < len(starts) else ()
            if max_tokens - len(ids) <= SLACK:
                break
        return np.array(ids, np.int32)


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, each with the white space before it; joined they are the text.

    A line break ends a sentence only before a blank line, or where the sentence would be too long.
    """
    sentences = _split(text, SENTENCE_END)
    return [part for one in sentences for part in (_split(one, LINE_END) if len(one) > MAX_SENTENCE else [one])]


def _split(text: str, end: re.Pattern[str]) -> list[str]:
    ends = sorted({0, *(match.end() for match in end.finditer(text)), len(text)})
    return [text[start:stop] for start, stop in pairwise(ends)]


def by_piece(encode: Encode) -> Encode:
    """Return `encode` for pieces of a longer text: without the space that some tokenizers put before a text."""
    if len(encode("")):
        raise InputError("encode", "adds tokens of its own", "switch off BOS and EOS, as in encode(text, bos=False)")
    word = list(encode("x"))
    if list(encode("\nx"))[-len(word) :] == word:
        return encode
    num_extra = len(encode(ANCHOR))
    return lambda text: encode(ANCHOR + text)[num_extra:]

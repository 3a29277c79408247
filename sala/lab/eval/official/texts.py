"""What RULER takes from elsewhere: word lists, essays with their sentences, and documents with questions."""

import random
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, cycle, islice
from typing import Any

from sala.errors import MissingExtra
from sala.lab.eval.tasks.haystack import split_sentences

CACHED_CUTS = 64


def read_words() -> dict[str, list[str]]:
    """Return the nouns, adjectives and verbs of the package wonderwords; raise MissingExtra without it."""
    try:
        from wonderwords import RandomWord
    except ImportError:
        raise MissingExtra("wonderwords", "eval") from None
    lists = RandomWord()._categories
    return {kind: list(lists[kind]) for kind in ("noun", "adjective", "verb")}


class WordPairs(Sequence[str]):
    """All different "adjective-noun" in sorted order, six million of them, without a list of them.

    Pairs sort by adjective unless one adjective with its hyphen begins another: only such groups are sorted as a whole.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        self._nouns = sorted(set(nouns))
        self._groups: list[tuple[str, list[str] | None]] = []  # first adjective; all pairs if there are several
        members: list[list[str]] = []
        for adjective in sorted(set(adjectives), key=lambda one: f"{one}-"):
            if members and f"{adjective}-".startswith(f"{members[-1][0]}-"):
                members[-1].append(adjective)
            else:
                members.append([adjective])
        for first, *others in members:
            pairs = {f"{one}-{noun}" for one in (first, *others) for noun in self._nouns} if others else None
            self._groups.append((first, None if pairs is None else sorted(pairs)))
        sizes = (len(self._nouns) if pairs is None else len(pairs) for _, pairs in self._groups)
        self._ends = [*accumulate(sizes)]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        at = bisect_right(self._ends, index)
        if at == len(self._ends):
            raise IndexError(index)
        first, pairs = self._groups[at]
        place = index - (self._ends[at - 1] if at else 0)
        return f"{first}-{self._nouns[place]}" if pairs is None else pairs[place]


class Essays:
    """Essays as words; texts that are longer than all of them repeat them, as RULER does."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._words = re.sub(r"\s+", " ", " ".join(texts)).split(" ")
        self._ends = [*accumulate(len(word) + 1 for word in self._words)]
        self.sentences = lru_cache(CACHED_CUTS)(self._sentences)

    def num_chars(self, num_words: int) -> int:
        """Return how many characters so many words have."""
        rounds, rest = divmod(num_words, len(self._words))
        return rounds * self._ends[-1] + (self._ends[rest - 1] if rest else 0)

    def _sentences(self, num_words: int) -> list[str]:
        """Return the first words as sentences."""
        words = self._words[:num_words]
        if num_words > len(self._words):
            words = [*islice(chain.from_iterable(cycle([self._words])), num_words)]
        return to_sentences(" ".join(words).strip())


def has_punkt() -> bool:
    """Whether nltk and its model of sentences are installed, which lm-eval uses."""
    try:
        from nltk.data import find

        find("tokenizers/punkt_tab")
    except (ImportError, LookupError):
        return False
    return True


def to_sentences(text: str) -> list[str]:
    """Return the sentences of a text, by nltk where its model is installed, else by our rules."""
    if has_punkt():
        from nltk import sent_tokenize

        return [*sent_tokenize(text)]
    return [sentence.strip() for sentence in split_sentences(text)]


@dataclass(frozen=True)
class DocumentQuestion:
    """`needed` are the places of the documents that it is about, `related` of others that go with them."""

    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionDocuments:
    """Documents without repetitions, sorted, and questions about them."""

    texts: list[str]
    questions: list[DocumentQuestion]

    @staticmethod
    def choose(documents: Sequence[str], question: DocumentQuestion, num_docs: int, rng: random.Random) -> list[str]:
        """Return the documents of a question and others, so many in all; fewer than there are."""
        needed, related = [*question.needed], [*question.related]
        missing = max(0, num_docs - len(needed))
        if missing > len(related):
            known = {*needed, *related}
            others = [at for at in range(len(documents)) if at not in known]
            chosen = needed + related + rng.sample(others, missing - len(related))
        else:
            chosen = needed + rng.sample(related, missing)
        return [documents[at] for at in chosen]


def squad(data: Any) -> QuestionDocuments:
    """Return SQuAD 2.0's questions that have an answer; `data` is the content of dev-v2.0.json."""
    texts = sorted({part["context"] for article in data["data"] for part in article["paragraphs"]})
    places = {text: at for at, text in enumerate(texts)}
    questions = []
    for article in data["data"]:
        whole = [places[part["context"]] for part in article["paragraphs"]]
        for part in article["paragraphs"]:
            own = places[part["context"]]
            related = tuple(at for at in whole if at != own)
            questions += [
                DocumentQuestion(one["question"], tuple(each["text"] for each in one["answers"]), (own,), related)
                for one in part["qas"]
                if not one["is_impossible"]
            ]
    return QuestionDocuments(texts, questions)


def hotpotqa(data: Any) -> QuestionDocuments:
    """Return HotpotQA's questions; `data` is the content of hotpot_dev_distractor_v1.json."""

    def document(title: str, lines: Sequence[str]) -> str:
        return f"{title}\n{''.join(lines)}"

    texts = sorted({document(*one) for row in data for one in row["context"]})
    places = {text: at for at, text in enumerate(texts)}
    questions = [
        DocumentQuestion(row["question"], (row["answer"],), tuple(places[document(*one)] for one in row["context"]))
        for row in data
    ]
    return QuestionDocuments(texts, questions)


READERS = {"squad": squad, "hotpotqa": hotpotqa}

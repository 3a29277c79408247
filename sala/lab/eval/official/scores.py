"""The metrics of the benchmarks, as their authors define them. Each returns a share from 0 to 1."""

import re
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

CONTROLS = re.compile(r"[\x00-\x1f]")


def contains_all(answers: Sequence[str], text: str) -> float:
    """Return the share of the answers that occur in the text, in any case (RULER)."""
    given = _clean(text)
    return sum(answer.lower() in given for answer in answers) / len(answers)


def contains_any(answers: Sequence[str], text: str) -> float:
    """Return 1 if some answer occurs in the text, in any case (RULER's questions, BABILong, NoLiMa)."""
    given = _clean(text)
    return float(any(answer.lower() in given for answer in answers))


def _clean(text: str) -> str:
    return CONTROLS.sub("\n", text.strip()).strip().lower()


def continues(answer: str, prefix: str, text: str) -> float:
    """Return how alike the answer and the text are after the prefix; 0 without the prefix (MRCR)."""
    if not text.startswith(prefix):
        return 0.0
    return SequenceMatcher(None, text.removeprefix(prefix), answer.removeprefix(prefix)).ratio()


def overlap(wanted: Sequence[str], text: str) -> float:
    """Return the F1 of the nodes in the last line's "Final Answer: [a, b]" (GraphWalks); 1 if both are empty."""
    lines = text.rstrip("\n").split("\n")
    found = re.search(r"Final Answer:\s*\[(.*)\]", lines[-1])
    if found is None:
        return 0.0
    given = {part.strip().strip("'\"") for part in found[1].split(",") if part.strip()}
    if not given and not wanted:
        return 1.0
    common = len(given.intersection(wanted))
    return 2 * common / (len(given) + len(set(wanted)))


def word_f1(answers: Sequence[str], text: str, is_chinese: bool = False) -> float:
    """Return the best F1 over words, or over characters of Chinese, without case, articles and punctuation."""
    given = Counter(_units(text, is_chinese))
    return max(_f1(Counter(_units(answer, is_chinese)), given) for answer in answers)


def _units(text: str, is_chinese: bool) -> list[str]:
    kept = "".join(char for char in text.lower() if char.isalnum() or char.isspace() or char == "_")
    if is_chinese:
        return [char for char in kept if not char.isspace()]
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def _f1(wanted: Counter[str], given: Counter[str]) -> float:
    common = (wanted & given).total()
    return 2 * common / (wanted.total() + given.total()) if common else 0.0


def letter(wanted: str, text: str, letters: str = "ABCD", name: str | None = None) -> float:
    """Return 1 if the last single letter that the text names is the right one.

    Without a letter, the text may begin with the right one or with the `name` of the right option.
    """
    named = re.findall(rf"\b[{letters}]\b", text)
    if named:
        return float(named[-1] == wanted)
    text = text.strip()
    return float(text[:1].upper() == wanted or (name is not None and text.startswith(name)))


def choice(wanted: str, text: str) -> float:
    """Return 1 for the right letter, as LongBench v2 looks for it: in "The correct answer is (A)", else by itself."""
    text = text.replace("*", "")
    for pattern in (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])"):
        if found := re.search(pattern, text):
            return float(found[1] == wanted)
    found = re.search(r"^\W*([A-D])\b", text)
    return float(found is not None and found[1] == wanted)


def first_number(wanted: str, text: str) -> float:
    """Return 1 if the first whole number of the text is the right one (InfiniteBench's retrieval)."""
    found = re.search(r"[0-9]+", text)
    return float(found is not None and found[0] == wanted)


def first_value(wanted: str, text: str) -> float:
    """Return 1 if the first number, whole or decimal, has the right value."""
    found = re.search(r"-?\d+\.\d+|-?\d+", text)
    return float(found is not None and float(found[0]) == float(wanted))


def last_word(wanted: str, text: str) -> float:
    """Return 1 if the text ends with the right word or number."""
    words = text.translate(str.maketrans("", "", ".,`'\"*")).split()
    return float(bool(words) and words[-1] == wanted)


def has_word(wanted: str, text: str) -> float:
    """Return 1 if the right word is among the words of the text, which punctuation separates."""
    return float(wanted in re.split(r"[\s:\"'.,?!{}]+", text))


CITATION = re.compile(r" ?\[\d+\]?")
LISTED = 5  # answers that are enough


def long_answer(parts: Sequence[Sequence[str]], text: str) -> float:
    """Return the share of parts of which the text has some spelling (HELMET's ASQA).

    Citations, case, articles and punctuation do not matter.
    """
    given = _bare(CITATION.sub("", text))
    return sum(any(_bare(one) in given for one in part) for part in parts) / len(parts)


def listed(parts: Sequence[Sequence[str]], text: str) -> float:
    """Return the share of parts that the text names between commas, where five are enough (HELMET's QAMPARI)."""
    given = {_bare(one) for one in CITATION.sub("", text).split(",")}
    found = sum(any(_bare(one) in given for one in part) for part in parts)
    return min(LISTED, found) / min(LISTED, len(parts))


def _bare(text: str) -> str:
    """Return a text without case, articles and punctuation."""
    return " ".join(_units(text, False))

"""The metrics of the benchmarks, as their authors define them. Each returns a share from 0 to 1.

Those of InfiniteBench follow its compute_scores.py, which is stricter in some tasks than the copy in lm-eval.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

CONTROLS = re.compile(r"[\x00-\x1f]")
ARTICLES = re.compile(r"\b(a|an|the)\b")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


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
    if is_chinese:
        return [char for char in text.lower() if char.isalnum()]
    return ARTICLES.sub(" ", text.lower().translate(WITHOUT_PUNCTUATION)).split()


def _f1(wanted: Counter[str], given: Counter[str]) -> float:
    common = (wanted & given).total()
    return 2 * common / (wanted.total() + given.total()) if common else 0.0


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
    """Return 1 if the first number, whole or decimal and without its sign, has the right value (math_find)."""
    found = re.search(r"\d+\.\d+|\d+", text)
    return float(found is not None and float(found[0]) == float(wanted))


def last_number(wanted: str, text: str) -> float:
    """Return 1 if the last word, without marks such as ` and :, is the right whole number (code_run)."""
    words = re.sub(r"[.`'\":]", " ", text).split()
    try:
        return float(bool(words) and int(words[-1]) == int(wanted))
    except ValueError:
        return 0.0


def has_word(wanted: str, text: str) -> float:
    """Return 1 if the right word is among the words of the text, which punctuation separates (kv_retrieval)."""
    return float(wanted in re.split(r"[\s:\"'.,?!{}]+", text))


def has_name(wanted: str, text: str) -> float:
    """Return 1 if the right name is among the words of the text in capitals, as scripts have it (longdialogue)."""
    return has_word(wanted, text.upper())


def begins_with_choice(wanted: Sequence[str], text: str) -> float:
    """Return 1 if the answer is the right letter or option, both in `wanted` (longbook_choice).

    A first letter from A to D is the answer, of whatever word. Without one the answer is what follows "answer is" and
    the like, and without that the first word of these letters.
    """
    text = text.strip()
    if text and text[0] in "ABCD":
        return float(text[0] in wanted)
    if text in wanted:
        return 1.0
    text = re.sub(r" {2,}", " ", re.sub(r"[\n\"'.,?!{}]", " ", text))
    rest = _behind(("answer is:", "answer:", "answer is", "option is"), text)
    if rest is not None:
        return float(rest.startswith(tuple(wanted)))
    letters = (word for word in text.split() if word in "ABCD")
    return float(next(letters, "") in wanted)


def tells_choice(letter: str, name: str, text: str) -> float:
    """Return 1 if the answer begins with the right letter and a mark, or tells letter or name (code_debug).

    It tells what follows "answer is:" and the like. A letter alone counts for nothing.
    """
    text = text.strip()
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = re.sub(r" {2,}", " ", re.sub(r"[\n`'\"\-*]|[Oo]ption", " ", text))
    rest = _behind(("answer is:", "is:", "answer:"), text)
    return float(rest is not None and rest.startswith((letter, name)))


def _behind(phrases: Sequence[str], text: str) -> str | None:
    """Return what the first of the phrases that occurs has behind it and one more character; None without any."""
    found = next((phrase for phrase in phrases if phrase in text), None)
    return None if found is None else text.partition(found)[2][1:]


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

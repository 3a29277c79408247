"""Everyday questions with rules that judge an answer: written before any training, applied without a reader.

A line of JSON has a `kind`, the user's `turns`, and `rules`, all of which the last answer must meet:

    any         one of these words or phrases, as whole words in any case
    all         of each of these lists one
    none        none of these
    number      one of these, where digits and points do not go on
    items       exactly so many different items: lines of a list, or parts between commas
    json        a JSON object with these keys
    min_words, max_words
    pattern, not_pattern   a regular expression that is or is not found
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sala.errors import InputError

_ITEM = re.compile(r"^\s*(?:\d+\s*[.):]|[-*•–])\s+(.*\S)", re.M)
_WORD = re.compile(r"[\w'’]+")


@dataclass(frozen=True, slots=True)
class RuledQuestion:
    kind: str
    turns: tuple[str, ...]
    rules: Mapping[str, Any]
    avoid: tuple[str, ...] = ()


def read_questions(file: Path) -> list[RuledQuestion]:
    """Read questions from JSONL; raises InputError if a rule is not known."""
    out = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        entry = json.loads(line)
        if unknown := set(entry["rules"]) - set(_RULES):
            raise InputError("rules", f"{file}, line {number}: {', '.join(unknown)}", "use " + ", ".join(_RULES))
        out.append(RuledQuestion(entry["kind"], tuple(entry["turns"]), entry["rules"], tuple(entry.get("avoid", ()))))
    return out


def simple_questions() -> list[RuledQuestion]:
    """Return 64 questions that any working model answers, a quick check after a conversion or quantization."""
    listed = tomllib.loads(Path(__file__).with_name("questions.toml").read_text(encoding="utf-8"))
    return [RuledQuestion("simple", (text,), {"any": accepted}) for text, accepted in listed.items()]


def accuracy(questions: Sequence[RuledQuestion], answers: Sequence[str]) -> float:
    """Return the share of questions whose answer meets their rules; `answers[i]` is the answer to `questions[i]`."""
    met = [is_met(question, answer) for question, answer in zip(questions, answers, strict=True)]
    return sum(met) / max(1, len(met))


def is_met(question: RuledQuestion, answer: str) -> bool:
    """Return whether the answer meets all rules of the question."""
    return all(_RULES[name](value, answer) for name, value in question.rules.items())


def _has(phrase: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE) is not None


def _has_number(value: str, text: str) -> bool:
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    return re.search(rf"(?<![\w.]){re.escape(value)}(?![\w]|\.\d)", plain, re.IGNORECASE) is not None


def list_items(text: str) -> list[str]:
    """Return the items of a list: its marked lines, else unmarked lines after a colon, else parts between commas."""
    marked = _ITEM.findall(text)
    if marked:
        return marked
    body = text.rsplit(":", 1)[-1] if ":" in text else text
    lines = [line.strip() for line in body.splitlines() if line.strip()]
    if len(lines) > 1 and all(len(line) < 80 for line in lines):
        return lines
    sentence = re.split(r"(?<=[.!?])\s", body.strip())[0]
    parts = re.split(r",\s*(?:and\s+|or\s+)?|\s+and\s+", sentence)
    return [part.strip(" .!?") for part in parts if part.strip(" .!?")]


def _has_items(count: int, text: str) -> bool:
    items = [" ".join(_WORD.findall(item.lower())) for item in list_items(text)]
    return len(items) == count and len(set(items)) == count


def _has_json(keys: Sequence[str], text: str) -> bool:
    for start in (match.start() for match in re.finditer(r"\{", text)):
        try:
            value, _ = json.JSONDecoder().raw_decode(text[start:])
        except ValueError:
            continue
        if isinstance(value, dict) and all(key in value for key in keys):
            return True
    return False


_RULES: dict[str, Any] = {
    "any": lambda value, text: any(_has(phrase, text) for phrase in value),
    "all": lambda value, text: all(any(_has(phrase, text) for phrase in one) for one in value),
    "none": lambda value, text: not any(_has(phrase, text) for phrase in value),
    "number": lambda value, text: any(_has_number(number, text) for number in value),
    "items": _has_items,
    "json": _has_json,
    "min_words": lambda value, text: len(_WORD.findall(text)) >= value,
    "max_words": lambda value, text: len(_WORD.findall(text)) <= value,
    "pattern": lambda value, text: re.search(value, text) is not None,
    "not_pattern": lambda value, text: re.search(value, text) is None,
}

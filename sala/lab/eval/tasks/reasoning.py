"""Reasoning: arithmetic, stories of several steps, and puzzles with constraints, each with one right answer.

Three outcomes are reported separately: whether there is an answer, whether it is right, and whether the model never
stopped reasoning.
"""

import re
from collections.abc import Callable
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

from sala.errors import InputError
from sala.lab.eval.data import read_data
from sala.lab.eval.tasks.case import random
from sala.lab.eval.tasks.words import pick, words_of

ANSWER = re.compile(r"answer\s*[:：]\s*(.+)", re.IGNORECASE)
RULES: dict[str, Callable[[int, int], bool]] = {  # about the places of two names in a row of four
    "{} stands before {}.": lambda one, other: one < other,
    "{} does not stand next to {}.": lambda one, other: abs(one - other) > 1,
    "{} is neither first nor last.": lambda one, _: one in (1, 2),
}


class ReasoningProblem(NamedTuple):
    """A problem; `candidates` are the possible answers, none if the answer is a number."""

    text: str
    answer: str
    candidates: tuple[str, ...] = ()


class Judgement(NamedTuple):
    is_answered: bool
    is_correct: bool
    is_stuck: bool  # the reasoning never ended


def make(kind: str, number: int, seed: int = 0) -> ReasoningProblem:
    """Return the problem that seed, kind and number determine."""
    if kind not in KINDS:
        raise InputError("tasks", f"hold {kind!r}", f"choose from {', '.join(KINDS)}")
    problem = KINDS[kind](random(seed, "reasoning", kind, number))
    return problem._replace(text=f"{problem.text}\n\n{_text('closing')}")


def judge(problem: ReasoningProblem, text: str, reasoning: str) -> Judgement:
    """Judge an answer: `text` is what follows the `reasoning`."""
    given = read_answer(problem, text)
    is_stuck = given is None and bool(reasoning.strip()) and not text.strip()
    return Judgement(given is not None, given == problem.answer, is_stuck)


def read_answer(problem: ReasoningProblem, text: str) -> str | None:
    """Return what follows the last "Answer:", else the last number or name of the text; None if there is none."""
    marked = ANSWER.findall(text)
    if marked:
        found = _read(problem, marked[-1])
        return found[0] if found else None
    found = _read(problem, text)
    return found[-1] if found else None


def _read(problem: ReasoningProblem, text: str) -> list[str]:
    if problem.candidates:
        known = {one.casefold(): one for one in problem.candidates}
        return [known[word] for word in re.findall(r"[^\W\d_]+", text.casefold()) if word in known]
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text.replace("−", "-"))
    return [_plain(one) for one in numbers]


def _plain(number: str) -> str:
    value = float(number.replace(",", ""))
    return str(int(value)) if value == int(value) else str(value)


def _sum(rng: np.random.Generator) -> ReasoningProblem:
    """Return a sum of three to five steps with numbers of up to three digits."""
    value = int(rng.integers(12, 200))
    parts = [f"Begin with {value}."]
    for _ in range(int(rng.integers(3, 6))):
        kind, by = int(rng.integers(4)), int(rng.integers(2, 10))
        if kind == 0:
            much = int(rng.integers(15, 400))
            value, text = value + much, f"Add {much}."
        elif kind == 1:
            much = int(rng.integers(5, 120))
            value, text = value - much, f"Take away {much}."
        elif kind == 2:
            value, text = value * by, f"Multiply by {by}."
        else:
            value, text = 2 * value, "Double it."
        parts.append(text)
    return ReasoningProblem(f"{' '.join(parts)} Which number do you get?", str(value))


def _shop(rng: np.random.Generator) -> ReasoningProblem:
    name, fruit = pick(words_of("given_names"), rng), _some(2, "fruit", rng)
    counts, prices = rng.integers(3, 15, 2).tolist(), rng.integers(2, 10, 2).tolist()
    cost = counts[0] * prices[0] + counts[1] * prices[1]
    paid = cost + int(rng.integers(3, 60))
    text = _text("shop", name=name, fruit=fruit, counts=counts, prices=prices, paid=paid)
    return ReasoningProblem(text, str(paid - cost))


def _tank(rng: np.random.Generator) -> ReasoningProblem:
    flow, leak, hours, extra = (int(rng.integers(*span)) for span in ((20, 60), (3, 15), (4, 12), (10, 90)))
    text = _text("tank", flow=flow, leak=leak, hours=hours, extra=extra)
    return ReasoningProblem(text, str((extra + hours * (flow - leak)) // 2))


def _ages(rng: np.random.Generator) -> ReasoningProblem:
    names = _some(3, "given_names", rng)
    age, times, less, years = (int(rng.integers(*span)) for span in ((5, 14), (2, 5), (1, 4), (2, 12)))
    text = _text("ages", names=names, age=age, times=times, less=less, years=years)
    return ReasoningProblem(text, str(age + age * times + age * times - less + 3 * years))


def _text(key: str, **gaps: Any) -> str:
    template: str = read_data("reasoning")[key]
    return template.format(**gaps)


def _row(rng: np.random.Generator) -> ReasoningProblem:
    """Return a puzzle about who stands where; clues are added until only one order is left."""
    names = _some(4, "given_names", rng)
    secret = [names[at] for at in rng.permutation(4).tolist()]
    clues = _clues(secret)
    left = list(permutations(names))
    told: list[str] = []
    for at in rng.permutation(len(clues)).tolist():
        rule, one, other = clues[at]
        fewer = [order for order in left if RULES[rule](order.index(one), order.index(other))]
        if len(fewer) < len(left):
            left, told = fewer, [*told, rule.format(one, other)]
        if len(left) == 1:
            break
    place = int(rng.integers(4))
    listed = ", ".join(names[:-1]) + f" and {names[-1]}"
    question = f"Who is {('first', 'second', 'third', 'last')[place]}?"
    return ReasoningProblem(f"{listed} stand in a row. {' '.join(told)} {question}", secret[place], tuple(names))


def _clues(secret: list[str]) -> list[tuple[str, str, str]]:
    """Return every rule that holds in an order, with the two names it is about. Together they leave only this order."""
    clues = []
    for at, one in enumerate(secret):
        for rule, holds in RULES.items():
            is_about_one = rule.count("{}") == 1
            others = [place for place in range(len(secret)) if (place == at) == is_about_one]
            clues += [(rule, one, secret[place]) for place in others if holds(at, place)]
    return clues


def _some(count: int, kind: str, rng: np.random.Generator) -> list[str]:
    words = words_of(kind)
    return [words[at] for at in rng.choice(len(words), count, replace=False).tolist()]


KINDS: dict[str, Callable[[np.random.Generator], ReasoningProblem]] = {
    "arithmetic": _sum,
    "steps": lambda rng: pick((_shop, _tank, _ages), rng)(rng),
    "constraints": _row,
}

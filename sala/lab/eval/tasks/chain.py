"""Chains: a value passes from name to name across a long text, and all names that have it are asked for."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sala.lab.eval.tasks.case import Case, Frame, PromptWriter, Solution, insert, random, remaining
from sala.lab.eval.tasks.haystack import Haystack
from sala.lab.eval.tasks.words import sample_names


class Telling(NamedTuple):
    """One way to tell a chain: how it begins, how it goes on, and how to ask for it."""

    first: str
    then: str
    question: str
    opening: str


TELLINGS = (
    Telling(
        "Note for the store: box {name} holds {value} beads.",
        "Note for the store: box {name} holds exactly as many beads as box {other}.",
        "Which {count} boxes hold {value} beads? Name all of them, separated by commas.",
        "The boxes that hold {value} beads are",
    ),
    Telling(
        "From the logbook: the register {name} was set to {value}.",
        "From the logbook: the register {name} was copied from the register {other}.",
        "Which {count} registers contain {value}? Name all of them, separated by commas.",
        "The registers that contain {value} are",
    ),
    Telling(
        "By order of the guild, the house of {name} pays {value} coins a year.",
        "By order of the guild, the house of {name} pays the same as the house of {other}.",
        "Which {count} houses pay {value} coins a year? Name all of them, separated by commas.",
        "The houses that pay {value} coins a year are",
    ),
)


@dataclass(frozen=True)
class ChainSpec:
    """The number of chains and of links in each; one chain is asked for. Its repr seeds the cases."""

    num_chains: int = 2
    num_links: int = 5


class ChainMaker:
    """Makes cases, each determined by seed, spec, length and number. A link comes after the one it refers to."""

    def __init__(self, writer: PromptWriter, haystack: Haystack, seed: int = 0, spec: ChainSpec | None = None) -> None:
        self._writer = writer
        self._haystack = haystack
        self._seed = seed
        self._spec = spec or ChainSpec()

    def make(self, num_tokens: int, number: int, question: int = 0) -> Case:
        """Return a case of `num_tokens`, answer included; `question` selects the chain of the text."""
        writer, spec = self._writer, self._spec
        rng = random(self._seed, spec, num_tokens, number)
        telling = TELLINGS[int(rng.integers(len(TELLINGS)))]
        names = [one.upper() for one in sample_names(spec.num_chains * spec.num_links, rng)]
        chains = [names[at : at + spec.num_links] for at in range(0, len(names), spec.num_links)]
        values = [str(value) for value in rng.choice(90_000, size=spec.num_chains, replace=False) + 10_000]
        asked = question % spec.num_chains
        frame = _frame(telling, values[asked], spec.num_links)
        head, tail = writer.around(frame)
        answer = f" {', '.join(chains[asked])}."
        pieces = [writer.ids(f" {line}") for lines in _tell(telling, chains, values) for line in lines]
        max_tokens = max(writer.max_answer_tokens(f" {', '.join(chain)}.") for chain in chains)
        ends = [len(writer.around(_frame(telling, value, spec.num_links))[1]) for value in values]
        used = len(head) + max(ends) + max_tokens + sum(map(len, pieces))
        stretch = self._haystack.cut(remaining(num_tokens, used, "a chain"), rng)
        places = [
            place for _ in chains for place in sorted(rng.choice(stretch.boundaries, size=spec.num_links).tolist())
        ]
        return Case(
            token_ids=np.concatenate([head, insert(pieces, places, stretch.tokens), tail]),
            answer=answer,
            max_tokens=max_tokens,
            solution=Solution(tuple(chains[asked]), candidates=tuple(names)),
            facts={"question": frame.after.strip(), "depth_found": None},
        )


def _frame(telling: Telling, value: str, count: int) -> Frame:
    question, opening = (text.format(value=value, count=count) for text in (telling.question, telling.opening))
    return Frame("Between the following passages there are some notes.\n\n", f"\n\n{question}", opening)


def _tell(telling: Telling, chains: list[list[str]], values: list[str]) -> list[list[str]]:
    out = []
    for chain, value in zip(chains, values, strict=True):
        links = [telling.then.format(name=name, other=other) for other, name in pairwise(chain)]
        out.append([telling.first.format(name=chain[0], value=value), *links])
    return out

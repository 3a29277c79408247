"""Chains: a value passes from name to name across a long text, and all names that have it are asked for."""

from dataclasses import dataclass
from itertools import pairwise

from sala.lab.eval.data import read_data
from sala.lab.eval.tasks.case import Case, Frame, PromptWriter, Solution, insert, random
from sala.lab.eval.tasks.haystack import Haystack
from sala.lab.eval.tasks.words import pick, sample_names

Telling = dict[str, str]  # one way to tell a chain: first, then, question and opening, as in chain.toml


@dataclass(frozen=True)
class ChainSpec:
    """The number of chains and of links in each; one chain is asked for. Its repr seeds the cases."""

    num_chains: int = 2
    num_links: int = 5


@dataclass(frozen=True)
class ChainMaker:
    """Makes cases, each determined by seed, spec, length and number. A link comes after the one it refers to."""

    writer: PromptWriter
    haystack: Haystack
    seed: int = 0
    spec: ChainSpec = ChainSpec()

    def make(self, num_tokens: int, number: int, question: int = 0) -> Case:
        """Return a case of `num_tokens`, answer included; `question` selects the chain of the text."""
        writer, spec = self.writer, self.spec
        rng = random(self.seed, spec, num_tokens, number)
        telling = pick(read_data("chain")["tellings"], rng)
        names = [one.upper() for one in sample_names(spec.num_chains * spec.num_links, rng)]
        chains = [names[at : at + spec.num_links] for at in range(0, len(names), spec.num_links)]
        values = [str(value) for value in rng.choice(90_000, size=spec.num_chains, replace=False) + 10_000]
        asked = question % spec.num_chains
        frames = [_frame(telling, value, spec.num_links) for value in values]
        prompt = writer.prompt(frames, [f" {', '.join(chain)}." for chain in chains], asked)
        told = zip(chains, values, strict=True)
        pieces = [writer.ids(f" {line}") for chain, value in told for line in _tell(telling, chain, value)]
        stretch = self.haystack.cut(prompt.remaining(num_tokens, pieces, "a chain"), rng)
        places = [
            place for _ in chains for place in sorted(rng.choice(stretch.boundaries, size=spec.num_links).tolist())
        ]
        solution = Solution(tuple(chains[asked]), candidates=tuple(names))
        text = insert(pieces, places, stretch.tokens)
        return prompt.case(text, solution, question=frames[asked].after.strip(), depth_found=None)


def _frame(telling: Telling, value: str, count: int) -> Frame:
    question, opening = (text.format(value=value, count=count) for text in (telling["question"], telling["opening"]))
    return Frame("Between the following passages there are some notes.\n\n", f"\n\n{question}", opening)


def _tell(telling: Telling, chain: list[str], value: str) -> list[str]:
    links = [telling["then"].format(name=name, other=other) for other, name in pairwise(chain)]
    return [telling["first"].format(name=chain[0], value=value), *links]

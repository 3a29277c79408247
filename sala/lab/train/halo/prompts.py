"""Compose distinct prompts of many kinds from a table of templates and lists.

A table is TOML: `[lists]` with words and phrases, and `[[kind]]` tables with a `name`, a `weight` and `templates`.
A template is a string, or a list of strings for several turns of the user. Slots are written in braces:

    {place}        an entry of the list `place`, whose own slots are filled
    {a=place}      the same, stored as `a` for the rest of the prompt; {a} repeats it
    {2..99}        a whole number; {n=2..99} stores it
    {3*fruit}      three different entries, separated by commas; {n=3*fruit} stores them

    python -m sala.lab.train.halo.prompts TABLE COUNT OUT.jsonl --seed 1 --held-out everyday.jsonl
"""

import argparse
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sala.errors import ConfigError
from sala.lab.train.documents import HeldOut

_SLOT = re.compile(r"\{(?:(\w+)=)?(?:(\d+)\*)?(\w+(?:\.\.\d+)?)\}")
_AN = re.compile(r"\b([Aa]) (?=[aeioAEIO])")  # "an apple"; words with u take either article
_TRIES = 40  # attempts at a new prompt, after which it is skipped


@dataclass(frozen=True, slots=True)
class PromptKind:
    name: str
    weight: float
    templates: tuple[tuple[str, ...], ...]  # each a list of turns


@dataclass(frozen=True, slots=True)
class Prompt:
    kind: str
    turns: tuple[str, ...]


class PromptTable:
    """Templates and lists; the prompts are a function of the seed."""

    def __init__(self, lists: Mapping[str, Sequence[str]], kinds: Sequence[PromptKind]) -> None:
        self.lists, self.kinds = dict(lists), tuple(kinds)

    @classmethod
    def load(cls, file: Path) -> "PromptTable":
        """Read a table; raise ConfigError if a template names an unknown list."""
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        kinds = [
            PromptKind(
                one["name"],
                float(one.get("weight", 1)),
                tuple((t,) if isinstance(t, str) else tuple(t) for t in one["templates"]),
            )
            for one in values.get("kind", [])
        ]
        table = cls(values.get("lists", {}), kinds)
        table.check(str(file))
        return table

    def check(self, where: str) -> None:
        texts = [turn for kind in self.kinds for template in kind.templates for turn in template]
        texts += [entry for entries in self.lists.values() for entry in entries]
        remembered = {match[1] for text in texts for match in _SLOT.finditer(text) if match[1]}
        for text in texts:
            for match in _SLOT.finditer(text):
                if match[3] not in self.lists and match[3] not in remembered and ".." not in match[3]:
                    raise ConfigError(f"{where}: {text!r} names the unknown list {match[3]!r}", "add it to [lists]")

    def prompts(self, count: int, seed: int, held_out: HeldOut | None = None) -> Iterator[Prompt]:
        """Yield up to `count` distinct prompts in the shares of the kinds, none of them held out."""
        rng = np.random.default_rng(seed)
        shares = np.array([kind.weight for kind in self.kinds])
        seen: set[tuple[str, ...]] = set()
        for choice in rng.choice(len(self.kinds), size=count, p=shares / shares.sum()):
            kind = self.kinds[choice]
            for _ in range(_TRIES):
                template = kind.templates[int(rng.integers(len(kind.templates)))]
                names: dict[str, str] = {}
                turns = tuple(self.fill(turn, names, rng) for turn in template)
                is_held_out = held_out is not None and (
                    any(turn in held_out for turn in turns) or " ".join(turns) in held_out
                )
                if turns not in seen and not is_held_out:
                    seen.add(turns)
                    yield Prompt(kind.name, turns)
                    break

    def fill(self, text: str, names: dict[str, str], rng: np.random.Generator) -> str:
        """Return the text with all slots filled; `names` holds the stored values and is updated."""
        return _AN.sub(r"\1n ", self._fill(text, names, rng))

    def _fill(self, text: str, names: dict[str, str], rng: np.random.Generator) -> str:
        def one(match: re.Match[str]) -> str:
            name, many, what = match.groups()
            if what in names and name is None:
                return names[what]
            value = self._value(what, int(many) if many else 0, names, rng)
            if name is not None:
                names[name] = value
            return value

        return _SLOT.sub(one, text)

    def _value(self, what: str, many: int, names: dict[str, str], rng: np.random.Generator) -> str:
        if ".." in what:
            low, _, high = what.partition("..")
            return str(int(rng.integers(int(low), int(high) + 1)))
        entries = self.lists[what]
        if many:
            chosen = rng.permutation(len(entries))[:many]
            return ", ".join(self._fill(entries[int(at)], names, rng) for at in chosen)
        return self._fill(entries[int(rng.integers(len(entries)))], names, rng)


def read_held_out(files: Sequence[Path]) -> HeldOut:
    """Return the `turns` of JSONL files, and their `avoid` words, as texts held out from training."""
    texts: list[str] = []
    avoid: list[tuple[list[str], str]] = []
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            texts += record["turns"]
            if record.get("avoid"):
                avoid.append((record["avoid"], " ".join(record["turns"])))
    return HeldOut(texts, avoid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("count", type=int)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--held-out", type=Path, action="append", default=[], help="JSONL of questions to leave out")
    options = parser.parse_args()
    table = PromptTable.load(options.table)
    with options.output.open("w", encoding="utf-8") as out:
        for prompt in table.prompts(options.count, options.seed, read_held_out(options.held_out)):
            out.write(json.dumps({"kind": prompt.kind, "turns": prompt.turns}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

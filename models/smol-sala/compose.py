"""Compose distinct prompts of many kinds from a table of templates and lists.

A table is TOML: `[lists]` with words and phrases, and `[[kind]]` tables with a `name`, a `weight` and `templates`.
A template is a string, or a list of strings for several turns of the user. Its slots are those of
`sala.lab.train.needles.SlotLists`.

    python models/smol-sala/compose.py TABLE COUNT OUT.jsonl --seed 1 --held-out everyday.jsonl
"""

import argparse
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sala.lab.train.documents import HeldOut, read_held_out
from sala.lab.train.needles import SlotLists

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


class PromptTable(SlotLists):
    """Templates and lists; the prompts are a function of the seed."""

    def __init__(self, lists: Mapping[str, Sequence[str]], kinds: Sequence[PromptKind]) -> None:
        super().__init__(lists)
        self.kinds = tuple(kinds)

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
        table.check((turn for kind in kinds for template in kind.templates for turn in template), str(file))
        return table

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

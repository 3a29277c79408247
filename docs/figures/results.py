"""Reads committed results, and writes tables in Markdown."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks"


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def read_model(name: str) -> Any:
    return json.loads((ROOT / "models" / "smol-sala" / name).read_text(encoding="utf-8"))


def lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""

    def line(cells: Sequence[str]) -> str:
        return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"

    return [line(head), "|" + "---|" * len(head), *map(line, rows)]

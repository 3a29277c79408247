"""What keeps the code readable: no file is long, and nothing is written twice."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 500
BLOCK = 10  # lines


def repeated_blocks(files: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the places of every block of BLOCK lines that occurs more than once, with blank lines and without."""
    places: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for name, text in files:
        numbered = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
        for lines in (numbered, [(number, line) for number, line in numbered if line]):
            for at in range(len(lines) - BLOCK + 1):
                places[tuple(line for _, line in lines[at : at + BLOCK])].add(f"{name}:{lines[at][0]}")
    return [sorted(found) for found in places.values() if len(found) > 1]


def sources() -> list[tuple[str, str]]:
    files = sorted((ROOT / "sala").rglob("*.py"))
    return [(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files]


def test_no_file_is_long() -> None:
    assert len(sources()) > 300
    assert {name: lines for name, text in sources() if (lines := len(text.splitlines())) > MAX_LINES} == {}


def test_no_block_of_ten_lines_appears_twice() -> None:
    assert repeated_blocks(sources()) == []


@pytest.mark.parametrize("between", ["", "\n", "    "])
def test_a_repeated_block_is_found(between: str) -> None:
    block = [f"x_{number} = {number}" for number in range(BLOCK)]
    once, again = "\n".join(["import a", *block]), "\n".join([*block[:4], between, *block[4:], "y = 1"])
    assert repeated_blocks([("a.py", once), ("b.py", again)])
    assert not repeated_blocks([("a.py", once), ("b.py", again.replace("x_5", "z"))])

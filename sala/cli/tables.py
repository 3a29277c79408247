"""Tables on stdout."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sala.lab.report.record import Record


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], is_left: Sequence[bool]) -> None:
    """Print a title and a table with aligned columns; `is_left` says which ones are aligned to the left."""
    lines = [list(headings), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(title)
    for line in lines:
        cells = zip(line, widths, is_left, strict=True)
        print("  ".join(cell.ljust(width) if left else cell.rjust(width) for cell, width, left in cells).rstrip())


def print_record(record: "Record", title: str) -> None:
    """Print the results of a run as the report shows them."""
    from sala.lab.report.kinds import table_of

    headings, rows, is_left = table_of(record)
    print_table(title, headings, rows, is_left)

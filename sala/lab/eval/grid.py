"""Alias of sala.lab.eval.summary."""

from collections.abc import Sequence
from pathlib import Path

from sala.lab.eval.summary import summarise, summarise_reasoning, write_csv
from sala.lab.report.kinds import plot_record
from sala.lab.report.record import Record, Row

__all__ = ["draw_grid", "draw_tasks", "summarise", "summarise_reasoning", "write_csv"]


def draw_grid(cells: Sequence[Row], file: Path, title: str) -> None:
    plot_record(Record("needle", "", {}, list(cells)), file, title)


def draw_tasks(cells: Sequence[Row], file: Path, title: str) -> None:
    plot_record(Record("ruler", "", {}, list(cells)), file, title)

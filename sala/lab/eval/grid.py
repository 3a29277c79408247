"""Rows of single cases → tables: what was found by length and depth, by task and length, by kind and budget."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sala.lab.bench.plots import label, need_matplotlib
from sala.lab.eval.record import Row, write_atomically
from sala.lab.eval.runner import mean


def summarise(rows: Sequence[Row], by: Sequence[str]) -> list[Row]:
    """One row per cell: the share that is exact, the mean score, and the speeds of all its cases together."""
    return [
        {
            **dict(zip(by, group, strict=True)),
            "trials": len(members),
            "exact": mean(float(row["is_exact"]) for row in members),
            "score": mean(row["score"] for row in members),
            "prompt_tokens": round(mean(row["prompt_tokens"] for row in members)),
            "prefill_per_second": _speed(members, "prefill"),
            "decode_per_second": _speed(members, "decode"),
        }
        for group, members in _groups(rows, by)
    ]


def summarise_reasoning(rows: Sequence[Row]) -> list[Row]:
    """By kind and budget, and all kinds together: answered, correct and stuck, each by itself."""
    whole = [{**row, "task": "all"} for row in rows]
    return [
        {
            "task": task,
            "budget": budget,
            "cases": len(members),
            "answered": mean(float(row["is_answered"]) for row in members),
            "correct": mean(float(row["is_correct"]) for row in members),
            "stuck": mean(float(row["is_stuck"]) for row in members),
            "tokens": mean(row["completion_tokens"] for row in members),
        }
        for (task, budget), members in _groups([*rows, *whole], ("task", "budget"))
    ]


def write_csv(rows: Sequence[Row], path: Path) -> None:
    out = io.StringIO(newline="")
    if rows:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    write_atomically(path, out.getvalue().encode())


def draw_grid(cells: Sequence[Row], file: Path, title: str) -> None:
    """The share found as colours: lengths from left to right, depths from the start of the text down to its end."""
    lengths, depths = (sorted({cell[name] for cell in cells}) for name in ("length", "depth"))
    found = {(cell["depth"], cell["length"]): cell["exact"] for cell in cells}
    values = [[found.get((depth, length), float("nan")) for length in lengths] for depth in depths]
    rows = [f"{depth:g} %" for depth in depths]
    _draw(values, [label(length) for length in lengths], rows, "depth of the needle", file, title)


def draw_tasks(cells: Sequence[Row], file: Path, title: str) -> None:
    """The mean score as colours: lengths from left to right, a line per task."""
    lengths = sorted({cell["length"] for cell in cells})
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    found = {(cell["task"], cell["length"]): cell["score"] for cell in cells}
    values = [[found.get((task, length), float("nan")) for length in lengths] for task in tasks]
    _draw(values, [label(length) for length in lengths], tasks, "", file, title)


def _draw(values: list[list[float]], columns: list[str], rows: list[str], name: str, file: Path, title: str) -> None:
    pyplot = need_matplotlib()
    size = (2.6 + 0.85 * len(columns), 1.5 + 0.5 * len(rows))
    figure, axes = pyplot.subplots(figsize=(max(5.0, size[0]), max(2.6, size[1])), layout="constrained")
    image = axes.imshow(values, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel(name)
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if value == value:  # a cell that was measured
                colour = "white" if abs(value - 0.5) > 0.4 else "black"
                axes.text(x, y, f"{value:.0%}", ha="center", va="center", fontsize=9, color=colour)
    figure.colorbar(image, ax=axes, format=lambda share, _: f"{share:.0%}")
    figure.suptitle(title, fontsize=10)
    data = io.BytesIO()
    figure.savefig(data, dpi=130, format="png")
    pyplot.close(figure)
    write_atomically(file, data.getvalue())


def _groups(rows: Sequence[Row], by: Sequence[str]) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """In order of first appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return list(groups.items())


def _speed(rows: Sequence[Row], part: str) -> float | None:
    """Tokens per second; None where nothing was computed."""
    seconds = sum(row[f"{part}_s"] for row in rows)
    tokens = sum(row[f"{part}_n"] for row in rows)
    return round(tokens / seconds, 2) if seconds > 0 and tokens else None

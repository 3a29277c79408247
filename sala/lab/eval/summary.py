"""Rows of single cases → rows of cells: found by length and depth, by task and length, by kind and budget."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sala.lab.report.record import ResultRow, write_atomically


def summarise(rows: Sequence[ResultRow], by: Sequence[str]) -> list[ResultRow]:
    """Return a row per cell: the share of exact answers, the mean score, and the speeds of all its cases together."""
    return [
        {
            **dict(zip(by, group, strict=True)),
            "trials": len(members),
            "exact": _mean(float(row["is_exact"]) for row in members),
            "score": _mean(row["score"] for row in members),
            "prompt_tokens": round(_mean(row["prompt_tokens"] for row in members)),
            "prefill_per_second": _speed(members, "prefill"),
            "decode_per_second": _speed(members, "decode"),
        }
        for group, members in _groups(rows, by)
    ]


def summarise_reasoning(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Return the shares answered, correct and stuck by kind and budget, and for all kinds together."""
    whole = [{**row, "task": "all"} for row in rows]
    return [
        {
            "task": task,
            "budget": budget,
            "cases": len(members),
            "answered": _mean(float(row["is_answered"]) for row in members),
            "correct": _mean(float(row["is_correct"]) for row in members),
            "stuck": _mean(float(row["is_stuck"]) for row in members),
            "tokens": _mean(row["completion_tokens"] for row in members),
        }
        for (task, budget), members in _groups([*rows, *whole], ("task", "budget"))
    ]


def write_csv(rows: Sequence[ResultRow], path: Path) -> None:
    out = io.StringIO(newline="")
    if rows:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    write_atomically(path, out.getvalue().encode())


def _groups(rows: Sequence[ResultRow], by: Sequence[str]) -> list[tuple[tuple[Any, ...], list[ResultRow]]]:
    """Return the groups in order of first appearance."""
    groups: dict[tuple[Any, ...], list[ResultRow]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return list(groups.items())


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


def _speed(rows: Sequence[ResultRow], part: str) -> float | None:
    """Return tokens per second; None if nothing was computed."""
    seconds = sum(row[f"{part}_s"] for row in rows)
    tokens = sum(row[f"{part}_n"] for row in rows)
    return round(tokens / seconds, 2) if seconds > 0 and tokens else None

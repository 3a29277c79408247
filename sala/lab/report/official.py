"""Published benchmarks in the report: charts by length, published scores beside ours, and results of lm-eval itself."""

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from sala.lab.report.charts import Chart, HeatMap, Lines, Series
from sala.lab.report.record import Record, ResultRow
from sala.lab.report.statistics import interval
from sala.options.schema import length_label

ALL = "all"  # the mean of all tasks of a benchmark, which others publish
MEAN = "mean of the tasks"  # the metric of a mean, also of some tasks
RULER_TASK = re.compile(r"niah_\w+|ruler_(?:vt|cwe|fwe|qa_squad|qa_hotpot)")
RULER_NAMES = {"ruler_qa_squad": "qa_1", "ruler_qa_hotpot": "qa_2"}


@cache
def published(benchmark: str) -> tuple[list[ResultRow], str]:
    """Return the rows that others have published for a benchmark, and where."""
    found = tomllib.loads((files(__package__) / "published.toml").read_text("utf-8"))
    rows = [
        {
            "model": one["model"], "task": one.get("task", ALL), "length": 1024 * int(length), "score": score / 100,
            "trials": None, "metric": "as published",
        }
        for one in found["scores"] if one["benchmark"] == benchmark for length, score in one["by_length"].items()
    ]  # fmt: skip
    return rows, str(found["source"])


def published_records(runs: Sequence[Record]) -> list[Record]:
    """Return a record of published scores for each benchmark of the runs that has any."""
    found = []
    for name in dict.fromkeys(_benchmark(run) for run in runs):
        rows, source = published(name)
        if rows:
            settings = {"benchmark": name, "source": source}
            found.append(Record("official", f"published, {name}", settings, rows, machine={}, versions={}, commit=None))
    return found


def _benchmark(run: Record) -> str:
    return str(run.settings.get("benchmark", ""))


def plot_official(runs: Sequence[Record]) -> list[Chart]:
    """Return for each benchmark the scores by length of all models, and for each model a map of its tasks."""
    charts: list[Chart] = []
    for name, rows, others in _benchmarks(runs):
        charts += _curves(name, rows, others)
        charts += [_map(model, rows) for model in _models(rows)]
    return charts


@dataclass(frozen=True)
class SideBySide:
    """All models on one task, or on the mean of all: a line for each, a column for each length."""

    title: str
    headings: list[str]
    lines: list[list[str]]


def side_by_side(runs: Sequence[Record]) -> list[SideBySide]:
    """Return a table for each curve of a benchmark: ours, other measured models, and published scores."""
    tables = []
    for name, rows, others in _benchmarks(runs):
        for task in _curve_tasks(rows):
            cells: dict[str, dict[float, str]] = {}
            for row in (one for one in rows if one["task"] == task):
                cells.setdefault(row["model"], {})[row["length"]] = _cell(row)
            for row in (one for one in others if one["task"] == task):
                cells.setdefault(_published_name(row["model"]), {})[row["length"]] = f"{100 * row['score']:.1f}"
            lengths = sorted({length for line in cells.values() for length in line})
            lines = [[model, *(line.get(length, "–") for length in lengths)] for model, line in cells.items()]
            headings = ["model", *(length_label(round(length)) for length in lengths)]
            tables.append(SideBySide(name if task == ALL else f"{name}, {task}", headings, lines))
    return tables


def _benchmarks(runs: Sequence[Record]) -> Iterator[tuple[str, list[ResultRow], list[ResultRow]]]:
    """Yield each benchmark with the rows of all runs, and the published ones that are comparable."""
    for name in dict.fromkeys(_benchmark(run) for run in runs):
        own = [run for run in runs if _benchmark(run) == name]
        rows = [row for run in _distinct_rows(own) for row in run]
        yield name, rows, [] if any(run.settings.get("haystack") for run in own) else published(name)[0]


def _curve_tasks(rows: Sequence[ResultRow]) -> list[str]:
    """Return the means if there are any, else all tasks."""
    means = dict.fromkeys(row["task"] for row in rows if row["task"] == ALL or row.get("metric") == MEAN)
    return list(means or dict.fromkeys(row["task"] for row in rows))


def _published_name(model: str) -> str:
    return f"{model} (published)"


def _distinct_rows(runs: Sequence[Record]) -> list[list[ResultRow]]:
    """Return the rows of runs; a model that occurs in several of them is named with its seed, or else numbered."""
    counts = Counter(model for run in runs for model in dict.fromkeys(_models(run.results)))
    seeds = [run.settings.get("seed") for run in runs]
    words = [f"run {at}" if len(set(seeds)) < len(runs) else f"seed {seed}" for at, seed in enumerate(seeds, 1)]
    return [
        [row | {"model": f"{row['model']} ({word})"} if counts[row["model"]] > 1 else row for row in run.results]
        for run, word in zip(runs, words, strict=True)
    ]


def _curves(name: str, rows: Sequence[ResultRow], others: Sequence[ResultRow]) -> list[Chart]:
    """Return lines over the length: of the means if there are any, else of each task.

    Published scores are shown beside scores of the same tasks only: a mean of some tasks is not one of all.
    """
    charts: list[Chart] = []
    for task in _curve_tasks(rows):
        series = [_series(model, task, rows, False) for model in _models(rows)]
        chosen = [row for row in others if row["task"] == task]
        series += [
            _series(_published_name(model), None, [r for r in chosen if r["model"] == model], True)
            for model in _models(chosen)
        ]
        title = name if task == ALL else f"{name}, {task}"
        charts.append(Lines(f"{title} score, %".lstrip(), "tokens of context", [one for one in series if one.points]))
    return charts


def _models(rows: Sequence[ResultRow]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))


def _series(name: str, task: str | None, rows: Sequence[ResultRow], is_faint: bool) -> Series:
    chosen = [row for row in rows if task is None or (row["model"], row["task"]) == (name, task)]
    chosen = sorted(chosen, key=lambda row: float(row["length"]))
    bounds = [] if is_faint or not all(row.get("trials") for row in chosen) else [*map(_bounds, chosen)]
    return Series(name, [(row["length"], 100 * row["score"]) for row in chosen], is_faint=is_faint, bounds=bounds)


def _bounds(row: ResultRow) -> tuple[float, float]:
    """Return how far the interval reaches below and above the score, in percent."""
    low, high = interval(row["score"], int(row["trials"]))
    return 100 * (row["score"] - low), 100 * (high - row["score"])


def _cell(row: ResultRow | None) -> str:
    """Return a score with its number of cases, where that is known; for a single case its own score."""
    if row is None:
        return ""
    if row.get("trials") == 1:
        return f"{row['score']:.2g} of 1"
    return f"{100 * row['score']:.0f}" + (f" n={row['trials']:.0f}" if row.get("trials") else "")


def _map(model: str, rows: Sequence[ResultRow]) -> HeatMap:
    """Return the scores of a model by task and length, each with the number of its cases."""
    own = {(row["task"], row["length"]): row for row in rows if row["model"] == model}
    lengths, tasks = sorted({length for _, length in own}), list(dict.fromkeys(task for task, _ in own))
    cells = [[own.get((task, length)) for length in lengths] for task in tasks]
    return HeatMap(
        model,
        [length_label(round(length)) for length in lengths],
        tasks,
        [[None if row is None else row["score"] for row in line] for line in cells],
        [[*map(_cell, line)] for line in cells],
    )


# lm-eval's own results


def is_lm_eval(data: Mapping[str, Any]) -> bool:
    """Whether an object is a file of results that lm-eval has written, of whatever model."""
    return "kind" not in data and isinstance(data.get("results"), dict) and "config" in data


def from_lm_eval(data: Mapping[str, Any]) -> Record:
    """Return lm-eval's results as a record: RULER's by task and length, all others in their own metrics."""
    config = data["config"] if isinstance(data["config"], dict) else {}
    model = str(data.get("model_name") or config.get("model") or "model").rstrip("/").rpartition("/")[2]
    counts = data.get("n-samples") or {}
    lengths = list[ResultRow]()
    others = list[ResultRow]()
    for task, found in data["results"].items():
        count = (counts.get(task) or {}).get("effective")
        for name, value in found.items():
            metric, _, chain = name.partition(",")
            if not chain or metric.endswith("_stderr") or not isinstance(value, int | float) or value < 0:
                continue
            if RULER_TASK.fullmatch(task) and metric.isdigit():
                lengths.append(_ruler_row(model, task, int(metric), value, count, metric))
            else:
                error = found.get(f"{metric}_stderr,{chain}")
                others.append(_harness_row(task, metric, chain, value, error, count))
    settings = {"source": "lm-eval", **({"benchmark": "ruler"} if lengths else {})}
    date = str(data.get("date", ""))
    versions: dict[str, str | None] = {"lm-eval": str(data.get("lm_eval_version") or "")}
    kind, rows = ("official", lengths) if lengths else ("harness", others)
    return Record(kind, model, settings, rows, machine={}, versions=versions, commit=None, date=date)


def _ruler_row(model: str, task: str, length: int, score: float, count: Any, metric: str) -> ResultRow:
    name = RULER_NAMES.get(task, task.removeprefix("ruler_"))
    trials = count if isinstance(count, int) and count > 0 else None
    return {"model": model, "task": name, "length": length, "score": score, "trials": trials, "metric": metric}


def _harness_row(task: str, metric: str, chain: str, value: float, error: Any, count: Any) -> ResultRow:
    stderr = error if isinstance(error, int | float) else None
    return {"task": task, "metric": metric, "filter": chain, "value": value, "stderr": stderr, "count": count}

"""How runs of each kind are shown: what their rows must contain, the columns of their tables, and their charts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from sala.lab.report.charts import Bars, Chart, HeatMap, Lines, Series, length_label, plot
from sala.lab.report.record import Record, ResultRow

MAX_NUMBER = 1e30
MANY = 20  # trials from which on a share says more than a count
X_NAME = "tokens of context"
SIDES = ("before", "after")  # of a comparison


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value can be plotted: a number that is neither NaN nor huge."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def minute(date: str) -> str:
    return date[:16].replace("T", " ")


# How values are shown.


def plain(value: Any) -> str:
    """Return a number with four digits, anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _length(value: float) -> str:
    return length_label(round(value))


def _gib(value: float) -> str:
    return f"{value / 2**30:.2f} GiB"


def ratio_text(share: float, trials: int) -> str:
    """Return 3/4, or 75% if there are many trials."""
    return f"{round(share * trials)}/{trials}" if trials < MANY else f"{share:.0%}"


def interval(share: float, trials: int) -> tuple[float, float]:
    """Return the 95% Wilson interval of a share of so many trials."""
    z = 1.96
    middle = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    return max(0.0, middle - half), min(1.0, middle + half)


def _interval(row: ResultRow) -> str | None:
    trials, share = row.get("trials"), row.get("exact")
    if not (is_number(trials) and is_number(share) and trials >= 1 and 0 <= share <= 1):
        return None
    low, high = interval(share, int(trials))
    return f"{100 * low:.0f}–{100 * high:.0f} %"


@dataclass(frozen=True)
class Column:
    """A column of a table: its name, where the value comes from, and how to show it (a format or a function).

    With `is_bar` the page also shows the share as a bar.
    """

    name: str
    key: str | Callable[[ResultRow], Any]
    show: str | Callable[[Any], str]
    is_bar: bool = False
    is_left: bool = False

    @property
    def is_number(self) -> bool:
        """Whether the value, if there is one, must be a number."""
        return isinstance(self.key, str) and (isinstance(self.show, str) or self.show in (_length, _gib))

    def value(self, row: ResultRow) -> Any:
        return row.get(self.key) if isinstance(self.key, str) else self.key(row)

    def text(self, row: ResultRow) -> str:
        """Return the value as it is shown; nothing if there is none."""
        value = self.value(row)
        if value is None:
            return ""
        return self.show.format(value) if isinstance(self.show, str) else self.show(value)


def _text(name: str, key: str | Callable[[ResultRow], Any], show: Callable[[Any], str] = str) -> Column:
    return Column(name, key, show, is_left=True)


@dataclass(frozen=True)
class RecordKind:
    """How runs of a kind are shown: every row must have `numbers` and `texts`; `charts` show all runs together."""

    title: str
    about: str
    columns: tuple[Column, ...]
    charts: Callable[[Sequence[Record]], list[Chart]] = lambda _: []
    numbers: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    is_mapped: bool = False  # a heat map shows every row, so that a long table may be folded

    def columns_of(self, record: Record) -> list[Column]:
        """Return the columns that have a value in some row."""
        return [one for one in self.columns if any(one.value(row) is not None for row in record.results)]


def heading(name: str, record: Record) -> str:
    """Return the heading of a column; a comparison names its two models in its settings."""
    names = record.settings.get("names")
    return str(names.get(name, name)) if isinstance(names, dict) else name


# The charts of each kind.


def _names(runs: Sequence[Record]) -> list[str]:
    """Return what to call each run: its model, with the date where that is ambiguous."""
    names = [run.model for run in runs]
    pairs = zip(names, runs, strict=True)
    return [name if names.count(name) == 1 else f"{name} ({minute(run.date)})" for name, run in pairs]


def _points(rows: Sequence[ResultRow], x: str, y: str, scale: float = 1) -> list[tuple[float, float]]:
    return sorted((float(row[x]), row[y] * scale) for row in rows if is_number(row.get(y)) and row[x] > 0)


def _lines(
    runs: Sequence[Record], title: str, x: str, y: str, *, x_name: str = X_NAME, is_log: bool = False, scale: float = 1
) -> list[Chart]:
    series = [Series(name, _points(run.results, x, y, scale)) for name, run in zip(_names(runs), runs, strict=True)]
    return [Lines(title, x_name, series, is_log)] if any(one.points for one in series) else []


def _plot_perplexity(runs: Sequence[Record]) -> list[Chart]:
    series = []
    for name, run in zip(_names(runs), runs, strict=True):
        rows = sorted((row for row in run.results if row["length"] > 0), key=lambda row: row["length"])
        errors = [row["stderr"] if is_number(row.get("stderr")) else 0.0 for row in rows]
        series.append(Series(name, _points(rows, "length", "perplexity"), errors))
    return [Lines("perplexity", X_NAME, series), *_lines(runs, "bits per byte", "length", "bits_per_byte")]


def _plot_latency(runs: Sequence[Record]) -> list[Chart]:
    return [
        *_lines(runs, "time to first token, s", "num_tokens", "first_token_s", is_log=True),
        *_lines(runs, "decode, tok/s", "num_tokens", "decode_per_second"),
        *_lines(runs, "peak memory, GiB", "num_tokens", "peak_bytes", scale=2**-30),
    ]


def _plot_throughput(runs: Sequence[Record]) -> list[Chart]:
    x_name = "requests at a time"
    return [
        *_lines(runs, "decode of all requests, tok/s", "batch", "decode_per_second", x_name=x_name),
        *_lines(runs, "peak memory, GiB", "batch", "peak_bytes", x_name=x_name, scale=2**-30),
    ]


def _plot_against(runs: Sequence[Record]) -> list[Chart]:
    charts: list[Chart] = []
    for run in runs:
        dense = str(run.settings.get("dense", "dense"))
        measures = (
            ("first_token", "time to first token, s", "first_token_s"),
            ("decode", "decode, tok/s", "decode_per_second"),
        )
        for name, title, key in measures:
            both = [
                Series(run.model, _points(run.results, "num_tokens", key)),
                Series(dense, _points(run.results, "num_tokens", f"dense_{key}"), is_faint=True),
            ]
            crossings = [row["crossover"].get(name) for row in run.results if isinstance(row.get("crossover"), dict)]
            marks = [at for at in crossings if is_number(at)]
            ratios = Series("ratio", _points(run.results, "num_tokens", f"{name}_ratio"))
            charts.append(Lines(title, X_NAME, both, name == "first_token", marks))
            charts.append(Lines(f"{name.replace('_', ' ')}: times as fast as {dense}", X_NAME, [ratios], marks=marks))
    return [one for one in charts if isinstance(one, Lines) and any(series.points for series in one.series)]


def _plot_needle(runs: Sequence[Record]) -> list[Chart]:
    def text(row: ResultRow) -> str:
        trials = row.get("trials")
        return ratio_text(row["exact"], int(trials)) if is_number(trials) and trials >= 1 else f"{row['exact']:.0%}"

    return [
        _map(run, name, "depth", "exact", text, lambda depth: f"{depth:g} %", "depth of the needle")
        for name, run in zip(_names(runs), runs, strict=True)
    ]


def _plot_ruler(runs: Sequence[Record]) -> list[Chart]:
    return [
        _map(run, name, "task", "score", lambda row: f"{row['score']:.0%}", str)
        for name, run in zip(_names(runs), runs, strict=True)
    ]


def _map(
    run: Record,
    title: str,
    down: str,
    key: str,
    text: Callable[[ResultRow], str],
    show: Callable[[Any], str],
    row_name: str = "",
) -> HeatMap:
    """Return a heat map with lengths from left to right; depths go down from the start of the text to its end."""
    lengths = sorted({row["length"] for row in run.results})
    lines = list(dict.fromkeys(row[down] for row in run.results))
    lines = sorted(lines) if all(map(is_number, lines)) else lines
    found = {(row[down], row["length"]): row for row in run.results}
    cells = [[found.get((line, length)) for length in lengths] for line in lines]
    return HeatMap(
        title,
        [_length(length) for length in lengths],
        [show(line) for line in lines],
        [[None if row is None else row[key] for row in line] for line in cells],
        [["" if row is None else text(row) for row in line] for line in cells],
        row_name,
    )


def _plot_kernels(runs: Sequence[Record]) -> list[Chart]:
    """Return bars of the share of the roofline, the best on top; kernels that did not run are left out."""
    charts: list[Chart] = []
    for run in runs:
        rows = sorted((row for row in run.results if is_number(row.get("share"))), key=lambda row: row["share"])
        labels = [f"{plain(row.get('ms'))} ms, {_peer(row) or ''}".removesuffix(", ") for row in rows]
        names, shares = [_kernel(row) for row in rows], [100 * row["share"] for row in rows]
        charts.append(Bars("share of the roofline", names, shares, labels, "% of the roofline"))
    return charts


def _kernel(row: ResultRow) -> str:
    return f"{row['name']}, {row['size']}"


def _peer(row: ResultRow) -> str | None:
    return row.get("error") or None if row.get("ratio") is None else f"{row['ratio']:.3g} x {row.get('peer')}"


def _milliseconds(row: ResultRow) -> str:
    value = row.get("ms")
    if not is_number(value):
        return "failed"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _quantity(key: str) -> Callable[[ResultRow], str | None]:
    """Return a function that shows the value of a comparison in its unit."""

    def show(row: ResultRow) -> str | None:
        value, unit = row.get(key), row.get("unit", "")
        if not is_number(value):
            return None
        return f"{value:.1%}" if unit == "share" else f"{value:,.4g} {unit}".rstrip()

    return show


def _difference(row: ResultRow) -> str | None:
    before, after = (row.get(key) for key in SIDES)
    if not (is_number(before) and is_number(after)):
        return None
    if row.get("unit") == "share":
        return f"{100 * (after - before):+.1f}"
    return f"× {after / before:.3f}" if before else None


def _plot_comparison(runs: Sequence[Record]) -> list[Chart]:
    """Return lines for what was measured at several lengths, bars for everything else."""
    charts: list[Chart] = []
    for run in runs:
        names = [heading(key, run) for key in SIDES]
        by_length: dict[str, list[ResultRow]] = {}
        for row in run.results:
            values = [value for key in SIDES if is_number(value := row.get(key))]
            if is_number(row.get("on")):
                by_length.setdefault(row["measure"], []).append(row)
            elif len(values) == len(SIDES):
                title = ", ".join(str(part) for part in (row["measure"], row.get("on")) if part)
                charts.append(Bars(title, names, values, [f"{value:,.4g}" for value in values]))
        for title, rows in by_length.items():
            both = [Series(name, _points(rows, "on", key)) for name, key in zip(names, SIDES, strict=True)]
            charts.append(Lines(title, X_NAME, both))
    return charts


SHARE, COUNT, DIGITS, TENTHS = "{:.0%}", "{:,.0f}", "{:,.4g}", "{:,.1f}"
TASK, TOKENS, LENGTH = (
    _text("task", "task"),
    Column("tokens", "num_tokens", _length),
    Column("tokens", "length", _length),
)
SPEEDS = (Column("prefill tok/s", "prefill_per_second", COUNT), Column("decode tok/s", "decode_per_second", TENTHS))
MEMORY, TRIALS = Column("memory", "peak_bytes", _gib), Column("trials", "trials", COUNT)
FIRST = Column("first token", "first_token_s", "{:.3g} s")
KINDS = {
    "needle": RecordKind(
        "Needles", "A fact is hidden in a text, at a depth in percent; the share of answers that contain it.",
        (
            LENGTH, Column("depth", "depth", "{:g} %"), TRIALS, Column("found", "exact", SHARE, is_bar=True),
            Column("95% interval", _interval, str), Column("score", "score", SHARE), *SPEEDS,
        ),
        _plot_needle, ("length", "depth", "exact"), is_mapped=True,
    ),
    "ruler": RecordKind(
        "Long-context tasks", "Several things to find, to follow and to count in long texts; the mean score.",
        (
            TASK, LENGTH, TRIALS, Column("score", "score", SHARE, is_bar=True), Column("all right", "exact", SHARE),
            Column("95% interval", _interval, str), *SPEEDS,
        ),
        _plot_ruler, ("length", "score"), ("task",), is_mapped=True,
    ),
    "reasoning": RecordKind(
        "Reasoning", "Small problems with one right answer: answered, correct, and stuck in reasoning.",
        (
            TASK, Column("budget", lambda row: "none" if row.get("budget") is None else row["budget"], plain),
            Column("problems", "cases", COUNT), Column("answered", "answered", SHARE),
            Column("correct", "correct", SHARE, is_bar=True), Column("stuck", "stuck", SHARE),
            Column("tokens", "tokens", COUNT),
        ),
        numbers=("answered", "correct", "stuck"), texts=("task",),
    ),
    "perplexity": RecordKind(
        "Perplexity", "How well the model predicts a text, by how much of it the model sees. Lower is better.",
        (
            LENGTH, Column("windows", "windows", COUNT), Column("scored", "tokens", COUNT),
            Column("perplexity", "perplexity", DIGITS), Column("±", "stderr", "{:.2g}"),
            Column("bits per byte", "bits_per_byte", DIGITS), Column("tok/s", "tokens_per_second", COUNT),
        ),
        _plot_perplexity, ("length", "perplexity"),
    ),
    "harness": RecordKind(
        "lm-eval", "Tasks of lm-eval, in its own metrics.",
        (
            TASK, _text("metric", "metric"), _text("filter", "filter"), Column("value", "value", plain),
            Column("±", "stderr", plain), Column("shots", "shots", plain), Column("questions", "count", plain),
        ),
        texts=("task", "metric"),
    ),
    "latency": RecordKind(
        "Latency", "One request at a time.",
        (TOKENS, FIRST, *SPEEDS, Column("vs. shortest", "decode_ratio", "{:.2f}"), MEMORY),
        _plot_latency, ("num_tokens", "first_token_s", "decode_per_second"),
    ),
    "throughput": RecordKind(
        "Throughput", "Several requests at a time; speeds of all together.",
        (
            Column("requests", "batch", COUNT), Column("tokens each", "num_tokens", _length),
            Column("first tokens", "first_tokens_s", "{:.3g} s"), *SPEEDS,
            Column("vs. fewest", "decode_ratio", "{:.2f}"), MEMORY,
        ),
        _plot_throughput, ("batch", "decode_per_second"),
    ),
    "against": RecordKind(
        "Against a dense model", "Both in one run; a dashed line where ours becomes the faster one.",
        (
            TOKENS, FIRST, Column("dense", "dense_first_token_s", "{:.3g} s"),
            Column("times as fast", "first_token_ratio", "{:.2f}"),
            Column("decode tok/s", "decode_per_second", TENTHS), Column("dense", "dense_decode_per_second", TENTHS),
            Column("times as fast", "decode_ratio", "{:.2f}"), MEMORY, Column("dense", "dense_peak_bytes", _gib),
        ),
        _plot_against, ("num_tokens",),
    ),
    "kernels": RecordKind(
        "Kernels", "Each kernel alone, and its share of what the GPU can do.",
        (
            _text("kernel", _kernel), Column("ms", _milliseconds, str),
            Column("share", "share", SHARE, is_bar=True), Column("TFLOP/s", "tflops", COUNT),
            _text("times as fast as", _peer),
        ),
        _plot_kernels, texts=("name", "size"),
    ),
    "comparison": RecordKind(
        "Comparison", "A model beside the one that it was made from.",
        (
            _text("measure", "measure"), Column("on", lambda row: row.get("on") or None, plain),
            *(Column(key, _quantity(key), str) for key in SIDES), Column("difference", _difference, str),
        ),
        _plot_comparison, texts=("measure",),
    ),
}  # fmt: skip


def plot_record(record: Record, file: Path, title: str) -> None:
    """Draw the charts of one run into a file; its suffix selects the format."""
    plot(KINDS[record.kind].charts([record]), file, title)


def table_of(record: Record) -> tuple[list[str], list[list[str]], list[bool]]:
    """Return the headings and cells of a run's table, and which columns are aligned to the left."""
    columns = KINDS[record.kind].columns_of(record)
    rows = [[one.text(row) for one in columns] for row in record.results]
    return [heading(one.name, record) for one in columns], rows, [one.is_left for one in columns]

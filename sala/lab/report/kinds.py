"""How runs of each kind are shown: `kinds.toml` lists their columns and line charts; what is computed is here."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from sala.checkpoint.writer import write_atomically
from sala.errors import MissingExtra
from sala.lab.report.charts import DPI, Bars, Chart, HeatMap, Lines, Series, plot
from sala.lab.report.official import plot_official
from sala.lab.report.record import KIND_TABLES, Record, ResultRow
from sala.lab.report.statistics import interval, ratio_text
from sala.options.schema import length_label

MAX_NUMBER = 1e30
X_NAME = "tokens of context"
SIDES = ("before", "after")  # of a comparison


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value can be plotted: a number that is neither NaN nor huge."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def minute(date: str) -> str:
    return date[:16].replace("T", " ")


# How values are shown, and values that are computed from a row.


def plain(value: Any) -> str:
    """Return a number with four digits, anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _interval(row: ResultRow, key: str = "exact") -> str | None:
    trials, share = row.get("trials"), row.get(key)
    if not (is_number(trials) and is_number(share) and trials >= 1 and 0 <= share <= 1):
        return None
    low, high = interval(share, int(trials))
    return f"{100 * low:.0f}–{100 * high:.0f} %"


def _peer(row: ResultRow) -> str | None:
    return row.get("error") or None if row.get("ratio") is None else f"{row['ratio']:.3g} x {row.get('peer')}"


def _milliseconds(row: ResultRow) -> str:
    value = row.get("ms")
    if not is_number(value):
        return "failed"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _quantity(row: ResultRow, key: str) -> str | None:
    """Return a value of a comparison in its unit."""
    value, unit = row.get(key), row.get("unit", "")
    if not is_number(value):
        return None
    return f"{value:.1%}" if unit == "share" else f"{value:,.4g} {unit}".rstrip()


def _difference(row: ResultRow) -> str | None:
    before, after = (row.get(key) for key in SIDES)
    if not (is_number(before) and is_number(after)):
        return None
    if row.get("unit") == "share":
        return f"{100 * (after - before):+.1f}"
    return f"× {after / before:.3f}" if before else None


def _percentiles(row: ResultRow, key: str) -> str | None:
    """Return percentiles of seconds as milliseconds, e.g. 12 / 15 / 40."""
    values = [1000 * value for percent in (50, 90, 99) if is_number(value := row.get(f"{key}_p{percent}"))]
    return " / ".join(f"{one:,.0f}" if one >= 100 else f"{one:.3g}" for one in values) or None


COMPUTED: dict[str, Callable[[ResultRow], Any]] = {
    "interval": _interval,
    "score_interval": partial(_interval, key="score"),
    "between_tokens": lambda row: _percentiles(row, "between_tokens_s"),
    "budget": lambda row: "none" if row.get("budget") is None else row["budget"],
    "first_tokens": lambda row: _percentiles(row, "first_token_s"),
    "kernel": "{0[name]}, {0[size]}".format,
    "ms": _milliseconds,
    "peer": _peer,
    "on": lambda row: row.get("on") or None,
    **{key: partial(_quantity, key=key) for key in SIDES},
    "difference": _difference,
}
NUMERIC: dict[str, Callable[[float], str]] = {
    "count": "{:,.0f}".format,
    "digits": "{:,.4g}".format,
    "gib": lambda value: f"{value / 2**30:.2f} GiB",
    "length": lambda value: length_label(round(value)),
    "percent": "{:g} %".format,
    "ratio": "{:.2f}".format,
    "seconds": "{:.3g} s".format,
    "share": "{:.0%}".format,
    "tenths": "{:,.1f}".format,
    "two digits": "{:.2g}".format,
}
SHOWS: dict[str, Callable[[Any], str]] = {**NUMERIC, "plain": plain, "text": str}


@dataclass(frozen=True)
class Column:
    """A column of a table: its name, the key of its value in a row or in COMPUTED, and how to show it.

    With `is_bar` the page also shows the share as a bar.
    """

    name: str
    key: str
    show: str = "text"
    is_bar: bool = False
    is_left: bool = False

    @property
    def is_number(self) -> bool:
        """Whether the value, if there is one, must be a number."""
        return self.key not in COMPUTED and self.show in NUMERIC

    def value(self, row: ResultRow) -> Any:
        return COMPUTED[self.key](row) if self.key in COMPUTED else row.get(self.key)

    def text(self, row: ResultRow) -> str:
        """Return the value as it is shown; nothing if there is none."""
        value = self.value(row)
        return "" if value is None else SHOWS[self.show](value)


class RecordKind:
    """How runs of a kind are shown, from its table in `kinds.toml`; every row must have `numbers` and `texts`."""

    def __init__(self, name: str, table: Mapping[str, Any]) -> None:
        self.title: str = table["title"]
        self.about: str = table["about"]
        self.columns = [Column(**one) for one in table["columns"]]
        self.numbers: Sequence[str] = table.get("numbers", ())
        self.texts: Sequence[str] = table.get("texts", ())
        self.map: Mapping[str, Any] | None = table.get("map")
        self._lines = table.get("lines", ())
        self._plot = PLOTS.get(name)

    def columns_of(self, record: Record) -> list[Column]:
        """Return the columns that have a value in some row."""
        return [one for one in self.columns if any(one.value(row) is not None for row in record.results)]

    def charts(self, runs: Sequence[Record]) -> list[Chart]:
        """Return the charts that show all these runs together."""
        maps = [] if self.map is None else [_heat_map(run, name, **self.map) for name, run in _named(runs)]
        lines = _not_empty(_lines(runs, **one) for one in self._lines)
        return [*maps, *lines, *(self._plot(runs) if self._plot else ())]


def heading(name: str, record: Record) -> str:
    """Return the heading of a column; a comparison names its two models in its settings."""
    names = record.settings.get("names")
    return str(names.get(name, name)) if isinstance(names, dict) else name


# The charts of each kind.


def _named(runs: Sequence[Record]) -> list[tuple[str, Record]]:
    """Return what to call each run, its model, with the date where that is ambiguous; and the run."""
    models = [run.model for run in runs]
    return [(run.model if models.count(run.model) == 1 else f"{run.model} ({minute(run.date)})", run) for run in runs]


def _not_empty(charts: Iterable[Lines]) -> list[Lines]:
    return [one for one in charts if any(series.points for series in one.series)]


def _points(rows: Sequence[ResultRow], x: str, y: str, scale: float = 1) -> list[tuple[float, float]]:
    return sorted((float(row[x]), row[y] * scale) for row in rows if is_number(row.get(y)) and row[x] > 0)


def _lines(
    runs: Sequence[Record], title: str, x: str, y: Mapping[str, str], x_name: str = X_NAME, is_log: bool = False,
    scale: float = 1, errors: str = "",
) -> Lines:  # fmt: skip
    """Return a line for each run and key of `y`, by its label; `errors` is the key of standard errors.

    Rows without a value of `x` are left out.
    """
    series = []
    for name, run in _named(runs):
        rows = sorted((row for row in run.results if is_number(row.get(x)) and row[x] > 0), key=lambda row: row[x])
        spread = [row[errors] if is_number(row.get(errors)) else 0.0 for row in rows] if errors else []
        for label, key in y.items():
            parts = [name] if len(runs) > 1 or not label else []
            series.append(Series(", ".join(filter(None, (*parts, label))), _points(rows, x, key, scale), spread))
    return Lines(title, x_name, series, is_log)


def _plot_against(runs: Sequence[Record]) -> list[Chart]:
    charts = []
    for run in runs:
        dense = str(run.settings.get("dense", "dense"))
        for name, title, key in (
            ("first_token", "time to first token, s", "first_token_s"),
            ("decode", "decode, tok/s", "decode_per_second"),
        ):
            both = [
                Series(run.model, _points(run.results, "num_tokens", key)),
                Series(dense, _points(run.results, "num_tokens", f"dense_{key}"), is_faint=True),
            ]
            crossings = [row["crossover"].get(name) for row in run.results if isinstance(row.get("crossover"), dict)]
            marks = [at for at in crossings if is_number(at)]
            ratios = Series("ratio", _points(run.results, "num_tokens", f"{name}_ratio"))
            charts.append(Lines(title, X_NAME, both, name == "first_token", marks))
            charts.append(Lines(f"{name.replace('_', ' ')}: times as fast as {dense}", X_NAME, [ratios], marks=marks))
    return [*_not_empty(charts)]


def _heat_map(run: Record, title: str, down: str, key: str, row_name: str = "", in_trials: bool = False) -> HeatMap:
    """Return a heat map with lengths from left to right; depths go down from the start of the text to its end."""
    lengths = sorted({row["length"] for row in run.results})
    lines = list(dict.fromkeys(row[down] for row in run.results))
    lines = sorted(lines) if all(map(is_number, lines)) else lines
    found = {(row[down], row["length"]): row for row in run.results}
    cells = [[found.get((line, length)) for length in lengths] for line in lines]

    def text(row: ResultRow) -> str:
        trials = row.get("trials") if in_trials else None
        return ratio_text(row[key], int(trials)) if is_number(trials) and trials >= 1 else f"{row[key]:.0%}"

    return HeatMap(
        title,
        [length_label(round(length)) for length in lengths],
        [f"{line:g} %" if is_number(line) else str(line) for line in lines],
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
        names, shares = [COMPUTED["kernel"](row) for row in rows], [100 * row["share"] for row in rows]
        charts.append(Bars("share of the roofline", names, shares, labels, "% of the roofline"))
    return charts


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


PLOTS: dict[str, Callable[[Sequence[Record]], list[Chart]]] = {
    "against": _plot_against,
    "kernels": _plot_kernels,
    "comparison": _plot_comparison,
    "official": plot_official,
}
KINDS = {name: RecordKind(name, table) for name, table in KIND_TABLES.items()}


def plot_record(record: Record, file: Path, title: str, dpi: int = DPI) -> None:
    """Draw the charts of one run into a file; its suffix selects the format."""
    plot(KINDS[record.kind].charts([record]), file, title, dpi)


def table_of(record: Record) -> tuple[list[str], list[list[str]], list[bool]]:
    """Return the headings and cells of a run's table, and which columns are aligned to the left."""
    columns = KINDS[record.kind].columns_of(record)
    rows = [[one.text(row) for one in columns] for row in record.results]
    return [heading(one.name, record) for one in columns], rows, [one.is_left for one in columns]


# Two models side by side: a record, a table and a picture, for conversion and quantization alike.


def pair(
    measure: str, before: float | None, after: float | None, on: str | int | None = None, unit: str = ""
) -> ResultRow:
    """Return a row of a comparison. `on` is a text, a task or a length; the unit "share" is shown in percent."""
    return {"measure": measure, "on": on, "before": before, "after": after, "unit": unit}


def comparison(model: str, before: str, after: str, settings: Mapping[str, Any], results: list[ResultRow]) -> Record:
    """Return the record of a comparison; `before` and `after` are the headings of the two models."""
    return Record("comparison", model, {"names": {"before": before, "after": after}, **settings}, results)


def save(record: Record, directory: Path, name: str) -> bool:
    """Write NAME.json and NAME.png; return whether matplotlib was there for the picture."""
    with suppress(MissingExtra):
        plot_record(record, directory / f"{name}.png", record.model)
        record.plots = [f"{name}.png"]
    record.save(directory / f"{name}.json", force=True)
    return bool(record.plots)


def write_markdown(record: Record, file: Path, title: str) -> None:
    headings, rows, _ = table_of(record)
    lines = [headings, ["---"] * len(headings), *rows]
    table = "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
    write_atomically(file, f"# {title}\n\n{table}")

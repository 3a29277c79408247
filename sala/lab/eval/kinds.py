"""How runs of every kind are shown: what their rows must hold, the columns of their tables, and their charts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sala.lab.bench.plots import label
from sala.lab.eval.charts import Series, draw_lines, draw_map

MAX_NUMBER = 1e30
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A record that has been read and checked."""

    file: Path
    kind: str
    model: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, Any]
    commit: str | None
    date: str
    results: list[Row]
    pictures: list[tuple[str, bytes]] = field(default_factory=list)


@dataclass(frozen=True)
class Column:
    """Of a table: its name, the key of the value, and how to show it. A `bar` shows a share as well."""

    name: str
    key: str
    show: Callable[[Any], str]
    is_bar: bool = False
    is_left: bool = False

    @property
    def is_number(self) -> bool:
        """Whether the value must be one, if it is there."""
        return self.show not in (_text, _plain)


@dataclass(frozen=True)
class Kind:
    """How runs of a kind are shown: `numbers` and `texts` must be in every row; what `draw` makes comes first."""

    title: str
    about: str
    numbers: tuple[str, ...]
    columns: tuple[Column, ...]
    draw: Callable[[Sequence[Run]], str]
    texts: tuple[str, ...] = ()

    @property
    def is_mapped(self) -> bool:
        """Whether a map shows every row: then a long table may be folded."""
        return self.draw in (_draw_needle, _draw_ruler)


def is_number(value: object) -> bool:
    """One that can be drawn: neither NaN nor beyond all measure."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def day(date: str) -> str:
    return date[:16].replace("T", " ")


# How values are shown.


def _text(value: Any) -> str:
    return str(value)


def _plain(value: Any) -> str:
    """Whatever it is: numbers with some digits, the rest as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _length(value: float) -> str:
    return label(round(value))


def _share(value: float) -> str:
    return f"{value:.0%}"


def _gib(value: float) -> str:
    return f"{value / 2**30:.2f} GiB"


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def _digits(value: float) -> str:
    return f"{value:,.4g}"


def _tenths(value: float) -> str:
    return f"{value:,.1f}"


def _percent(value: float) -> str:
    return f"{value:g} %"


# What is drawn of the runs of a kind, all together.


def _names(runs: Sequence[Run]) -> list[str]:
    """What to call every run: its model, and more where that is not enough."""
    names = [run.model for run in runs]
    return [
        name if names.count(name) == 1 else f"{name} ({day(run.date)})" for name, run in zip(names, runs, strict=True)
    ]


def _lines(runs: Sequence[Run], title: str, x: str, y: str, x_name: str, is_log: bool = False, scale: float = 1) -> str:
    series = [Series(name, _points(run.results, x, y, scale)) for name, run in zip(_names(runs), runs, strict=True)]
    return draw_lines(title, x_name, series, is_log)


def _points(rows: Iterable[Row], x: str, y: str, scale: float = 1) -> list[tuple[float, float]]:
    found = [(float(row[x]), row[y] * scale) for row in rows if is_number(row.get(y)) and row[x] > 0]
    return sorted(found)


def _draw_perplexity(runs: Sequence[Run]) -> str:
    about = {"perplexity": "perplexity", "bits per byte": "bits_per_byte"}
    return "".join(_lines(runs, title, "length", key, "tokens of context") for title, key in about.items())


def _draw_latency(runs: Sequence[Run]) -> str:
    return (
        _lines(runs, "time to first token, s", "num_tokens", "first_token_s", "tokens of context", is_log=True)
        + _lines(runs, "decode, tok/s", "num_tokens", "decode_per_second", "tokens of context")
        + _lines(runs, "peak memory, GiB", "num_tokens", "peak_bytes", "tokens of context", scale=2**-30)
    )


def _draw_throughput(runs: Sequence[Run]) -> str:
    return _lines(runs, "decode of all together, tok/s", "batch", "decode_per_second", "requests at a time") + _lines(
        runs, "peak memory, GiB", "batch", "peak_bytes", "requests at a time", scale=2**-30
    )


def _draw_against(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        dense = str(run.settings.get("dense", "dense"))
        panels = (
            ("first_token", "time to first token, s", "first_token_s", True),
            ("decode", "decode, tok/s", "decode_per_second", False),
        )
        for name, title, key, is_log in panels:
            both = [
                Series(run.model, _points(run.results, "num_tokens", key)),
                Series(dense, _points(run.results, "num_tokens", f"dense_{key}"), is_faint=True),
            ]
            marks = _marks(run.results, name)
            parts.append(draw_lines(title, "tokens of context", both, is_log, marks))
            ratio = Series("ratio", _points(run.results, "num_tokens", f"{name}_ratio"))
            parts.append(
                draw_lines(
                    f"{name.replace('_', ' ')}: times as fast as {dense}", "tokens of context", [ratio], marks=marks
                )
            )
    return "".join(parts)


def _marks(rows: Iterable[Row], name: str) -> list[float]:
    places = [row["crossover"].get(name) for row in rows if isinstance(row.get("crossover"), dict)]
    return [place for place in places if is_number(place)]


def _draw_needle(runs: Sequence[Run]) -> str:
    return "".join(
        _map(run, name, "length", "depth", "exact", _percent) for name, run in zip(_names(runs), runs, strict=True)
    )


def _draw_ruler(runs: Sequence[Run]) -> str:
    return "".join(
        _map(run, name, "length", "task", "score", str) for name, run in zip(_names(runs), runs, strict=True)
    )


def _map(run: Run, name: str, across: str, down: str, key: str, show: Callable[[Any], str]) -> str:
    columns = sorted({row[across] for row in run.results})
    lines = list(dict.fromkeys(row[down] for row in run.results))
    found = {(row[down], row[across]): row[key] for row in run.results}
    body = [(show(line), [found.get((line, column)) for column in columns]) for line in lines]
    return draw_map(name, "", [_length(column) for column in columns], body)


def _draw_nothing(_: Sequence[Run]) -> str:
    return ""


SPEEDS = (Column("prefill tok/s", "prefill_per_second", _count), Column("decode tok/s", "decode_per_second", _tenths))
KINDS = {
    "needle": Kind(
        "Needles", "A fact is hidden in a text, at a depth in percent; the share of answers that hold it.",
        ("length", "depth", "exact"),
        (
            Column("tokens", "length", _length), Column("depth", "depth", _percent), Column("trials", "trials", _count),
            Column("found", "exact", _share, is_bar=True), Column("score", "score", _share), *SPEEDS,
        ),
        _draw_needle,
    ),
    "ruler": Kind(
        "Long-context tasks", "Several things to find, to follow and to count in long texts; the mean score.",
        ("length", "score"),
        (
            Column("task", "task", _text, is_left=True), Column("tokens", "length", _length),
            Column("trials", "trials", _count), Column("score", "score", _share, is_bar=True),
            Column("all right", "exact", _share), *SPEEDS,
        ),
        _draw_ruler, ("task",),
    ),
    "reasoning": Kind(
        "Reasoning", "Small problems with one right answer: answered, right, and never out of the model's thoughts.",
        ("answered", "correct", "stuck"),
        (
            Column("task", "task", _text, is_left=True), Column("thoughts at most", "budget", _plain),
            Column("problems", "cases", _count), Column("answered", "answered", _share),
            Column("right", "correct", _share, is_bar=True), Column("stuck", "stuck", _share),
            Column("tokens", "tokens", _count),
        ),
        _draw_nothing, ("task",),
    ),
    "perplexity": Kind(
        "Perplexity", "How well the model predicts a text, by how much of it the model sees. Lower is better.",
        ("length", "perplexity"),
        (
            Column("tokens", "length", _length), Column("windows", "windows", _count),
            Column("scored", "tokens", _count), Column("perplexity", "perplexity", _digits),
            Column("±", "stderr", _digits), Column("bits per byte", "bits_per_byte", _digits),
            Column("tok/s", "tokens_per_second", _count),
        ),
        _draw_perplexity,
    ),
    "harness": Kind(
        "lm-eval", "Tasks of lm-eval, in its own metrics.",
        (),
        (
            Column("task", "task", _text, is_left=True), Column("metric", "metric", _text, is_left=True),
            Column("filter", "filter", _text, is_left=True), Column("value", "value", _plain),
            Column("±", "stderr", _plain), Column("shots", "shots", _plain), Column("questions", "count", _plain),
        ),
        _draw_nothing, ("task", "metric"),
    ),
    "latency": Kind(
        "Latency", "One request at a time.",
        ("num_tokens", "first_token_s", "decode_per_second"),
        (
            Column("tokens", "num_tokens", _length), Column("first token", "first_token_s", _seconds), *SPEEDS,
            Column("memory", "peak_bytes", _gib),
        ),
        _draw_latency,
    ),
    "throughput": Kind(
        "Throughput", "Several requests at a time; speeds of all together.",
        ("batch", "decode_per_second"),
        (
            Column("requests", "batch", _count), Column("tokens each", "num_tokens", _length),
            Column("first tokens", "first_tokens_s", _seconds), *SPEEDS, Column("memory", "peak_bytes", _gib),
        ),
        _draw_throughput,
    ),
    "against": Kind(
        "Against a dense model", "Both in one run; a dashed line where ours becomes the faster one.",
        ("num_tokens",),
        (
            Column("tokens", "num_tokens", _length), Column("first token", "first_token_s", _seconds),
            Column("dense", "dense_first_token_s", _seconds), Column("times as fast", "first_token_ratio", _digits),
            Column("decode tok/s", "decode_per_second", _tenths), Column("dense", "dense_decode_per_second", _tenths),
            Column("times as fast", "decode_ratio", _digits), Column("memory", "peak_bytes", _gib),
            Column("dense", "dense_peak_bytes", _gib),
        ),
        _draw_against,
    ),
    "kernels": Kind(
        "Kernels", "Each kernel alone, and its share of what the GPU could do.",
        (),
        (
            Column("kernel", "name", _text, is_left=True), Column("size", "size", _text, is_left=True),
            Column("ms", "ms", _digits), Column("of the roofline", "share", _share, is_bar=True),
            Column("TFLOP/s", "tflops", _count), Column("peer", "peer", _text, is_left=True),
            Column("times as fast", "ratio", _digits), Column("", "error", _text, is_left=True),
        ),
        _draw_nothing, ("name", "size"),
    ),
}  # fmt: skip

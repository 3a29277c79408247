"""All charts, plotted with matplotlib in one style: PDF, SVG and PNG files, and inline SVG for the report page.

Colours are safe for colour-blind readers: the palette of Okabe and Ito for lines and bars, cividis for heat maps.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, ClassVar

from sala.checkpoint.writer import write_atomically
from sala.errors import InputError, MissingExtra
from sala.options.schema import length_label

SUFFIXES = (".png", ".pdf", ".svg")
INK, LINE, GREY = "#1d2129", "#dfe3e8", "#8a8f98"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
VARIABLES = {INK: "--ink", LINE: "--line", GREY: "--faint", **{one: f"--c{at}" for at, one in enumerate(COLOURS)}}
MAX_TICKS = 8
DPI = 300
STYLE = files(__package__) / "charts.mplstyle"
METADATA: dict[str, dict[str, None]] = {
    "svg": {"Date": None, "Creator": None, "Type": None, "Format": None},
    "pdf": {"CreationDate": None},
}


@dataclass(frozen=True, slots=True)
class Series:
    """A line: its name, its points with x ascending, and standard errors where they are known."""

    name: str
    points: Sequence[tuple[float, float]]
    errors: Sequence[float] = ()
    is_faint: bool = False  # a model to compare with
    bounds: Sequence[tuple[float, float]] = ()  # how far an interval reaches below and above each point


@dataclass(frozen=True, slots=True)
class Lines:
    """Values over a length or a number of steps; `marks` are dashed vertical lines."""

    title: str
    x_name: str
    series: Sequence[Series]
    is_log: bool = False  # the y axis is logarithmic if all values allow it
    marks: Sequence[float] = ()
    is_linear: bool = False  # the x axis is linear; else logarithmic with a tick for each x
    has_markers: bool = True
    size: ClassVar = (3.7, 2.7)

    def plot_on(self, axes: Any) -> None:
        shown = [one for one in self.series if one.points]
        colours = iter(COLOURS * len(shown))
        for one in shown:
            xs, ys = zip(*one.points, strict=True)
            style = {"color": GREY, "linestyle": "--"} if one.is_faint else {"color": next(colours)}
            spread = [*zip(*one.bounds, strict=True)] if one.bounds else one.errors or None
            line = axes.errorbar(xs, ys, yerr=spread, capsize=2, linewidth=1.5, **style)
            line.lines[0].set(gid="series", marker="o" if self.has_markers else "")
        values = [y for one in shown for _, y in one.points]
        values += [y + error for one in shown for (_, y), error in zip(one.points, one.errors, strict=False)]
        values += [y + up for one in shown for (_, y), (_, up) in zip(one.points, one.bounds, strict=False)]
        if self.is_log and values and min(values) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_minor_formatter("")
        elif values:
            low, high = min(0.0, *values), max(0.0, *values)
            axes.set_ylim(low * 1.08, high * 1.08 if high > low else 1.0)
        if not self.is_linear:
            lengths = sorted({x for one in shown for x, _ in one.points})
            every = max(1, -(-len(lengths) // MAX_TICKS))
            ticks = lengths[::-every][::-1]
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [length_label(round(x)) for x in ticks])
            axes.minorticks_off()
        for at in self.marks:
            axes.axvline(at, color=INK, alpha=0.5, linestyle="--", linewidth=1)
            axes.annotate(f"{at:,.0f}", (at, 1), xycoords=("data", "axes fraction"), fontsize=8, va="top", ha="left")
        axes.set_xlabel(self.x_name)
        axes.grid(True, axis="y")
        if len(shown) > 1:
            axes.legend(axes.containers, [_legible(one.name) for one in shown], fontsize=8)


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Shares from 0 to 1 by row and column, with a text in each cell; a cell without a value stays empty."""

    title: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float | None]]
    texts: Sequence[Sequence[str]]
    row_name: str = ""

    @property
    def size(self) -> tuple[float, float]:
        return max(4.0, 2.2 + 0.7 * len(self.columns)), max(2.2, 1.2 + 0.36 * len(self.rows))

    def plot_on(self, axes: Any) -> None:
        filled = [[float("nan") if value is None else value for value in line] for line in self.values]
        mesh = axes.pcolormesh(filled, cmap="cividis", vmin=0, vmax=1, edgecolors="white", linewidth=1)
        axes.invert_yaxis()
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.set_xticks([at + 0.5 for at in range(len(self.columns))], self.columns)
        axes.set_yticks([at + 0.5 for at in range(len(self.rows))], [_legible(row) for row in self.rows])
        axes.set_xlabel("tokens of context")
        axes.set_ylabel(self.row_name)
        for y, line in enumerate(self.values):
            for x, value in enumerate(line):
                if value is not None:
                    colour = "black" if value > 0.5 else "white"
                    axes.text(x + 0.5, y + 0.5, self.texts[y][x], ha="center", va="center", color=colour)
        bar = axes.figure.colorbar(mesh, ax=axes, format=lambda share, _: f"{share:.0%}")
        bar.outline.set_visible(False)


@dataclass(frozen=True, slots=True)
class Bars:
    """Upright bars, one for each name; or, with `x_name`, bars from left to right, the first at the bottom."""

    title: str
    names: Sequence[str]
    values: Sequence[float]
    labels: Sequence[str]
    x_name: str = ""

    @property
    def size(self) -> tuple[float, float]:
        return (7.0, 0.9 + 0.26 * len(self.names)) if self.x_name else (2.3, 2.7)

    def plot_on(self, axes: Any) -> None:
        names, most = [_legible(name) for name in self.names], max([*self.values, 1e-9])
        if not self.x_name:
            colours = [GREY, *COLOURS][: len(names)]
            axes.bar_label(axes.bar(names, self.values, color=colours, width=0.6), self.labels, fontsize=8)
            axes.set_ylim(0, 1.15 * most)
            return
        bars = axes.barh(range(len(names)), self.values, color=COLOURS[0])
        axes.set_yticks(range(len(names)), names)
        axes.bar_label(bars, self.labels, padding=4, fontsize=8)
        axes.set_xlim(0, 1.4 * most)  # the labels need space
        axes.set_xlabel(self.x_name)
        axes.grid(True, axis="x")


Chart = Lines | HeatMap | Bars


def need_matplotlib() -> Any:
    """Return matplotlib; raise MissingExtra, before anything is measured, if it is not installed."""
    try:
        import matplotlib
        from matplotlib import figure  # noqa: F401
    except ImportError:
        raise MissingExtra("matplotlib", "eval") from None
    return matplotlib


def check_plot(file: Path) -> None:
    """Raise before the work begins if the picture could not be plotted."""
    if file.suffix not in SUFFIXES:
        message = f"{file} does not end in {', '.join(SUFFIXES)}"
        raise InputError("plot", message, f"choose a format, e.g. {file.stem}.pdf")
    need_matplotlib()


def plot(charts: Sequence[Chart], file: Path, title: str = "", dpi: int = DPI) -> None:
    """Draw the charts side by side into a file; its suffix selects the format."""
    kind = file.suffix.removeprefix(".")
    write_atomically(file, _save(charts, kind, title=title, dpi=dpi))


def to_svg(chart: Chart) -> str:
    """Return a chart as SVG to embed into the page, in the page's own colours; its title is left to the page."""
    text = _save([chart], "svg", has_titles=False, transparent=True).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<clipPath.*?</clipPath>", "", text, flags=re.DOTALL)
    text = re.sub(r' clip-path="[^"]*"| id="[\w.]+_\d+"', "", text)  # ids would be repeated on the page
    text = text.replace(' id="series"', ' class="series"')
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(chart.title)}" ', 1)


def _save(charts: Sequence[Chart], kind: str, title: str = "", has_titles: bool = True, **options: Any) -> bytes:
    matplotlib = need_matplotlib()
    num_columns = 2 if len(charts) == 4 else min(3, max(1, len(charts)))
    num_rows = max(1, -(-len(charts) // num_columns))
    widths, heights = zip(*(one.size for one in charts), strict=True) if charts else ((4.0,), (2.0,))
    size = (sum(widths) if num_rows == 1 else max(widths) * num_columns, max(heights) * num_rows)
    with as_file(STYLE) as style, matplotlib.rc_context(fname=style):
        figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
        for at, chart in enumerate(charts, 1):
            axes = figure.add_subplot(num_rows, num_columns, at)
            chart.plot_on(axes)
            if has_titles and not (title and len(charts) == 1):
                axes.set_title(chart.title)
        if title:
            figure.suptitle(title, fontsize=9)
        data = io.BytesIO()
        figure.savefig(data, format=kind, metadata=METADATA.get(kind), **options)
    return data.getvalue()


def _legible(name: str) -> str:
    """Return the name; matplotlib would hide one that begins with an underscore."""
    return f" {name}" if name.startswith("_") else name

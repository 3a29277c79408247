"""Charts as SVG text, in the colours of the page that they stand on: no library, no script, sharp at any size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from sala.lab.bench.plots import label

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40
NUM_COLOURS = 6
MAX_LABELS = 8


@dataclass(frozen=True, slots=True)
class Series:
    """A line: its name and its points, x ascending."""

    name: str
    points: Sequence[tuple[float, float]]
    is_faint: bool = False  # a rival's


@dataclass(frozen=True, slots=True)
class Axis:
    """Values → places between `near` and `far`."""

    low: float
    high: float
    near: float
    far: float
    is_log: bool = False

    def place(self, value: float) -> float:
        low, high, value = (math.log(one) if self.is_log else one for one in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.near + share * (self.far - self.near)


def draw_lines(
    title: str,
    x_name: str,
    series: Sequence[Series],
    is_log: bool = False,
    marks: Sequence[float] = (),
    base: float = 0.0,
) -> str:
    """Lines over a logarithmic x axis, all x above 0; `marks` are dashed lines upright, `base` must be in view.

    With `is_log` the other axis is logarithmic too, if all values allow it.
    """
    shown = [one for one in series if one.points]
    if not shown:
        return ""
    xs = sorted({x for one in shown for x, _ in one.points})
    ys = [y for one in shown for _, y in one.points]
    is_log = is_log and min(ys) > 0
    across = Axis(min(xs), max(xs), LEFT + 12, WIDTH - RIGHT - 12, is_log=True)
    ticks = _decades(min(ys), max(ys)) if is_log else _steps(min(base, *ys), max(base, *ys))
    up = Axis(min(ticks[0], *ys), max(ticks[-1], *ys), HEIGHT - BOTTOM, TOP, is_log)
    parts = [_grid(across, up, xs, ticks, x_name)]
    for at in marks:
        place = across.place(min(max(at, across.low), across.high))
        parts.append(f'<line class="mark" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text class="tick" x="{place + 4:.1f}" y="{TOP + 10}">{escape(f"{at:,.0f}")}</text>')
    parts += [_line(one, index, across, up) for index, one in enumerate(shown)]
    names = "".join(_legend(one, index) for index, one in enumerate(shown)) if len(shown) > 1 else ""
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f'<figure><figcaption>{escape(title)}</figcaption>{drawing}<p class="legend">{names}</p></figure>'


def _colour(one: Series, index: int) -> str:
    return "faint" if one.is_faint else f"s{index % NUM_COLOURS}"


def _line(one: Series, index: int, across: Axis, up: Axis) -> str:
    places = [(across.place(x), up.place(y)) for x, y in one.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(f"{one.name}: {label(round(at))}, {value:,.4g}")}'
        "</title></circle>"
        for (x, y), (at, value) in zip(places, one.points, strict=True)
    )
    return f'<g class="{_colour(one, index)}"><polyline points="{path}"/>{dots}</g>'


def _legend(one: Series, index: int) -> str:
    return f'<span class="{_colour(one, index)}"><b></b>{escape(one.name)}</span>'


def _grid(across: Axis, up: Axis, xs: Sequence[float], ticks: Sequence[float], x_name: str) -> str:
    parts = []
    for tick in ticks:
        y = up.place(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    every = -(-len(xs) // MAX_LABELS)
    for x in xs[::-every][::-1]:
        place = f'x="{across.place(x):.1f}" y="{HEIGHT - BOTTOM + 16}"'
        parts.append(f'<text class="tick" {place} text-anchor="middle">{escape(label(round(x)))}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_name)}</text>')
    return "".join(parts)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _steps(low: float, high: float) -> list[float]:
    """Round values from below `low` to above `high`, about five of them."""
    span = high - low or abs(high) or 1.0
    size = 10 ** math.floor(math.log10(span / 4))
    step = next(size * times for times in (1, 2, 2.5, 5, 10) if span / (size * times) <= 5)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = -(-(last - first + 1) // 6)
    return [10.0**power for power in range(first, max(last, first + 1) + 1, every)]


def draw_map(
    title: str, corner: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[float | None]]]
) -> str:
    """Shares from 0 to 1 as a table in colours."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(_cell(value) for value in values)}</tr>" for name, values in rows
    )
    caption = f"<figcaption>{escape(title)}</figcaption>" if title else ""
    table = f'<table class="map"><thead><tr><th>{escape(corner)}</th>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<figure class="wide">{caption}<div class="scroll">{table}</div></figure>'


def _cell(value: float | None) -> str:
    if value is None:
        return "<td></td>"
    share = min(max(value, 0.0), 1.0)
    low, middle, high = (226, 122, 110), (240, 214, 128), (126, 196, 138)
    ends = (low, middle) if share < 0.5 else (middle, high)
    part = 2 * share if share < 0.5 else 2 * share - 1
    mixed = ",".join(str(round(a + (b - a) * part)) for a, b in zip(*ends, strict=True))
    return f'<td style="background:rgb({mixed});color:#111">{share:.0%}</td>'


def draw_bar(share: float) -> str:
    """A bar in a cell of a table."""
    return f'<span class="bar"><b style="width:{100 * min(max(share, 0.0), 1.0):.1f}%"></b></span>'

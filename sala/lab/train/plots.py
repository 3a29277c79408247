"""Pictures of a run; without matplotlib there are none, and nothing else is missing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLOURS = ("#6e7781", "#4a90c2", "#e8a33d")


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return None
    return pyplot


def plot_log(log: Sequence[Mapping[str, float]], file: Path, title: str) -> None:
    """The loss terms over the steps, the learning rate behind them."""
    pyplot = _pyplot()
    if pyplot is None or not log:
        return
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    steps = [entry["step"] for entry in log]
    for name in (key for key in log[0] if key not in ("step", "norm", "rate")):
        values = [entry[name] for entry in log]
        if any(values):
            axes.plot(steps, values, label=name, linewidth=1.4)
    axes.set_xlabel("step")
    axes.set_yscale("log")
    axes.set_title(title)
    axes.grid(alpha=0.25, which="both")
    if axes.get_lines():
        axes.legend(loc="upper right")
    rates = axes.twinx()
    rates.plot(steps, [entry["rate"] for entry in log], color="0.75", linewidth=1, linestyle="--")
    rates.set_ylabel("learning rate", color="0.5")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def plot_by_length(panels: Mapping[str, Mapping[str, Mapping[int, float]]], file: Path) -> None:
    """A panel per measure: for each name a line of values over the length in tokens."""
    pyplot = _pyplot()
    panels = {title: lines for title, lines in panels.items() if any(lines.values())}
    if pyplot is None or not panels:
        return
    figure, grid = pyplot.subplots(
        1, len(panels), figsize=(5.5 * len(panels), 3.6), layout="constrained", squeeze=False
    )
    for axes, (title, lines) in zip(grid[0], panels.items(), strict=True):
        ticks = sorted({length for line in lines.values() for length in line})
        for (name, line), colour in zip(lines.items(), _COLOURS, strict=False):
            axes.plot(list(line), list(line.values()), marker="o", markersize=4, color=colour, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in ticks])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens")
        axes.set_title(title, loc="left")
        axes.grid(alpha=0.25)
        axes.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def plot_losses(log: Sequence[Mapping[str, float]], file: Path, title: str) -> bool:
    """The loss of training and, where it was measured, of the examples held out; False if nothing could be drawn."""
    pyplot = _pyplot()
    if pyplot is None or not log:
        return False
    figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    for (name, label), colour in zip((("loss", "training"), ("eval", "held out")), _COLOURS[1:], strict=True):
        points = [(entry["step"], entry[name]) for entry in log if name in entry]
        if points:
            marker = "o" if name == "eval" else None
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, label=label, color=colour, linewidth=1.4, marker=marker, markersize=4)
    axes.set_xlabel("update")
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.25)
    if axes.get_lines():
        axes.legend()
    figure.savefig(file, dpi=100)
    pyplot.close(figure)
    return True

"""Plots of a training run; without matplotlib they are left out."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sala.errors import MissingExtra
from sala.lab.report.charts import Chart, Lines, Series, plot

Log = Sequence[Mapping[str, float]]


def plot_log(log: Log, file: Path, title: str) -> None:
    """Plot the loss terms and the learning rate over the steps."""
    if not log:
        return
    names = [key for key in log[0] if key not in ("step", "norm", "rate")]
    terms = [Series(name, [point for point in _points(log, name) if point[1] > 0]) for name in names]
    panels = [_over_steps("loss", "step", terms, is_log=True)]
    _plot([*panels, _over_steps("learning rate", "step", [Series("rate", _points(log, "rate"))])], file, title)


def plot_losses(log: Log, file: Path, title: str) -> None:
    """Plot the training loss and the evaluation loss, if any."""
    names = {"training": "loss", "held out": "eval"}
    series = [Series(label, points) for label, name in names.items() if (points := _points(log, name))]
    if log:
        _plot([_over_steps("loss", "update", series)], file, title)


def _over_steps(title: str, x_name: str, series: Sequence[Series], is_log: bool = False) -> Lines:
    return Lines(title, x_name, series, is_log, is_linear=True, has_markers=False)


def _points(log: Log, name: str) -> list[tuple[float, float]]:
    return [(entry["step"], entry[name]) for entry in log if name in entry]


def _plot(charts: Sequence[Chart], file: Path, title: str) -> None:
    with suppress(MissingExtra):
        plot(charts, file, title)

"""Plots of a training run; without matplotlib they are left out."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sala.errors import MissingExtra
from sala.lab.report.charts import Chart, Lines, Series, plot

Log = Sequence[Mapping[str, float]]


def plot_log(log: Log, file: Path, title: str) -> None:
    """Plot the loss terms and the learning rate over the steps."""
    if log:
        terms = {key: key for key in log[0] if key not in ("step", "norm", "rate")}
        rates = _lines(log, "learning rate", "step", {"rate": "rate"})
        _plot([_lines(log, "loss", "step", terms, is_log=True), rates], file, title)


def plot_losses(log: Log, file: Path, title: str) -> None:
    """Plot the training loss and the evaluation loss, if any."""
    if log:
        _plot([_lines(log, "loss", "update", {"training": "loss", "held out": "eval"})], file, title)


def _lines(log: Log, title: str, x_name: str, names: Mapping[str, str], is_log: bool = False) -> Lines:
    """Return a line for each key of the log's entries, by its label; a logarithmic axis shows positive values only."""
    series = [
        Series(
            label, [(entry["step"], entry[name]) for entry in log if name in entry and (entry[name] > 0 or not is_log)]
        )
        for label, name in names.items()
    ]
    return Lines(title, x_name, series, is_log, is_linear=True, has_markers=False)


def _plot(charts: Sequence[Chart], file: Path, title: str) -> None:
    with suppress(MissingExtra):
        plot(charts, file, title)

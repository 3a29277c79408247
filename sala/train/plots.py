"""Pictures of a run; without matplotlib there are none, and nothing else is missing."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def plot_log(log: Sequence[Mapping[str, float]], file: Path, title: str) -> None:
    """The loss terms over the steps, the learning rate behind them."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return
    if not log:
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
    axes.legend(loc="upper right")
    rates = axes.twinx()
    rates.plot(steps, [entry["rate"] for entry in log], color="0.75", linewidth=1, linestyle="--")
    rates.set_ylabel("learning rate", color="0.5")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)

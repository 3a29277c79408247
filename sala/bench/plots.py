"""Pictures of measurements."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sala.bench.measure import Latency, Throughput
from sala.errors import MissingExtra

BLUE = "#4a90c2"


def need_matplotlib() -> Any:
    """pyplot, without a window; to be asked for before the measuring begins."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise MissingExtra("matplotlib", "eval") from None
    return pyplot


def label(count: int) -> str:
    """4096 → 4K, 1048576 → 1M."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return f"{count:,}"


def plot_latency(results: Sequence[Latency], file: Path, title: str) -> None:
    panels = {
        "time to first token, s": [one.first_token_s for one in results],
        "prefill, tok/s": [one.prefill_per_second for one in results],
        "decode, tok/s": [one.decode_per_second for one in results],
        "peak memory, GiB": [one.peak_bytes / 2**30 for one in results],
    }
    _draw([one.num_tokens for one in results], panels, file, title, "tokens of context")


def plot_throughput(results: Sequence[Throughput], file: Path, title: str) -> None:
    panels = {
        "decode of all together, tok/s": [one.decode_per_second for one in results],
        "peak memory, GiB": [one.peak_bytes / 2**30 for one in results],
    }
    _draw([one.batch for one in results], panels, file, title, "requests at a time")


def _draw(x: Sequence[int], panels: dict[str, list[float]], file: Path, title: str, x_name: str) -> None:
    pyplot = need_matplotlib()
    figure, grid = pyplot.subplots(
        1, len(panels), figsize=(3.6 * len(panels), 3.2), layout="constrained", squeeze=False
    )
    for axes, (name, values) in zip(grid[0], panels.items(), strict=True):
        axes.plot(x, values, marker="o", markersize=4, color=BLUE)
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [label(n) for n in x])
        axes.minorticks_off()
        axes.set_ylim(0, 1.1 * max(values))
        axes.set_xlabel(x_name)
        axes.set_title(name, loc="left", fontsize=10)
        axes.grid(alpha=0.25)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)

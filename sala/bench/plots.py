"""Pictures of measurements."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sala.bench.measure import Latency, Throughput
from sala.errors import MissingExtra

if TYPE_CHECKING:
    from sala.bench.roofline import Result

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


def plot_kernels(results: Sequence["Result"], file: Path, title: str) -> None:
    """Bars of what each kernel reaches of the roofline, the best on top; those that did not run are left out."""
    pyplot = need_matplotlib()
    shares = sorted(((one.share, one) for one in results if one.share is not None), key=lambda pair: pair[0])
    figure, axes = pyplot.subplots(figsize=(9, 0.8 + 0.3 * len(shares)), layout="constrained")
    bars = axes.barh(range(len(shares)), [100 * share for share, _ in shares], color=BLUE)
    axes.set_yticks(range(len(shares)), [f"{one.name}, {one.size}" for _, one in shares])
    axes.bar_label(bars, [_time_and_ratio(one) for _, one in shares], padding=4, fontsize=8)
    axes.axvline(100, color="black", alpha=0.25)
    axes.set_xlim(0, 140 * max(1, shares[-1][0] if shares else 1))  # the labels need room
    axes.set_xticks(range(0, 101, 25))
    axes.set_xlabel("% of the roofline")
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _time_and_ratio(one: "Result") -> str:
    return f"{one.ms:.3g} ms" + ("" if one.ratio is None else f", {one.ratio:.3g} x {one.peer}")


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

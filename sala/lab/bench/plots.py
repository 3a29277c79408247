"""Pictures of measurements."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sala.errors import MissingExtra
from sala.lab.bench.measure import Latency, Throughput

if TYPE_CHECKING:
    from sala.lab.bench.roofline import Result

BLUE = "#4a90c2"
GREY = "#8a8a8a"


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
    """4096 → 4K, 1048576 → 1M; round thousands, which people mean as such, stay numbers."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if count % size == 0 and count % 1000:
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


def plot_against(rows: Sequence[dict[str, Any]], file: Path, title: str) -> None:
    """Both models, and how many times as fast ours is; a dashed line where it overtakes the other."""
    pyplot = need_matplotlib()
    figure, grid = pyplot.subplots(2, 2, figsize=(9, 6), layout="constrained")
    lengths = [row["num_tokens"] for row in rows]
    panels = (
        ("first_token", "time to first token, s", "first_token_s"),
        ("decode", "decode, tok/s", "decode_per_second"),
    )
    for column, (name, caption, key) in enumerate(panels):
        above, below = grid[0][column], grid[1][column]
        for prefix, who, colour in (("", "ours", BLUE), ("dense_", "dense", GREY)):
            points = [(row["num_tokens"], row[prefix + key]) for row in rows if row[prefix + key] is not None]
            above.plot(*_columns(points), marker="o", markersize=4, color=colour, label=who)
        above.set_yscale("log" if name == "first_token" else "linear")
        above.set_title(caption, loc="left", fontsize=10)
        above.legend(frameon=False)
        ratios = [(row["num_tokens"], row[f"{name}_ratio"]) for row in rows if row[f"{name}_ratio"] is not None]
        below.plot(*_columns(ratios), marker="o", markersize=4, color=BLUE)
        below.axhline(1, color="black", alpha=0.25)
        below.set_title("times as fast as the dense model", loc="left", fontsize=10)
        for axes in (above, below):
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [label(n) for n in lengths])
            axes.minorticks_off()
            axes.set_xlabel("tokens of context")
            axes.grid(alpha=0.25)
            for at in (row["crossover"][name] for row in rows if name in row["crossover"]):
                axes.axvline(at, color="black", alpha=0.4, linestyle="--")
                axes.annotate(f"{at:,}", (at, 0.02), xycoords=("data", "axes fraction"), fontsize=8, ha="center")
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


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

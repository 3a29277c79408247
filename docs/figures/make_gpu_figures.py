"""Draws prefill and decode on a GPU from benchmarks/gpu_model.json, for `make figures`."""

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).parents[2] / "benchmarks" / "gpu_model.json"
INK, SOFT = "#24292f", "#6e7781"
OURS, PEER = "#4a90c2", "#e8a33d"
LOOK = {
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "legend.frameon": False,
    "savefig.dpi": 150,
}


def label(count: int) -> str:
    return f"{count >> 20}M" if count >= 1 << 20 else f"{count >> 10}K"


def by_length(axes: Axes, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [label(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("tokens of context")


def prefill(axes: Axes, results: dict[str, Any]) -> None:
    """Seconds until the first token can be drawn, ours and the dense peer's."""
    ours = {int(length): entry for length, entry in {**results["prefill"], **results.get("long", {})}.items()}
    lengths = sorted(ours)
    axes.plot(lengths, [ours[n]["seconds"] for n in lengths], "o-", color=OURS, label="MiniCPM-SALA 9B, this project")
    both = [n for n in lengths if "peer_seconds" in ours[n]]
    axes.plot(both, [ours[n]["peer_seconds"] for n in both], "o-", color=PEER, label="Qwen3-8B, transformers")
    for n in both:
        axes.annotate(f"{ours[n]['ratio']:.1f}x", (n, ours[n]["peer_seconds"]), (-28, 4), textcoords="offset points")
    axes.set_yscale("log")
    axes.set_ylabel("seconds")
    axes.set_title("Reading a prompt")
    axes.legend(loc="lower right")
    by_length(axes, lengths)


def decode(axes: Axes, results: dict[str, Any]) -> None:
    """Tokens per second of one sequence, by context."""
    ours = {int(name.split(" x ")[1]): e for name, e in results["decode"].items() if name.startswith("1 x ")}
    peer = {int(length): entry for length, entry in results.get("peer", {}).items()}
    for found, color, name in ((ours, OURS, "MiniCPM-SALA 9B"), (peer, PEER, "dense, Qwen3-8B's shapes")):
        lengths = sorted(found)
        axes.plot(lengths, [found[n]["tokens_per_second"] for n in lengths], "o-", color=color, label=name)
    axes.set_ylim(0)
    axes.set_ylabel("tokens per second, one sequence, bf16")
    axes.set_title("Answering")
    axes.legend(loc="lower left")
    by_length(axes, sorted({*ours, *peer}))


def draw() -> Figure:
    """Return the figure of prefill and decode."""
    matplotlib.use("Agg")
    results = json.loads(RESULTS.read_text())
    with pyplot.rc_context(LOOK):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
        prefill(left, results)
        decode(right, results)
    return figure

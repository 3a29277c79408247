"""Draws the figures of a real conversion, smol-sala, from its log, for `make figures`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

RUN = Path(__file__).parents[2] / "models" / "smol-sala" / "run"
INK, SOFT = "#24292f", "#6e7781"
SPARSE, LIGHTNING, ANSWER = "#e8a33d", "#4a90c2", "#8a6fc0"
TOKENS = {"align": 64 * 512, "settle": 64 * 512, "distil": 32 * 1024, "distil-2": 32 * 1024}  # per step
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


def read(name: str) -> Any:
    return json.loads((RUN / name).read_text())


def losses() -> Figure:
    """How each stage learns, over the tokens it read."""
    log = read("losses.json")
    figure, (first, second, third) = pyplot.subplots(
        1, 3, figsize=(9.6, 3.3), layout="constrained", width_ratios=[1, 1.3, 1.6]
    )
    for stage, colour, words in (
        ("align", LIGHTNING, "30 lightning mixers"),
        ("settle", SPARSE, "7 kept, without RoPE"),
    ):
        curve(first, log, stage, "error", colour, words)
    first.set_title("Alignment: relative error")
    first.set_yscale("log")
    first.set_yticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
    first.minorticks_off()
    for axes, stage, title in ((second, "distil", "Distillation: losses"), (third, "distil-2", "Second run, rounded")):
        curve(axes, log, stage, "kl", SOFT, "KL from the teacher")
        curve(axes, log, stage, "answer", ANSWER, "answers about hidden facts (median of 9)", smooth=9, alpha=0.9)
        axes.set_title(title)
        axes.set_ylim(0, 1.05)
    third.tick_params(labelleft=False)
    first.legend(fontsize=9)
    second.legend(fontsize=9)
    for axes in (first, second, third):
        axes.set_xlim(left=0)
        axes.set_xlabel("million tokens")
        axes.grid(alpha=0.2)
    return figure


def curve(
    axes: Axes, log: Any, stage: str, term: str, colour: str, words: str, smooth: int = 1, alpha: float = 1.0
) -> None:
    millions = [step * TOKENS[stage] / 1e6 for step in log[stage]["step"]]
    values = log[stage][term]
    if smooth > 1:
        values = [median(values[max(0, i - smooth // 2) : i + smooth // 2 + 1]) for i in range(len(values))]
    axes.plot(millions, values, color=colour, linewidth=1.5, label=words, alpha=alpha)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def layers() -> Figure:
    """What recall loses with each layer's attention, and which layers kept it."""
    found = read("layers.json")
    kept, table = set(found["kept"]), found["layers"]
    best = max(entry["recall"] for entry in table.values())
    lost = [100 * (best - table[str(index)]["recall"]) for index in range(len(table))]
    scores = [table[str(index)]["score"] for index in range(len(table))]
    colours = [SPARSE if index in kept else LIGHTNING for index in range(len(table))]
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(9.6, 4.4), layout="constrained", sharex=True)
    for axes, values, top, title in (
        (upper, lost, 8, "Recall lost without the attention of a layer, in points of answer tokens"),
        (lower, scores, 6, "Score: recall lost, over what common sense loses"),
    ):
        axes.bar(range(len(values)), [min(value, top) for value in values], color=colours, width=0.8)
        axes.set_ylim(0, top * 1.02)
        axes.set_title(title)
        axes.grid(alpha=0.2, axis="y")
        axes.set_axisbelow(True)
        for index, value in enumerate(values):
            if value > top:
                axes.annotate(f"↑ {value:.0f}", (index, top), (index + 0.6, top * 0.9), color=INK, fontsize=9)
    lower.set_xticks(range(len(table)))
    lower.set_xlim(-0.7, len(table) - 0.3)
    lower.set_xlabel("layer")
    words = [Patch(color=SPARSE, label="keeps attention"), Patch(color=LIGHTNING, label="becomes lightning")]
    lower.legend(handles=words, loc="upper left", ncols=2, fontsize=9)
    return figure


def draw(figure: Callable[[], Figure]) -> Figure:
    """Return a figure in the style of this page."""
    matplotlib.use("Agg")
    with pyplot.rc_context(LOOK):
        drawn = figure()
        drawn.canvas.draw()
    return drawn

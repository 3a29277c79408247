"""Draws how sources come about, for `make figures`: what an answer attended to, and the weights of the heads."""

from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.make_halo_figures import ANSWER, INK, LOOK, SOFT, SPARSE
from docs.figures.results import read, read_model

UNTOLD = "#d9dce0"


def draw() -> Figure:
    matplotlib.use("Agg")
    with pyplot.rc_context(LOOK):
        figure, axes = pyplot.subplot_mosaic(
            [["heads", "alike"], ["heads", "learnt"]], figsize=(9.6, 4.2), layout="constrained", width_ratios=[1, 2.1]
        )
        heads(axes["heads"])
        example = read("sources_example.json")
        blocks(axes["alike"], example, "alike", "1. All heads alike: the first block and the question take most")
        blocks(axes["learnt"], example, "learnt", "3. Heads weighed: the block with the fact stands out")
        axes["learnt"].set_xlabel(f"blocks of {example['block_size']} tokens of the prompt")
    return figure


def heads(axes: Axes) -> None:
    """The weights of the heads, by sparse layer."""
    weights = read_model("sources.json")["heads"]
    values = np.array([*weights.values()])
    axes.imshow(values, cmap="Purples", aspect="auto", vmin=0)
    axes.set_title("2. Weights of heads, learnt")
    axes.set_xlabel("query head")
    axes.set_ylabel("sparse layer")
    axes.set_yticks(range(len(weights)), [*weights])
    axes.set_xticks(range(values.shape[1]))
    for (layer, head), value in np.ndenumerate(values):
        if value >= 0.01:
            colour = "white" if value > 0.2 else INK
            axes.text(head, layer, f"{value:.0%}", ha="center", va="center", fontsize=8, color=colour)
    axes.spines[:].set_visible(False)


def blocks(axes: Axes, example: dict[str, Any], kind: str, title: str) -> None:
    """The share of each block; those that are never told are grey."""
    shares = example["shares"][kind]
    facts = set(example["facts"])
    colours = [ANSWER if at in facts else SPARSE if told else UNTOLD for at, told in enumerate(example["told"])]
    axes.bar(range(len(shares)), shares, color=colours, width=0.9)
    axes.set_title(title)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    at = example["facts"][0]
    axes.annotate(
        "the fact", (at, max(shares[fact] for fact in facts)), (0, 4), textcoords="offset points", ha="center",
        fontsize=9, color=ANSWER,
    )  # fmt: skip
    axes.text(len(shares) - 1, max(shares) * 0.9, "grey: never told", ha="right", fontsize=9, color=SOFT)
    axes.margins(x=0.01, y=0.15)

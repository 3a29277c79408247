"""Draws how many sequences fit on GPUs, and makes the tables of the guide, for `make figures`.

All numbers are those of `sala estimate --shape 9b --chunk 8192 --tp N`, with 90% of the memory used.
"""

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sala.backends.memory import USABLE, estimate
from sala.checkpoint.names import count_parameters, expected_tensors
from sala.checkpoint.random import RELEASED

GIB = 1 << 30
CHUNK = 8192
CONTEXTS = [32 << 10, 128 << 10, 512 << 10, 1 << 20]
WEIGHTS = {"bf16": None, "8 bits": 8, "4 bits": 4}
GPUS = {"24 GB": 24, "48 GB": 48, "80 GB": 80, "141 GB": 141}
INK, SOFT = "#24292f", "#6e7781"
COLOURS = ["#8fbcd9", "#4a90c2", "#24527a"]
LOOK = {
    "font.size": 10, "text.color": INK, "axes.edgecolor": SOFT, "axes.labelcolor": SOFT, "axes.spines.top": False,
    "axes.spines.right": False, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "xtick.color": SOFT, "ytick.color": SOFT, "legend.frameon": False, "savefig.dpi": 130,
}  # fmt: skip
PARAMETERS = count_parameters(expected_tensors(RELEASED))


def total(ctx: int, batch: int, bits: int | None, num_ranks: int) -> int:
    """Bytes on each GPU."""
    return estimate(RELEASED, PARAMETERS, ctx, batch, bits, chunk=CHUNK, num_ranks=num_ranks).total


def most(ctx: int, memory: int, bits: int | None, num_ranks: int) -> int:
    """Sequences that fit at a time: memory grows by the same amount with each."""
    none, one = total(ctx, 0, bits, num_ranks), total(ctx, 1, bits, num_ranks)
    return max(0, int(memory * GIB * USABLE - none) // (one - none))


def label(count: int) -> str:
    return f"{count >> 20}M" if count >= 1 << 20 else f"{count >> 10}K"


def table_of_bytes() -> list[str]:
    """GiB on each GPU by weights, ranks, context and concurrency."""
    cases = [(ctx, batch) for ctx in CONTEXTS for batch in (1, 8)]
    head = [f"{batch} × {label(ctx)}" for ctx, batch in cases]
    lines = ["| weights | GPUs | " + " | ".join(head) + " |", "|---|---|" + "---|" * len(cases)]
    for name, bits in WEIGHTS.items():
        for ranks in (1, 2, 4):
            cells = [f"{total(ctx, batch, bits, ranks) / GIB:.1f}" for ctx, batch in cases]
            lines.append(f"| {name} | {ranks} | " + " | ".join(cells) + " |")
    return lines


def table_of_sequences() -> list[str]:
    """Sequences at a time, for bf16 / 8 bits / 4 bits."""
    lines = ["| GPUs | " + " | ".join(label(ctx) for ctx in CONTEXTS) + " |", "|---|" + "---|" * len(CONTEXTS)]
    for name, memory in GPUS.items():
        for ranks in (1, 2, 4):
            counts = [[most(ctx, memory, bits, ranks) for bits in WEIGHTS.values()] for ctx in CONTEXTS]
            cells = [" / ".join(str(count) if count else "–" for count in row) for row in counts]
            lines.append(f"| {ranks} × {name} | " + " | ".join(cells) + " |")
    return lines


def draw(axes: Axes, memory: int) -> None:
    for ranks, colour in zip((1, 2, 4), COLOURS, strict=True):
        counts = [most(ctx, memory, None, ranks) for ctx in CONTEXTS]
        shown = [(ctx, count) for ctx, count in zip(CONTEXTS, counts, strict=True) if count]
        axes.plot(*zip(*shown, strict=True), marker="o", color=colour, label=f"{ranks} GPU{'s' if ranks > 1 else ''}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(CONTEXTS, [label(ctx) for ctx in CONTEXTS])
    axes.minorticks_off()
    axes.set_xlabel("tokens of each sequence")


def draw_all() -> Figure:
    """Return the figure of the sequences that fit, by length and number of GPUs."""
    matplotlib.use("Agg")
    with pyplot.rc_context(LOOK):
        return _draw_all()


def _draw_all() -> Figure:
    figure, rows = pyplot.subplots(1, 3, figsize=(9.5, 3.1), sharey=True)
    for axes, (name, memory) in zip(rows, list(GPUS.items())[1:], strict=True):
        draw(axes, memory)
        axes.set_title(f"GPUs with {name}")
    rows[0].set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    rows[0].set_ylabel("sequences at a time, bf16")
    rows[-1].legend()
    figure.tight_layout()
    figure.canvas.draw()
    return figure

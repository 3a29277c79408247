"""`sala init`: write a checkpoint with random weights."""

from pathlib import Path
from typing import Annotated

import typer

from sala.cli import flags as s


def init(
    directory: Annotated[Path, typer.Argument(help="Directory to write; must not exist.")],
    shape: Annotated[str, typer.Option(help="tiny (a few MB) or 9b (the released shapes).")] = "tiny",
    layers: Annotated[int | None, typer.Option(help="Only this many layers.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights.", min=0)] = 0,
) -> None:
    from sala.checkpoint.random import SHAPES, cut_layers, write_random
    from sala.errors import InputError

    if shape not in SHAPES:
        raise InputError("shape", f"is {shape!r}", "use " + " or ".join(SHAPES))
    config = SHAPES[shape] if layers is None else cut_layers(SHAPES[shape], layers)
    write_random(directory, config, seed)
    s.note(f"wrote {directory}: random weights, so its answers mean nothing")

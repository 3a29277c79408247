"""`sala train`: run the stages of a recipe on a checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from sala.cli import flags as s
from sala.options import Options


@s.derived
def train(
    *,
    recipe: Annotated[Path, typer.Argument(help="Recipe of the stages, in TOML.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory of the result; must not exist.")],
    teacher: Annotated[
        Path | None, typer.Option(help="Teacher of stages of kind distil: a checkpoint or a dense model.")
    ] = None,
    work: Annotated[Path | None, typer.Option(help="Working directory; by default OUTPUT.run.")] = None,
    options: Annotated[Options, s.Use(only=("model", "device", "threads"))],
    minutes: Annotated[
        float | None, typer.Option(help="Stop after so many minutes, to resume another time.", min=0)
    ] = None,
) -> None:
    from sala.cli.progress import training_bar
    from sala.lab.train.convert import train_model

    start = s.find_model(options.model)
    with training_bar() as bar:
        train_model(
            start, output, recipe, work or output.with_name(output.name + ".run"), options.device, bar, minutes, teacher
        )

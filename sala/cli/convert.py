"""`sala convert`: a dense model becomes a hybrid."""

from pathlib import Path
from typing import Annotated

import typer


def convert(
    source: Annotated[Path, typer.Argument(help="A Llama- or Qwen-style model: a directory, or a .gguf file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the hybrid goes; must not exist.")],
    recipe: Annotated[Path, typer.Option("--recipe", "-r", help="The stages to go through, in TOML.")],
    work: Annotated[Path | None, typer.Option(help="Working directory; OUTPUT.run unless given.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N")] = "auto",
    minutes: Annotated[float | None, typer.Option(help="Stop after so long, to go on another time.", min=0)] = None,
) -> None:
    from sala.cli.training import TrainingBar
    from sala.lab.train.convert import convert as run

    with TrainingBar() as bar:
        run(source, output, recipe, work or output.with_name(output.name + ".run"), device, bar, minutes)

"""`sala convert`: turn a dense model into a hybrid."""

from pathlib import Path
from typing import Annotated

import typer

from sala.cli import flags as s
from sala.options import Options


@s.derived
def convert(
    *,
    source: Annotated[Path, typer.Argument(help="A Llama- or Qwen-style model: a directory, or a .gguf file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory of the hybrid; must not exist.")],
    recipe: Annotated[Path, typer.Option("--recipe", "-r", help="Recipe of the stages, in TOML.")],
    work: Annotated[Path | None, typer.Option(help="Working directory; by default OUTPUT.run.")] = None,
    options: Annotated[Options, s.Use(only=("device", "threads"))],
    minutes: Annotated[
        float | None, typer.Option(help="Stop after so many minutes, to resume another time.", min=0)
    ] = None,
) -> None:
    from sala.cli.progress import training_bar
    from sala.lab.train.convert import convert as run

    with training_bar() as bar:
        run(source, output, recipe, work or output.with_name(output.name + ".run"), options.device, bar, minutes)

"""`sala fuse`: merge an adapter into its model."""

from pathlib import Path
from typing import Annotated

import typer

from sala.cli import flags as s
from sala.cli.progress import ProgressBar
from sala.options import Options


@s.derived
def fuse(
    *,
    model: Annotated[str, typer.Argument(help="Checkpoint directory, or the name of a local model.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory of the merged model; must not exist.")],
    options: Annotated[Options, s.Use(only=("adapter", "dtype"))],
    whole: Annotated[
        bool, typer.Option("--whole", help="Dequantize the weights that the adapter leaves alone, too.")
    ] = False,
) -> None:
    from sala.checkpoint.lora_merge import fuse as merge
    from sala.models.embedded import find_base

    path, found = find_base(s.find_model(model), options.adapter, s.note)
    if found is None and not whole:
        from sala.errors import InputError

        raise InputError("adapter", "is missing", "name its directory with --adapter")
    dtype = None if options.dtype == "auto" else options.dtype
    with ProgressBar() as bar:
        merged = merge(path, found, output.expanduser(), dtype, whole, bar)
    rest = ""
    if merged.quantization is None and (path / "config.json").is_file():
        rest = f"; fewer bits: sala quantize {output} -o …"
    s.note(f"ready: {output}{rest}")

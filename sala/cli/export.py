"""`sala export`: write a directory that transformers loads with `trust_remote_code=True`."""

from pathlib import Path
from typing import Annotated

import typer

from sala.cli import flags as s
from sala.cli.progress import ProgressBar
from sala.options import Options


@s.derived
def export(
    *,
    model: Annotated[str, typer.Argument(help="Checkpoint directory, or the name of a local model.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to write; must not exist.")],
    options: Annotated[Options, s.Use(only=("adapter", "dtype"))],
) -> None:
    from sala.models.embedded import find_base
    from sala.plugins.transformers.export import export as write

    path, found = find_base(s.find_model(model), options.adapter, s.note)
    with ProgressBar() as bar:
        write(path, output.expanduser(), found, None if options.dtype == "auto" else options.dtype, bar)
    s.note(f"ready: AutoModelForCausalLM.from_pretrained({str(output)!r}, trust_remote_code=True)")

"""`sala rm`: remove a model from the models directory."""

import sys
from typing import Annotated

import typer

from sala.cli import flags as s


def rm(
    name: Annotated[str, typer.Argument(help="Name as in `sala list`, or organisation/name.", metavar="NAME")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    from sala.cli.show import size
    from sala.errors import InputError
    from sala.models.catalog import Library
    from sala.models.embedded import EMBEDDED, models_dir

    library = Library(models_dir())
    entry = library.find(name)
    if entry is not None and not yes:
        if not sys.stdin.isatty():
            raise InputError("--yes", "is required when standard input is not a terminal")
        typer.confirm(f"remove {entry.id} ({size(entry.size_bytes)}) from {library.directory}?", abort=True, err=True)
    library.delete(name)
    s.note(f"{name} removed")
    if entry is not None and entry.id == EMBEDDED:
        s.note("it is assembled again when it is used")

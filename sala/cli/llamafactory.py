"""`sala llamafactory`: run LLaMA-Factory with our model registered."""

from typing import Annotated

import typer


def llamafactory(
    command: Annotated[str, typer.Argument(help="train, export, chat or api.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="A YAML file, then KEY=VALUE for changes to it.")
    ] = None,
) -> int:
    from sala.plugins.llamafactory import launch

    return launch(command, arguments or [])

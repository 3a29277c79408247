"""`sala serve`: the server, with every setting as a flag, a variable and a key of a file."""

import inspect
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from sala.cli.flags import note
from sala.errors import InputError, MissingExtra
from sala.server.settings import (
    Count,
    Flag,
    Number,
    Place,
    Secret,
    Settings,
    Several,
    Whole,
    flag_name,
    gather,
    show_default,
    variable_name,
)

SHORT = {"model": ["-m"]}
METAVARS = {Count: "COUNT", Number: "X", Place: "PATH", Secret: "KEY", Whole: "N"}


def serve(more: list[str] | None, config: Path | None, show_config: bool, print_command: bool, **flags: Any) -> int:
    given = gather(config, os.environ, flags)
    settings = Settings(**given)
    if show_config:
        print("\n".join(show(settings)))
        return 0
    if settings.engine != "sala":
        return launch(settings, given, more or [], print_command)
    from sala.server.launch import check_own

    check_own(given, more or [])
    if print_command:
        raise InputError("--print-command", "is for other engines", "add --engine vllm or --engine sglang")
    return serve_here(settings)


def launch(settings: Settings, given: dict[str, Any], more: list[str], is_shown_only: bool) -> int:
    """Another engine's server, in the place of this process."""
    from sala.server.launch import plan

    found = plan(settings, given, more, os.environ)
    if is_shown_only:
        print(found.show())
        return 0
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    note(f"starting {settings.engine}; once it is ready it listens at http://{host}:{settings.port}/v1")
    return found.run()


def serve_here(settings: Settings) -> int:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtra(str(error.name), "server") from None
    from sala.server.http.serving import serve as run

    for name in ("api_key", "admin_key"):  # no other process that we start needs to know
        os.environ.pop(variable_name(name), None)
    os.environ[variable_name("models_dir")] = str(settings.models_dir)  # where models are looked for by name
    return run(settings, note)


def show(settings: Settings) -> list[str]:
    """The settings in the form of the file; what is not set is a comment."""
    return [
        f"# {key} is not set" if value is None else f"{key} = {_as_toml(value)}"
        for key, value in settings.show().items()
    ]


def _as_toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _signature() -> inspect.Signature:
    """The flags of `sala serve`: the settings, and a few that are about them."""
    rest = typer.Argument(metavar="FLAGS", help="After --: flags of vllm or sglang, passed on as they are.")
    file = typer.Option("--config", help="TOML file with settings.", envvar="SALA_CONFIG", metavar="FILE")
    shown = typer.Option("--show-config", help="Show the settings as they add up, and exit.")
    command = typer.Option("--print-command", help="Show how the other engine would be started, and exit.")
    flags = [
        _flag("more", Annotated[list[str] | None, rest], None),
        _flag("config", Annotated[Path | None, file], None),
        _flag("show_config", Annotated[bool, shown], False),
        _flag("print_command", Annotated[bool, command], False),
    ]
    for each in fields(Settings):
        kind = each.metadata["kind"]
        names = [flag_name(each.name) + (f"/{kind.off}" if isinstance(kind, Flag) else ""), *SHORT.get(each.name, ())]
        option = typer.Option(
            *names,
            help=each.metadata["help"],
            show_default=show_default(each) or False,
            metavar=None if isinstance(kind, Flag) else METAVARS.get(type(kind), "TEXT"),
        )
        value = list[str] if isinstance(kind, Several) else bool if isinstance(kind, Flag) else str
        flags.append(_flag(each.name, Annotated[value | None, option], None))
    return inspect.Signature(flags)


def _flag(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


# typer reads the flags from here: they are written down once, in Settings
serve.__signature__ = _signature()  # type: ignore[attr-defined]
serve.__annotations__ = {name: each.annotation for name, each in serve.__signature__.parameters.items()}  # type: ignore[attr-defined]

"""`sala serve`: the server, with every setting as a flag, a variable and a key of a file."""

import os
from collections.abc import Collection
from typing import Annotated

from sala.cli import flags as s
from sala.errors import InputError, MissingExtra
from sala.options.schema import variable_name
from sala.server.settings import Settings


@s.derived
def serve(
    *,
    more: Annotated[
        list[str] | None, s.argument("After --: flags of vllm or sglang, passed on as they are.", metavar="FLAGS")
    ] = None,
    print_command: Annotated[
        bool, s.flag("Show how the other engine would be started, and exit.", "--print-command")
    ] = False,
    settings: Settings,
    given: s.GivenNames,
) -> int:
    if settings.engine != "sala":
        return launch(settings, given, more or [], print_command)
    from sala.server.launch import check_own

    check_own(given, more or [])
    if print_command:
        raise InputError("--print-command", "is for other engines", "add --engine vllm or --engine sglang")
    return serve_here(settings)


def launch(settings: Settings, given: Collection[str], more: list[str], is_shown_only: bool) -> int:
    """Replace this process by the server of another engine."""
    from sala.server.launch import plan

    found = plan(settings, given, more, os.environ)
    if is_shown_only:
        print(found.show())
        return 0
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    s.note(f"starting {settings.engine}; once it is ready it listens at http://{host}:{settings.port}/v1")
    return found.run()


def serve_here(settings: Settings) -> int:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtra(str(error.name), "server") from None
    from sala.server.serving import serve as run

    for name in ("api_key", "admin_key"):  # processes that we start need no keys
        os.environ.pop(variable_name(name), None)
    os.environ[variable_name("models_dir")] = str(settings.models_dir)  # where names of models are looked up
    return run(settings, s.note)

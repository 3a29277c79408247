"""`sala serve`: the server, with every setting as a flag, a variable and a key of a file; `sala ps`: what it does."""

import json
import os
from typing import Annotated, Any

from sala.cli import flags as s
from sala.cli.outputs import print_json, print_table, size
from sala.errors import InputError, MissingExtra, SalaError
from sala.options import CommandOptions
from sala.options.schema import variable_name
from sala.server.settings import Settings

MAX_ANSWER_BYTES = 16 << 20
TIERS = ("device", "host", "disk")  # of the cache


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
    from sala.server.launch import check_own, plan

    if settings.engine == "sala":
        check_own(given, more or [])
        if print_command:
            raise InputError("--print-command", "is for other engines", "add --engine vllm or --engine sglang")
        return serve_here(settings)
    found = plan(settings, given, more or [], os.environ)  # how to replace this process by the other server
    if print_command:
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
    return run(settings, s.note)


@s.derived
def ps(
    *,
    server: Annotated[CommandOptions, s.Use(only=("url",))],
    keys: Annotated[Settings, s.Use(only=("api_key", "api_key_file"))],
    as_json: s.AsJson = False,
) -> None:
    listed = [model for model in ask(server.url, keys.api_key) if model.get("loaded")]
    models = [model for model in listed if model.get("root") in (None, model.get("id"))]  # not their aliases
    if as_json:
        print_json(models)
    elif models:
        rows = []
        for model in models:
            requests = model.get("requests") or {}
            values = (model.get("id"), model.get("context_length"), requests.get("running"), requests.get("waiting"))
            row = ["–" if one is None else f"{one:,}" if isinstance(one, int) else str(one) for one in values]
            rows.append([*row, *_cache_use(model.get("cache") or {})])
        print_table("", ("name", "context", "running", "waiting", "cached", *TIERS), rows, [True])
    else:
        s.note("no model is loaded")


def _cache_use(cache: dict[str, Any]) -> list[str]:
    """Return the share of prompt tokens that were found in the cache, and how full its tiers are."""
    rate, tiers = cache.get("hit_rate"), cache.get("tiers") or {}
    found = [tiers.get(name) for name in TIERS]
    uses = ["–" if one is None else f"{size(one['used_bytes'])} of {size(one['size_bytes'])}" for one in found]
    return ["–" if rate is None else f"{rate:.0%}", *uses]


def ask(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """Return the models of a server."""
    import http.client
    import urllib.error
    import urllib.request

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(url.rstrip("/") + "/v1/models", headers=headers)  # noqa: S310
        opener = urllib.request.OpenerDirector()  # no redirects: they would receive the key
        for handler in (urllib.request.ProxyHandler({}), urllib.request.HTTPHandler(), urllib.request.HTTPSHandler()):
            opener.add_handler(handler)
        with opener.open(request, timeout=10) as response:
            status, body = response.status, response.read(MAX_ANSWER_BYTES)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        message = f"no server answers at {url}: {getattr(reason, 'strerror', None) or reason}"
        raise SalaError(message, "start one: sala serve") from None
    if status in (401, 403):
        raise SalaError(f"the server at {url} requires a key", "set SALA_API_KEY")
    try:
        models = json.loads(body)["data"]
        if status != 200 or not all(isinstance(model, dict) for model in models):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise SalaError(f"{url} is not a sala server (status {status})", "check the address") from None
    return models  # type: ignore[no-any-return]

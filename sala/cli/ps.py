"""`sala ps`: list what a running server has loaded and is doing."""

import json
from typing import Annotated, Any

import typer

from sala.cli.flags import Use, derived, note
from sala.options import CommandOptions
from sala.server.settings import Settings

MAX_ANSWER_BYTES = 16 << 20


@derived
def ps(
    *,
    server: Annotated[CommandOptions, Use(only=("url",))],
    keys: Annotated[Settings, Use(only=("api_key", "api_key_file"))],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
) -> None:
    models = [model for model in ask(server.url, keys.api_key) if model.get("loaded")]
    if as_json:
        print(json.dumps(models, ensure_ascii=False))
    elif models:
        _print(models)
    else:
        note("no model is loaded")


def ask(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """Return the models of a server."""
    import http.client
    import urllib.error
    import urllib.request

    from sala.errors import SalaError

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
        raise SalaError(
            f"no server answers at {url}: {getattr(reason, 'strerror', None) or reason}", "start one: sala serve"
        ) from None
    if status in (401, 403):
        raise SalaError(f"the server at {url} requires a key", "set SALA_API_KEY")
    try:
        models = json.loads(body)["data"]
        if status != 200 or not all(isinstance(model, dict) for model in models):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise SalaError(f"{url} is not a sala server (status {status})", "check the address") from None
    return models  # type: ignore[no-any-return]


def _print(models: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from sala.cli.show import open_console

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("name", "context", "running", "waiting"):
        table.add_column(name, justify="left" if name == "name" else "right")
    for model in models:
        requests = model.get("requests") or {}
        cells = [model.get("id"), model.get("context_length"), requests.get("running"), requests.get("waiting")]
        table.add_row(*(Text("".join(char for char in _cell(cell) if char.isprintable())) for cell in cells))
    open_console().print(table)


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "–" if value is None else str(value)

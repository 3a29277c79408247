"""`sala ps`: list what a running server has loaded and is doing."""

import json
from typing import Annotated, Any

from sala.cli.flags import AsJson, Use, derived, note
from sala.cli.outputs import print_json, print_table
from sala.options import CommandOptions
from sala.server.settings import Settings

MAX_ANSWER_BYTES = 16 << 20


@derived
def ps(
    *,
    server: Annotated[CommandOptions, Use(only=("url",))],
    keys: Annotated[Settings, Use(only=("api_key", "api_key_file"))],
    as_json: AsJson = False,
) -> None:
    models = [model for model in ask(server.url, keys.api_key) if model.get("loaded")]
    if as_json:
        print_json(models)
    elif models:
        rows = []
        for model in models:
            requests = model.get("requests") or {}
            values = (model.get("id"), model.get("context_length"), requests.get("running"), requests.get("waiting"))
            rows.append([_cell(value) for value in values])
        print_table("", ("name", "context", "running", "waiting"), rows, [True])
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


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "–" if value is None else str(value)

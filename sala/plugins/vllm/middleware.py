"""What clients of our own server rely on and vLLM's lacks; `sala serve --engine vllm` adds it to vLLM's server.

- Error codes are those of OpenAI's API, not the HTTP status as a number.
- `GET /v1/models/NAME`, `/health/live` and `/health/ready` exist.
- Several answers at temperature 0 are computed, not refused.
"""

# mypy: disable-error-code="import-not-found"

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_MODELS = "/v1/models"
_PROBES = ("/health/live", "/health/ready")


class ClientMiddleware:
    """Wraps vLLM's application (ASGI)."""

    def __init__(self, app: App) -> None:
        self._app = app
        allow_several_greedy()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = str(scope["path"])
        name = path.removeprefix(f"{_MODELS}/") if scope["method"] == "GET" and path.startswith(f"{_MODELS}/") else ""
        answer = _Answer(send, (lambda body: pick_model(body, name)) if name else None)
        inner = _MODELS if name else "/health" if path in _PROBES else path
        if inner != path:
            scope = {**scope, "path": inner, "raw_path": inner.encode()}
        await self._app(scope, receive, answer.send)


class _Answer:
    """Passes an answer on. An error, or an answer that `change` is for, is held until it is complete."""

    def __init__(self, send: Send, change: Callable[[bytes], tuple[int, bytes]] | None) -> None:
        self._send, self._change = send, change
        self._start: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and (message["status"] >= 400 or self._change is not None):
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._finish(self._start)

    async def _finish(self, start: Message) -> None:
        status = start["status"]
        if status >= 400:
            body = name_error(status, self._body)
        else:
            assert self._change is not None  # noqa: S101
            status, body = self._change(self._body)
        kept = [(key, value) for key, value in start["headers"] if key.lower() != b"content-length"]
        headers = [*kept, (b"content-length", str(len(body)).encode())]
        await self._send({**start, "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def name_error(status: int, body: bytes) -> bytes:
    """Return vLLM's error with a code that clients of OpenAI's API compare; anything else as it is."""
    try:
        content = json.loads(body)
    except ValueError:
        return body
    error = content.get("error") if isinstance(content, dict) else None
    if isinstance(error, str):  # of the key's check
        content["error"] = error = {"message": error, "type": "authentication_error", "param": None, "code": status}
    if not isinstance(error, dict) or not isinstance(error.get("code"), int):
        return body
    if status == 400:
        is_long = "context length" in str(error.get("message"))
        error["code"] = "context_length_exceeded" if is_long else "invalid_value"
    else:
        named = {401: "invalid_api_key", 404: "model_not_found" if error.get("param") == "model" else "not_found"}
        error["code"] = named.get(status, "server_error" if status >= 500 else "invalid_request")
    return json.dumps(content).encode()


def pick_model(body: bytes, name: str) -> tuple[int, bytes]:
    """Return status and body of one model, from the list of all."""
    found = [one for one in json.loads(body)["data"] if one["id"] == name]
    if found:
        return 200, json.dumps(found[0]).encode()
    message = f"The model `{name[:200]}` does not exist."
    error = {"message": message, "type": "NotFoundError", "param": "model", "code": "model_not_found"}
    return 404, json.dumps({"error": error}).encode()


def allow_several_greedy() -> None:
    """Lift vLLM's rule against `n` above 1 at temperature 0: its engine computes such requests."""
    from vllm.sampling_params import SamplingParams

    if hasattr(SamplingParams, "_verify_greedy_sampling"):
        SamplingParams._verify_greedy_sampling = lambda _: None

"""What a request may weigh: checked before it is read, and while it is.

These are pure ASGI: they hold nothing back and see every byte once. What concerns the connection itself, such as
deadlines, is in `connection`.
"""

import re
from typing import TYPE_CHECKING

from sala.server.errors import ApiError
from sala.server.settings import Settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 100
MAX_JSON_DEPTH = 64
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
ROUND = bytes.maketrans(b"[{]}", b"(())")
NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))


class BodyTooLarge(Exception):
    """Ends the reading of a body; the client gets 413 whatever the application makes of it."""


class RequestLimits:
    """Middleware: refuses what is too large, doubtful or compressed, if possible before a byte of the body is read."""

    def __init__(self, app: "ASGIApp", settings: Settings) -> None:
        self.app = app
        self.max_body = settings.max_body

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = check_headers(scope, self.max_body)
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        await BodyMeter(self.max_body, scope, receive, send).run(self.app)


class BodyMeter:
    """Counts the body of one request as it comes in."""

    def __init__(self, max_body: int, scope: "Scope", receive: "Receive", send: "Send") -> None:
        self.max_body = max_body
        self._scope = scope
        self._receive = receive
        self._send = send
        self.num_bytes = 0
        self.is_started = False
        self.is_refused = False

    async def run(self, app: "ASGIApp") -> None:
        try:
            await app(self._scope, self.receive, self.send)
        except BodyTooLarge:
            if self.is_started:
                raise
            await self._refuse()

    async def receive(self) -> "Message":
        message = await self._receive()
        if message["type"] == "http.request":
            self.num_bytes += len(message.get("body", b""))
            if self.num_bytes > self.max_body:
                raise BodyTooLarge
        return message

    async def send(self, message: "Message") -> None:
        if self.is_refused:
            return
        if self.num_bytes > self.max_body and not self.is_started:  # the application caught the error: it is ours
            await self._refuse()
            return
        self.is_started = True
        await self._send(message)

    async def _refuse(self) -> None:
        if not self.is_refused:
            self.is_refused = True
            await too_large(self.max_body).response()(self._scope, self._receive, self._send)


def too_large(max_body: int) -> ApiError:
    return ApiError(
        413, f"the body has more than {max_body:,} bytes; send less or raise max_body", code="body_too_large"
    )


def check_headers(scope: "Scope", max_body: int) -> ApiError | None:
    """What is wrong with the head of a request, if anything."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    size += sum(len(name) + len(value) + 4 for name, value in headers)
    if size > MAX_HEADER_BYTES or len(headers) > MAX_HEADERS:
        return ApiError(
            431, f"the header has more than {MAX_HEADER_BYTES:,} bytes or {MAX_HEADERS} lines", code="header_too_large"
        )
    lengths = [value.strip() for name, value in headers if name == b"content-length"]
    if lengths and any(name == b"transfer-encoding" for name, _ in headers):
        return ApiError(
            400,
            "Content-Length and Transfer-Encoding exclude each other",
            code="bad_request",
            headers={"connection": "close"},
        )
    if len(set(lengths)) > 1 or not all(length.isdigit() for length in lengths):
        return ApiError(400, "Content-Length must be one number", code="bad_request")
    encodings = [value.strip().lower() for name, value in headers if name == b"content-encoding"]
    if any(encoding not in (b"", b"identity") for encoding in encodings):
        return ApiError(
            415, "compressed bodies are not read; send it without Content-Encoding", code="unsupported_encoding"
        )
    if lengths and (len(lengths[0]) > 18 or int(lengths[0]) > max_body):
        return too_large(max_body)
    return None


def is_too_deep(data: bytes, max_depth: int = MAX_JSON_DEPTH) -> bool:
    """Whether a JSON text nests deeper than that; brackets within strings do not count.

    Innermost pairs are taken away as often as the depth allows: what has more is left over. No step looks at single
    characters in Python, so that a large text takes about as long as parsing it.
    """
    if data.count(b"[") + data.count(b"{") <= max_depth:
        return False
    brackets = STRING.sub(b"", data).translate(ROUND, delete=NO_BRACKETS)
    for _ in range(max_depth):
        rest = brackets.replace(b"()", b"")
        if len(rest) == len(brackets):
            break
        brackets = rest
    return b"()" in brackets or brackets.count(b"(") > max_depth

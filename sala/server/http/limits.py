"""What a request may weigh: checked before it is read, and while it is.

These are pure ASGI: they hold nothing back and see every byte once. What concerns the connection itself, such as
deadlines, is in `connection`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sala.server.http.errors import ApiError
from sala.server.settings import Settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 100
MAX_JSON_DEPTH = 64
MAX_JSON_BRANCHES = 1 << 17  # objects and lists
MAX_JSON_VALUES = 1 << 22  # a list of all the token ids that a long context holds is no more
MAX_BODIES = 4  # that may be as large as one may be, in memory at a time
BLOCK = 1 << 20
ROUND = bytes.maketrans(b"[{]}", b"(())")
NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))


class BodyTooLarge(Exception):
    """Ends the reading of a body; the client gets the refusal whatever the application makes of it."""


class RequestLimits:
    """Middleware: refuses what is too large, doubtful or compressed, if possible before a byte of the body is read."""

    def __init__(self, app: "ASGIApp", settings: Settings) -> None:
        self.app = app
        self.max_body = settings.max_body
        self.held = 0  # bytes of all bodies that nobody has answered yet

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = check_headers(scope, self.max_body)
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        await BodyMeter(self, scope, receive, send).run()

    def take(self, num_bytes: int, already: int) -> ApiError | None:
        """Bytes that came in for a body that has `already` so many; what speaks against it, if anything."""
        self.held += num_bytes
        if already + num_bytes > self.max_body:
            return too_large(self.max_body)
        if self.held > MAX_BODIES * self.max_body:
            message = "too many large requests at a time; send it again later"
            return ApiError(503, message, "server_error", code="bodies_too_large", headers={"retry-after": "1"})
        return None


class BodyMeter:
    """Counts the body of one request as it comes in."""

    def __init__(self, limits: RequestLimits, scope: "Scope", receive: "Receive", send: "Send") -> None:
        self._limits = limits
        self._scope = scope
        self._receive = receive
        self._send = send
        self.num_bytes = 0
        self.refusal: ApiError | None = None
        self.is_started = False
        self.is_refused = False

    async def run(self) -> None:
        try:
            await self._limits.app(self._scope, self.receive, self.send)
        except BodyTooLarge:
            if self.is_started:
                raise
            await self._refuse()
        finally:
            self._let_go()

    async def receive(self) -> "Message":
        message = await self._receive()
        if message["type"] == "http.request":
            num_bytes = len(message.get("body", b""))
            self.refusal = self._limits.take(num_bytes, self.num_bytes)
            self.num_bytes += num_bytes
            if self.refusal is not None:
                raise BodyTooLarge
        return message

    async def send(self, message: "Message") -> None:
        if self.is_refused:
            return
        if self.refusal is not None and not self.is_started:  # the application caught the error: it is ours
            await self._refuse()
            return
        self.is_started = True
        self._let_go()
        await self._send(message)

    async def _refuse(self) -> None:
        if not self.is_refused and self.refusal is not None:
            self.is_refused = True
            await self.refusal.response()(self._scope, self._receive, self._send)

    def _let_go(self) -> None:
        """What is being answered has been read: its text is not held any more."""
        self._limits.held -= self.num_bytes
        self.num_bytes = 0


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


def find_excess(data: bytes) -> str | None:
    """What a JSON text has too much of, if anything; what stands within strings does not count.

    A text of many small values is a hundred times as large in memory, and reading it holds up the whole process. No
    step looks at single characters in Python, so that this takes no longer than reading.
    """
    if data.count(b"[") + data.count(b"{") <= MAX_JSON_DEPTH and data.count(b",") < MAX_JSON_VALUES:
        return None
    brackets, num_values = b"", 1
    for outside in leave_out_strings(data):
        brackets += outside.translate(None, delete=NO_BRACKETS)
        num_values += outside.count(b",")
        if brackets.count(b"[") + brackets.count(b"{") > MAX_JSON_BRANCHES or num_values > MAX_JSON_VALUES:
            return f"more than {MAX_JSON_BRANCHES:,} objects and lists, or {MAX_JSON_VALUES:,} values"
    return f"more than {MAX_JSON_DEPTH} levels" if is_too_deep(brackets) else None


def leave_out_strings(data: bytes) -> Iterator[bytes]:
    """A JSON text without its strings, in pieces."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # what quotes are left begin or end a string
    is_inside = False
    for at in range(0, len(data), BLOCK):
        pieces = data[at : at + BLOCK].split(b'"')
        yield b"".join(pieces[is_inside::2])
        is_inside ^= len(pieces) % 2 == 0


def is_too_deep(data: bytes) -> bool:
    """Whether a JSON text nests deeper than it may.

    Innermost pairs of brackets are taken away as often as the depth allows: what has more is left over.
    """
    brackets = b"".join(piece.translate(ROUND, delete=NO_BRACKETS) for piece in leave_out_strings(data))
    for _ in range(MAX_JSON_DEPTH):
        rest = brackets.replace(b"()", b"")
        if len(rest) == len(brackets):
            break
        brackets = rest
    return b"()" in brackets or brackets.count(b"(") > MAX_JSON_DEPTH

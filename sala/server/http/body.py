"""Read request bodies: limits on their size, strict JSON, and the base class of the models that validate them.

The limits are plain ASGI middleware: they buffer nothing and see every byte once. Deadlines, which concern the
connection, are in `connection`.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from sala.server.http.errors import ApiError, from_validation
from sala.server.http.security import need_key
from sala.server.settings import Settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 100
MAX_JSON_DEPTH = 64
MAX_JSON_BRANCHES = 1 << 17  # objects and lists
MAX_JSON_VALUES = 1 << 22  # enough for a list of the token ids of the longest context
MAX_BODIES = 4  # bodies of the maximum size that may be in memory at once
LARGE = 1 << 16  # bytes from which a body is parsed in a thread, so as not to block the event loop
BLOCK = 1 << 20
ROUND = bytes.maketrans(b"[{]}", b"(())")
NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))


# ------------------------------------------------------------------------------------------------------------- size


class BodyTooLarge(Exception):
    """Stops the reading of a body; the client gets the refusal whatever the application does with this exception."""


class RequestLimits:
    """Middleware: refuse requests that are too large, ambiguous or compressed, if possible before reading the body."""

    def __init__(self, app: "ASGIApp", settings: Settings) -> None:
        self.app = app
        self.max_body = settings.max_body
        self.held = 0  # bytes of all bodies that have not been answered yet

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
        """Count bytes that arrived for a body of which `already` were read; return the reason to refuse it, if any."""
        self.held += num_bytes
        if already + num_bytes > self.max_body:
            return too_large(self.max_body)
        if self.held > MAX_BODIES * self.max_body:
            message = "the server is reading too many large requests at once; send this one again later"
            return ApiError(503, message, "server_error", code="bodies_too_large", headers={"retry-after": "1"})
        return None


class BodyMeter:
    """Counts the bytes of one request's body as they arrive."""

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
            self._release()

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
        if self.refusal is not None and not self.is_started:  # the application caught BodyTooLarge: send our refusal
            await self._refuse()
            return
        self.is_started = True
        self._release()
        await self._send(message)

    async def _refuse(self) -> None:
        if not self.is_refused and self.refusal is not None:
            self.is_refused = True
            await self.refusal.response()(self._scope, self._receive, self._send)

    def _release(self) -> None:
        """Stop counting the body: once the answer begins, its text is no longer held."""
        self._limits.held -= self.num_bytes
        self.num_bytes = 0


def too_large(max_body: int) -> ApiError:
    return ApiError(
        413, f"the body has more than {max_body:,} bytes; send less or raise max_body", code="body_too_large"
    )


def check_headers(scope: "Scope", max_body: int) -> ApiError | None:
    """Return the reason to refuse a request by its headers, if there is one."""
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
            415, "compressed bodies are not supported; send it without Content-Encoding", code="unsupported_encoding"
        )
    if lengths and (len(lengths[0]) > 18 or int(lengths[0]) > max_body):
        return too_large(max_body)
    return None


def find_excess(data: bytes) -> str | None:
    """Return what a JSON text has too much of, if anything; the contents of strings do not count.

    A text of many small values takes a hundred times its size in memory, and parsing it blocks the process. No step
    looks at single characters in Python, so this takes no longer than parsing.
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
    """Yield a JSON text without its strings, in pieces."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # the remaining quotes begin or end a string
    is_inside = False
    for at in range(0, len(data), BLOCK):
        pieces = data[at : at + BLOCK].split(b'"')
        yield b"".join(pieces[is_inside::2])
        is_inside ^= len(pieces) % 2 == 0


def is_too_deep(data: bytes) -> bool:
    """Return whether a JSON text is nested deeper than MAX_JSON_DEPTH.

    Innermost pairs of brackets are removed once per permitted level; anything deeper is left over.
    """
    brackets = b"".join(piece.translate(ROUND, delete=NO_BRACKETS) for piece in leave_out_strings(data))
    for _ in range(MAX_JSON_DEPTH):
        rest = brackets.replace(b"()", b"")
        if len(rest) == len(brackets):
            break
        brackets = rest
    return b"()" in brackets or brackets.count(b"(") > MAX_JSON_DEPTH


# ------------------------------------------------------------------------------------------------------------- JSON


class StrictRoute(APIRoute):
    """Checks the key, then reads the body as strict JSON: declared as such, in UTF-8, without NaN, within limits."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            if self.body_field is not None:
                await need_key(request)  # before the body: don't read what an unknown client sends
                check_content_type(request)
                request = _StrictRequest(request, cast(type[BaseModel], self.body_field.field_info.annotation))
            return await handle(request)

        return strictly


def check_content_type(request: Request) -> None:
    """Insist on JSON by name: browsers let a page of another origin send any other type without asking us first."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the content type must be application/json", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "compressed bodies are not supported", code="unsupported_media_type")


class _StrictRequest(Request):
    """Parses its body once; a large one is parsed and validated in a thread, so that the event loop stays free."""

    def __init__(self, request: Request, kind: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._kind = kind

    async def json(self) -> Any:
        body = await self.body()
        return read_json(body) if len(body) < LARGE else await asyncio.to_thread(self._validate, body)

    def _validate(self, body: bytes) -> Any:
        """Return an instance of the model, which FastAPI does not validate again."""
        data = read_json(body)
        try:
            return self._kind.model_validate(data)
        except ValidationError as error:
            raise from_validation(error.errors(include_url=False, include_input=False)) from None


def read_json(body: bytes) -> Any:
    """Parse strict JSON. If a key occurs twice in an object, the last value counts."""
    excess = find_excess(body)
    if excess is not None:
        raise ApiError(400, f"the body holds {excess}; send less at a time", code="invalid_json")
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False, cache_strings="keys")
    except (ValueError, RecursionError) as error:
        problem = str(error).partition("\n")[0][:200]
        raise ApiError(400, f"the body is not valid JSON: {problem}", code="invalid_json") from None


# ------------------------------------------------------------------------------------------------------- validation


class Strict(BaseModel):
    """A body, or a part of one: no coercion, no NaN, no unknown field except those in `ignored`."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    types: ClassVar[tuple[str, ...]] = ()  # if given, `type` must be one of these; otherwise say `remedy`
    remedy: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if cls.types and isinstance(data.get("type"), str) and data["type"] not in cls.types:
            raise problem(cls.remedy, "type")
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in data:
            if name not in known and name not in cls.ignored:
                raise problem("this field is not supported; leave it out", name, "unknown_field")
        return {name: value for name, value in data.items() if name in known}


def problem(message: str, field: str | None = None, kind: str = "value") -> PydanticCustomError:
    """Return a validation error about the value at hand, or about one of its fields."""
    return PydanticCustomError(kind, message, None if field is None else {"field": field})


def union(kinds: dict[type, str], words: str) -> Discriminator:
    """Tell the members of a union apart by their type. Tags begin with ~, which keeps them out of error paths."""
    return discriminate(
        lambda value: next((tag for kind, tag in kinds.items() if isinstance(value, kind)), None), words
    )


def discriminate(find: Callable[[Any], str | None], words: str) -> Discriminator:
    """Tell the members of a union apart by `find`; where it finds none, the value "must be `words`"."""
    return Discriminator(find, custom_error_type="value", custom_error_message=f"must be {words}")


class _FirstOnly(FailFast):
    """Stop validating a long list at the first invalid item."""

    __hash__ = object.__hash__


FIRST_ONLY = _FirstOnly()

"""What guards the routes: API keys, permitted host names and origins, limits on requests, strict bodies.

Routes themselves require the key; no decision depends on what a path looks like. The checks of Host and Origin protect
a server without a key from web pages: by DNS rebinding, a page can be served under a name that resolves to this
machine, and any page can submit a form to it.

The limits buffer nothing and see every byte once. Deadlines, which concern the connection, are in `connection`.
"""

import asyncio
import ctypes
import logging
import os
import re
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sala.engine.requests import Client
from sala.options.schema import is_ip
from sala.server.http.body import read_json
from sala.server.http.errors import ApiError, from_exception, from_validation
from sala.server.http.keys import Key, key_ring, owner_of
from sala.server.http.rates import Rates
from sala.server.settings import LOCAL_HOSTS, Settings, is_loopback
from sala.text.workers import FairPool

AUTHORITY = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::(\d{1,5}))?")
ORIGIN = re.compile(rb"(https?)://(.+)")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
DEFAULT_PORTS = {b"http": b"80", b"https": b"443"}
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 100
MAX_BODIES = 4  # bodies of the maximum size that may be in memory at once
MAX_IN_BACKGROUND = 2  # of them, for answers that are made when their requests have ended
HELD = "sala.held"  # in the scope of a request: its HeldBytes
LARGE = 1 << 16  # bytes from which a body is parsed in a thread, so as not to block the event loop
TRIM_FROM = 1 << 20  # bytes of a body and of the answer to it
TRIM_S = 0.5  # after a large request has ended: what refers to its body is gone then
M_ARENA_MAX, NUM_ARENAS = -8, 2  # of malloc.h
_LIBC: Any = ctypes.CDLL(None) if os.name == "posix" else None
_log = logging.getLogger("sala.server")


# -------------------------------------------------------------------------------------------------------------- keys


async def need_key(request: Request) -> None:
    """Dependency: require a key, if there are any."""
    settings: Settings = request.app.state.settings
    if (settings.api_key or settings.keys_file) and find_key(request, settings) is None:
        raise _wrong_key(request)


def find_key(request: Request, settings: Settings) -> Key | None:
    """Return the key that a request brings, if it is valid; without keys in the settings none is."""
    if not (settings.api_key or settings.admin_key or settings.keys_file):
        return None
    return key_ring(settings.api_key, settings.admin_key, settings.keys_file).find(_given_keys(request))


async def need_admin_key(request: Request) -> None:
    """Dependency: require a key that may manage models; without keys, a client on this machine."""
    settings: Settings = request.app.state.settings
    if is_admin(request):
        return
    if not (settings.api_key or settings.admin_key or settings.keys_file):
        message = "models can be managed from the server's own machine only, or with a key"
        raise ApiError(403, message, code="admin_key_needed")
    if find_key(request, settings) is not None:
        raise ApiError(403, "this needs the admin key", code="admin_key_needed")
    raise _wrong_key(request)


def is_admin(request: Request) -> bool:
    """Return whether a request may manage models: by its key or, without keys, from this machine."""
    settings: Settings = request.app.state.settings
    if settings.api_key or settings.admin_key or settings.keys_file:
        key = find_key(request, settings)
        return key is not None and key.role == "admin"
    return settings.is_local or (request.client is not None and is_loopback(request.client.host))


def find_owner(request: Request) -> str:
    """Return the name of the key that a request brings; what belongs to one key is not shown to another."""
    key = find_key(request, request.app.state.settings)
    return owner_of("" if key is None else key.name)


def admit_client(request: Request, cache_salt: str | None) -> tuple[Client, Rates | None]:
    """Return who asks for an answer, and the meters of its key: each key of a file has shares, limits and cached
    prefixes of its own. Counts the request. Raises ApiError if it is one too many.
    """
    state = request.app.state
    settings: Settings = state.settings
    key = find_key(request, settings) if settings.keys_file is not None else None
    client = find_client(request)
    salt = client.salt + ("" if cache_salt is None else f" salt {cache_salt}")
    most = key.max_sequences if key is not None and key.max_sequences else settings.max_key_sequences
    rates = find_rates(state.rates, client.owner, key, settings)
    if rates is not None:
        try:
            rates.count_request()
        except ApiError:
            state.metrics.statistics.rejected()
            raise
    return replace(client, salt=salt, max_sequences=most, token_limit=rates), rates


def find_client(request: Request) -> Client:
    """Return who sends a request, without limits."""
    settings: Settings = request.app.state.settings
    key = find_key(request, settings) if settings.keys_file is not None else None
    return client_of("" if key is None else key.owner, settings, key.salt if key else "")


def find_rates(known: dict[str, Rates], owner: str, key: Key | None, settings: Settings) -> Rates | None:
    """Return the meters of an owner with the limits that hold now; None if there are no limits."""
    num_tokens = (key.max_tokens_per_minute if key else 0) or settings.max_key_tokens_per_minute
    num_requests = (key.max_requests_per_minute if key else 0) or settings.max_key_requests_per_minute
    if not num_tokens and not num_requests:
        return None
    rates = known.setdefault(owner, Rates())
    rates.limit(num_tokens, num_requests)
    return rates


def client_of(owner: str, settings: Settings, salt: str = "") -> Client:
    """Return the client that an owner is to the engine. Those without a key of their own are one client."""
    return Client() if settings.keys_file is None else Client(owner, f"key {salt or owner}")


def _wrong_key(request: Request) -> ApiError:
    problem = "wrong" if _given_keys(request) else "missing"
    message = f"the API key is {problem}; send it as Authorization: Bearer KEY"
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": 'Bearer realm="sala"'})


def _given_keys(request: Request) -> list[bytes]:
    keys = [value.strip().encode("latin-1") for value in request.headers.getlist("x-api-key")]
    for value in filter(str.strip, request.headers.getlist("authorization")):
        scheme, *rest = value.split(maxsplit=1)
        if scheme.lower() == "bearer" and rest:
            keys.append(rest[0].strip().encode("latin-1"))
    return [key for key in keys if key]


# -------------------------------------------------------------------------------------------------- hosts and origins


class Guard:
    """Middleware: refuse foreign host names and, for unsafe methods, web pages of origins that are not permitted.

    Every response gets an id and security headers for browsers. A client may choose the id, to find its request in
    logs; the server only echoes it.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self.hosts = LOCAL_HOSTS | {name.rstrip(".") for name in settings.allowed_hosts}
        self.origins = {origin.encode() for origin in settings.cors_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next(iter(_values(scope, b"x-request-id")), b"")
        number = given.decode() if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)

        async def stamp(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("x-request-id", number)
                headers.setdefault("x-content-type-options", "nosniff")
                headers.setdefault("x-frame-options", "DENY")
                headers.setdefault("referrer-policy", "no-referrer")
            await send(message)

        refusal = self._check_host(scope) or self._check_origin(scope)
        await (self.app if refusal is None else refusal)(scope, receive, stamp)

    def _check_host(self, scope: Scope) -> ApiError | None:
        found = [AUTHORITY.fullmatch(value.strip()) for value in _values(scope, b"host")]
        if len(found) != 1 or found[0] is None:
            return ApiError(400, "the request must have one valid Host header", code="bad_request")
        name = found[0][1].decode().lower().strip("[]").rstrip(".")
        if name in self.hosts or self._is_safe(name):
            return None
        message = "this server does not answer to that host name; add it with the setting allowed_hosts"
        return ApiError(421, message, code="unknown_host")

    def _is_safe(self, name: str) -> bool:
        """Return whether DNS rebinding cannot be at work: with an IP address, or where every request needs a key."""
        if self.settings.is_local:
            return is_loopback(name)
        return is_ip(name) or (self.settings.needs_key and not self.settings.allowed_hosts)

    def _check_origin(self, scope: Scope) -> ApiError | None:
        hosts = _values(scope, b"host")
        origins = [value.strip().lower() for value in _values(scope, b"origin")]
        is_own = all(origin in self.origins or any(is_same(origin, host) for host in hosts) for origin in origins)
        if scope["method"] in SAFE_METHODS:
            # an image or a script of another site is fetched without an Origin; a link to our page is followed
            is_link = b"navigate" in _values(scope, b"sec-fetch-mode")
            if origins or is_link or b"cross-site" not in _values(scope, b"sec-fetch-site"):
                return None
        elif is_own:
            return None
        message = "web pages of that origin may not call this server; permit it with the setting cors_origins"
        return ApiError(403, message, code="foreign_origin")


def is_same(origin: bytes, host: bytes) -> bool:
    """Return whether an Origin is the server's own: its host and port are those that the request was sent to."""
    found = ORIGIN.fullmatch(origin)
    if found is None:
        return False
    theirs, ours = (AUTHORITY.fullmatch(text.strip().lower()) for text in (found[2], host))
    if theirs is None or ours is None:
        return False
    default = DEFAULT_PORTS[found[1]]
    return (theirs[1], theirs[2] or default) == (ours[1], ours[2] or default)


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


# ------------------------------------------------------------------------------------------------------------- limits


class BodyTooLarge(Exception):
    """Stops the reading of a body; the client gets the refusal whatever the application does with this exception."""


class HeldBytes:
    """The bytes that one request holds in memory, among those of all; counted until everyone has released them."""

    def __init__(self, limits: "RequestLimits") -> None:
        self._limits = limits
        self._num_bytes = 0
        self._num_holders = 1
        self._is_in_background = False

    def add(self, num_bytes: int) -> ApiError | None:
        """Count bytes that are read for this request; return the reason to refuse it if all of them are too many."""
        self._num_bytes += num_bytes
        self._limits.held += num_bytes
        if self._limits.held <= MAX_BODIES * self._limits.max_body:
            return None
        return too_many_held("the server is reading too many large requests at once")

    def hold_in_background(self) -> None:
        """Go on counting after the request has ended, until one more `release`. Raises ApiError if those that are in
        the background already hold too much: what is left is for requests whose clients wait.
        """
        limits = self._limits
        if limits.held_in_background + self._num_bytes > MAX_IN_BACKGROUND * limits.max_body:
            raise too_many_held("too many large requests are being answered in the background")
        limits.held_in_background += self._num_bytes
        self._num_holders += 1
        self._is_in_background = True

    def release(self) -> None:
        self._num_holders -= 1
        if not self._num_holders:
            self._limits.held -= self._num_bytes
            self._limits.held_in_background -= self._num_bytes * self._is_in_background


def too_many_held(problem: str) -> ApiError:
    message = f"{problem}; send this one again later"
    return ApiError(503, message, "server_error", code="bodies_too_large", retry_s=1)


class RequestLimits:
    """Middleware: refuse requests that are too large, ambiguous or compressed, if possible before reading the body.

    The memory of large bodies and answers is returned to the system when they are gone.

    Unexpected exceptions become errors, so that the connection can serve further requests.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.max_body = settings.max_body
        self.held = 0  # bytes of the bodies of all requests that have not ended, or whose answers are still made
        self.held_in_background = 0  # of them, bytes for answers that are made in the background
        self.will_trim = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = check_headers(scope, self.max_body)
        await (self._meter if refusal is None else refusal)(scope, receive, send)

    async def _meter(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application and count the bytes of the body as they arrive, until the request has ended."""
        num_bytes, num_sent, is_started = 0, 0, False
        refusal: ApiError | None = None
        held = scope[HELD] = HeldBytes(self)

        async def count() -> Message:
            nonlocal num_bytes, refusal
            message = await receive()
            if message["type"] == "http.request":
                arrived = len(message.get("body", b""))
                num_bytes += arrived
                excess = held.add(arrived)
                refusal = too_large(self.max_body) if num_bytes > self.max_body else excess
                if refusal is not None:
                    raise BodyTooLarge
            return message

        async def watch(message: Message) -> None:
            nonlocal is_started, num_sent
            if refusal is None or is_started:  # otherwise the application has caught BodyTooLarge
                is_started = True
                num_sent += len(message.get("body", b""))
                await send(message)

        try:
            await self.app(scope, count, watch)
        except Exception as error:
            if is_started:
                raise
            if refusal is None:
                _log.error("a request failed: %s", type(error).__name__, exc_info=error)
                refusal = from_exception(error)
        finally:
            held.release()
            if num_bytes + num_sent > TRIM_FROM and not self.will_trim:
                self.will_trim = True
                asyncio.get_running_loop().call_later(TRIM_S, self._trim_memory)
        if refusal is not None and not is_started:
            await refusal(scope, receive, send)

    def _trim_memory(self) -> None:
        self.will_trim = False
        asyncio.get_running_loop().run_in_executor(None, trim_memory)


def trim_memory() -> None:
    """Let glibc return freed memory to the system; it keeps what bodies, answers and caches took."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def limit_arenas() -> None:
    """Let the threads of this process share a few arenas of glibc's malloc, before any of them is started.

    By default there are eight for each core, and each keeps what was freed in it: with threads that come and go the
    memory of a server grows for hours though it uses no more. MALLOC_ARENA_MAX in the environment goes first.
    """
    if hasattr(_LIBC, "malloc_trim") and "MALLOC_ARENA_MAX" not in os.environ:
        _LIBC.mallopt(M_ARENA_MAX, NUM_ARENAS)


def too_large(max_body: int) -> ApiError:
    message = f"the body has more than {max_body:,} bytes; send less or raise max_body"
    return ApiError(413, message, code="body_too_large")


def header_too_large() -> ApiError:
    message = f"the header has more than {MAX_HEADER_BYTES:,} bytes or {MAX_HEADERS} lines"
    return ApiError(431, message, code="header_too_large")


def check_headers(scope: Scope, max_body: int) -> ApiError | None:
    """Return the reason to refuse a request by its headers, if there is one."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    size += sum(len(name) + len(value) + 4 for name, value in headers)
    if size > MAX_HEADER_BYTES or len(headers) > MAX_HEADERS:
        return header_too_large()
    lengths = [value.strip() for name, value in headers if name == b"content-length"]
    if lengths and any(name == b"transfer-encoding" for name, _ in headers):
        message = "Content-Length and Transfer-Encoding exclude each other"
        return ApiError(400, message, code="bad_request", headers={"connection": "close"})
    if len(set(lengths)) > 1 or not all(length.isdigit() for length in lengths):
        return ApiError(400, "Content-Length must be one number", code="bad_request")
    encodings = [value.strip().lower() for name, value in headers if name == b"content-encoding"]
    if any(encoding not in (b"", b"identity") for encoding in encodings):
        message = "compressed bodies are not supported; send it without Content-Encoding"
        return ApiError(415, message, code="unsupported_encoding")
    if lengths and (len(lengths[0]) > 18 or int(lengths[0]) > max_body):
        return too_large(max_body)
    return None


# ------------------------------------------------------------------------------------------------------------- bodies


class StrictRoute(APIRoute):
    """Checks the key, then reads the body as strict JSON: declared as such, in UTF-8, without NaN, within limits."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            if self.body_field is not None:
                await need_key(request)  # before the body: don't read what an unknown client sends
                # by name: browsers let a page of another origin send any other type without asking us first
                if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                    raise ApiError(415, "the content type must be application/json", code="unsupported_media_type")
                body, kind = await read_body(request), cast(type[BaseModel], self.body_field.field_info.annotation)
                if body:
                    is_large = len(body) >= LARGE
                    pool: FairPool = request.app.state.body_pool
                    request._json = (
                        await pool.run(find_owner(request), parse, kind, body) if is_large else parse(kind, body)
                    )
            return await handle(request)

        return strictly


async def read_body(request: Request) -> bytes | bytearray:
    """Return the body, which grows as it arrives: joining megabytes at the end would hold up the event loop."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
    request._body = body  # type: ignore[assignment]  # for FastAPI, which asks whether there is one
    return body


def parse(kind: type[BaseModel], body: bytes | bytearray) -> BaseModel:
    """Return a body as an instance of a model, which FastAPI does not validate again. Raises ApiError."""
    try:
        data = read_json(body)
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_json") from None
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_input=False)) from None

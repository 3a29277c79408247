"""Authorization: API keys, permitted host names, and the origins of web pages that may call the server.

Routes themselves require the key; no decision depends on what a path looks like. The checks of Host and Origin protect
a server without a key from web pages: by DNS rebinding, a page can be served under a name that resolves to this
machine, and any page can submit a form to it.
"""

import hmac
import logging
import re
import secrets
from typing import TYPE_CHECKING

from fastapi import Request
from starlette.datastructures import MutableHeaders

from sala.options.schema import is_ip
from sala.server.http.errors import ApiError, from_exception
from sala.server.settings import LOCAL_HOSTS, Settings, is_loopback

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

AUTHORITY = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::(\d{1,5}))?")
ORIGIN = re.compile(rb"(https?)://(.+)")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
DEFAULT_PORTS = {b"http": b"80", b"https": b"443"}
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_log = logging.getLogger("sala.server")


async def need_key(request: Request) -> None:
    """Dependency: require the API key, if one is set. The admin key is accepted too."""
    settings: Settings = request.app.state.settings
    if settings.api_key is not None:
        _check_key(request, [key for key in (settings.api_key, settings.admin_key) if key is not None])


async def need_admin_key(request: Request) -> None:
    """Dependency: require the admin key; if none is set the API key, if neither is set a client on this machine."""
    settings: Settings = request.app.state.settings
    key = settings.admin_key or settings.api_key
    if key is None:
        if not settings.is_local and not _is_local_client(request):
            raise ApiError(
                403, "models can be managed from the server's own machine only, or with a key", code="admin_key_needed"
            )
        return
    try:
        _check_key(request, [key])
    except ApiError:
        if settings.api_key is not None and _matches(request, settings.api_key):
            raise ApiError(403, "this needs the admin key", code="admin_key_needed") from None
        raise


def _check_key(request: Request, keys: list[str]) -> None:
    if any(_matches(request, key) for key in keys):
        return
    given = "wrong" if _given_keys(request) else "missing"
    raise ApiError(
        401,
        f"the API key is {given}; send it as Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"WWW-Authenticate": 'Bearer realm="sala"'},
    )


def _matches(request: Request, key: str) -> bool:
    """Compare in constant time, so that timing reveals nothing about the key."""
    return any(hmac.compare_digest(given, key.encode()) for given in _given_keys(request))


def _given_keys(request: Request) -> list[bytes]:
    keys = [value.strip().encode("latin-1") for value in request.headers.getlist("x-api-key")]
    for value in filter(str.strip, request.headers.getlist("authorization")):
        scheme, *rest = value.split(maxsplit=1)
        if scheme.lower() == "bearer" and rest:
            keys.append(rest[0].strip().encode("latin-1"))
    return [key for key in keys if key]


def _is_local_client(request: Request) -> bool:
    return request.client is not None and is_loopback(request.client.host)


class HostCheck:
    """Middleware: refuse requests for host names that are not ours."""

    def __init__(self, app: "ASGIApp", settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self.names = LOCAL_HOSTS | {name.rstrip(".") for name in settings.allowed_hosts}

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        problem = self._check(scope) if scope["type"] == "http" else None
        await (self.app if problem is None else problem.response())(scope, receive, send)

    def _check(self, scope: "Scope") -> ApiError | None:
        found = [AUTHORITY.fullmatch(value.strip()) for value in _values(scope, b"host")]
        if len(found) != 1 or found[0] is None:
            return ApiError(400, "the request must have one valid Host header", code="bad_request")
        name = found[0][1].decode().lower().strip("[]").rstrip(".")
        if name in self.names or self._is_safe(name):
            return None
        return ApiError(
            421,
            "this server does not answer to that host name; add it with the setting allowed_hosts",
            code="unknown_host",
        )

    def _is_safe(self, name: str) -> bool:
        """Return whether DNS rebinding cannot be at work: with an IP address, or where every request needs a key."""
        if self.settings.is_local:
            return is_loopback(name)
        return is_ip(name) or (self.settings.api_key is not None and not self.settings.allowed_hosts)


class OriginCheck:
    """Middleware: refuse unsafe methods from web pages of other origins, unless these are permitted."""

    def __init__(self, app: "ASGIApp", settings: Settings) -> None:
        self.app = app
        self.allowed = {origin.encode() for origin in settings.cors_origins}

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] == "http" and scope["method"] not in SAFE_METHODS and not self._is_permitted(scope):
            problem = ApiError(
                403,
                "web pages of that origin may not call this server; permit it with the setting cors_origins",
                code="foreign_origin",
            )
            await problem.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_permitted(self, scope: "Scope") -> bool:
        hosts = _values(scope, b"host")
        origins = [value.strip().lower() for value in _values(scope, b"origin")]
        return all(origin in self.allowed or any(is_same(origin, host) for host in hosts) for origin in origins)


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


class Stamp:
    """Middleware: give every response an id and security headers for browsers.

    A client may choose the id, to find its request in logs; the server only echoes it.
    """

    def __init__(self, app: "ASGIApp") -> None:
        self.app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next(iter(_values(scope, b"x-request-id")), b"")
        number = given.decode() if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)

        async def stamp(message: "Message") -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("x-request-id", number)
                headers.setdefault("x-content-type-options", "nosniff")
                headers.setdefault("x-frame-options", "DENY")
                headers.setdefault("referrer-policy", "no-referrer")
            await send(message)

        await self.app(scope, receive, stamp)


class Failures:
    """Middleware: answer unexpected exceptions with an error, so that the connection can serve further requests."""

    def __init__(self, app: "ASGIApp") -> None:
        self.app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        is_started = False

        async def watch(message: "Message") -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception as error:
            if is_started or scope["type"] != "http":
                raise
            _log.error("a request failed: %s", type(error).__name__, exc_info=error)
            await from_exception(error).response()(scope, receive, send)


def _values(scope: "Scope", name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]

"""Who may ask: keys, the names by which the server may be called, and the web pages that may call it.

The key is asked for by the routes themselves, never by what a path looks like. Host and Origin guard a server without
a key against web pages: a page may be shown under a name that leads here, or may send a form here.
"""

import hmac
import re
import secrets
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware

from sala.options.kinds import is_ip
from sala.server.http.errors import ApiError, Failures
from sala.server.http.limits import RequestLimits
from sala.server.settings import LOCAL_HOSTS, Settings, is_loopback

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

AUTHORITY = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::(\d{1,5}))?")
ORIGIN = re.compile(rb"(https?)://(.+)")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
DEFAULT_PORTS = {b"http": b"80", b"https": b"443"}
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


async def need_key(request: Request) -> None:
    """Dependency: the request must bring the API key, if there is one. The admin key opens everything."""
    settings: Settings = request.app.state.settings
    if settings.api_key is not None:
        _check_key(request, [key for key in (settings.api_key, settings.admin_key) if key is not None])


async def need_admin_key(request: Request) -> None:
    """Dependency: the request must bring the admin key; without one the API key, without both it must be local."""
    settings: Settings = request.app.state.settings
    key = settings.admin_key or settings.api_key
    if key is None:
        if not settings.is_local and not _is_from_here(request):
            raise ApiError(
                403, "models are managed from the server's own machine, or with a key", code="admin_key_needed"
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
    """Compared in constant time: how long it takes tells nothing about the key."""
    return any(hmac.compare_digest(given, key.encode()) for given in _given_keys(request))


def _given_keys(request: Request) -> list[bytes]:
    keys = [value.strip().encode("latin-1") for value in request.headers.getlist("x-api-key")]
    for value in filter(str.strip, request.headers.getlist("authorization")):
        scheme, *rest = value.split(maxsplit=1)
        if scheme.lower() == "bearer" and rest:
            keys.append(rest[0].strip().encode("latin-1"))
    return [key for key in keys if key]


def _is_from_here(request: Request) -> bool:
    return request.client is not None and is_loopback(request.client.host)


class HostCheck:
    """Middleware: answers only under the names it is known by."""

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
        if name in self.names or self._is_free(name):
            return None
        return ApiError(
            421, "this server is not known by that host name; the setting allowed_hosts can add it", code="unknown_host"
        )

    def _is_free(self, name: str) -> bool:
        """An address cannot be a trick with names; and where every request needs a key, a trick gains nothing."""
        if self.settings.is_local:
            return is_loopback(name)
        return is_ip(name) or (self.settings.api_key is not None and not self.settings.allowed_hosts)


class OriginCheck:
    """Middleware: a page of another origin may change nothing here, unless it is allowed to call."""

    def __init__(self, app: "ASGIApp", settings: Settings) -> None:
        self.app = app
        self.allowed = {origin.encode() for origin in settings.cors_origins}

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] == "http" and scope["method"] not in SAFE_METHODS and not self._is_welcome(scope):
            problem = ApiError(
                403,
                "web pages of that origin may not call; the setting cors_origins can allow it",
                code="foreign_origin",
            )
            await problem.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_welcome(self, scope: "Scope") -> bool:
        hosts = _values(scope, b"host")
        origins = [value.strip().lower() for value in _values(scope, b"origin")]
        return all(origin in self.allowed or any(is_same(origin, host) for host in hosts) for origin in origins)


def is_same(origin: bytes, host: bytes) -> bool:
    """Whether an Origin is the server's own: its host and port are those that the request was sent to."""
    found = ORIGIN.fullmatch(origin)
    if found is None:
        return False
    theirs, ours = (AUTHORITY.fullmatch(text.strip().lower()) for text in (found[2], host))
    if theirs is None or ours is None:
        return False
    default = DEFAULT_PORTS[found[1]]
    return (theirs[1], theirs[2] or default) == (ours[1], ours[2] or default)


class Stamp:
    """Middleware: every answer has an id and the headers that keep browsers careful.

    A client may choose the id, to find its request in logs; it is shown, and used for nothing.
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


def add_guards(app: FastAPI, settings: Settings) -> None:
    """All middlewares of this package, in their order; the last one added sees a request first."""
    app.add_middleware(RequestLimits, settings=settings)
    app.add_middleware(Failures)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["retry-after", "x-request-id"],
        )
    app.add_middleware(OriginCheck, settings=settings)
    app.add_middleware(HostCheck, settings=settings)
    app.add_middleware(Stamp)


def _values(scope: "Scope", name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]

"""Build the application: routes, middleware, state and lifespan."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from sala import __version__
from sala.errors import SalaError
from sala.models.catalog import Downloads, Library
from sala.server.admin import models, monitoring
from sala.server.api import routes
from sala.server.http import page
from sala.server.http.errors import GUARDED, ApiError, describe, from_exception, from_validation
from sala.server.http.security import Guard, RequestLimits, need_key
from sala.server.runtime import Runtime
from sala.server.settings import Settings

METHODS = ("DELETE", "GET", "HEAD", "POST")
CLIENT_GONE = 499  # for the log only: the client has disconnected
WORDS = {
    404: "there is no route at this path",
    405: "this path does not support that method",
    413: "the request is too large",
}
_log = logging.getLogger("sala.server")


def create_app(settings: Settings) -> FastAPI:
    """Return the application: the API with and without the prefix /v1. When it starts, it loads the default model."""
    app = FastAPI(
        title="sala",
        version=__version__,
        summary="MiniCPM-SALA behind an OpenAI-compatible API.",
        lifespan=_live,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.settings = settings
    app.state.metrics = monitoring.Metrics()
    app.state.library = Library(settings.models_dir)
    app.state.downloads = Downloads(app.state.library, settings.hub_url)
    app.state.runtime = Runtime(settings, app.state.library, app.state.metrics.statistics)
    keyed, errors = [Depends(need_key)], GUARDED | describe(401)
    for router in (routes.router, models.router):
        app.include_router(router, prefix="/v1", dependencies=keyed, responses=errors)
        app.include_router(router, dependencies=keyed, include_in_schema=False)
    app.include_router(monitoring.metrics_router, dependencies=keyed, responses=errors)
    for router in (monitoring.health_router, page.router):  # public: they reveal nothing
        app.include_router(router, responses=GUARDED)
    add_handlers(app)
    add_guards(app, settings)
    return app


def add_guards(app: FastAPI, settings: Settings) -> None:
    """Add our middleware; what is added last sees a request first."""
    app.add_middleware(RequestLimits, settings=settings)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["retry-after", "x-request-id"],
        )
    app.add_middleware(Guard, settings=settings)


def add_handlers(app: FastAPI) -> None:
    """Answer every exception with an error in our form."""
    for kind in (HTTPException, RequestValidationError, ApiError, SalaError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _answer_error)


async def _answer_error(request: Request, error: Exception) -> Any:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    if isinstance(error, RequestValidationError):
        return from_validation(error.errors())
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        headers = {"Allow": ", ".join(_methods(request))} if error.status_code == 405 else error.headers
        message = WORDS.get(error.status_code) or str(error.detail) or "the request failed"
        return ApiError(error.status_code, message, code=code, headers=headers)
    found = from_exception(error)
    if isinstance(error, SalaError) and found.status_code >= 500:
        _log.error("%s: %s", type(error).__name__, error)
    return found


def _methods(request: Request) -> list[str]:
    """Return the methods that the routes of this path support."""
    matches = [route.matches for route in request.app.routes]
    return [each for each in METHODS if any(one({**request.scope, "method": each})[0] is Match.FULL for one in matches)]


@contextlib.asynccontextmanager
async def _live(app: FastAPI) -> AsyncIterator[None]:
    runtime: Runtime = app.state.runtime
    tasks = [asyncio.create_task(_load_default(runtime)), asyncio.create_task(runtime.watch())]
    await asyncio.sleep(0)  # let the task start, so that the first request sees that a model is loading
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(app.state.downloads.close)
        await runtime.close(app.state.settings.drain_s)


async def _load_default(runtime: Runtime) -> None:
    with contextlib.suppress(ApiError):  # logged already; the next request tries again
        await runtime.load(runtime.default_id)

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
from sala.server.api import batches as batch_routes
from sala.server.api import documents as document_routes
from sala.server.api import routes, stored, tools
from sala.server.api.background import Responses
from sala.server.batches import Batches
from sala.server.documents import DocumentReader, KeptDocuments
from sala.server.http import page, rates
from sala.server.http.encoding import NUM_ENCODERS
from sala.server.http.errors import GUARDED, ApiError, describe, from_exception, from_validation
from sala.server.http.security import Guard, RequestLimits, need_key
from sala.server.runtime import Runtime
from sala.server.settings import Settings
from sala.text.workers import FairPool, MonitoredPool

METHODS = ("DELETE", "GET", "HEAD", "POST")
NUM_PARSERS = 4  # threads that parse large bodies
MAX_PARSERS = 2  # of them for one key at a time
CLIENT_GONE = 499  # for the log only: the client has disconnected
WORDS = {
    404: "there is no route at this path; GET /docs lists them",
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
    app.state.pool = MonitoredPool(NUM_ENCODERS, "encode")
    app.state.threads = MonitoredPool(None, "asyncio")
    app.state.body_pool = FairPool(NUM_PARSERS, MAX_PARSERS, "sala-bodies")
    app.state.metrics = monitoring.Metrics()
    app.state.rates = {}  # meters by owner
    app.state.library = Library(settings.models_dir)
    app.state.downloads = Downloads(app.state.library, settings.hub_url, settings.hub_hosts)
    app.state.runtime = Runtime(settings, app.state.library, app.state.metrics.statistics)
    app.state.batches = Batches(settings, app.state.runtime, app.state.rates)
    app.state.document_reader = DocumentReader()
    app.state.documents = KeptDocuments(app.state.batches.files)
    app.state.responses = Responses.open(settings, app.state.pool)
    app.state.tool_servers = tools.ToolServers(settings)
    watch_pools(app)
    keyed, errors = [Depends(need_key)], GUARDED | describe(401)
    for router in (
        routes.router, stored.router, models.router, batch_routes.router, document_routes.router, tools.router,
    ):  # fmt: skip
        app.include_router(router, prefix="/v1", dependencies=keyed, responses=errors)
        app.include_router(router, dependencies=keyed, include_in_schema=False)
    app.include_router(monitoring.metrics_router, dependencies=keyed, responses=errors)
    for router in (monitoring.health_router, page.router):  # public: they reveal nothing
        app.include_router(router, responses=GUARDED)
    add_handlers(app)
    add_guards(app, settings)
    build_routes(app)
    return app


def build_routes(app: FastAPI) -> None:
    """Let FastAPI build all routes now; it would do so on the event loop when they are first asked for."""
    for route in app.routes:
        route.matches({"type": "http", "method": "GET", "path": "", "headers": []})


def watch_pools(app: FastAPI) -> None:
    """Let health checks and metrics see all that jobs wait for."""
    state = app.state
    runtime: Runtime = state.runtime
    pools: dict[str, monitoring.JobQueue] = {
        "encode": state.pool,
        "bodies": state.body_pool,
        "threads": state.threads,
        "documents": state.document_reader,
        "batches": state.batches.writer,
        "responses": state.responses.store.writer,
    }
    state.metrics.watch_pools(pools, runtime.jobs_waiting)


def add_guards(app: FastAPI, settings: Settings) -> None:
    """Add our middleware; what is added last sees a request first."""
    app.add_middleware(RequestLimits, settings=settings)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["retry-after", "x-request-id", *rates.HEADERS],
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
    batches: Batches = app.state.batches
    asyncio.get_running_loop().set_default_executor(app.state.threads)  # of asyncio.to_thread
    watches = (runtime.watch(), batches.watch(), app.state.metrics.watch_loop())
    tasks = [asyncio.create_task(one) for one in (_load_default(runtime), *watches, app.state.tool_servers.open())]
    await asyncio.sleep(0)  # let the task start, so that the first request sees that a model is loading
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await batches.close()
        await app.state.tool_servers.close()
        app.state.body_pool.close()
        await asyncio.to_thread(app.state.document_reader.close)
        await asyncio.to_thread(app.state.downloads.close)
        await runtime.close(app.state.settings.drain_s)
        await app.state.responses.close()
        app.state.pool.shutdown(wait=False, cancel_futures=True)


async def _load_default(runtime: Runtime) -> None:
    with contextlib.suppress(ApiError):  # logged already; the next request tries again
        await runtime.load(runtime.default_id)

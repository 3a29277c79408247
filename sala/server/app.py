"""Build the application: routes, middleware, state and lifespan."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import APIRouter, Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware

from sala import __version__
from sala.models.catalog import Downloads, Library
from sala.server.admin import docs, health, metrics, models
from sala.server.admin.metrics import Metrics
from sala.server.api import anthropic, chat, completions, responses, tokens
from sala.server.http import page as web
from sala.server.http.body import RequestLimits
from sala.server.http.errors import GUARDED, ApiError, add_handlers, describe
from sala.server.http.security import Failures, HostCheck, OriginCheck, Stamp, need_key
from sala.server.runtime import Runtime
from sala.server.settings import Settings

API_ROUTERS: tuple[APIRouter, ...] = (
    chat.router,
    completions.router,
    responses.router,
    anthropic.router,
    models.router,
    tokens.router,
)


def create_app(settings: Settings, runtime: Runtime | None = None) -> FastAPI:
    """Return the application. Unless a runtime is given, the default model is loaded at the start."""
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
    app.state.metrics = Metrics()
    app.state.library = Library(settings.models_dir) if runtime is None else runtime.library
    app.state.downloads = Downloads(app.state.library, settings.hub_url)
    app.state.runtime = runtime or Runtime(settings, app.state.library, app.state.metrics.statistics)
    add_routes(app)
    add_handlers(app)
    add_guards(app, settings)
    return app


def add_routes(app: FastAPI) -> None:
    """Add the API with and without the prefix /v1. The routes themselves require the key."""
    keyed = [Depends(need_key)]
    errors = GUARDED | describe(401)
    for router in API_ROUTERS:
        app.include_router(router, prefix="/v1", dependencies=keyed, responses=errors)
        app.include_router(router, dependencies=keyed, include_in_schema=False)
    app.include_router(metrics.router, dependencies=keyed, responses=errors)
    for router in (health.router, docs.router, web.router):  # public: they reveal nothing
        app.include_router(router, responses=GUARDED)


def add_guards(app: FastAPI, settings: Settings) -> None:
    """Add our middleware; what is added last sees a request first."""
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

"""Puts the server together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import APIRouter, Depends, FastAPI

from sala import __version__
from sala.models.catalog import Downloads, Library
from sala.server.admin import docs, health, metrics, models
from sala.server.admin.metrics import Metrics
from sala.server.api import anthropic, chat, completions, responses, tokens
from sala.server.http import page as web
from sala.server.http.errors import GUARDED, ApiError, add_handlers, describe
from sala.server.http.security import add_guards, need_key
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
    """The application; a runtime that is given comes with its models, else the default model is loaded at the start."""
    app = FastAPI(
        title="sala",
        version=__version__,
        summary="MiniCPM-SALA behind OpenAI's API.",
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
    app.state.runtime = runtime or Runtime(settings, app.state.library, app.state.metrics)
    add_routes(app)
    add_handlers(app)
    add_guards(app, settings)
    return app


def add_routes(app: FastAPI) -> None:
    """OpenAI's routes with /v1 and without; the key is asked for by the routes themselves."""
    keyed = [Depends(need_key)]
    errors = GUARDED | describe(401)
    for router in API_ROUTERS:
        app.include_router(router, prefix="/v1", dependencies=keyed, responses=errors)
        app.include_router(router, dependencies=keyed, include_in_schema=False)
    app.include_router(metrics.router, dependencies=keyed, responses=errors)
    for router in (health.router, docs.router, web.router):  # these give nothing away
        app.include_router(router, responses=GUARDED)


@contextlib.asynccontextmanager
async def _live(app: FastAPI) -> AsyncIterator[None]:
    runtime: Runtime = app.state.runtime
    tasks = [asyncio.create_task(_load_default(runtime)), asyncio.create_task(runtime.watch())]
    await asyncio.sleep(0)  # from the first request on it is known that a model is being loaded
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(app.state.downloads.close)
        await runtime.close(app.state.settings.drain_s)


async def _load_default(runtime: Runtime) -> None:
    with contextlib.suppress(ApiError):  # the log says why; the next request tries again
        await runtime.load(runtime.default_id)

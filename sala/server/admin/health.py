"""Health checks for load balancers, containers and people.

They need no key and reveal nothing. `/health` checks that the engine makes progress: a process that is up but stuck is
not healthy.
"""

from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

router = APIRouter(tags=["health"])

MAX_SILENCE_S = 60.0  # an engine with work whose loop has not turned for this long is stuck

State = Literal["ok", "idle", "loading", "draining", "unhealthy"]
NOT_READY: dict[int | str, dict[str, Any]] = {503: {"description": "The server cannot answer now; `status` says why."}}


class Health(BaseModel):
    status: State = Field(description="ok; idle: no model is loaded; loading; draining: shutting down; unhealthy.")


@router.get("/health", responses=NOT_READY, summary="Can the server answer?")
async def check_health(request: Request, response: Response) -> Health:
    """200 if requests can be answered, at once or after loading a model; otherwise 503."""
    return _answer(response, find_state(request.app.state), healthy={"ok", "idle"})


@router.get("/health/live", summary="Is the process up?")
async def check_live() -> Health:
    """Always 200. To decide whether to restart the server, use `/health`."""
    return Health(status="ok")


@router.get("/health/ready", responses=NOT_READY, summary="Is a model loaded and its engine running?")
async def check_ready(request: Request, response: Response) -> Health:
    """200 if a model is loaded, or was unloaded because it was idle: the next request loads it again."""
    may_be_idle = request.app.state.settings.idle_unload_s > 0
    return _answer(response, find_state(request.app.state), healthy={"ok", "idle"} if may_be_idle else {"ok"})


def find_state(state: Any) -> State:
    if getattr(state, "is_draining", False):
        return "draining"
    runtime = getattr(state, "runtime", None)
    if runtime is None:
        return "loading"
    statuses = [each.service.status() for each in list(runtime.loaded.values())]
    if any(is_stuck(status) for status in statuses):
        return "unhealthy"
    if statuses:
        return "ok"
    return "loading" if runtime.is_loading else "idle"


def is_stuck(status: Any) -> bool:
    """Return whether an engine is dead, or has work and makes no progress. An idle engine may sleep."""
    has_work = status.waiting + status.running > 0
    return not status.is_alive or (has_work and status.heartbeat_s > MAX_SILENCE_S)


def _answer(response: Response, state: State, healthy: set[str]) -> Health:
    response.headers["cache-control"] = "no-store"
    if state not in healthy:
        response.status_code = 503
        response.headers["retry-after"] = "5"
    return Health(status=state)

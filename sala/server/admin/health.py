"""Whether the server is up, and whether it can answer: for load balancers, containers and people.

No key is needed and nothing is given away. `/health` proves that the engine moves: a process that is up but stuck is
not healthy.
"""

from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

router = APIRouter(tags=["health"])

MAX_SILENCE_S = 60.0  # an engine that has work and does not go round for so long is stuck

State = Literal["ok", "idle", "loading", "draining", "unhealthy"]
NOT_READY: dict[int | str, dict[str, Any]] = {503: {"description": "It cannot answer now; `status` says why."}}


class Health(BaseModel):
    status: State = Field(description="ok; idle: no model is loaded; loading; draining: it is ending; unhealthy.")


@router.get("/health", responses=NOT_READY, summary="Can it answer?")
async def check_health(request: Request, response: Response) -> Health:
    """200 if requests can be answered, at once or after loading a model; else 503."""
    return _answer(response, find_state(request.app.state), healthy={"ok", "idle"})


@router.get("/health/live", summary="Is the process up?")
async def check_live() -> Health:
    """Always 200; for the decision to restart, ask `/health`."""
    return Health(status="ok")


@router.get("/health/ready", responses=NOT_READY, summary="Is a model loaded and its engine moving?")
async def check_ready(request: Request, response: Response) -> Health:
    """200 if a model is loaded. One that was unloaded because nobody used it counts: the next request loads it."""
    may_be_idle = request.app.state.settings.idle_unload_s > 0
    return _answer(response, find_state(request.app.state), healthy={"ok", "idle"} if may_be_idle else {"ok"})


def find_state(state: Any) -> State:
    if getattr(state, "is_draining", False):
        return "draining"
    runtime = getattr(state, "runtime", None)
    if runtime is None:
        return "loading"
    statuses = [each.worker.status() for each in list(runtime.loaded.values())]
    if any(is_stuck(status) for status in statuses):
        return "unhealthy"
    if statuses:
        return "ok"
    return "loading" if runtime.is_loading else "idle"


def is_stuck(status: Any) -> bool:
    """Whether an engine is dead, or has work and does nothing. One without work may sleep."""
    has_work = status.waiting + status.running > 0
    return not status.is_alive or (has_work and status.heartbeat_s > MAX_SILENCE_S)


def _answer(response: Response, state: State, healthy: set[str]) -> Health:
    response.headers["cache-control"] = "no-store"
    if state not in healthy:
        response.status_code = 503
        response.headers["retry-after"] = "5"
    return Health(status=state)

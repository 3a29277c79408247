"""Model management over HTTP: list, download, load, unload and delete models."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import StreamingResponse
from pydantic import Field

from sala.errors import ModelNotFound
from sala.models.catalog import DownloadJob, Downloads, Entry, Library, NotOurs
from sala.models.embedded import EMBEDDED
from sala.models.hub import AlreadyThere, Busy
from sala.server.http.body import Strict
from sala.server.http.errors import ApiError, describe
from sala.server.http.security import StrictRoute, need_admin_key
from sala.server.runtime import LoadedModel, Runtime, no_such_model

router = APIRouter(tags=["models"], route_class=StrictRoute)
POLL_SECONDS = 0.2
ADMIN = [Depends(need_admin_key)]
ModelId = Annotated[str, Path(description="The id; for a model from a hub also organisation/name.", max_length=256)]
FACTS = ("repo_id", "revision", "quantization", "size_bytes", "downloaded_at")
UNLOADED: dict[str, Any] = {"loaded": False} | dict.fromkeys(("context_length", "trained_length", "requests", "cache"))


class DownloadRequest(Strict):
    repo_id: str = Field(
        max_length=20_000, description="organisation/name on the hub.", examples=["openbmb/MiniCPM-SALA"]
    )
    revision: str | None = Field(
        None, max_length=20_000, description="Branch, tag or commit; by default the main branch."
    )


class ModelRequest(Strict):
    model: str = Field(max_length=256, description="Id of a model.")


def admin(answer: str, *errors: int, success: int = 200) -> dict[str, Any]:
    """Return the arguments of a route that needs the admin key, sends this answer and may send these errors."""
    return {"dependencies": ADMIN, "responses": describe(401, 403, *errors, answer=answer, success=success)}


class State:
    """Dependency: what the routes work on."""

    def __init__(self, request: Request) -> None:
        state = request.app.state
        self.library: Library = state.library
        self.runtime: Runtime = state.runtime
        self.downloads: Downloads = state.downloads
        self.ping_s: float = state.settings.ping_s

    async def find(self, model_id: str) -> tuple[Entry | None, LoadedModel | None]:
        """Return a model in the library and among those that are loaded; these may come from elsewhere."""
        model_id = self.library.resolve(model_id)
        entry = await asyncio.to_thread(self.library.find_served, model_id)
        return entry, self.runtime.loaded.get(model_id) if entry is None else self.find_loaded(entry)

    def find_loaded(self, entry: Entry) -> LoadedModel | None:
        for model in list(self.runtime.loaded.values()):
            if model.id in (entry.id, entry.repo_id) or model.path == entry.path:
                return model
        return None


async def _is_admin(request: Request) -> bool:
    try:
        await need_admin_key(request)
    except ApiError:
        return False
    return True


AppState = Annotated[State, Depends()]
IsAdmin = Annotated[bool, Depends(_is_admin)]


def _find_job(state: AppState, job_id: Annotated[str, Path(max_length=64)]) -> DownloadJob:
    job = state.downloads.get(job_id)
    if job is None:
        raise ApiError(
            404, "there is no such download; GET /v1/models/download lists them", param="job_id", code="job_not_found"
        )
    return job


FoundJob = Annotated[DownloadJob, Depends(_find_job)]


@router.get("/models", responses=describe(answer="ModelList"), summary="List the models")
async def list_models(state: AppState, is_admin: IsAdmin) -> Any:
    pairs = [(entry, state.find_loaded(entry)) for entry in await asyncio.to_thread(state.library.list)]
    listed = [model for _, model in pairs]
    cards = [_card(entry, model, is_admin) for entry, model in pairs]
    cards += [_card(None, one, is_admin) for one in list(state.runtime.loaded.values()) if one not in listed]
    named = {card["id"]: card for card in cards}
    aliases = [{**named[root], "id": alias} for alias, root in state.library.aliases.items() if root in named]
    default = named.get(state.library.default_id or "")
    adapters = [_adapted(default, name) for name in state.library.adapters] if default is not None else []
    return {"object": "list", "data": [*cards, *aliases, *adapters]}


@router.post(
    "/models/download",
    status_code=202,
    summary="Download a model from the hub",
    **admin("JobAnswer", 400, 409, success=202),
)
async def start_download(state: AppState, body: DownloadRequest) -> Any:
    """Downloads in the background. A second request for a model that is being downloaded returns the same job."""
    try:
        job = await asyncio.to_thread(state.downloads.start, body.repo_id, body.revision)
    except AlreadyThere as error:
        raise ApiError(409, str(error), param="repo_id", code="model_exists") from None
    except Busy as error:
        raise ApiError(409, str(error), code="model_busy") from None
    return {"job": _show(job)}


@router.get("/models/download", summary="List the downloads", **admin("JobList"))
async def list_downloads(state: AppState) -> Any:
    return {"object": "list", "data": [_show(job) for job in state.downloads.list()]}


@router.get("/models/download/{job_id}", summary="Describe a download", **admin("DownloadJob", 404))
async def get_download(job: FoundJob) -> Any:
    return _show(job)


@router.get(
    "/models/download/{job_id}/events", summary="Follow a download", dependencies=ADMIN,
    responses={200: {"content": {"text/event-stream": {}}, "description": "download_progress until model_status."},
               **describe(401, 403, 404)},
    response_class=StreamingResponse,
)  # fmt: skip
async def follow_download(state: AppState, job: FoundJob) -> StreamingResponse:
    """Server-sent events: `download_progress` while bytes arrive, then one `model_status`."""
    events = _events(state.downloads, job.id, state.ping_s)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


@router.delete("/models/download/{job_id}", summary="Cancel a download", **admin("DownloadJob", 404))
async def cancel_download(state: AppState, job: FoundJob) -> Any:
    """Keeps the data that has arrived: a new download of the model resumes there."""
    cancelled = await asyncio.to_thread(state.downloads.cancel, job.id)
    return _show(cancelled or job)


@router.post("/models/load", summary="Load a model", **admin("ModelCard", 400, 404, 409, 503))
async def load_model(state: AppState, body: ModelRequest) -> Any:
    entry, _ = await state.find(body.model)
    return _card(entry, await state.runtime.load(body.model if entry is None else entry.id), True)


@router.post("/models/unload", summary="Unload a model", **admin("ModelCard", 400, 404, 409))
async def unload_model(state: AppState, body: ModelRequest) -> Any:
    entry, model = await state.find(body.model)
    if model is None:
        raise ApiError(404, "that model is not loaded", param="model", code="model_not_loaded")
    card = {**_card(entry, model, True), **UNLOADED}
    await state.runtime.unload(model.id)
    return card


@router.get("/models/{model_id:path}", summary="Describe a model", responses=describe(401, 404, answer="ModelCard"))
async def get_model(state: AppState, model_id: ModelId, is_admin: IsAdmin) -> Any:
    adapter = await asyncio.to_thread(state.library.find_adapter, model_id)
    entry, model = await state.find(model_id if adapter is None else str(state.library.default_id))
    if entry is None and model is None:
        raise no_such_model()
    card = _card(entry, model, is_admin)
    if adapter is not None:
        return _adapted(card, adapter)
    return {**card, "id": model_id} if state.library.resolve(model_id) != model_id else card


@router.delete("/models/{model_id:path}", summary="Delete a model", **admin("Deleted", 404, 409, 507))
async def delete_model(state: AppState, model_id: ModelId) -> Any:
    """Removes its directory from the models directory. A model elsewhere is only removed from the list."""
    entry = await asyncio.to_thread(state.library.find, model_id)  # deleting takes exact ids only
    model_id = model_id if entry is None else entry.id
    if state.downloads.find_active(model_id) is not None:
        raise ApiError(409, "that model is being downloaded; cancel the download first", code="model_busy")
    if model_id in state.runtime.loaded or (entry is not None and state.find_loaded(entry) is not None):
        raise ApiError(409, "that model is loaded; unload it first", code="model_loaded")
    if state.runtime.is_loading:
        raise ApiError(409, "a model is being loaded; try again when it is ready", code="model_busy")
    try:
        await asyncio.to_thread(state.library.delete, model_id)
    except ModelNotFound:
        raise no_such_model() from None
    except Busy:
        raise ApiError(409, "another process is using that model; try again later", code="model_busy") from None
    except NotOurs as error:
        raise ApiError(409, str(error), code="model_elsewhere") from None
    note = "it is assembled again when it is used" if entry is not None and entry.id == EMBEDDED else None
    return {"id": model_id, "object": "model", "deleted": True, "note": note}


async def _events(downloads: Downloads, job_id: str, ping_s: float) -> AsyncIterator[str]:
    shown: DownloadJob | None = None
    sent_at = time.monotonic()
    while (job := downloads.get(job_id)) is not None:
        if shown is None or job.files != shown.files:
            yield _event(job, "download_progress", _show(job)["files"])
            shown, sent_at = job, time.monotonic()
        if job.is_over:
            yield _event(job, "model_status", {"status": job.status, "error": job.error})
            return
        if time.monotonic() - sent_at >= ping_s:
            yield ": ping\n\n"
            sent_at = time.monotonic()
        await asyncio.sleep(POLL_SECONDS)


def _event(job: DownloadJob, name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps({'model': job.repo_id, 'event': name, 'data': data})}\n\n"


def _card(entry: Entry | None, model: LoadedModel | None, is_admin: bool) -> dict[str, Any]:
    """Describe a model that is in the library, loaded, or both."""
    found: Any = entry or model
    facts, state, created = dict.fromkeys(FACTS) | {"size_bytes": 0}, UNLOADED, 0.0
    if model is not None:
        status, llm = model.service.status(), model.llm
        state = {"loaded": True, "context_length": llm.ctx, "trained_length": llm.config.trained_length}
        state["requests"] = {"running": status.running, "waiting": status.waiting}
        tiers = {
            name: {"prefixes": tier.prefixes, "used_bytes": tier.used, "size_bytes": tier.size}
            for name, tier in status.prefix.tiers.items()
        }
        state["cache"] = {"hit_rate": status.prefix.hit_rate, "tiers": tiers}
        created = model.loaded_at
    if entry is not None:
        facts = {name: getattr(entry, name) for name in FACTS}
        written = entry.path / "config.json"
        created = entry.downloaded_at or (written.stat().st_mtime if written.exists() else 0.0)
    return {
        "id": found.id,
        "object": "model",
        "created": int(created),
        "owned_by": str(facts["repo_id"]).partition("/")[0] if facts["repo_id"] else "local",
        "root": found.id,
        "path": str(found.path) if is_admin else found.path.name,
        **facts,
        **state,
    }


def _adapted(card: dict[str, Any], adapter: str) -> dict[str, Any]:
    """Describe an adapter of a model that has this card."""
    return {**card, "id": f"{card['id']}:{adapter}", "parent": card["id"]}


def _show(job: DownloadJob) -> dict[str, Any]:
    same = ("id", "repo_id", "revision", "status", "done_bytes", "total_bytes", "error")
    return {
        **{name: getattr(job, name) for name in same},
        "object": "model.download",
        "files": {name: {"done": done, "total": total} for name, (done, total) in job.files.items()},
        "notes": list(job.skipped),
        "created": int(job.created_at),
    }

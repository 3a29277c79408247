"""Model management over HTTP: list, download, load, unload and delete models."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from sala.errors import ModelNotFound
from sala.models.catalog import Downloads, Entry, Job, Library
from sala.models.embedded import EMBEDDED
from sala.models.hub import AlreadyThere, Busy
from sala.server.http.body import Strict, StrictRoute
from sala.server.http.errors import ApiError, describe
from sala.server.http.security import need_admin_key

if TYPE_CHECKING:
    from sala.server.runtime import LoadedModel, Runtime

router = APIRouter(tags=["models"], route_class=StrictRoute)
POLL_SECONDS = 0.2
ModelId = Annotated[str, Path(description="The id; for a model from a hub also organisation/name.", max_length=256)]
JobId = Annotated[str, Path(max_length=64)]
ADMIN = [Depends(need_admin_key)]


class Requests(BaseModel):
    running: int
    waiting: int


class ModelCard(BaseModel):
    """A model; the first four fields are OpenAI's."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="When it was downloaded or its files were written, in seconds since 1970.")
    owned_by: str
    path: str = Field(description="The name of its directory; the full path with the admin key.")
    loaded: bool
    repo_id: str | None
    revision: str | None
    quantization: dict[str, Any] | None
    size_bytes: int
    downloaded_at: float | None
    context_length: int | None = Field(description="The longest sequence in tokens; null unless it is loaded.")
    trained_length: int | None = Field(description="The longest sequence of its training; null unless known.")
    requests: Requests | None = Field(description="Its requests; null unless it is loaded.")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class FileProgress(BaseModel):
    done: int
    total: int


class DownloadJob(BaseModel):
    """The state of a download."""

    id: str
    object: Literal["model.download"] = "model.download"
    repo_id: str
    revision: str | None
    status: Literal["queued", "running", "done", "failed", "cancelled"]
    done_bytes: int
    total_bytes: int = Field(description="0 until the hub has listed the files.")
    files: dict[str, FileProgress]
    notes: list[str] = Field(description="Files that were skipped, and why.")
    error: str | None
    created: int


class JobList(BaseModel):
    object: Literal["list"] = "list"
    data: list[DownloadJob]


class JobAnswer(BaseModel):
    job: DownloadJob


class Deleted(BaseModel):
    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True
    note: str | None = None


class DownloadRequest(Strict):
    repo_id: str = Field(
        max_length=20_000, description="organisation/name on the hub.", examples=["openbmb/MiniCPM-SALA"]
    )
    revision: str | None = Field(
        None, max_length=20_000, description="Branch, tag or commit; by default the main branch."
    )


class ModelRequest(Strict):
    model: str = Field(max_length=256, description="Id of a model.")


@router.get("/models", response_model=ModelList, summary="List the models")
async def list_models(request: Request) -> Any:
    library, runtime, is_admin = _library(request), _runtime(request), await _is_admin(request)
    entries = await asyncio.to_thread(library.list)
    cards = [_card(entry, _loaded(runtime, entry), is_admin) for entry in entries]
    cards += [_loaded_card(model, is_admin) for model in _unlisted(runtime, entries)]
    return {"data": cards}


@router.post(
    "/models/download", status_code=202, response_model=JobAnswer, summary="Download a model from the hub",
    responses=describe(400, 401, 403, 409), dependencies=ADMIN,
)  # fmt: skip
async def start_download(request: Request, body: DownloadRequest) -> Any:
    """Downloads in the background. A second request for a model that is being downloaded returns the same job."""
    try:
        job = await asyncio.to_thread(_downloads(request).start, body.repo_id, body.revision)
    except AlreadyThere as error:
        raise ApiError(409, str(error), param="repo_id", code="model_exists") from None
    except Busy as error:
        raise ApiError(409, str(error), code="model_busy") from None
    return {"job": _show(job)}


@router.get(
    "/models/download", response_model=JobList, summary="List the downloads",
    responses=describe(401, 403), dependencies=ADMIN,
)  # fmt: skip
async def list_downloads(request: Request) -> Any:
    return {"data": [_show(job) for job in _downloads(request).list()]}


@router.get(
    "/models/download/{job_id}", response_model=DownloadJob, summary="Describe a download",
    responses=describe(401, 403, 404), dependencies=ADMIN,
)  # fmt: skip
async def get_download(request: Request, job_id: JobId) -> Any:
    return _show(_job(_downloads(request).get(job_id)))


@router.get(
    "/models/download/{job_id}/events", summary="Follow a download", dependencies=ADMIN,
    responses={200: {"content": {"text/event-stream": {}}, "description": "download_progress until model_status."},
               **describe(401, 403, 404)},
    response_class=StreamingResponse,
)  # fmt: skip
async def follow_download(request: Request, job_id: JobId) -> StreamingResponse:
    """Server-sent events: `download_progress` while bytes arrive, then one `model_status`."""
    downloads = _downloads(request)
    _job(downloads.get(job_id))
    ping_s = float(getattr(request.app.state.settings, "ping_s", 15.0))
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(downloads, job_id, ping_s), media_type="text/event-stream", headers=headers)


@router.delete(
    "/models/download/{job_id}", response_model=DownloadJob, summary="Cancel a download",
    responses=describe(401, 403, 404), dependencies=ADMIN,
)  # fmt: skip
async def cancel_download(request: Request, job_id: JobId) -> Any:
    """Keeps the data that has arrived: a new download of the model resumes there."""
    return _show(_job(await asyncio.to_thread(_downloads(request).cancel, job_id)))


@router.post(
    "/models/load", response_model=ModelCard, summary="Load a model",
    responses=describe(400, 401, 403, 404, 409, 503), dependencies=ADMIN,
)  # fmt: skip
async def load_model(request: Request, body: ModelRequest) -> Any:
    entry = await asyncio.to_thread(_library(request).find, body.model)
    model = await _runtime(request).load(body.model if entry is None else entry.id)
    return _loaded_card(model, True) if entry is None else _card(entry, model, True)


@router.post(
    "/models/unload", response_model=ModelCard, summary="Unload a model",
    responses=describe(400, 401, 403, 404, 409), dependencies=ADMIN,
)  # fmt: skip
async def unload_model(request: Request, body: ModelRequest) -> Any:
    runtime = _runtime(request)
    entry = await asyncio.to_thread(_library(request).find, body.model)
    model = runtime.loaded.get(body.model) if entry is None else _loaded(runtime, entry)
    if model is None:
        raise ApiError(404, "that model is not loaded", param="model", code="model_not_loaded")
    card = _loaded_card(model, True) if entry is None else _card(entry, None, True)
    await runtime.unload(model.id)
    return {**card, **_state(None)}


@router.get(
    "/models/{model_id:path}", response_model=ModelCard, summary="Describe a model", responses=describe(401, 404)
)
async def get_model(request: Request, model_id: ModelId) -> Any:
    runtime, is_admin = _runtime(request), await _is_admin(request)
    entry = await asyncio.to_thread(_library(request).find, model_id)
    if entry is not None:
        return _card(entry, _loaded(runtime, entry), is_admin)
    if model_id in runtime.loaded:
        return _loaded_card(runtime.loaded[model_id], is_admin)
    raise _not_found()


@router.delete(
    "/models/{model_id:path}", response_model=Deleted, summary="Delete a model",
    responses=describe(401, 403, 404, 409), dependencies=ADMIN,
)  # fmt: skip
async def delete_model(request: Request, model_id: ModelId) -> Any:
    """Removes its directory from the models directory. A model elsewhere is only removed from the list."""
    library, runtime = _library(request), _runtime(request)
    entry = await asyncio.to_thread(library.find, model_id)
    if _downloads(request).find_active(model_id) is not None:
        raise ApiError(409, "that model is being downloaded; cancel the download first", code="model_busy")
    if model_id in runtime.loaded or (entry is not None and _loaded(runtime, entry) is not None):
        raise ApiError(409, "that model is loaded; unload it first", code="model_loaded")
    if runtime.is_loading:
        raise ApiError(409, "a model is being loaded; try again when it is ready", code="model_busy")
    try:
        await asyncio.to_thread(library.delete, model_id)
    except ModelNotFound:
        raise _not_found() from None
    except Busy:
        raise ApiError(409, "another process is using that model; try again later", code="model_busy") from None
    note = "it is assembled again when it is used" if entry is not None and entry.id == EMBEDDED else None
    return {"id": model_id if entry is None else entry.id, "note": note}


async def _events(downloads: Downloads, job_id: str, ping_s: float) -> AsyncIterator[str]:
    shown: Job | None = None
    sent_at = time.monotonic()
    while (job := downloads.get(job_id)) is not None:
        if shown is None or job.files != shown.files:
            files = {name: {"done": done, "total": total} for name, (done, total) in job.files.items()}
            yield _event(job, "download_progress", files)
            shown, sent_at = job, time.monotonic()
        if job.is_over:
            yield _event(job, "model_status", {"status": job.status, "error": job.error})
            return
        if time.monotonic() - sent_at >= ping_s:
            yield ": ping\n\n"
            sent_at = time.monotonic()
        await asyncio.sleep(POLL_SECONDS)


def _event(job: Job, name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps({'model': job.repo_id, 'event': name, 'data': data})}\n\n"


def _library(request: Request) -> Library:
    return request.app.state.library  # type: ignore[no-any-return]


def _downloads(request: Request) -> Downloads:
    return request.app.state.downloads  # type: ignore[no-any-return]


def _runtime(request: Request) -> "Runtime":
    return request.app.state.runtime  # type: ignore[no-any-return]


async def _is_admin(request: Request) -> bool:
    try:
        await need_admin_key(request)
    except ApiError:
        return False
    return True


def _not_found() -> ApiError:
    return ApiError(404, "there is no such model; GET /v1/models lists them", param="model", code="model_not_found")


def _job(job: Job | None) -> Job:
    if job is None:
        raise ApiError(
            404, "there is no such download; GET /v1/models/download lists them", param="job_id", code="job_not_found"
        )
    return job


def _loaded(runtime: "Runtime", entry: Entry) -> "LoadedModel | None":
    for model in list(runtime.loaded.values()):
        if model.id in (entry.id, entry.repo_id) or model.path == entry.path:
            return model
    return None


def _unlisted(runtime: "Runtime", entries: list[Entry]) -> "list[LoadedModel]":
    """Return the loaded models that are not in the library."""
    known = {model.id for entry in entries if (model := _loaded(runtime, entry)) is not None}
    return [model for model in list(runtime.loaded.values()) if model.id not in known]


def _card(entry: Entry, model: "LoadedModel | None", is_admin: bool) -> dict[str, Any]:
    created = entry.downloaded_at
    if created is None:
        created = (entry.path / "config.json").stat().st_mtime if (entry.path / "config.json").exists() else 0
    return {
        "id": entry.id,
        "created": int(created),
        "owned_by": entry.repo_id.partition("/")[0] if entry.repo_id else "local",
        "path": str(entry.path) if is_admin else entry.path.name,
        "repo_id": entry.repo_id,
        "revision": entry.revision,
        "quantization": entry.quantization,
        "size_bytes": entry.size_bytes,
        "downloaded_at": entry.downloaded_at,
        **_state(model),
    }


def _loaded_card(model: "LoadedModel", is_admin: bool) -> dict[str, Any]:
    return {
        "id": model.id,
        "created": int(model.loaded_at),
        "owned_by": "local",
        "path": str(model.path) if is_admin else model.path.name,
        "repo_id": None,
        "revision": None,
        "quantization": None,
        "size_bytes": 0,
        "downloaded_at": None,
        **_state(model),
    }


def _state(model: "LoadedModel | None") -> dict[str, Any]:
    if model is None:
        return {"loaded": False, "context_length": None, "trained_length": None, "requests": None}
    status = model.service.status()
    requests = {"running": status.running, "waiting": status.waiting}
    trained = model.llm.config.trained_length
    return {"loaded": True, "context_length": model.llm.ctx, "trained_length": trained, "requests": requests}


def _show(job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "repo_id": job.repo_id,
        "revision": job.revision,
        "status": job.status,
        "done_bytes": job.done_bytes,
        "total_bytes": job.total_bytes,
        "files": {name: {"done": done, "total": total} for name, (done, total) in job.files.items()},
        "notes": list(job.skipped),
        "error": job.error,
        "created": int(job.created_at),
    }

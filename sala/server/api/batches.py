"""Files and batches, as in OpenAI's API: upload requests in a file, let them be answered, download the answers."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar

from annotated_types import MaxLen
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import Field
from starlette.datastructures import UploadFile
from starlette.responses import FileResponse

from sala.server.api.routes import respond
from sala.server.batch import ROUTES
from sala.server.batches import Batches, BatchJob
from sala.server.files import StoredFile
from sala.server.http.body import LazyList, Strict
from sala.server.http.errors import ALWAYS, ApiError, describe
from sala.server.http.security import StrictRoute, find_owner

MAX_FIELDS = 8  # of an upload, besides its file
MAX_FIELD = 4096  # bytes
MIN_KEEP_S, MAX_KEEP_S = 3600, 30 * 24 * 3600
PURPOSES = ("batch",)
UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(PURPOSES)},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {
                            "type": "integer", "minimum": MIN_KEEP_S, "maximum": MAX_KEEP_S,
                        },
                    },
                }
            }
        },
    }
}  # fmt: skip
router = APIRouter(route_class=StrictRoute)


class ExpiresAfter(Strict):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_KEEP_S, le=MAX_KEEP_S)


class BatchRequest(Strict):
    input_file_id: str = Field(max_length=256, description="Id of an uploaded file with a request per line.")
    endpoint: Literal[tuple(ROUTES)] = Field(description="What all requests of the file are for.")  # type: ignore[valid-type]
    completion_window: Literal["24h"] = Field(description="What is not answered by then is given up.")
    metadata: dict[Annotated[str, MaxLen(64)], Annotated[str, MaxLen(512)]] | None = Field(
        None, max_length=16, description="Returned unchanged."
    )
    output_expires_after: ExpiresAfter | None = Field(None, description="When the files of the answers expire.")


class OwnedBatches:
    """Dependency: the batches and files, and whose request this is."""

    def __init__(self, request: Request) -> None:
        self.batches: Batches = request.app.state.batches
        self.files = self.batches.files
        self.owner = find_owner(request)


async def _open(request: Request) -> OwnedBatches:
    owned = OwnedBatches(request)
    await owned.batches.open()
    return owned


Store = Annotated[OwnedBatches, Depends(_open)]


def _find_file(store: Store, file_id: Annotated[str, Path(max_length=256)]) -> StoredFile:
    file: StoredFile = store.files.find(store.owner, file_id)
    return file


def _find_batch(store: Store, batch_id: Annotated[str, Path(max_length=256)]) -> BatchJob:
    return store.batches.find(store.owner, batch_id)


FoundFile = Annotated[StoredFile, Depends(_find_file)]
FoundBatch = Annotated[BatchJob, Depends(_find_batch)]
After = Annotated[str | None, Query(max_length=256, description="Go on after the object with this id.")]


class Shown(Protocol):
    id: str

    def show(self) -> dict[str, Any]: ...


S = TypeVar("S", bound=Shown)
SHOWN_BYTES = 256  # about the JSON of one


def page(items: Sequence[S], after: str | None, limit: int) -> dict[str, Any]:
    """Return a part of a list, as OpenAI's API does."""
    ids = [item.id for item in items]
    if after is not None and after not in ids:
        raise ApiError(400, "after: there is no such object", param="after", code="invalid_value")
    begin = 0 if after is None else ids.index(after) + 1
    shown = items[begin : begin + limit]
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    data = LazyList(lambda item: item.show(), shown, SHOWN_BYTES)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": begin + limit < len(items)}


@router.post(
    "/files", tags=["files"], summary="Upload a file", openapi_extra=UPLOAD,
    responses=describe(401, 404, 507, answer="FileObject"),
)  # fmt: skip
async def upload_file(store: Store, request: Request) -> Any:
    """A file of requests for a batch, one JSON object per line; at most `max_body` bytes with all that is around it."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "multipart/form-data":
        raise ApiError(415, "the content type must be multipart/form-data", code="unsupported_media_type")
    async with request.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD) as form:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise _missing("file")
        if purpose is None:
            raise _missing("purpose")
        if purpose not in PURPOSES:
            message = f"purpose: must be one of {', '.join(PURPOSES)}"
            raise ApiError(400, message, param="purpose", code="invalid_value")
        keep_s = _read_expiry(form.get("expires_after[anchor]"), form.get("expires_after[seconds]"))
        name = file.filename or "upload.jsonl"
        return (await asyncio.to_thread(store.files.add, store.owner, name, purpose, file.file, keep_s)).show()


def _missing(field: str) -> ApiError:
    return ApiError(400, f"{field}: Field required", param=field, code="missing_required_parameter")


def _read_expiry(anchor: Any, seconds: Any) -> float | None:
    """Return how long a file is to be kept, if the upload says."""
    if anchor is None and seconds is None:
        return None
    is_number = isinstance(seconds, str) and seconds.isascii() and seconds.isdigit() and len(seconds) < 12
    if anchor != "created_at" or not is_number or not MIN_KEEP_S <= int(seconds) <= MAX_KEEP_S:
        message = f"expires_after: give the anchor created_at and {MIN_KEEP_S:,} to {MAX_KEEP_S:,} seconds"
        raise ApiError(400, message, param="expires_after", code="invalid_value")
    return float(seconds)


@router.get("/files", tags=["files"], summary="List the files", responses=ALWAYS | describe(answer="FileList"))
async def list_files(
    request: Request,
    store: Store,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=256)] = None,
) -> Any:
    files = [file for file in store.files.owned(store.owner) if purpose in (None, file.purpose)]
    return await respond(request, page(files if order == "asc" else files[::-1], after, limit))


@router.get(
    "/files/{file_id}", tags=["files"], summary="Describe a file", responses=describe(401, 404, answer="FileObject")
)
async def get_file(file: FoundFile) -> Any:
    return file.show()


@router.get(
    "/files/{file_id}/content", tags=["files"], summary="Download a file", response_class=FileResponse,
    responses=describe(401, 404) | {200: {"content": {"application/octet-stream": {}}, "description": "Its contents."}},
)  # fmt: skip
async def get_content(store: Store, file: FoundFile) -> Response:
    return FileResponse(store.files.path(file), media_type="application/octet-stream")


@router.delete(
    "/files/{file_id}", tags=["files"], summary="Delete a file", responses=describe(401, 404, 409, answer="FileDeleted")
)
async def delete_file(store: Store, file: FoundFile) -> Any:
    """Refused with 409 while an unfinished batch reads the file."""
    await asyncio.to_thread(store.files.delete, file)
    return {"id": file.id, "object": "file", "deleted": True}


@router.post(
    "/batches", tags=["batches"], summary="Answer a file", responses=ALWAYS | describe(507, answer="BatchObject")
)
async def create_batch(body: BatchRequest, store: Store) -> Any:
    """Answers every request in the file, behind all other requests. An invalid one does not stop the others."""
    file = store.files.find(store.owner, body.input_file_id)
    keep = body.output_expires_after
    keep_s = None if keep is None else float(keep.seconds)
    return (await store.batches.create(store.owner, file, body.endpoint, body.metadata, keep_s)).show()


@router.get("/batches", tags=["batches"], summary="List the batches", responses=ALWAYS | describe(answer="BatchList"))
async def list_batches(
    request: Request, store: Store, after: After = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> Any:
    return await respond(request, page(store.batches.owned(store.owner), after, limit))


@router.get(
    "/batches/{batch_id}",
    tags=["batches"],
    summary="Describe a batch",
    responses=describe(401, 404, answer="BatchObject"),
)
async def get_batch(batch: FoundBatch) -> Any:
    return batch.show()


@router.post(
    "/batches/{batch_id}/cancel", tags=["batches"], summary="Cancel a batch",
    responses=describe(401, 404, 409, answer="BatchObject"),
)  # fmt: skip
async def cancel_batch(store: Store, batch: FoundBatch) -> Any:
    """The answers so far become the output."""
    await store.batches.cancel(batch)
    return batch.show()

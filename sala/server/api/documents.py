"""Documents: upload a file of any readable format, get its text and tokens, and keep it for further conversations.

The text of an answer begins the first message of a conversation; other questions about it then share that prefix.
"""

import asyncio
from functools import partial
from typing import Annotated, Any

from annotated_types import MaxLen, MinLen
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import Field
from starlette.datastructures import FormData, UploadFile

from sala.server.api.batches import MAX_FIELD, MAX_FIELDS, After, page
from sala.server.api.routes import MAX_NAME, call, respond, until_gone
from sala.server.documents import DocumentPrompt, DocumentReader, KeptDocuments, describe, dump_text
from sala.server.files import StoredFile
from sala.server.http import errors
from sala.server.http.body import FIRST_ONLY, Strict
from sala.server.http.errors import ALWAYS, ApiError
from sala.server.http.security import StrictRoute, client_of, find_key, find_owner

MAX_DOCUMENTS = 256  # of a prompt
UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "keep": {"type": "string", "enum": ["true", "false"], "default": "false"},
                        "model": {"type": "string", "description": "The model whose tokens are counted."},
                    },
                }
            }
        },
    }
}  # fmt: skip
router = APIRouter(route_class=StrictRoute)
Id = Annotated[str, Path(max_length=256)]


class StateRequest(Strict):
    model: str | None = Field(None, description="The model that is asked; by default the server's default model.")
    system: str = Field("", max_length=1 << 20, description="The system prompt before the document.")


class StatesRequest(StateRequest):
    documents: Annotated[list[Annotated[str, MaxLen(256)]], MinLen(1), MaxLen(MAX_DOCUMENTS), FIRST_ONLY] = Field(
        description="Ids, in the order in which the prompt has the documents."
    )


class OwnedDocuments:
    """Dependency: the documents that the key of a request keeps."""

    def __init__(self, request: Request) -> None:
        self.documents: KeptDocuments = request.app.state.documents
        self.owner = find_owner(request)

    def show(self) -> list["ShownDocument"]:
        return [ShownDocument(self.documents, file) for file in self.documents.owned(self.owner)]


class ShownDocument:
    """A document in a list."""

    def __init__(self, documents: KeptDocuments, file: StoredFile) -> None:
        self.id = file.id
        self.show = partial(documents.show, file)


async def _open(request: Request) -> OwnedDocuments:
    await request.app.state.batches.open()
    return OwnedDocuments(request)


Store = Annotated[OwnedDocuments, Depends(_open)]


def _find(store: Store, document_id: Id) -> StoredFile:
    return store.documents.find(store.owner, document_id)


Found = Annotated[StoredFile, Depends(_find)]


@router.post(
    "/documents", tags=["documents"], summary="Read a document", openapi_extra=UPLOAD,
    responses=ALWAYS | errors.describe(507, answer="DocumentObject"),
)  # fmt: skip
async def read_document(request: Request) -> Response:
    """The text of a PDF, DOCX, PPTX, XLSX, EPUB, HTML, mail, ZIP or text file, its pages and lines, and its tokens."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "multipart/form-data":
        raise ApiError(415, "the content type must be multipart/form-data", code="unsupported_media_type")
    async with request.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD) as form:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise ApiError(400, "file: Field required", param="file", code="missing_required_parameter")
        keep, model = _read_fields(form)
        store = await _open(request) if keep else None
        name, size = (file.filename or "document")[:MAX_NAME], file.size or 0
        reader: DocumentReader = request.app.state.document_reader
        found = await until_gone(request, reader.read(find_owner(request), name, file.file))
        described, _ = await call(request, model, lambda llm: describe(name, size, found, llm))
        if store is not None:
            described = await asyncio.to_thread(store.documents.add, store.owner, described)
    return Response(await asyncio.to_thread(dump_text, described), media_type="application/json")


def _read_fields(form: FormData) -> tuple[bool, str | None]:
    keep, model = form.get("keep", "false"), form.get("model") or None
    if keep not in ("true", "false"):
        raise ApiError(400, "keep: must be true or false", param="keep", code="invalid_value")
    if isinstance(model, UploadFile):
        raise ApiError(400, "model: must be a name", param="model", code="invalid_value")
    return keep == "true", model


@router.get(
    "/documents",
    tags=["documents"],
    summary="List the documents that are kept",
    responses=ALWAYS | errors.describe(answer="DocumentList"),
)
async def list_documents(
    request: Request, store: Store, after: After = None, limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000
) -> Any:
    """The newest first."""
    return await respond(request, page(store.show()[::-1], after, limit))


@router.get(
    "/documents/{document_id}",
    tags=["documents"],
    summary="Get a document that is kept",
    responses=errors.describe(401, 404, answer="DocumentObject"),
)
async def get_document(store: Store, file: Found) -> Response:
    kept = await asyncio.to_thread(store.documents.read, file)
    return Response(await asyncio.to_thread(dump_text, kept), media_type="application/json")


@router.post(
    "/documents/{document_id}/state",
    tags=["documents"],
    summary="Tell what of a document the cache holds",
    responses=ALWAYS | errors.describe(answer="DocumentState"),
)
async def get_state(body: StateRequest, store: Store, file: Found, request: Request) -> Any:
    """How much of a prompt that begins with this document need not be computed again."""
    prompt, cached = await _find_cached(body, store, [file], request)
    return {"id": file.id, "object": "document.state", "tokens": len(prompt.ids), "cached_tokens": cached}


@router.post(
    "/documents/state",
    tags=["documents"],
    summary="Tell what of several documents the cache holds",
    responses=ALWAYS | errors.describe(404, answer="DocumentStates"),
)
async def get_states(body: StatesRequest, store: Store, request: Request) -> Any:
    """How much of a prompt that begins with these documents, in this order, need not be computed again."""
    files = [store.documents.find(store.owner, one) for one in body.documents]
    prompt, cached = await _find_cached(body, store, files, request)
    data = [
        {"id": file.id, "object": "document.state", "tokens": tokens, "cached_tokens": known}
        for file, (tokens, known) in zip(files, prompt.count_cached(cached), strict=True)
    ]
    return {"object": "document.states", "tokens": len(prompt.ids), "cached_tokens": cached, "data": data}


async def _find_cached(
    body: StateRequest, store: OwnedDocuments, files: list[StoredFile], request: Request
) -> tuple[DocumentPrompt, int]:
    """Return a prompt that begins with documents, and how many of its tokens the cache holds for this client."""
    prompt, model = await call(request, body.model, lambda llm: store.documents.prompt(files, body.system, llm))
    key, settings = find_key(request, request.app.state.settings), request.app.state.settings
    salt = client_of("" if key is None else key.owner, settings, key.salt if key else "").salt
    if model.adapter is not None:
        salt = model.llm.adapters[model.adapter].fingerprint + salt
    work = model.service.execute(model.llm.engine.num_cached, prompt.ids, salt)
    return prompt, await until_gone(request, asyncio.wait_for(asyncio.wrap_future(work), None))


@router.delete(
    "/documents/{document_id}",
    tags=["documents"],
    summary="Delete a document",
    responses=errors.describe(401, 404, 409, answer="DocumentDeleted"),
)
async def delete_document(store: Store, file: Found) -> Any:
    await asyncio.to_thread(store.documents.files.delete, file)
    return {"id": file.id, "object": "document", "deleted": True}

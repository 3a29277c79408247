"""The routes of the Responses API: answer items, also in the background; return, cancel and delete what is kept."""

import asyncio
import json
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from sala.server.api.background import BackgroundJob, Events, Responses
from sala.server.api.items import ItemReference, keep_items, read_items
from sala.server.api.responses import ResponseReply, ResponseRequest, read_response
from sala.server.api.routes import EventStream, answer, count_tokens, open_reply, post, respond
from sala.server.api.store import Kept, KeptInput, NotStored, ResponseStore
from sala.server.http.errors import ALWAYS, ApiError, refer
from sala.server.http.security import StrictRoute, find_owner
from sala.server.settings import Settings

MAX_PAGE = 100
STORED = refer("ResponseObject")
STORED["description"] = "The response; with `stream`, its server-sent events."
STORED["content"]["text/event-stream"] = {}
router = APIRouter(route_class=StrictRoute)
ResponseId = Annotated[str, Path(max_length=128)]


class OwnedResponses:
    """Dependency: the responses, and who asks for them."""

    def __init__(self, request: Request) -> None:
        self.responses: Responses = request.app.state.responses
        self.store: ResponseStore = self.responses.store
        self.owner = find_owner(request)
        self._max_body: int = request.app.state.settings.max_body

    async def get(self, response_id: str) -> Kept:
        """Return a stored response with its input. Raises ApiError."""
        try:
            return await asyncio.to_thread(self.store.get, self.owner, response_id)
        except NotStored:
            raise _not_found() from None

    async def read_history(self, body: ResponseRequest) -> list[Any]:
        """Return the items that precede the input, and put stored items in the place of references to them."""
        try:
            return await asyncio.to_thread(self._read_history, body)
        except NotStored:
            message = "that response, or one that it follows, is not stored: it was deleted, dropped or never stored"
            field, code = "previous_response_id", "previous_response_not_found"
            raise ApiError(400, message, param=field, code=code) from None

    def items_before(self, response_id: str | None) -> list[Any]:
        return self.store.items_before(self.owner, response_id, self._max_body)

    def _read_history(self, body: ResponseRequest) -> list[Any]:
        before = read_items(self.items_before(body.previous_response_id))
        places = {at: item.id for at, item in enumerate(body.items) if isinstance(item, ItemReference)}
        found = self.store.find_items(self.owner, {*places.values()}) if places else {}
        for at, item_id in places.items():
            if item_id not in found:
                message = f"input[{at}]: there is no stored item with that id; send the item itself"
                raise ApiError(400, message, param=f"input[{at}]", code="item_not_found")
            body.items[at] = read_items([found[item_id]])[0]
        return before


AppState = Annotated[OwnedResponses, Depends()]


def _not_found() -> ApiError:
    message = "there is no response with that id: it was deleted, dropped or never stored"
    return ApiError(404, message, param="response_id", code="response_not_found")


@post(
    "/responses", "Answer items with items", "ResponseObject", "from response.created to response.completed", at=router
)
async def create_response(body: ResponseRequest, request: Request, state: AppState) -> Response:
    settings: Settings = request.app.state.settings
    history = await state.read_history(body)
    if body.store is False or not settings.max_responses:
        if body.background:
            raise ApiError(400, "this server stores no responses: leave background out", param="background")
        return await answer(request, body, partial(ResponseReply, history=history))
    kept = await asyncio.to_thread(lambda: KeptInput.of(keep_items(body.items)))
    make = partial(ResponseReply, history=history, keep=partial(state.store.add, state.owner, items=kept))
    if not body.background:
        return await answer(request, body, make)
    reply, stream, rates = await open_reply(request, body, make)
    job = BackgroundJob(state.owner, reply, stream, kept)
    state.responses.start(job)
    queued: Response
    if job.events is not None:
        queued = _follow(job.events, 0, settings)
    else:
        queued = await respond(request, reply.snapshot("queued"))
    queued.headers.update(rates.headers() if rates is not None else {})
    return queued


@post("/responses/input_tokens", "Count the tokens of a request", "ResponseTokens", at=router)
async def count_response_tokens(body: ResponseRequest, request: Request, state: AppState) -> Any:
    """Takes what /responses takes, and returns the length of the prompt."""
    history, settings = await state.read_history(body), request.app.state.settings
    read = partial(read_response, body, history, settings=settings)
    counted = await count_tokens(request, body.model, lambda llm: read(llm=llm), ResponseReply.fields)
    return {"object": "response.input_tokens", **counted}


@router.get(
    "/responses/{response_id}", tags=["responses"], summary="Return a stored response",
    responses=ALWAYS | {200: STORED},
)  # fmt: skip
async def get_response(
    request: Request,
    state: AppState,
    response_id: ResponseId,
    stream: bool = False,
    starting_after: Annotated[
        int | None, Query(ge=-1, description="In a stream: the last event that is known.")
    ] = None,
    include_obfuscation: Annotated[bool | None, Query(description="Accepted and not used.")] = None,
) -> Any:
    """Its status tells how far a response in the background is. With `stream`, its events are replayed and followed."""
    job = state.responses.find_job(state.owner, response_id)
    if stream:
        events = state.responses.find_events(state.owner, response_id)
        if events is not None:
            return _follow(events, 0 if starting_after is None else starting_after + 1, request.app.state.settings)
        if job is None:
            await state.get(response_id)
        message = "only a response created with background and stream is streamed, as long as its events are kept"
        raise ApiError(400, f"{message}; leave stream out", param="stream", code="invalid_value")
    if starting_after is not None:
        raise ApiError(400, "starting_after goes with stream", param="starting_after", code="invalid_value")
    return await respond(request, job.state if job is not None else (await state.get(response_id))["response"])


def _follow(events: Events, start: int, settings: Settings) -> EventStream:
    """Return the events from a number on; the response goes on if the client leaves."""
    return EventStream(events.follow(start, settings.ping_s), asyncio.Event(), lambda: None)


@router.delete(
    "/responses/{response_id}", tags=["responses"], summary="Delete a stored response",
    responses=ALWAYS | {200: refer("ResponseDeleted")},
)  # fmt: skip
async def delete_response(state: AppState, response_id: ResponseId) -> Any:
    """Cancels it if it is under way. Responses that follow it remain, but cannot be followed any more."""
    job = state.responses.find_job(state.owner, response_id)
    if job is not None:
        await state.responses.cancel(job)
    state.responses.forget(state.owner, response_id)
    try:
        state.store.delete(state.owner, response_id)
    except NotStored:
        raise _not_found() from None
    return {"id": response_id, "object": "response", "deleted": True}


@router.post(
    "/responses/{response_id}/cancel", tags=["responses"], summary="Cancel a response in the background",
    responses=ALWAYS | {200: refer("ResponseObject")},
)  # fmt: skip
async def cancel_response(request: Request, state: AppState, response_id: ResponseId) -> Any:
    """Returns the response; one that has ended is returned as it is."""
    job = state.responses.find_job(state.owner, response_id)
    if job is not None:
        await state.responses.cancel(job)
    response = (await state.get(response_id))["response"]
    if not response["background"]:
        message = "only responses that were created with background can be cancelled"
        raise ApiError(400, message, param="response_id", code="invalid_value")
    return await respond(request, response)


@router.get(
    "/responses/{response_id}/input_items", tags=["responses"], summary="List the input of a stored response",
    responses=ALWAYS | {200: refer("ItemList")},
)  # fmt: skip
async def list_input_items(
    request: Request,
    state: AppState,
    response_id: ResponseId,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(max_length=128, description="Begin after the item with this id.")] = None,
) -> Any:
    """All items that the response answered, also those of the responses that it follows; the last one first."""
    job = state.responses.find_job(state.owner, response_id)
    if job is not None:
        kept: Kept = {"input": json.loads(job.items.data), "response": job.state}
    else:
        kept = await state.get(response_id)
    try:
        items = await asyncio.to_thread(state.items_before, kept["response"]["previous_response_id"])
    except NotStored:
        items = []  # what it follows has been deleted
    items += kept["input"]
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise ApiError(400, "after: the response has no such item", param="after", code="invalid_value")
    begin = 0 if after is None else ids.index(after) + 1
    page = items[begin : begin + limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    has_more = begin + limit < len(items)
    found = {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": has_more}
    return await respond(request, found)

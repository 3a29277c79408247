"""The routes of the Responses API: answer items, also in the background; return, cancel and delete what is kept."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from sala.errors import InputError
from sala.server.api.background import BackgroundJob, Events, Responses
from sala.server.api.items import ItemReference, keep_items, read_items
from sala.server.api.records import TOGETHER, ItemList, ItemSource, NotStored
from sala.server.api.responses import ResponseReply, ResponseRequest, read_response
from sala.server.api.routes import EventStream, answer, count_tokens, open_reply, post, respond
from sala.server.api.store import ResponseStore
from sala.server.http.body import dump
from sala.server.http.encoding import BlocksResponse, split
from sala.server.http.errors import ALWAYS, ApiError, refer
from sala.server.http.security import HELD, HeldBytes, StrictRoute, find_owner
from sala.server.settings import Settings
from sala.text.workers import FairPool

MAX_PAGE = 100
STORED = refer("ResponseObject")
STORED["description"] = "The response; with `stream`, its server-sent events."
STORED["content"]["text/event-stream"] = {}
router = APIRouter(route_class=StrictRoute)
ResponseId = Annotated[str, Path(max_length=128)]
T = TypeVar("T")


class OwnedResponses:
    """Dependency: the responses, and who asks for them. What may take long is done in threads, at the owner's turn."""

    def __init__(self, request: Request) -> None:
        self.responses: Responses = request.app.state.responses
        self.store: ResponseStore = self.responses.store
        self.owner = find_owner(request)
        self.held: HeldBytes = request.scope[HELD]
        self._max_body: int = request.app.state.settings.max_body
        self._pool: FairPool = request.app.state.body_pool

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self._pool.run(self.owner, work, *arguments)

    async def find(self, work: Callable[..., T], response_id: str) -> T:
        """Return what a method of the store returns for a response. Raises ApiError if there is none."""
        try:
            return await self.run(work, self.owner, response_id)
        except NotStored:
            message = "there is no response with that id: it was deleted, dropped or never stored"
            raise ApiError(404, message, param="response_id", code="response_not_found") from None

    async def respond(self, response_id: str) -> Response:
        """Return a stored response, as it is stored."""
        return BlocksResponse(await self.find(lambda *key: _in_blocks(self.store.read_response(*key)), response_id))

    async def read_history(self, body: ResponseRequest) -> list[Any]:
        """Return the items that precede the input, and put stored items in the place of references to them.

        They count as bytes of the request, as if they had been sent.
        """
        if body.previous_response_id is None and isinstance(body.input, str):
            return []
        try:
            stored = await self.run(self._find_stored, body)
            excess = self.held.add(stored.num_bytes)
            if excess is not None:
                raise excess
            return await self.run(self._read_stored, body, stored)
        except NotStored:
            message = "that response, or one that it follows, is not stored: it was deleted, dropped or never stored"
            field, code = "previous_response_id", "previous_response_not_found"
            raise ApiError(400, message, param=field, code=code) from None

    def lists_before(self, response_id: str | None) -> list[ItemSource]:
        """Return the inputs and outputs up to a response; none if one of them has been deleted."""
        try:
            chain, _ = self.store.find_chain(self.owner, response_id, self._max_body)
            return self.store.find_lists(self.owner, chain)
        except NotStored:
            return []

    def _find_stored(self, body: ResponseRequest) -> "_Stored":
        """Return what is stored of a conversation. Raises NotStored, ApiError, and InputError if that is too much."""
        chain, num_bytes = self.store.find_chain(self.owner, body.previous_response_id, self._max_body)
        places = {at: item.id for at, item in enumerate(body.items) if isinstance(item, ItemReference)}
        found = self.store.find_items(self.owner, {*places.values()}, self._max_body) if places else {}
        for at, item_id in places.items():
            if item_id not in found:
                message = f"input[{at}]: there is no stored item with that id; send the item itself"
                raise ApiError(400, message, param=f"input[{at}]", code="item_not_found")
            num_bytes += len(found[item_id])
            if num_bytes > self._max_body:
                raise InputError(f"input[{at}]", f"refers to more than {self._max_body:,} bytes", "raise max_body")
        return _Stored(chain, places, found, num_bytes)

    def _read_stored(self, body: ResponseRequest, stored: "_Stored") -> list[Any]:
        lists = self.store.find_lists(self.owner, stored.chain)
        try:
            found = {number: read_items([json.loads(item)])[0] for number, item in stored.items.items()}
            history = [item for each in lists for some in each.parse() for item in read_items(some)]
        except ValueError:  # an older version took what this one does not take
            message = "what is stored of this conversation cannot be used any more; send it as input"
            raise ApiError(400, message, param="input", code="item_not_found") from None
        for at, item_id in stored.places.items():
            body.items[at] = found[item_id]
        return history


@dataclass(frozen=True)
class _Stored:
    """What is stored of a conversation.

    - chain: the responses that the input follows
    - places: where the input refers to which items
    - items: these, as JSON
    """

    chain: list[str]
    places: dict[int, str]
    items: dict[str, bytes]
    num_bytes: int


def _in_blocks(parts: list[bytes]) -> list[bytes]:
    return [block for part in parts for block in split(part)]


AppState = Annotated[OwnedResponses, Depends()]


@post(
    "/responses", "Answer items with items", "ResponseObject", "from response.created to response.completed", at=router
)
async def create_response(body: ResponseRequest, request: Request, state: AppState) -> Response:
    history = await state.read_history(body)
    try:
        return await _create(body, request, state, history)
    finally:
        if history:
            request.app.state.threads.submit(_free, history)


def _free(items: list[Any]) -> None:
    """Free items, some at a time: freeing all of them at once would hold up the other threads."""
    while items:
        del items[-TOGETHER:]


async def _create(body: ResponseRequest, request: Request, state: OwnedResponses, history: list[Any]) -> Response:
    settings: Settings = request.app.state.settings
    if body.store is False or not settings.max_responses:
        if body.background:
            raise ApiError(400, "this server stores no responses: leave background out", param="background")
        return await answer(request, body, partial(ResponseReply, history=history))
    kept = await state.run(lambda: ItemList.of(keep_items(body.items)))
    make = partial(ResponseReply, history=history, keep=partial(state.store.add, state.owner, items=kept))
    if not body.background:
        return await answer(request, body, make)
    state.held.hold_in_background()
    try:
        reply, stream, rates = await open_reply(request, body, make)
    except BaseException:
        state.held.release()
        raise
    reply.forget_input()
    job = BackgroundJob(state.owner, reply, stream, kept, state.held)
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
            await state.find(state.store.is_background, response_id)
        message = "only a response created with background and stream is streamed, as long as its events are kept"
        raise ApiError(400, f"{message}; leave stream out", param="stream", code="invalid_value")
    if starting_after is not None:
        raise ApiError(400, "starting_after goes with stream", param="starting_after", code="invalid_value")
    return await (state.respond(response_id) if job is None else respond(request, job.state))


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
    await state.find(state.store.delete, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post(
    "/responses/{response_id}/cancel", tags=["responses"], summary="Cancel a response in the background",
    responses=ALWAYS | {200: refer("ResponseObject")},
)  # fmt: skip
async def cancel_response(state: AppState, response_id: ResponseId) -> Any:
    """Returns the response; one that has ended is returned as it is."""
    job = state.responses.find_job(state.owner, response_id)
    if job is not None:
        await state.responses.cancel(job)
    if not await state.find(state.store.is_background, response_id):
        message = "only responses that were created with background can be cancelled"
        raise ApiError(400, message, param="response_id", code="invalid_value")
    return await state.respond(response_id)


@router.get(
    "/responses/{response_id}/input_items", tags=["responses"], summary="List the input of a stored response",
    responses=ALWAYS | {200: refer("ItemList")},
)  # fmt: skip
async def list_input_items(
    state: AppState,
    response_id: ResponseId,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(max_length=128, description="Begin after the item with this id.")] = None,
) -> Any:
    """All items that the response answered, also those of the responses that it follows; the last one first."""
    job = state.responses.find_job(state.owner, response_id)
    if job is not None:
        previous, own = job.reply.body.previous_response_id, job.items.source
    else:
        previous, own = await state.find(state.store.find_input, response_id)

    def read() -> list[bytes]:
        return _in_blocks(_read_page([*state.lists_before(previous), own], limit, order == "desc", after))

    return BlocksResponse(await state.find(lambda *_: read(), response_id))


def _read_page(lists: list[ItemSource], limit: int, is_descending: bool, after: str | None) -> list[bytes]:
    """Return a page of the items of several lists as JSON: they are cut out of what is stored. Raises NotStored."""
    places = [(each, at, number) for each in lists for at, number in enumerate(each.ids)]
    if is_descending:
        places.reverse()
    begin = 0
    if after is not None:
        begin = next((at for at, place in enumerate(places, 1) if place[2] == after), 0)
        if not begin:
            raise ApiError(400, "after: the response has no such item", param="after", code="invalid_value")
    page = places[begin : begin + limit]
    blocks = [b'{"object":"list","data":[']
    for each, at, _ in page:
        blocks += [*each.read(at, at + 1), b","]
    first, last = (page[0][2], page[-1][2]) if page else (None, None)
    facts = {"first_id": first, "last_id": last, "has_more": begin + limit < len(places)}
    return [*blocks[: len(blocks) - bool(page)], b"]," + dump(facts)[1:]]

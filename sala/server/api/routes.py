"""The generating routes and those of the tokenizer, and the one path that all generating ones take.

`answer` finds the model, prepares the request in the service's thread pool, and sends what the engine generates, as a
whole or as server-sent events. A `Reply` says what that looks like in one API. A client that disconnects cancels its
request.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from sala.engine.requests import COUNT_LIMIT
from sala.engine.service import Stream
from sala.errors import InputError, SlowReader
from sala.server.api.answers import B, Reply, naming
from sala.server.api.anthropic import CountRequest, MessageReply, MessagesRequest
from sala.server.api.anthropic import read_conversation as read_messages
from sala.server.api.chat import ChatReply, ChatRequest, Message, Tool, as_messages, read_chat
from sala.server.api.completions import CompletionReply, CompletionRequest, TokenIds
from sala.server.api.conversation import ChatInput, Tools
from sala.server.api.responses import ResponseReply, ResponseRequest
from sala.server.http.body import Strict, dump, problem
from sala.server.http.errors import ALWAYS, from_exception, refer
from sala.server.http.security import StrictRoute
from sala.server.runtime import LoadedModel
from sala.server.settings import Settings

MAX_PENDING = 1 << 20  # bytes of an answer that may wait for a slow client
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Descriptions = dict[int | str, dict[str, Any]]
router = APIRouter(route_class=StrictRoute)
TAGS = {"tokenize": "tokens", "detokenize": "tokens"}  # of routes that are not named after their path


MESSAGES_ERRORS: Descriptions = {
    status: {"description": error["description"], **refer("MessagesError")} for status, error in ALWAYS.items()
}


def post(path: str, summary: str, name: str, events: str = "", errors: Descriptions = ALWAYS) -> Callable[[F], F]:
    """Add a route that sends this answer or, with `stream`, such events."""
    found = refer(name)
    if events:
        found["description"] = f"The answer; with `stream`, server-sent events {events}."
        found["content"]["text/event-stream"] = {}
    tag = path.split("/")[1]
    return router.post(path, tags=[TAGS.get(tag, tag)], summary=summary, responses={**errors, 200: found})


class TokenizeRequest(Strict):
    """One of `prompt`, `content` (the same under another name) and `messages`."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: Tools[Tool] | None = None
    add_special_tokens: bool = Field(True, description="Begin a text with BOS, if the model uses it.")
    add_generation_prompt: bool = Field(True, description="End a conversation with the prompt for the answer.")

    @model_validator(mode="after")
    def _check_source(self) -> "TokenizeRequest":
        given = [name for name in ("prompt", "content", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise problem("give exactly one of prompt, content and messages", "prompt")
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: TokenIds


@post("/chat/completions", "Answer a conversation", "ChatCompletion", "of chunks that end with `[DONE]`")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    return await answer(request, body, ChatReply)


@post("/completions", "Continue a text", "TextCompletion", "of chunks that end with `[DONE]`")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    return await answer(request, body, CompletionReply)


@post("/responses", "Answer items with items", "ResponseObject", "from response.created to response.completed")
async def create_response(body: ResponseRequest, request: Request) -> Response:
    return await answer(request, body, ResponseReply)


@post(
    "/messages", "Answer messages with blocks", "MessageObject", "from message_start to message_stop", MESSAGES_ERRORS
)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    return await answer(request, body, MessageReply)


@post("/chat/completions/input_tokens", "Count the tokens of a conversation", "TokenCount")
async def count_input_tokens(body: ChatRequest, request: Request) -> Any:
    """Takes what /chat/completions takes, and returns the length of the prompt."""
    return await count_tokens(request, body.model, lambda: read_chat(body), ChatReply.fields)


@post("/messages/count_tokens", "Count the tokens of messages", "TokenCount", errors=MESSAGES_ERRORS)
async def count_message_tokens(body: CountRequest, request: Request) -> Any:
    """The length of the prompt of these messages; it may be longer than the context."""
    return await count_tokens(request, body.model, lambda: read_messages(body), MessageReply.fields)


@post("/tokenize", "Text to token ids", "Tokens")
async def tokenize(body: TokenizeRequest, request: Request) -> Any:
    model = await find_model(request, body.model)
    llm = model.llm

    def encode() -> list[int]:
        if body.messages is not None:
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None
            ends_open = body.add_generation_prompt
            return llm.encode_chat(as_messages(body.messages), tools=tools, add_generation_prompt=ends_open)
        text = body.prompt if body.prompt is not None else body.content
        return llm.tokenizer.encode(text or "", body.add_special_tokens, max_tokens=llm.ctx, count_limit=COUNT_LIMIT)

    with naming(ChatReply.fields):
        ids = await until_gone(request, model.service.call(encode))
    return {"tokens": ids, "count": len(ids), "max_model_len": model.llm.ctx}


@post("/detokenize", "Token ids to text", "DetokenizedText")
async def detokenize(body: DetokenizeRequest, request: Request) -> Any:
    model = await find_model(request, body.model)
    llm = model.llm

    def decode() -> str:
        if max(body.tokens) >= llm.config.vocab_size:
            raise InputError("tokens", f"hold {max(body.tokens)}", f"ids go to {llm.config.vocab_size - 1}")
        return llm.tokenizer.decode(body.tokens, skip_special=False)

    text = await until_gone(request, model.service.call(decode))
    return {"prompt": text, "content": text}


@router.get(
    "/tokenizer_info", tags=["tokens"], summary="Facts about the tokenizer",
    responses=ALWAYS | {200: refer("TokenizerInfo")},
)  # fmt: skip
async def show_tokenizer(request: Request, model: str | None = None) -> Any:
    loaded = await find_model(request, model)
    llm = loaded.llm
    bos_id, stop_ids = llm.tokenizer.bos_id, sorted(llm.stop_ids)
    return {
        "model": loaded.id,
        "vocab_size": llm.config.vocab_size,
        "bos_token": None if bos_id is None else llm.tokenizer.decode([bos_id], skip_special=False),
        "bos_token_id": bos_id,
        "eos_token": llm.tokenizer.decode(stop_ids[:1], skip_special=False) or None,
        "eos_token_ids": stop_ids,
        "max_model_len": llm.ctx,
        "fingerprint": llm.tokenizer.fingerprint,
    }


async def count_tokens(
    request: Request, model_id: str | None, read: Callable[[], ChatInput], fields: Mapping[str, str]
) -> dict[str, int]:
    """Return the length of the prompt of the conversation that `read` returns."""
    model = await find_model(request, model_id)
    with naming(fields):
        ids = await until_gone(request, model.service.call(lambda: read().encode(model.llm.inputs)))
    return {"input_tokens": len(ids)}


async def find_model(request: Request, model_id: str | None) -> LoadedModel:
    """Return a model by its id, by default the server's default model; load it first if necessary."""
    return await until_gone(request, request.app.state.runtime.get(model_id))


async def answer(request: Request, body: B, kind: type[Reply[B]]) -> Response:
    """Answer a request."""
    settings: Settings = request.app.state.settings
    model = await find_model(request, body.model)
    reply = kind(model.id, model.llm, body, settings)
    with naming(kind.fields):
        work = model.service.open(partial(reply.prepare, model.llm.inputs), MAX_PENDING)
        stream = await until_gone(request, work, Stream.close)
    if body.stream:
        return EventStream(send_events(stream, reply, settings.ping_s), stream.overflowed, stream.close)
    try:
        whole = await until_gone(request, reply.collect(stream))
    finally:
        stream.close()
    return Response(dump(whole), media_type="application/json")


async def send_events(stream: Stream, reply: Reply[Any], ping_s: float) -> AsyncIterator[bytes]:
    """Yield a stream as server-sent events, with a ping whenever nothing else was sent for `ping_s` seconds.

    An error is the last event; `done` follows only a complete answer.
    """
    sent_at = time.monotonic()
    try:
        for chunk in reply.opening():
            yield reply.encode(chunk)
        while True:
            try:
                item = await stream.aread(max(0.001, ping_s - (time.monotonic() - sent_at)))
            except TimeoutError:
                yield reply.ping
                sent_at = time.monotonic()
                continue
            if item is None:
                break
            reply.take(item)
            for chunk in reply.chunks(item):
                yield reply.encode(chunk)
                sent_at = time.monotonic()
        for chunk in reply.closing():
            yield reply.encode(chunk)
        if reply.done:
            yield reply.done
    except SlowReader:
        return
    except Exception as error:
        yield reply.encode(reply.failed(from_exception(error)))


class EventStream(StreamingResponse):
    """Send events until they end, the client disconnects or `is_given_up` is set; then call `close` in any case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], is_given_up: asyncio.Event, close: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._is_given_up = is_given_up
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_first(self.stream_response(send), wait_for_disconnect(receive), self._is_given_up.wait())
        except (OSError, ClientDisconnect):  # the connection was lost, perhaps while we were writing
            return
        finally:
            self._close()


async def wait_for_disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def until_gone(request: Request, work: Coroutine[Any, Any, T], undo: Callable[[T], None] | None = None) -> T:
    """Return the result of `work`; raise ClientDisconnect if the client leaves first."""
    return await run_first(work, wait_for_disconnect(request.receive), undo=undo)


async def run_first(
    work: Coroutine[Any, Any, T], *others: Coroutine[Any, Any, Any], undo: Callable[[T], None] | None = None
) -> T:
    """Return the result of `work`, or raise ClientDisconnect if one of the others ends first; cancel what is left.

    `undo` releases a result that cannot be delivered because this coroutine was cancelled.
    """
    task = asyncio.create_task(work)
    tasks = [task, *(asyncio.create_task(other) for other in others)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    except asyncio.CancelledError:
        if undo is not None and task.done() and not task.cancelled() and task.exception() is None:
            undo(task.result())
        raise
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

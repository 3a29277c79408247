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

from sala.engine.requests import COUNT_LIMIT, Client
from sala.engine.service import Stream
from sala.errors import EngineClosed, InputError, SlowReader
from sala.llm import LLM
from sala.server.api.answers import MAX_MODEL_NAME, TURN, AnswerRequest, B, Reply, explain, naming
from sala.server.api.anthropic import CountRequest, MessageReply, MessagesRequest
from sala.server.api.anthropic import read_conversation as read_messages
from sala.server.api.chat import ChatReply, ChatRequest, ChatTool, Message, as_messages, read_chat
from sala.server.api.completions import CompletionReply, CompletionRequest, TokenIds
from sala.server.api.conversation import ChatInput, Tools
from sala.server.http.body import Strict, problem
from sala.server.http.encoding import BlocksResponse, encode
from sala.server.http.errors import ALWAYS, refer
from sala.server.http.rates import Rates
from sala.server.http.security import StrictRoute, admit_client, find_client, is_admin
from sala.server.runtime import LoadedModel, Loads, Runtime
from sala.server.settings import Settings
from sala.text.workers import MonitoredPool

MAX_PENDING = 1 << 20  # bytes of an answer that may wait for a slow client
MAX_NAME = 256
T = TypeVar("T")
R = TypeVar("R", bound=Reply[Any])
F = TypeVar("F", bound=Callable[..., Any])
Descriptions = dict[int | str, dict[str, Any]]
router = APIRouter(route_class=StrictRoute)
TAGS = {"tokenize": "tokens", "detokenize": "tokens"}  # of routes that are not named after their path


MESSAGES_ERRORS: Descriptions = {
    status: {"description": error["description"], **refer("MessagesError")} for status, error in ALWAYS.items()
}


def post(
    path: str,
    summary: str,
    name: str,
    events: str = "",
    errors: Descriptions = ALWAYS,
    at: APIRouter = router,
) -> Callable[[F], F]:
    """Add a route that sends this answer or, with `stream`, such events."""
    found = refer(name)
    if events:
        found["description"] = f"The answer; with `stream`, server-sent events {events}."
        found["content"]["text/event-stream"] = {}
    tag = path.split("/")[1]
    return at.post(path, tags=[TAGS.get(tag, tag)], summary=summary, responses={**errors, 200: found})


class TokenizeRequest(Strict):
    """One of `prompt`, `content` (the same under another name) and `messages`."""

    model: str | None = Field(None, max_length=MAX_MODEL_NAME)
    prompt: str | None = None
    content: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: Tools[ChatTool] | None = None
    add_special_tokens: bool = Field(True, description="Begin a text with BOS, if the model uses it.")
    add_generation_prompt: bool = Field(True, description="End a conversation with the prompt for the answer.")
    continue_final_message: bool = Field(
        False, description="End with the text of the last message, an answer that is to be continued."
    )

    @model_validator(mode="after")
    def _check_source(self) -> "TokenizeRequest":
        given = [name for name in ("prompt", "content", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise problem("give exactly one of prompt, content and messages", "prompt")
        return self


class DetokenizeRequest(Strict):
    model: str | None = Field(None, max_length=MAX_MODEL_NAME)
    tokens: TokenIds


@post("/chat/completions", "Answer a conversation", "ChatCompletion", "of chunks that end with `[DONE]`")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    return await answer(request, body, ChatReply)


@post("/completions", "Continue a text", "TextCompletion", "of chunks that end with `[DONE]`")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    return await answer(request, body, CompletionReply)


@post(
    "/messages", "Answer messages with blocks", "MessageObject", "from message_start to message_stop", MESSAGES_ERRORS
)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    return await answer(request, body, MessageReply)


@post("/chat/completions/input_tokens", "Count the tokens of a conversation", "TokenCount")
async def count_input_tokens(body: ChatRequest, request: Request) -> Any:
    """Takes what /chat/completions takes, and returns the length of the prompt."""
    return await count_tokens(request, body.model, lambda _: read_chat(body), ChatReply.fields)


@post("/messages/count_tokens", "Count the tokens of messages", "TokenCount", errors=MESSAGES_ERRORS)
async def count_message_tokens(body: CountRequest, request: Request) -> Any:
    """The length of the prompt of these messages; it may be longer than the context."""
    return await count_tokens(request, body.model, lambda _: read_messages(body), MessageReply.fields)


@post("/tokenize", "Text to token ids", "Tokens")
async def tokenize(body: TokenizeRequest, request: Request) -> Any:

    def encode(llm: LLM) -> list[int]:
        if body.messages is not None:
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None
            more = {"add_generation_prompt": body.add_generation_prompt, "continue_final": body.continue_final_message}
            return llm.encode_chat(as_messages(body.messages), tools=tools, **more)
        text = body.prompt if body.prompt is not None else body.content
        return llm.tokenizer.encode(text or "", body.add_special_tokens, max_tokens=llm.ctx, count_limit=COUNT_LIMIT)

    with naming(ChatReply.fields):
        ids, model = await call(request, body.model, encode)
    return await respond(request, {"tokens": ids, "count": len(ids), "max_model_len": model.llm.ctx})


@post("/detokenize", "Token ids to text", "DetokenizedText")
async def detokenize(body: DetokenizeRequest, request: Request) -> Any:
    def decode(llm: LLM) -> str:
        if len(body.tokens) > llm.ctx:
            raise InputError("tokens", f"hold {len(body.tokens):,} ids", f"at most {llm.ctx:,} fit into the context")
        if max(body.tokens) >= llm.config.vocab_size:
            raise InputError("tokens", f"hold {max(body.tokens)}", f"ids go to {llm.config.vocab_size - 1}")
        return llm.tokenizer.decode(body.tokens, skip_special=False)

    text, _ = await call(request, body.model, decode)
    return await respond(request, {"prompt": text, "content": text})


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
    request: Request, model_id: str | None, read: Callable[[LLM], ChatInput], fields: Mapping[str, str]
) -> dict[str, int]:
    """Return the length of the prompt of the conversation that `read` returns."""
    with naming(fields):
        ids, _ = await call(request, model_id, lambda llm: read(llm).encode(llm.inputs))
    return {"input_tokens": len(ids)}


async def call(request: Request, model_id: str | None, work: Callable[[LLM], T]) -> tuple[T, LoadedModel]:
    """Run something that needs a model but not its engine, such as encoding; return the result and the model."""

    async def run(model: LoadedModel) -> tuple[T, LoadedModel]:
        return await until_gone(request, model.service.call(work, model.llm, owner=find_client(request).owner)), model

    return await with_model(request, model_id, run)


async def with_model(request: Request, model_id: str | None, work: Callable[[LoadedModel], Awaitable[T]]) -> T:
    """Do something with a model. Retries if another request unloads it before it counts as in use."""
    runtime: Runtime = request.app.state.runtime
    while True:
        model = await find_model(request, model_id)
        try:
            return await work(model)
        except EngineClosed:
            if runtime.is_loaded(model):  # and still so: the server is shutting down
                raise


async def find_model(request: Request, model_id: str | None) -> LoadedModel:
    """Return a model by its id, by default the server's default model; load it first if necessary.

    GET loads nothing: a link must not. Another model is loaded for those who may manage models, unless all may.
    """

    def find_loads() -> Loads:
        if request.method == "GET":
            return "none"
        return "any" if request.app.state.settings.users_load or is_admin(request) else "default"

    return await until_gone(request, request.app.state.runtime.get(model_id, find_loads=find_loads))


def name_for(body: AnswerRequest, model: LoadedModel) -> str:
    """Return the name of the model in an answer: as the client calls it, but a repository is written as the id."""
    name = body.model or model.id
    return model.id if len(name) > MAX_NAME or name.replace("/", "--", 1) == model.id else name


async def answer(request: Request, body: B, make: Callable[..., Reply[B]]) -> Response:
    """Answer a request; `make` is the class of the reply."""
    settings: Settings = request.app.state.settings
    pool: MonitoredPool = request.app.state.pool
    reply, stream, rates = await open_reply(request, body, make, MAX_PENDING)
    if body.stream:
        sending = send_events(stream, reply, settings.ping_s, pool)
        events = EventStream(sending, stream.overflowed, stream.close)
        events.headers.update(rates.headers() if rates is not None else {})
        return events

    async def finish() -> list[bytes]:
        await reply.collect(stream, pool)
        return await encode(pool, reply.whole)

    try:
        blocks = await until_gone(request, finish())
    finally:
        stream.close()
    return BlocksResponse(blocks, rates.headers() if rates is not None else None)


async def respond(request: Request, value: Any) -> Response:
    """Return a value as JSON, however large it is."""
    return BlocksResponse(await encode(request.app.state.pool, lambda: value))


async def open_reply(
    request: Request, body: AnswerRequest, make: Callable[..., R], max_pending: int | None = None
) -> tuple[R, Stream, Rates | None]:
    """Hand a request to its model; return what will make the answer, the stream, and the rates of the client."""
    admitted: tuple[Client, Rates | None] | None = None

    async def work(model: LoadedModel) -> tuple[R, Stream, Rates | None]:
        nonlocal admitted
        reply = make(name_for(body, model), model.llm, body, request.app.state.settings)
        with naming(reply.fields):
            client, rates = admitted = admitted or admit_client(request, body.cache_salt)  # counted once
            opening = model.service.open(partial(model.prepare, reply.checked), max_pending, client)
            return reply, await until_gone(request, opening, Stream.close), rates

    return await with_model(request, body.model, work)


async def send_events(stream: Stream, reply: Reply[Any], ping_s: float, pool: MonitoredPool) -> AsyncIterator[bytes]:
    """Yield a stream as server-sent events, with a ping whenever nothing else was sent for `ping_s` seconds.

    An error is the last event; `done` follows only a complete answer. What is large is encoded in `pool`.
    """
    sent_at, num_sent = time.monotonic(), 0
    try:
        for chunk in reply.opening():
            for block in await reply.encode(chunk, pool):
                yield block
        while True:
            try:
                item = await stream.aread(max(0.001, ping_s - (time.monotonic() - sent_at)))
            except TimeoutError:
                yield reply.ping
                sent_at = time.monotonic()
                continue
            if item is None:
                break
            await reply.receive(item, pool)
            for chunk in reply.chunks(item):
                for block in await reply.encode(chunk, pool):
                    yield block
                sent_at = time.monotonic()
                num_sent += 1
                if num_sent % TURN == 0:
                    await asyncio.sleep(0)
        for chunk in await pool.run(lambda: [*reply.closing()]):
            for block in await reply.encode(chunk, pool):
                yield block
        if reply.done:
            yield reply.done
    except SlowReader:
        return
    except Exception as error:
        for block in await reply.encode(reply.failed(explain(error, reply.fields)), pool):
            yield block


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
        del task, tasks, one  # an error refers to this frame: with the tasks in it, the request would stay in memory

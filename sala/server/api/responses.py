"""POST /responses: OpenAI's newer interface. Items in, items out; nothing is stored."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from sala.engine.service import Stream
from sala.engine.stream import StreamItem
from sala.server.api import answers
from sala.server.api.anthropic_blocks import Block, Blocks, Step, build_chat, encode_named
from sala.server.api.chat import Plan
from sala.server.api.chat_schema import StrictRoute
from sala.server.api.responses_schema import (
    CallItem,
    CallOutput,
    FunctionChoice,
    InputItem,
    InputMessage,
    ReasoningItem,
    ResponseObject,
    ResponseRequest,
    TextFormat,
    join,
)
from sala.server.http.errors import ALWAYS, ApiError, dump
from sala.server.http.sse import EventStream, until_gone
from sala.server.runtime import LoadedModel, Runtime
from sala.server.settings import Settings

router = APIRouter(tags=["responses"], route_class=StrictRoute)
FIELDS = {
    "messages": "input", "prompt": "input", "json_schema": "text.format", "response_format": "text.format",
    "grammar": "tools", "max_tokens": "max_output_tokens", "think_budget": "reasoning.effort",
}  # fmt: skip
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream` as server-sent events, from response.created to response.completed.",
        "content": {"text/event-stream": {}},
    }
}
PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


@router.post(
    "/responses", response_model=ResponseObject, responses={**ALWAYS, **STREAMED}, summary="Answer items with items"
)
async def create_response(body: ResponseRequest, request: Request) -> Response:
    runtime: Runtime = request.app.state.runtime
    settings: Settings = request.app.state.settings
    model = await until_gone(request, runtime.get(body.model))
    with answers.naming(FIELDS):
        plan = await asyncio.to_thread(build_plan, body, settings)
        stream = await until_gone(request, model.worker.open(plan.prepare), model.worker.cancel)
    reply = Reply(model, body, plan, stream)
    if body.stream:
        events = reply.events(settings.ping_s)
        return EventStream(events, stream.overflowed, lambda: model.worker.cancel(stream))
    try:
        whole = await until_gone(request, reply.collect())
    finally:
        model.worker.cancel(stream)
    return Response(dump(whole), media_type="application/json")


def build_plan(body: ResponseRequest, settings: Settings) -> Plan:
    return Plan.build(build_chat(as_chat(body), FIELDS), settings)


def as_chat(body: ResponseRequest) -> dict[str, Any]:
    """The fields of a chat that asks for the same."""
    choice: Any = body.tool_choice
    if isinstance(choice, FunctionChoice):
        choice = {"type": "function", "function": {"name": choice.name}}
    effort = body.reasoning.effort if body.reasoning else None
    return {
        "messages": list(as_messages(body)),
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": [
            {"type": "function", "function": tool.model_dump(include={"name", "description", "parameters"})}
            for tool in body.tools or ()
        ],
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _as_response_format(body.text.format if body.text else None),
        "reasoning_effort": "xhigh" if effort == "max" else effort,
    }


def _as_response_format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None or form.schema_ is None or form.type != "json_schema":
        return None if form is None else {"type": form.type}
    return {"type": "json_schema", "json_schema": {"schema": form.schema_}}


def as_messages(body: ResponseRequest) -> Iterator[dict[str, Any]]:
    """One message for all that the assistant thought, said and called in a row."""
    if body.instructions:
        yield {"role": "system", "content": body.instructions}
    if isinstance(body.input, str):
        yield {"role": "user", "content": body.input}
        return
    turn: dict[str, Any] = {}
    for item in body.input:
        if isinstance(item, ReasoningItem) and not item.content:
            continue
        if _belongs(item, turn):
            _add_to_turn(turn, item)
            continue
        if turn:
            yield turn
            turn = {}
        if isinstance(item, CallOutput):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": join(item.output)}
        elif isinstance(item, InputMessage) and item.role != "assistant":
            yield {"role": item.role, "content": join(item.content)}
        else:
            turn = {"role": "assistant"}
            _add_to_turn(turn, item)
    if turn:
        yield turn


def _belongs(item: InputItem, turn: dict[str, Any]) -> bool:
    """Whether the assistant's turn goes on with this item: it thinks, then speaks, then calls."""
    if isinstance(item, CallItem):
        return bool(turn)
    is_speech = isinstance(item, InputMessage) and item.role == "assistant"
    return bool(turn) and is_speech and "content" not in turn and "tool_calls" not in turn


def _add_to_turn(turn: dict[str, Any], item: InputItem) -> None:
    if isinstance(item, ReasoningItem):
        turn["reasoning_content"] = join(item.content or [])
    elif isinstance(item, InputMessage):
        turn["content"] = join(item.content)
    elif isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


class Reply:
    """The answer to one request."""

    def __init__(self, model: LoadedModel, body: ResponseRequest, plan: Plan, stream: Stream) -> None:
        self._model = model
        self._body = body
        self._plan = plan
        self._stream = stream
        self._blocks = Blocks(plan)
        self._id = f"resp_{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._item_ids: dict[int, str] = {}
        self._num_events = 0

    async def collect(self) -> dict[str, Any]:
        """The whole answer."""
        await self._blocks.collect(self._stream)
        return self._finished()

    def events(self, ping_s: float) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        start = self._response("in_progress")
        opening = [self._event("created", response=start), self._event("in_progress", response=start)]
        return answers.send_events(
            self._stream, ping_s, opening, self._events, self._closing,
            failing=self._failing, write=encode_named, done=b"",
        )  # fmt: skip

    def _events(self, item: StreamItem) -> Iterator[dict[str, Any]]:
        for step in self._blocks.take(item):
            yield from {"begin": self._begin, "grow": self._grow, "end": self._end}[step.what](step)

    def _begin(self, step: Step) -> Iterator[dict[str, Any]]:
        block = step.block
        empty = Block(block.kind, block.index, call=block.call)
        item = {**self._item(empty, "in_progress")}
        if block.kind != "call":
            item["content"] = []
        yield self._event("output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            yield self._event("content_part.added", **self._place(block), part=_part(empty))

    def _grow(self, step: Step) -> Iterator[dict[str, Any]]:
        kind, place = step.block.kind, self._place(step.block)
        if kind == "reasoning":
            yield self._event("reasoning_text.delta", **place, delta=step.text)
        elif kind == "text":
            yield self._event("output_text.delta", **place, delta=step.text, logprobs=[])
        else:
            yield self._event("function_call_arguments.delta", **place, delta=step.text)

    def _end(self, step: Step) -> Iterator[dict[str, Any]]:
        block, place = step.block, self._place(step.block)
        if block.kind == "reasoning":
            yield self._event("reasoning_text.done", **place, text=block.text)
        elif block.kind == "text":
            yield self._event("output_text.done", **place, text=block.text, logprobs=[])
        elif block.call is not None:
            done = {"name": block.call.name, "arguments": block.text}
            yield self._event("function_call_arguments.done", **place, **done)
        if block.kind != "call":
            yield self._event("content_part.done", **place, part=_part(block))
        yield self._event("output_item.done", output_index=block.index, item=self._item(block, self._status(block)))

    def _closing(self) -> Iterator[dict[str, Any]]:
        response = self._finished()
        yield self._event(response["status"], response=response)

    def _failing(self, error: ApiError) -> dict[str, Any]:
        problem = {"code": "server_error", "message": error.message}
        return self._event("failed", response={**self._response("failed"), "error": problem})

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": f"response.{kind}", "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    def _place(self, block: Block) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _item_id(self, block: Block) -> str:
        return self._item_ids.setdefault(block.index, f"{PREFIXES[block.kind]}_{secrets.token_hex(16)}")

    def _status(self, block: Block) -> str:
        """The last item of an answer that was cut is not complete, unless it is a call: those come out whole."""
        is_last = block.index == len(self._blocks.all) - 1
        return "incomplete" if self._blocks.is_cut and is_last and block.kind != "call" else "completed"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        if block.call is not None:
            call = {"call_id": block.call.id, "name": block.call.name, "arguments": block.text}
            return {"id": self._item_id(block), "type": "function_call", "status": status, **call}
        item = {"id": self._item_id(block), "status": status, "content": [_part(block)]}
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "encrypted_content": None}
        return {**item, "type": "message", "role": "assistant"}

    def _finished(self) -> dict[str, Any]:
        usage = self._blocks.completion.usage
        response = self._response("incomplete" if self._blocks.is_cut else "completed")
        response["completed_at"] = None if self._blocks.is_cut else int(time.time())
        response["incomplete_details"] = {"reason": "max_output_tokens"} if self._blocks.is_cut else None
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._blocks.num_reasoning},
            "total_tokens": usage.total_tokens,
        }
        return response

    def _response(self, status: str) -> dict[str, Any]:
        body, sampling = self._body, self._plan.sampling
        choice = body.tool_choice or "auto"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._model.id,
            "output": [self._item(block, self._status(block)) for block in self._blocks.all],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": self._format()},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [{**tool.model_dump(), "strict": bool(tool.strict)} for tool in body.tools or ()],
            "top_logprobs": 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
        }

    def _format(self) -> dict[str, Any]:
        form = self._body.text.format if self._body.text else None
        if form is None or form.type != "json_schema":
            return {"type": "text" if form is None else form.type}
        return {"type": form.type, "name": form.name or "schema", "schema": form.schema_, "strict": True}


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}

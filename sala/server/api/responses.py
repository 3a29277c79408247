"""POST /responses: OpenAI's newer API. Items in, items out; nothing is stored."""

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from sala.engine.stream import StreamItem
from sala.server.api import answers
from sala.server.api.blocks import Block, BlockChange, BlockReply
from sala.server.api.chat import ChatInput, as_call
from sala.server.api.chat_schema import ChosenFunction, ToolChoice
from sala.server.api.responses_schema import (
    CallItem,
    CallOutput,
    FunctionChoice,
    InputItem,
    MessageItem,
    ReasoningItem,
    ResponseObject,
    ResponseRequest,
    TextFormat,
    join,
)
from sala.server.http.body import StrictRoute
from sala.server.http.errors import ALWAYS, ApiError

router = APIRouter(tags=["responses"], route_class=StrictRoute)
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream`, server-sent events from response.created to response.completed.",
        "content": {"text/event-stream": {}},
    }
}
PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


@router.post(
    "/responses", response_model=ResponseObject, responses={**ALWAYS, **STREAMED}, summary="Answer items with items"
)
async def create_response(body: ResponseRequest, request: Request) -> Response:
    return await answers.answer(request, body, ResponseReply)


def read_conversation(body: ResponseRequest) -> ChatInput:
    choice: Any = body.tool_choice or "auto"
    if isinstance(choice, FunctionChoice):
        choice = ToolChoice(type="function", function=ChosenFunction(name=choice.name))
    return ChatInput(
        messages=list(as_messages(body)),
        sampling={"max_tokens": body.max_output_tokens, "temperature": body.temperature, "top_p": body.top_p},
        tools=[
            {
                "type": "function",
                "function": tool.model_dump(include={"name", "description", "parameters"}, exclude_none=True),
            }
            for tool in body.tools or ()
        ],
        tool_choice=choice,
        is_single=body.parallel_tool_calls is False,
        schema=_answer_schema(body.text.format if body.text else None),
        effort=body.reasoning.effort if body.reasoning else None,
    )


def _answer_schema(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return None
    return {"type": "object"} if form.type == "json_object" or form.schema_ is None else form.schema_


def as_messages(body: ResponseRequest) -> Iterator[dict[str, Any]]:
    """Yield messages; consecutive reasoning, text and calls of the assistant become one message."""
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
            yield {"content": "", **turn}
            turn = {}
        if isinstance(item, CallOutput):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": join(item.output)}
        elif isinstance(item, MessageItem) and item.role != "assistant":
            yield {"role": "user" if item.role == "user" else "system", "content": join(item.content)}
        else:
            turn = {"role": "assistant"}
            _add_to_turn(turn, item)
    if turn:
        yield {"content": "", **turn}


def _belongs(item: InputItem, turn: dict[str, Any]) -> bool:
    """Return whether the assistant's turn continues with this item: reasoning, then text, then calls."""
    if isinstance(item, CallItem):
        return bool(turn)
    is_speech = isinstance(item, MessageItem) and item.role == "assistant"
    return bool(turn) and is_speech and "content" not in turn and "tool_calls" not in turn


def _add_to_turn(turn: dict[str, Any], item: InputItem) -> None:
    if isinstance(item, ReasoningItem):
        turn["reasoning_content"] = join(item.content or [])
    elif isinstance(item, MessageItem):
        turn["content"] = join(item.content)
    elif isinstance(item, CallItem):
        call = as_call(item.call_id, item.name, json.loads(item.arguments or "{}"))
        turn.setdefault("tool_calls", []).append(call)


class ResponseReply(BlockReply[ResponseRequest]):
    """The answer to one request, as items."""

    fields = {  # noqa: RUF012
        "messages": "input", "prompt": "input", "json_schema": "text.format", "response_format": "text.format",
        "grammar": "tools", "max_tokens": "max_output_tokens", "think_budget": "reasoning.effort",
    }  # fmt: skip

    def conversation(self) -> ChatInput:
        self._id = f"resp_{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._item_ids: dict[int, str] = {}
        self._num_events = 0
        return read_conversation(self.body)

    def whole(self) -> dict[str, Any]:
        return self._finished()

    def opening(self) -> Iterator[dict[str, Any]]:
        start = self._response("in_progress")
        yield self._event("created", response=start)
        yield self._event("in_progress", response=start)

    def chunks(self, item: StreamItem) -> Iterator[dict[str, Any]]:
        for change in self.changes:
            yield from {"begin": self._begin, "grow": self._grow, "end": self._end}[change.what](change)

    def closing(self) -> Iterator[dict[str, Any]]:
        response = self._finished()
        yield self._event(response["status"], response=response)

    def failed(self, error: ApiError) -> dict[str, Any]:
        problem = {"code": "server_error", "message": error.message}
        return self._event("failed", response={**self._response("failed"), "error": problem})

    def _begin(self, change: BlockChange) -> Iterator[dict[str, Any]]:
        block = change.block
        empty = Block(block.kind, block.index, call=block.call)
        item = {**self._item(empty, "in_progress")}
        if block.kind != "call":
            item["content"] = []
        yield self._event("output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            yield self._event("content_part.added", **self._place(block), part=_part(empty))

    def _grow(self, change: BlockChange) -> Iterator[dict[str, Any]]:
        kind, place = change.block.kind, self._place(change.block)
        if kind == "reasoning":
            yield self._event("reasoning_text.delta", **place, delta=change.text)
        elif kind == "text":
            yield self._event("output_text.delta", **place, delta=change.text, logprobs=[])
        else:
            yield self._event("function_call_arguments.delta", **place, delta=change.text)

    def _end(self, change: BlockChange) -> Iterator[dict[str, Any]]:
        block, place = change.block, self._place(change.block)
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
        """Return "incomplete" for the last item of a cut answer, unless it is a call: calls are always whole."""
        is_last = block.index == len(self.blocks.all) - 1
        return "incomplete" if self.blocks.is_cut and is_last and block.kind != "call" else "completed"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        if block.call is not None:
            call = {"call_id": block.call.id, "name": block.call.name, "arguments": block.text}
            return {"id": self._item_id(block), "type": "function_call", "status": status, **call}
        item = {"id": self._item_id(block), "status": status, "content": [_part(block)]}
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "encrypted_content": None}
        return {**item, "type": "message", "role": "assistant"}

    def _finished(self) -> dict[str, Any]:
        usage = self.blocks.completion.usage
        response = self._response("incomplete" if self.blocks.is_cut else "completed")
        response["completed_at"] = None if self.blocks.is_cut else int(time.time())
        response["incomplete_details"] = {"reason": "max_output_tokens"} if self.blocks.is_cut else None
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.blocks.num_reasoning},
            "total_tokens": usage.total_tokens,
        }
        return response

    def _response(self, status: str) -> dict[str, Any]:
        body, sampling = self.body, self.sampling
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
            "model": self.model.id,
            "output": [self._item(block, self._status(block)) for block in self.blocks.all],
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
        form = self.body.text.format if self.body.text else None
        if form is None or form.type != "json_schema":
            return {"type": "text" if form is None else form.type}
        return {"type": form.type, "name": form.name or "schema", "schema": form.schema_, "strict": True}


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}

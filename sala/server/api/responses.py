"""OpenAI's Responses API: items in, items out; nothing is stored."""

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from sala.server.api.blocks import Block, BlockChange, BlockReply
from sala.server.api.chat import ChatInput, answer_schema, as_call, as_tool
from sala.server.api.responses_schema import (
    CallItem,
    CallOutput,
    InputItem,
    MessageItem,
    ReasoningItem,
    ResponseRequest,
    join,
)
from sala.server.http.errors import ApiError

PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
DELTAS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


def read_conversation(body: ResponseRequest) -> ChatInput:
    form = body.text.format if body.text else None
    return ChatInput(
        messages=list(as_messages(body)),
        sampling={"max_tokens": body.max_output_tokens, "temperature": body.temperature, "top_p": body.top_p},
        tools=[as_tool(tool.name, tool.description, tool.parameters) for tool in body.tools or ()],
        choice=body.choice,
        is_single=body.parallel_tool_calls is False,
        schema=answer_schema(form.type, form.schema_) if form else None,
        effort=body.reasoning.effort if body.reasoning else None,
    )


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
        usage = self.progress.result.usage
        response = self._response("incomplete" if self.is_cut else "completed")
        response["completed_at"] = None if self.is_cut else int(time.time())
        response["incomplete_details"] = {"reason": "max_output_tokens"} if self.is_cut else None
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.progress.num_reasoning},
            "total_tokens": usage.total_tokens,
        }
        return response

    def opening(self) -> Iterator[dict[str, Any]]:
        start = self._response("in_progress")
        yield self._event("created", response=start)
        yield self._event("in_progress", response=start)

    def closing(self) -> Iterator[dict[str, Any]]:
        response = self.whole()
        yield self._event(response["status"], response=response)

    def failed(self, error: ApiError) -> dict[str, Any]:
        problem = {"code": "server_error", "message": error.message}
        return self._event("failed", response={**self._response("failed"), "error": problem})

    def events(self, change: BlockChange) -> Iterator[dict[str, Any]]:
        block, output_index = change.block, change.block.index
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": output_index}
        if block.call is None:
            place["content_index"] = 0
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if change.what == "grow":
            yield self._event(f"{DELTAS[block.kind]}.delta", **place, delta=change.text, **logprobs)
        elif change.what == "begin":
            item = self._item(block.emptied(), "in_progress")
            if block.call is None:
                item["content"] = []
            yield self._event("output_item.added", output_index=output_index, item=item)
            if block.call is None:
                yield self._event("content_part.added", **place, part=_part(block.emptied()))
        else:
            call = block.call
            whole = {"text": block.text} if call is None else {"name": call.name, "arguments": block.text}
            yield self._event(f"{DELTAS[block.kind]}.done", **place, **whole, **logprobs)
            if call is None:
                yield self._event("content_part.done", **place, part=_part(block))
            item = self._item(block, self._status(block))
            yield self._event("output_item.done", output_index=output_index, item=item)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": f"response.{kind}", "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    def _item_id(self, block: Block) -> str:
        return self._item_ids.setdefault(block.index, f"{PREFIXES[block.kind]}_{secrets.token_hex(16)}")

    def _status(self, block: Block) -> str:
        """Return "incomplete" for the last item of a cut answer, unless it is a call: calls are always whole."""
        is_last = block.index == len(self.blocks) - 1
        return "incomplete" if self.is_cut and is_last and block.kind != "call" else "completed"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        if block.call is not None:
            call = {"call_id": block.call.id, "name": block.call.name, "arguments": block.text}
            return {"id": self._item_id(block), "type": "function_call", "status": status, **call}
        item = {"id": self._item_id(block), "status": status, "content": [_part(block)]}
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "encrypted_content": None}
        return {**item, "type": "message", "role": "assistant"}

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
            "model": self.model_id,
            "output": [self._item(block, self._status(block)) for block in self.blocks],
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

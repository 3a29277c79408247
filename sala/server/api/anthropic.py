"""POST /messages and /messages/count_tokens: Anthropic's interface. Its errors look different; see `errors`."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from sala.engine.service import Stream
from sala.engine.stream import StreamItem
from sala.server.api import answers
from sala.server.api.anthropic_blocks import Block, Blocks, Prepared, Step, build_chat, encode_named
from sala.server.api.anthropic_schema import (
    CountRequest,
    InputMessage,
    MessageObject,
    MessagesError,
    MessagesRequest,
    TextBlock,
    Thought,
    TokenCount,
    ToolResult,
    ToolUse,
    join,
)
from sala.server.api.chat import Plan
from sala.server.api.chat_schema import StrictRoute
from sala.server.http.errors import ALWAYS, anthropic_envelope, dump
from sala.server.http.sse import EventStream, until_gone
from sala.server.runtime import LoadedModel, Runtime
from sala.server.settings import Settings
from sala.text.stops import StopFinder

FIELDS = {
    "prompt": "messages", "stop": "stop_sequences", "json_schema": "output_config.format",
    "response_format": "output_config.format", "grammar": "tools", "think_budget": "thinking.budget_tokens",
}  # fmt: skip
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": MessagesError, "description": answer["description"]} for status, answer in ALWAYS.items()
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream` as server-sent events, from message_start to message_stop.",
        "content": {"text/event-stream": {}},
    }
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "repetition": "max_tokens", "tool_calls": "tool_use"}
BILLING = "x-anthropic-billing-header:"  # a line of some clients; it differs every time, so nothing could be reused
PING = {"type": "ping"}

router = APIRouter(tags=["messages"], route_class=StrictRoute)


@router.post(
    "/messages", response_model=MessageObject, responses={**ERRORS, **STREAMED}, summary="Answer messages with blocks"
)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    runtime: Runtime = request.app.state.runtime
    settings: Settings = request.app.state.settings
    model = await until_gone(request, runtime.get(body.model))
    with answers.naming(FIELDS):
        plan = await asyncio.to_thread(build_plan, body, settings)
        prepared = Prepared(plan)
        stream = await until_gone(request, model.worker.open(prepared.prepare), model.worker.cancel)
    reply = Reply(model, body, plan, stream)
    if body.stream:
        events = reply.events(settings.ping_s, prepared.num_tokens)
        return EventStream(events, stream.overflowed, lambda: model.worker.cancel(stream))
    try:
        whole = await until_gone(request, reply.collect())
    finally:
        model.worker.cancel(stream)
    return Response(dump(whole), media_type="application/json")


@router.post(
    "/messages/count_tokens", response_model=TokenCount, responses=ERRORS, summary="Count the tokens of messages"
)
async def count_tokens(body: CountRequest, request: Request) -> dict[str, int]:
    """How long the prompt of these messages is; it may be longer than the context."""
    model = await until_gone(request, request.app.state.runtime.get(body.model))
    with answers.naming(FIELDS):
        plan = await asyncio.to_thread(build_plan, body, request.app.state.settings)
        ids = await until_gone(request, model.worker.call(plan.encode))
    return {"input_tokens": len(ids)}


def build_plan(body: CountRequest, settings: Settings) -> Plan:
    plan = Plan.build(build_chat(as_chat(body), FIELDS), settings)
    is_hidden = body.thinking is not None and body.thinking.display == "omitted"
    return replace(plan, shows_reasoning=False) if is_hidden else plan


def as_chat(body: CountRequest) -> dict[str, Any]:
    """The fields of a chat that asks for the same."""
    fields = {"messages": list(as_messages(body)), **_thinking(body)}
    if body.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
            }
            for tool in body.tools
        ]
    choice = body.tool_choice
    if choice is not None:
        is_named = choice.type == "tool"
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = named if is_named else CHOICES[choice.type]
        fields["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    if body.output_config is not None and body.output_config.format is not None:
        schema = body.output_config.format.schema_
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    if isinstance(body, MessagesRequest):
        fields |= {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        fields["stop"] = body.stop_sequences
    return fields


def _thinking(body: CountRequest) -> dict[str, Any]:
    effort = body.output_config.effort if body.output_config else None
    fields: dict[str, Any] = {"reasoning_effort": "xhigh" if effort == "max" else effort}
    if body.thinking is not None and body.thinking.type == "disabled":
        fields["reasoning_effort"] = "none"
    if body.thinking is not None and body.thinking.type == "enabled":
        fields["thinking_budget"] = body.thinking.budget_tokens
    return fields


def as_messages(body: CountRequest) -> Iterator[dict[str, Any]]:
    system = join(body.system or "")
    if system.startswith(BILLING):
        system = system.partition("\n")[2]
    if system:
        yield {"role": "system", "content": system}
    for message in body.messages:
        if message.role == "assistant":
            yield _as_turn(message)
        else:
            yield from _as_inputs(message)


def _as_turn(message: InputMessage) -> dict[str, Any]:
    """What the assistant thought, said and called."""
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": "\n".join(block.text for block in message.content if isinstance(block, TextBlock)),
        "reasoning_content": "".join(block.thinking for block in message.content if isinstance(block, Thought)),
    }
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in message.content
        if isinstance(block, ToolUse)
    ]
    return {**turn, "tool_calls": calls} if calls else turn


def _as_inputs(message: InputMessage) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own; texts that stand together are one."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    texts: list[str] = []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResult):
            if texts:
                yield {"role": message.role, "content": "\n".join(texts)}
                texts = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": join(block.content)}
    if texts or not message.content:
        yield {"role": message.role, "content": "\n".join(texts)}


class Reply:
    """The answer to one request."""

    def __init__(self, model: LoadedModel, body: MessagesRequest, plan: Plan, stream: Stream) -> None:
        self._model = model
        self._body = body
        self._stream = stream
        self._blocks = Blocks(plan)

    async def collect(self) -> dict[str, Any]:
        """The whole answer."""
        await self._blocks.collect(self._stream)
        content = [_whole(block) for block in self._blocks.all]
        return {**self._head(), "content": content, **self._ending(), "usage": self._usage()}

    def events(self, ping_s: float, num_tokens: int) -> AsyncIterator[bytes]:
        """The answer as server-sent events. How much of the prompt was read before is known at the end only."""
        usage = _usage(num_tokens, 0, 0)
        start = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        opening: list[dict[str, Any]] = [{"type": "message_start", "message": start}, PING]
        return answers.send_events(
            self._stream, ping_s, opening, self._events, self._closing,
            failing=anthropic_envelope, write=encode_named, ping=encode_named(PING), done=b"",
        )  # fmt: skip

    def _events(self, item: StreamItem) -> Iterator[dict[str, Any]]:
        for step in self._blocks.take(item):
            yield _event(step)

    def _closing(self) -> Iterator[dict[str, Any]]:
        yield {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def _head(self) -> dict[str, Any]:
        number = f"msg_{secrets.token_hex(12)}"
        return {"id": number, "type": "message", "role": "assistant", "model": self._model.id}

    def _usage(self) -> dict[str, Any]:
        usage = self._blocks.completion.usage
        return _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)

    def _ending(self) -> dict[str, Any]:
        stop = self._find_stop()
        reason = STOP_REASONS.get(self._blocks.completion.finish_reason, "end_turn")
        return {"stop_reason": "stop_sequence" if stop is not None else reason, "stop_sequence": stop}

    def _find_stop(self) -> str | None:
        """The text that ended the answer, if one did."""
        completion = self._blocks.completion
        has_ended_itself = completion.stop_token is not None or completion.finish_reason not in ("stop", "tool_calls")
        if not self._body.stop_sequences or has_ended_itself:
            return None
        finder = StopFinder(self._body.stop_sequences)
        finder.push(self._model.llm.tokenizer.decode(completion.token_ids))
        return finder.found


def _usage(prompt: int, cached: int, sampled: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sampled,
    }


def _whole(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.call is None:
        return {"type": "text", "text": block.text, "citations": None}
    return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": block.call.arguments}


def _event(step: Step) -> dict[str, Any]:
    block = step.block
    if step.what == "begin":
        start = _whole(Block(block.kind, block.index, call=block.call))
        if block.kind == "call":
            start["input"] = {}
        return {"type": "content_block_start", "index": block.index, "content_block": start}
    if step.what == "end":
        return {"type": "content_block_stop", "index": block.index}
    return {"type": "content_block_delta", "index": block.index, "delta": _delta(block, step.text)}


def _delta(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    if block.kind == "text":
        return {"type": "text_delta", "text": text}
    return {"type": "input_json_delta", "partial_json": text}

"""OpenAI's Responses API: items in, items out, strictly validated; nothing is stored."""

import secrets
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import MaxLen, MinLen
from pydantic import Field, Tag, field_validator, model_validator

from sala.config import parse_object
from sala.server.api import conversation
from sala.server.api.answers import AnswerRequest, Count
from sala.server.api.conversation import Block, BlockReply, ChatInput, Parameters, ToolName, Tools, WithTools, WordOr
from sala.server.http.body import FIRST_ONLY, Strict, TextOr, discriminate, join, problem, union
from sala.server.http.errors import ApiError

NOT_STORED = "this server stores nothing; send the whole conversation as input"
PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
DELTAS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


class ContentPart(Strict, ignored={"annotations", "logprobs"}, remedy=conversation.TEXT_ONLY):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _read_refusal(cls, data: Any) -> Any:
        is_refusal = isinstance(data, dict) and data.get("type") == "refusal"
        return {"type": "refusal", "text": data.get("refusal")} if is_refusal else data


TextOrParts = Annotated[TextOr[ContentPart], union("a string or a list of text parts")]


class Item(Strict, ignored={"id", "status", "phase"}):
    """An item, perhaps of an earlier answer: the marks of those are not used when they are sent back."""


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts


class CallItem(Item):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: ToolName
    arguments: str = Field(description="A JSON object, as a string.")

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, value: str) -> str:
        if parse_object(value or "{}") is None:
            raise problem("must be a JSON object, as a string")
        return value


class CallOutput(Item):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: TextOrParts


class ReasoningItem(Item, ignored={"encrypted_content", "summary"}):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: list[ContentPart] | None = None


class ItemReference(Strict):
    """A reference to a stored item: refused, since the server stores nothing."""

    type: Literal["item_reference"]

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        raise problem(NOT_STORED)


def _item_kind(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else None
    known = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
    return f"~{kind}" if kind in known else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("~message")]
    | Annotated[CallItem, Tag("~function_call")]
    | Annotated[CallOutput, Tag("~function_call_output")]
    | Annotated[ReasoningItem, Tag("~reasoning")]
    | Annotated[ItemReference, Tag("~item_reference")],
    discriminate(_item_kind, "a message, function_call, function_call_output or reasoning"),
]
Input = Annotated[
    Annotated[str, Tag("~str")] | Annotated[list[InputItem], MinLen(1), FIRST_ONLY, Tag("~list")],
    union("a string or a list of items"),
]


class FunctionTool(Strict, remedy="only tools of type function can be offered; leave the others out"):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = Field(None, description="Accepted and not used: enforced calls are always strict.")


class FunctionChoice(Strict):
    type: Literal["function"]
    name: str


class TextFormat(
    Strict, ignored={"description", "strict"}, needs={"json_schema": ("schema", "json_schema needs a schema")}
):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(None, max_length=64)
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="The JSON schema that the answer must follow."
    )


class TextOptions(Strict, ignored={"verbosity"}):
    format: TextFormat | None = Field(None, description="Enforced while sampling.")


class Reasoning(Strict, ignored={"context"}):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="A budget for the reasoning, as in chats."
    )
    summary: Literal["auto"] | None = Field(None, description="Not summarised: the reasoning itself is returned.")
    generate_summary: None = Field(None, description="Not supported.")


UNUSED = (
    "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "max_tool_calls", "stream_options", "client_metadata",
)  # fmt: skip


class ResponseRequest(AnswerRequest, WithTools, ignored=UNUSED):
    """A conversation to answer, as a list of items.

    Nothing is stored, even if `store` is true. `user`, `service_tier`, `safety_identifier`, `prompt_cache_key`,
    `prompt_cache_retention`, `max_tool_calls`, `stream_options` and `text.verbosity` are accepted and not used.
    """

    input: Input = Field(json_schema_extra={"example": "Hello"})
    instructions: str | None = Field(None, description="A system message that precedes the input.")
    max_output_tokens: Count | None = Field(None, description="Maximum length of the answer, reasoning included.")
    tools: Tools[FunctionTool] | None = None
    tool_choice: WordOr[FunctionChoice] | None = None
    parallel_tool_calls: bool | None = Field(None, description="If false, only the first call is returned.")
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    metadata: dict[Annotated[str, MaxLen(64)], Annotated[str, MaxLen(512)]] | None = Field(
        None, max_length=16, description="Returned unchanged."
    )
    include: list[str] | None = Field(None, max_length=16, description="Accepted and not used.")
    truncation: Literal["disabled"] | None = Field(None, description="A prompt that is too long is always an error.")
    background: bool | None = Field(None, description="Not supported: only false.")
    top_logprobs: int | None = Field(None, ge=0, le=0, description="Not supported here; use /chat/completions.")
    previous_response_id: None = None
    conversation: None = None
    prompt: None = Field(None, description="Not supported.")

    @model_validator(mode="before")
    @classmethod
    def _check_memory(cls, data: Any) -> Any:
        for name in ("previous_response_id", "conversation"):
            if isinstance(data, dict) and data.get(name) is not None:
                raise problem(NOT_STORED, name)
        if isinstance(data, dict) and data.get("background") is True:
            raise problem("background requests are not supported; leave it out, or use stream", "background")
        return data

    @field_validator("include")
    @classmethod
    def _check_include(cls, value: list[str] | None) -> list[str] | None:
        if "message.output_text.logprobs" in (value or ()):
            raise problem("asks for logprobs, which only /chat/completions returns")
        return value


def as_messages(body: ResponseRequest) -> list[dict[str, Any]]:
    """Return messages; consecutive reasoning, text and calls of the assistant become one message."""
    items = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    out: list[dict[str, Any]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    for item in items:
        if isinstance(item, ReasoningItem) and not item.content:
            continue
        if isinstance(item, CallOutput):
            out.append({"role": "tool", "tool_call_id": item.call_id, "content": join(item.output)})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            out.append({"role": "user" if item.role == "user" else "system", "content": join(item.content)})
        else:
            if not (out and _continues(out[-1], item)):
                out.append({"role": "assistant"})
            _add_to_turn(out[-1], item)
    return [{"content": "", **message} for message in out]


def _continues(message: dict[str, Any], item: InputItem) -> bool:
    """Return whether a message goes on with this item of the assistant: reasoning, then text, then calls."""
    if message["role"] != "assistant" or isinstance(item, ReasoningItem):
        return False
    return isinstance(item, CallItem) or not message.keys() & {"content", "tool_calls"}


def _add_to_turn(turn: dict[str, Any], item: InputItem) -> None:
    if isinstance(item, ReasoningItem):
        turn["reasoning_content"] = join(item.content or [])
    elif isinstance(item, MessageItem):
        turn["content"] = join(item.content)
    elif isinstance(item, CallItem):
        call = conversation.as_call(item.call_id, item.name, parse_object(item.arguments or "{}"))
        turn.setdefault("tool_calls", []).append(call)


class ResponseReply(BlockReply[ResponseRequest]):
    """The answer to one request, as items."""

    fields = {  # noqa: RUF012
        "messages": "input", "prompt": "input", "json_schema": "text.format", "response_format": "text.format",
        "grammar": "tools", "max_tokens": "max_output_tokens", "think_budget": "reasoning.effort",
    }  # fmt: skip

    def read(self) -> ChatInput:
        self._id = f"resp_{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._num_events = 0
        body = self.body
        form = body.text.format if body.text else None
        return ChatInput(
            messages=as_messages(body),
            sampling={"max_tokens": body.max_output_tokens, "temperature": body.temperature, "top_p": body.top_p},
            tools=[conversation.as_tool(tool.name, tool.description, tool.parameters) for tool in body.tools or ()],
            choice=body.choice,
            is_single=body.parallel_tool_calls is False,
            schema=conversation.answer_schema(form.type, form.schema_) if form else None,
            effort=body.reasoning.effort if body.reasoning else None,
        )

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

    def events(self, change: conversation.Change, block: Block, text: str) -> Iterator[dict[str, Any]]:
        output_index = block.index
        place: dict[str, Any] = {"item_id": _item_id(block), "output_index": output_index}
        if block.call is None:
            place["content_index"] = 0
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if change == "grow":
            yield self._event(f"{DELTAS[block.kind]}.delta", **place, delta=text, **logprobs)
        elif change == "begin":
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

    def _status(self, block: Block) -> str:
        """Return "incomplete" for the last item of a cut answer, unless it is a call: calls are always whole."""
        is_last = block.index == len(self.blocks) - 1
        return "incomplete" if self.is_cut and is_last and block.kind != "call" else "completed"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        if block.call is not None:
            call = {"call_id": block.call.id, "name": block.call.name, "arguments": block.text}
            return {"id": _item_id(block), "type": "function_call", "status": status, **call}
        item = {"id": _item_id(block), "status": status, "content": [_part(block)]}
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "encrypted_content": None}
        return {**item, "type": "message", "role": "assistant"}

    def _response(self, status: str) -> dict[str, Any]:
        body, sampling = self.body, self.sampling
        choice = body.tool_choice or "auto"
        return {
            **dict.fromkeys(("completed_at", "error", "incomplete_details", "max_tool_calls", "previous_response_id")),
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model_id,
            "output": [self._item(block, self._status(block)) for block in self.blocks],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
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


def _item_id(block: Block) -> str:
    return f"{PREFIXES[block.kind]}_{block.number}"


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}

"""The items of OpenAI's Responses API: what clients send, as messages for the template and as objects to be kept."""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from annotated_types import MinLen
from pydantic import Field, Tag, TypeAdapter, model_validator

from sala.server.api import conversation
from sala.server.api.response_tools import (
    MAX_ID,
    CallItems,
    CustomCallItem,
    FunctionCallItem,
    HostedCallItem,
    Item,
    ShellCallItem,
    ShortText,
)
from sala.server.http.body import FIRST_ONLY, History, TextOr, discriminate, join, union

PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco", "local_shell_call": "lsh", "local_shell_call_output": "lsho", "reasoning": "rs",
}  # fmt: skip
NO_RESULT: dict[str, dict[str, Any]] = {  # what OpenAI's types demand of items whose results are dropped
    "image_generation_call": {"result": None},
    "tool_search_call": {"arguments": {}},
    "tool_search_output": {"tools": []},
}


class ContentPart(History, remedy=conversation.TEXT_ONLY):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _read_refusal(cls, data: Any) -> Any:
        return conversation.read_refusal(data)


TextOrParts = Annotated[TextOr[ContentPart], union("a string or a list of text parts")]


class MessageItem(Item):
    type: Literal["message"] = "message"
    status: ShortText | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts


class CallOutput(Item):
    """The result of a tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: ShortText
    output: TextOrParts


class ShellOutput(Item):
    """The result of a command; `id` or `call_id` is that of the call."""

    type: Literal["local_shell_call_output"]
    id: ShortText | None = None
    call_id: ShortText | None = None
    output: str


class ReasoningItem(Item):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: list[ContentPart] | None = None


class ItemReference(History):
    """An item of a stored response, input or output."""

    type: Literal["item_reference"]
    id: str = Field(max_length=MAX_ID)


ITEMS = {  # the tag of each type of item
    "message": "message", "function_call": "function_call", "function_call_output": "output",
    "custom_tool_call": "custom_call", "custom_tool_call_output": "output", "local_shell_call": "shell_call",
    "local_shell_call_output": "shell_output", "reasoning": "reasoning", "item_reference": "item_reference",
    "web_search_call": "hosted", "image_generation_call": "hosted", "tool_search_call": "hosted",
    "tool_search_output": "hosted",
}  # fmt: skip


def _item_kind(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else None
    return f"~{ITEMS[kind]}" if isinstance(kind, str) and kind in ITEMS else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("~message")]
    | Annotated[FunctionCallItem, Tag("~function_call")]
    | Annotated[CustomCallItem, Tag("~custom_call")]
    | Annotated[ShellCallItem, Tag("~shell_call")]
    | Annotated[CallOutput, Tag("~output")]
    | Annotated[ShellOutput, Tag("~shell_output")]
    | Annotated[ReasoningItem, Tag("~reasoning")]
    | Annotated[HostedCallItem, Tag("~hosted")]
    | Annotated[ItemReference, Tag("~item_reference")],
    discriminate(_item_kind, "a message, function_call, function_call_output or reasoning"),
]
Input = Annotated[
    Annotated[str, Tag("~str")] | Annotated[list[InputItem], MinLen(1), FIRST_ONLY, Tag("~list")],
    union("a string or a list of items"),
]
_ITEMS = TypeAdapter(list[InputItem])


def read_items(kept: Sequence[dict[str, Any]]) -> list[Any]:
    """Return items that were kept, or that an answer consists of, as items of an input."""
    return _ITEMS.validate_python(kept)


def keep_items(items: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield items of an input as objects that have ids."""
    return map(_keep, items)


def _keep(item: Any) -> dict[str, Any]:
    kept: dict[str, Any] = {**item.model_dump(exclude_none=True, exclude={"id", "status"}), **_head(item)}
    if isinstance(item, MessageItem):
        parts = [ContentPart(type="input_text", text=item.content)] if isinstance(item.content, str) else item.content
        kept["content"] = [_keep_part(part, item.role == "assistant") for part in parts]
    elif isinstance(item, CallOutput):
        kept["output"] = join(item.output)
    elif isinstance(item, ReasoningItem):
        content = [{"type": "reasoning_text", "text": part.text} for part in item.content or ()]
        kept |= {"summary": [], "content": content}
    elif isinstance(item, HostedCallItem):
        kept |= NO_RESULT.get(item.type, {})
    elif isinstance(item, ShellCallItem):
        kept["action"] |= {"type": "exec", "env": {}}
    return kept


def _head(item: Any) -> dict[str, Any]:
    number, status = getattr(item, "id", None), getattr(item, "status", None)
    if not isinstance(number, str) or not 0 < len(number) <= MAX_ID:
        number = f"{PREFIXES.get(item.type, 'item')}_{secrets.token_hex(16)}"
    return {"id": number, "status": status if status in ("in_progress", "incomplete") else "completed"}


def _keep_part(part: ContentPart, is_answer: bool) -> dict[str, Any]:
    if part.type == "refusal":
        return {"type": "refusal", "refusal": part.text}
    if is_answer:
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": part.text}


def as_messages(items: Iterable[Any], instructions: str | None) -> list[dict[str, Any]]:
    """Return messages; consecutive reasoning, text and calls of the assistant become one message."""
    out: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        if isinstance(item, HostedCallItem) or (isinstance(item, ReasoningItem) and not item.content):
            continue
        if isinstance(item, ShellOutput):
            out.append({"role": "tool", "tool_call_id": item.call_id or item.id, "content": item.output})
        elif isinstance(item, CallOutput):
            out.append({"role": "tool", "tool_call_id": item.call_id, "content": join(item.output)})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            out.append({"role": "user" if item.role == "user" else "system", "content": join(item.content)})
        else:
            if not (out and _continues(out[-1], item)):
                out.append({"role": "assistant"})
            _add_to_turn(out[-1], item)
    return [{"content": "", **message} for message in out]


def ends_open(items: Sequence[Any]) -> bool:
    """Return whether the last item may be the beginning of an answer: what was an answer as a whole says so."""
    last = items[-1]
    return isinstance(last, MessageItem) and last.status != "completed"


def _continues(message: dict[str, Any], item: Any) -> bool:
    """Return whether a message goes on with this item of the assistant: reasoning, then text, then calls."""
    if message["role"] != "assistant" or isinstance(item, ReasoningItem):
        return False
    return isinstance(item, CallItems) or not message.keys() & {"content", "tool_calls"}


def _add_to_turn(turn: dict[str, Any], item: Any) -> None:
    if isinstance(item, ReasoningItem):
        turn["reasoning_content"] = join(item.content or [])
    elif isinstance(item, MessageItem):
        turn["content"] = join(item.content)
    elif isinstance(item, CallItems):
        turn.setdefault("tool_calls", []).append(item.as_call())

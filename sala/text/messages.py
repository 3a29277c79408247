"""Conversations as they come from outside: checked before anything is made of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from sala.errors import InputError

Message = Mapping[str, Any]


def check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InputError(
            "messages",
            "must be a list with at least one message",
            'e.g. [{"role": "user", "content": "Hello"}]',
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"messages[{index}]", "has no role", 'use {"role": "user", "content": "..."}')
        tokens = message.get("token_ids")
        if tokens is not None and not (isinstance(tokens, list) and all(isinstance(item, int) for item in tokens)):
            raise InputError(f"messages[{index}].token_ids", "is no list of token ids", "leave it out")
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            raise InputError(f"messages[{index}].content", f"is of type {type(content).__name__}", "give text")


def check_tools(tools: object) -> None:
    if tools is None:
        return
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InputError("tools", "must be a list of objects", 'e.g. [{"type": "function", "function": {…}}]')

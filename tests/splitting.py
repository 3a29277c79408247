"""Whole answers through the splitters of `sala.text`."""

from collections.abc import Mapping, Sequence
from typing import Any

from sala.text.answer import Kind, ReasoningSplitter
from sala.text.tools import ToolCall, ToolSplitter


def split_reasoning(text: str, is_open: bool = False) -> tuple[str, str]:
    """A whole answer → (reasoning, content)."""
    parts: dict[Kind, str] = {"reasoning": "", "content": ""}
    splitter = ReasoningSplitter(is_open)
    for pieces in (splitter.push(text), splitter.flush()):
        for piece in pieces:
            parts[piece.kind] += piece.text
    return parts["reasoning"], parts["content"]


def parse_calls(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[ToolCall]]:
    """A whole answer → (text without the calls, calls)."""
    splitter = ToolSplitter(tools)
    content, calls = "", []
    for part in [*splitter.push(text), *splitter.flush()]:
        if isinstance(part, ToolCall):
            calls.append(part)
        else:
            content += part
    return (content.rstrip("\n") if calls else content), calls

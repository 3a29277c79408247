"""Whole answers through the splitters of `sala.text`."""

from collections.abc import Mapping, Sequence
from typing import Any

from sala.text.answer import ReasoningSplitter
from sala.text.tools import ToolCall, ToolSplitter


def split_reasoning(text: str, is_open: bool = False) -> tuple[str, str]:
    """A whole answer → (reasoning, content)."""
    splitter = ReasoningSplitter(is_open)
    deltas = [*splitter.push(text), *splitter.flush()]
    return "".join(delta.reasoning for delta in deltas), "".join(delta.text for delta in deltas)


def parse_calls(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[ToolCall]]:
    """A whole answer → (text without the calls, calls)."""
    splitter = ToolSplitter(tools)
    content, calls = "", []
    for part in [*splitter.push(text), *splitter.flush()]:
        if isinstance(part, ToolCall):
            calls.append(part)
        elif isinstance(part, str):
            content += part
    return (content.rstrip("\n") if calls else content), calls

"""Tool calls in the format of the released model: `<function name="f"><param name="p">v</param></function>`, or CDATA.

What is not a well-formed call stays text.
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<function", "</function>"
_CDATA = r"<!\[CDATA\[(?P<cdata>.*?)\]\]>"
_PARAM = re.compile(rf'\s*<param\s+name="(?P<name>[^"<>]*)"\s*>(?:\s*{_CDATA}\s*|(?P<plain>[^<]*))</param>', re.DOTALL)
_HEAD = re.compile(r'<function\s+name="(?P<name>[^"<>]+)"\s*>')
_MAX_CALL = 1 << 20
_KINDS: dict[Any, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,),
    "object": (dict,), "array": (list,), "null": (type(None),),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: dict[str, Any]


def parse_call(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ToolCall | None:
    """Parse one call, from `<function` to `</function>`. Return None if it is malformed."""
    head = _HEAD.match(text)
    if head is None or not text.endswith(CLOSE):
        return None
    types = _parameter_types(head["name"], tools)
    arguments: dict[str, Any] = {}
    at = head.end()
    while found := _PARAM.match(text, at):
        raw = found["plain"] if found["cdata"] is None else found["cdata"]
        arguments[found["name"]] = _typed(raw, types.get(found["name"]))
        at = found.end()
    if text[at : -len(CLOSE)].strip():
        return None
    return ToolCall(f"call_{secrets.token_hex(12)}", head["name"], arguments)


def _parameter_types(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            if not isinstance(properties, Mapping):
                return {}
            return {key: value.get("type") for key, value in properties.items() if isinstance(value, Mapping)}
    return {}


def _typed(raw: str, wanted: Any) -> Any:
    """Convert a parameter to the type in the tool's schema; what does not fit stays text."""
    kinds = [kind for kind in (wanted if isinstance(wanted, list) else [wanted]) if isinstance(kind, str)]
    if "string" in kinds or not any(kind in _KINDS for kind in kinds):
        return raw
    text = {"True": "true", "False": "false", "None": "null"}.get(raw.strip(), raw)
    try:
        value = json.loads(text, parse_constant=lambda name: name)
    except (ValueError, RecursionError):
        return raw
    is_fitting = any(type(value) in _KINDS.get(kind, ()) for kind in kinds)
    return value if is_fitting else raw


class ToolSplitter:
    """Splits a stream of text into text and calls, in order. A call is complete with its closing tag."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._tools = tools
        self._held = ""

    def push(self, text: str) -> Iterator[str | ToolCall]:
        self._held += text
        while self._held:
            at = self._held.find(OPEN)
            if at < 0:
                yield from self._text(len(self._held) - longest_overlap(self._held, OPEN))
                return
            yield from self._text(at)
            end = _find_close(self._held)
            if end < 0:
                if _may_be_call(self._held):
                    return
                yield from self._text(len(OPEN))
                continue
            call = parse_call(self._held[:end], self._tools)
            if call is None:
                yield from self._text(len(OPEN))
                continue
            self._held = self._held[end:]
            yield call

    def flush(self) -> Iterator[str]:
        yield from self._text(len(self._held))

    def _text(self, count: int) -> Iterator[str]:
        out, self._held = self._held[:count], self._held[count:]
        if out:
            yield out


def _find_close(text: str) -> int:
    """Return the end of the call at the beginning of `text`, or -1; a closing tag inside CDATA is data."""
    at = 0
    while True:
        close, cdata = text.find(CLOSE, at), text.find("<![CDATA[", at)
        if cdata < 0 or (0 <= close < cdata):
            return close + len(CLOSE) if close >= 0 else -1
        end = text.find("]]>", cdata)
        if end < 0:
            return -1
        at = end + 3


def _may_be_call(text: str) -> bool:
    """Return whether an unfinished `<function…` can still become a call."""
    if len(text) > _MAX_CALL:
        return False
    head = text.split(">", 1)[0] + ">" if ">" in text else None
    return (head is None and len(text) < 512) or (head is not None and _HEAD.match(head) is not None)


def longest_overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0

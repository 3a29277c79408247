"""Tools for chat templates that do not know them: described in the system message, called and answered as text.

Calls have the format that `text/tools.py` reads from answers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

Message = Mapping[str, Any]

_PROMPT = """You can call these functions, one JSON object per line:
<tools>
{tools}
</tools>
If you need one of them, answer with nothing but its call:
<function name="NAME"><param name="PARAMETER">VALUE</param></function>
Otherwise answer the user directly."""


def write_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[Message]:
    """Return the conversation without tools, calls and results of its own: all of them are text of its messages."""
    plain = list(_without_calls(messages))
    if not tools:
        return plain
    prompt = _PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0].get("role") == "system":
        text = plain[0].get("content")
        return [{**plain[0], "content": f"{text}\n\n{prompt}" if text else prompt}, *plain[1:]]
    return [{"role": "system", "content": prompt}, *plain]


def _without_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages with calls as text of the assistant, and results as a turn of the user."""
    for is_result, group in groupby(messages, lambda message: message.get("role") == "tool"):
        if is_result:
            results = (f"<tool_response>\n{message.get('content') or ''}\n</tool_response>" for message in group)
            yield {"role": "user", "content": "\n".join(results)}
            continue
        for message in group:
            calls = message.get("tool_calls")
            if not calls:
                yield message
                continue
            text = (message.get("content") or "") + "".join(_call(call.get("function", call)) for call in calls)
            yield {key: value for key, value in message.items() if key != "tool_calls"} | {"content": text}


def _call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {"": arguments}
    pairs = arguments.items() if isinstance(arguments, Mapping) else [("", arguments)]
    params = "".join(f'<param name="{name}">{_value(value)}</param>' for name, value in pairs)
    return f'<function name="{function.get("name")}">{params}</function>'


def _value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"<![CDATA[{text}]]>" if any(char in text for char in "<&\n") else text

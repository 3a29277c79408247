"""Tool calls and reasoning as vLLM's server parses them, with our reasoning parser and a tool parser by name.

Input: {"tool_parser": name, "answers": [text]}. Output: per answer [reasoning, content, calls] as a whole, and put
together from a stream of pieces of three characters.
"""

import json
import sys
from typing import Any

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


class Tokenizer:
    """All that the parsers ask of a tokenizer."""

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


def main() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    task = json.load(sys.stdin)
    kind: Any = ParserManager.get_parser(task["tool_parser"], "sala", enable_auto_tools=True, model_name="any")
    said = []
    for answer in task["answers"]:
        messages = [{"role": "user", "content": "?"}]
        request = ChatCompletionRequest(model="any", messages=messages, tools=[TOOL], tool_choice="auto")
        reasoning, content, calls = kind(Tokenizer(), request.tools).parse(answer, request, enable_auto_tools=True)
        whole = [reasoning, content, [[call.name, call.arguments] for call in calls or []]]
        said.append([whole, stream(kind(Tokenizer(), request.tools), answer, request)])
    print(json.dumps(said))


def stream(parser: Any, answer: str, request: Any) -> list[Any]:
    pieces = [answer[at : at + 3] for at in range(0, len(answer), 3)]
    reasoning, content, calls = "", "", dict[int, list[str]]()
    for index, piece in enumerate(pieces):
        is_last = index == len(pieces) - 1
        delta = parser.parse_delta(piece, list(map(ord, piece)), request, [1], finished=is_last)
        if delta is None:
            continue
        reasoning += delta.reasoning or ""
        content += delta.content or ""
        for call in delta.tool_calls or []:
            known = calls.setdefault(call.index, ["", ""])
            known[0] += call.function.name or ""
            known[1] += call.function.arguments or ""
    return [reasoning or None, content or None, list(calls.values())]


if __name__ == "__main__":
    main()

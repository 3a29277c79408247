"""The fields of a request that OpenAI documents for chats, completions and responses, with values to try.

Names and types are those of its interface; every value is our own. A test on demand compares the list with the document
(`tests/clients/test_openai_schema.py`).
"""

from dataclasses import dataclass, field
from typing import Any

HELLO = [{"role": "user", "content": "hello"}]
PARAMETERS = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
TOOLS = [{"type": "function", **FUNCTION}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"days": 3}'}}
HISTORY = [
    {"role": "developer", "content": [{"type": "text", "text": "be brief"}], "name": "us"},
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "me"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    {"role": "assistant", "content": None, "function_call": CALL["function"]},
    {"role": "function", "name": "get_weather", "content": "sunny"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    *HELLO,
]
ITEMS = [
    {"role": "developer", "content": "be brief"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"days": 3}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    {"type": "custom_tool_call", "call_id": "call_2", "name": "shout", "input": "hey"},
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "HEY"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So.", "annotations": []}]},
    {"role": "user", "content": "hello"},
]


@dataclass(frozen=True)
class Field:
    """Values that are accepted, and those that are refused with an error that names the field; `beside` goes along."""

    values: list[Any]
    refused: list[Any] = field(default_factory=list)
    beside: dict[str, Any] = field(default_factory=dict)


def named(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


UNUSED = {
    "prompt_cache_key": Field(["k", None]),
    "prompt_cache_options": Field([{"mode": "implicit"}]),
    "prompt_cache_retention": Field(["in_memory", "24h", None]),
    "safety_identifier": Field(["me", None]),
    "moderation": Field([{"model": "m"}, None]),
    "service_tier": Field(["auto", "default", "flex", "scale", "priority", "fast", None]),
}
SAMPLING = {"temperature": Field([0, 1, 2, None], [-1]), "top_p": Field([0, 0.5, 1, None], [1.5])}
OLDER = {
    **SAMPLING,
    "frequency_penalty": Field([-2, 0, 2.0, None], [2.5]),
    "presence_penalty": Field([-2, 0, 2.0, None], [-2.5]),
    "logit_bias": Field([{"97": 100, "98": -100}, {}, None], [{"a": 1}]),
    "max_tokens": Field([1, 5, None], [-1]),
    "model": Field(["tiny"], [7]),
    "n": Field([1, 3, 128, None], [0, 129], {"max_tokens": 1}),
    "seed": Field([0, 7, -1, None], [1.5]),
    "stop": Field(["e", ["e", "x"], None], [[""]]),
    "stream": Field([True, False, None], ["yes"]),
    "stream_options": Field(
        [{"include_usage": True}, {"include_usage": False, "include_obfuscation": False}, None],
        [{"include_usage": 1}],
        {"stream": True},
    ),
    "user": Field(["me"]),
}
CHAT = {
    **OLDER,
    **UNUSED,
    "audio": Field([None], [{"voice": "alloy", "format": "mp3"}]),
    "function_call": Field([None], ["auto", {"name": "get_weather"}]),
    "functions": Field([None], [[FUNCTION]]),
    "logprobs": Field([True, False, None], ["yes"]),
    "max_completion_tokens": Field([1, 5, None], [0]),
    "messages": Field(
        [HELLO, HISTORY],
        [
            [],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
            [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}],
        ],
    ),
    "metadata": Field([{"a": "b"}, None]),
    "modalities": Field([["text"], None], [["text", "audio"]]),
    "parallel_tool_calls": Field([True, False], ["no"], {"tools": CHAT_TOOLS}),
    "prediction": Field([None], [{"type": "content", "content": "hello"}]),
    "reasoning_effort": Field(["none", "minimal", "low", "medium", "high", "xhigh", "max", None], ["most"]),
    "response_format": Field(
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
            {"type": "json_schema", "json_schema": {"name": "a", "description": "An a.", "strict": None}},
        ],
        [{"type": "xml"}],
    ),
    "store": Field([True, False, None]),
    "tool_choice": Field(
        [
            "none",
            "auto",
            "required",
            *named("get_weather"),
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named("get_weather")}},
        ],
        ["always", *named("other"), {"type": "custom", "custom": {"name": "get_weather"}}],
        {"tools": CHAT_TOOLS},
    ),
    "tools": Field([CHAT_TOOLS, [], None], [[{"type": "custom", "custom": {"name": "shout"}}]]),
    "top_logprobs": Field([0, 20], [21], {"logprobs": True}),
    "verbosity": Field(["low", "medium", "high", None]),
    "web_search_options": Field([None], [{}]),
}
COMPLETIONS = {
    **OLDER,
    "best_of": Field([1, None], [2]),
    "echo": Field([True, False, None], ["yes"]),
    "logprobs": Field([0, 5, None], [6]),
    "prompt": Field(["hello", ["hello", "you"], [104, 105], [[104], [105, 106]]], [[], {}]),
    "suffix": Field([None], ["the end"]),
}
RESPONSES = {
    **SAMPLING,
    **UNUSED,
    "background": Field([True, False, None], ["yes"]),
    "context_management": Field([[{"type": "compaction", "compact_threshold": 1000}], None]),
    "conversation": Field([None], ["conv_1", {"id": "conv_1"}]),
    "include": Field(
        [
            [
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "message.input_image.image_url",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
                "reasoning.encrypted_content",
                "message.output_text.logprobs",
            ],
            None,
        ],
        ["all"],
    ),
    "input": Field(
        ["hello", ITEMS],
        [[], [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}], [{"type": "mcp_call"}]],
    ),
    "instructions": Field(["be brief", None], [7]),
    "max_output_tokens": Field([1, 5, None], [0]),
    "max_tool_calls": Field([3, None]),
    "metadata": Field([{"a": "b"}, {}, None], [{"a": 1}]),
    "model": Field(["tiny"], [7]),
    "parallel_tool_calls": Field([True, False], ["no"], {"tools": TOOLS}),
    "previous_response_id": Field([None], ["resp_1"]),
    "prompt": Field([None], [{"id": "pmpt_1"}]),
    "reasoning": Field(
        [{"effort": effort} for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max", None)]
        + [{"effort": "low", "summary": summary} for summary in ("auto", "concise", "detailed")],
        [{"effort": "most"}],
    ),
    "store": Field([True, False, None], ["yes"]),
    "stream": Field([True, False, None], ["yes"]),
    "stream_options": Field([{"include_obfuscation": False}, None], [], {"stream": True}),
    "text": Field(
        [
            {"format": {"type": "text"}, "verbosity": "low"},
            {"format": {"type": "json_object"}},
            {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}},
        ],
        [{"format": {"type": "xml"}}],
    ),
    "tool_choice": Field(
        [
            "none",
            "auto",
            "required",
            {"type": "function", "name": "get_weather"},
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]},
        ],
        ["always", {"type": "function", "name": "other"}, {"type": "file_search"}],
        {"tools": TOOLS},
    ),
    "tools": Field(
        [
            TOOLS,
            [{"type": "custom", "name": "shout"}, {"type": "local_shell"}],
            [*TOOLS, {"type": "web_search"}, {"type": "image_generation"}],
        ],
        [[{"type": "file_search", "vector_store_ids": ["vs"]}], [{"type": "web_search"}]],
    ),
    "top_logprobs": Field([0, 20, None], [21]),
    "truncation": Field(["auto", "disabled", None], ["some"]),
    "user": Field(["me"]),
}
FIELDS: dict[str, dict[str, Field]] = {
    "/chat/completions": CHAT, "/completions": COMPLETIONS, "/responses": RESPONSES
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/completions": {"prompt": "hello", "max_tokens": 2},
    "/responses": {"input": "hello", "max_output_tokens": 2},
}

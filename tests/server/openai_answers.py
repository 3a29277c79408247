"""One answer of every kind that OpenAI's interface has, from a real server with a tiny model."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx2

from tests.server.conftest import END, Puppet, Server, start

Kind = Literal["answer", "chunk", "error"]
CALL = '<function name="get_weather"><param name="days">3</param></function>'
PARAMETERS = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["days"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather of days to come.", "parameters": PARAMETERS}
HELLO = [{"role": "user", "content": "hello"}]
HISTORY = [
    {"type": "message", "role": "user", "content": "hello"},
    {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"days": 3}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
]
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Ask:
    """A request. The model says `says`, or fails, or babbles."""

    name: str
    path: str
    body: Any = None
    says: str | None = None
    fails: bool = False
    method: str = "post"
    status: int = 200


@dataclass(frozen=True)
class Answer:
    """What came back: one body, or the chunks of a stream. An error may end a stream."""

    ask: Ask
    bodies: list[Any]
    kinds: list[Kind]

    def __iter__(self) -> Iterator[tuple[Kind, Any]]:
        return zip(self.kinds, self.bodies, strict=True)


CHATS: dict[str, tuple[dict[str, Any], str | None]] = {
    "cut": ({}, None),
    "whole": ({"max_tokens": 100}, "über 😀"),
    "several": ({"n": 2}, None),
    "logprobs": ({"logprobs": True, "top_logprobs": 3}, None),
    "reasoning": ({"max_tokens": 100}, "<think>\nhmm\n</think>\n\nYes."),
    "late_reasoning": ({"max_tokens": 100}, "hmm</think>Yes."),
    "repeated": ({"max_tokens": 200}, "la " * 60),
    "calls": ({"tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 400}, f"So.\n{CALL}\n{CALL}"),
    "enforced_call": (
        {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required", "max_tokens": 200},
        None,
    ),
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, "max_tokens": 100},
        None,
    ),
}
TEXTS: dict[str, dict[str, Any]] = {
    "cut": {},
    "several": {"prompt": ["hello", "you"], "n": 2},
    "logprobs": {"logprobs": 2},
    "echo": {"echo": True},
    "echo_logprobs": {"echo": True, "logprobs": 2},
    "scored": {"echo": True, "logprobs": 2, "max_tokens": 0},
    "forbidden": {"logprobs": 1, "logit_bias": {"97": -100}},
}
RESPONSES: dict[str, tuple[dict[str, Any], str | None]] = {
    "cut": ({"metadata": {"a": "b"}, "instructions": "be brief"}, None),
    "whole": ({"max_output_tokens": 100}, "über 😀"),
    "reasoning": ({"max_output_tokens": 100, "reasoning": {"effort": "high"}}, "<think>\nhmm\n</think>\n\nYes."),
    "calls": ({"tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 400}, f"So.\n{CALL}\n{CALL}"),
    "enforced_call": (
        {
            "tools": [{"type": "function", **FUNCTION, "strict": True}],
            "tool_choice": {"type": "function", "name": "get_weather"},
            "max_output_tokens": 200,
        },
        None,
    ),
    "bare_tool": ({"tools": [{"type": "function", "name": "go"}]}, None),
    "json_schema": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}, "max_output_tokens": 100},
        None,
    ),
    "json_object": ({"text": {"format": {"type": "json_object"}}}, None),
    "items": ({"input": HISTORY}, None),
}
ERRORS = (
    Ask("no_such_model", "/chat/completions", {"messages": HELLO, "model": "none"}, status=404),
    Ask("bad_field", "/chat/completions", {"messages": HELLO, "temperature": -1}, status=400),
    Ask("unknown_field", "/completions", {"prompt": "a", "colour": "red"}, status=400),
    Ask("no_input", "/responses", {}, status=400),
    Ask("no_object", "/responses", [], status=400),
    Ask("too_long", "/completions", {"prompt": "a" * 4000}, status=400),
    Ask("failure", "/chat/completions", {"messages": HELLO}, fails=True, status=500),
    Ask("failure_in_a_chat", "/chat/completions", {"messages": HELLO, "stream": True}, fails=True),
    Ask("failure_in_a_completion", "/completions", {"prompt": "hello", "stream": True}, fails=True),
    Ask("failure_in_a_response", "/responses", {"input": "hello", "stream": True}, fails=True),
    Ask("nowhere", "/nothing", method="get", status=404),
    Ask("no_such_method", "/completions", method="get", status=405),
    Ask("not_a_model", "/models/none", method="get", status=404),
    Ask("delete_nothing", "/models/none", method="delete", status=404),
)
MODELS = (
    Ask("models", "/models", method="get"),
    Ask("model", "/models/tiny", method="get"),
    Ask("deleted", "/models/spare", method="delete"),
)


def _asks() -> Iterator[Ask]:
    for name, (fields, says) in CHATS.items():
        body = {"messages": HELLO, "max_tokens": 12, "seed": 1, **fields}
        yield Ask(f"chat-{name}", "/chat/completions", body, says)
        yield Ask(f"chat-{name}-stream", "/chat/completions", {**body, **WITH_USAGE}, says)
    yield Ask("chat-bare-stream", "/chat/completions", {"messages": HELLO, "max_tokens": 4, "stream": True})
    told = {"messages": HELLO, "max_tokens": 4, "stream": True, "return_progress": True}
    yield Ask("chat-progress-stream", "/chat/completions", told)
    for name, fields in TEXTS.items():
        body = {"prompt": "hello", "max_tokens": 12, "seed": 1, **fields}
        yield Ask(f"text-{name}", "/completions", body)
        yield Ask(f"text-{name}-stream", "/completions", {**body, **WITH_USAGE})
    yield Ask("text-whole", "/completions", {"prompt": "hello", "max_tokens": 100}, "the end")
    for name, (fields, says) in RESPONSES.items():
        body = {"input": "hello", "max_output_tokens": 12, "temperature": 0, **fields}
        yield Ask(f"response-{name}", "/responses", body, says)
        yield Ask(f"response-{name}-stream", "/responses", {**body, "stream": True}, says)


ASKS = {ask.name: ask for ask in (*_asks(), *MODELS, *ERRORS)}


def collect(tiny: Path, room: Path) -> dict[str, Answer]:
    """All of them, by their names."""
    shutil.copytree(tiny, room / "spare")
    server = start(tiny, room, loop_guard=64)
    puppet = Puppet(server.llm.engine._executor)
    server.llm.engine._executor = puppet
    try:
        return {name: _ask(server, puppet, ask) for name, ask in ASKS.items()}
    finally:
        server.stop()


def fill(kind: Kind, body: Any) -> Any:
    """A completion without the nulls that OpenAI's service sends and neither its document nor its package allows.

    Chunks before the last have no reason to end and no usage yet; nothing is known about the first token of an echo.
    """
    if body.get("object") != "text_completion":
        return body
    choices = [{**choice, "logprobs": _fill_first(choice["logprobs"])} for choice in body["choices"]]
    if kind == "chunk":
        choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in choices]
        body = {name: value for name, value in body.items() if name != "usage" or value is not None}
    return {**body, "choices": choices}


def _fill_first(logprobs: Any) -> Any:
    if not logprobs or not logprobs["tokens"] or logprobs["token_logprobs"][0] is not None:
        return logprobs
    assert logprobs["top_logprobs"][0] is None
    logprobs = {name: [*values] for name, values in logprobs.items()}
    logprobs["token_logprobs"][0], logprobs["top_logprobs"][0] = 0.0, {}
    return logprobs


def _ask(server: Server, puppet: Puppet, ask: Ask) -> Answer:
    puppet.script = None if ask.says is None else [*ask.says.encode(), END]
    puppet.error = RuntimeError("it breaks") if ask.fails else None
    with server.client(verify=False) as client:  # quick to make: it reads no certificates
        response = client.request(ask.method, f"/v1{ask.path}", **({} if ask.body is None else {"json": ask.body}))
    assert response.status_code == ask.status, (ask.name, response.text)
    server.wait_idle(10)
    return _read(ask, response)


def _read(ask: Ask, response: httpx2.Response) -> Answer:
    if response.headers["content-type"].startswith("text/event-stream"):
        blocks = [line for line in response.text.splitlines() if line.startswith("data: ")]
        chunks = [json.loads(line.removeprefix("data: ")) for line in blocks if line != "data: [DONE]"]
        return Answer(ask, chunks, ["error" if "error" in chunk else "chunk" for chunk in chunks])
    return Answer(ask, [response.json()], ["answer" if response.status_code == 200 else "error"])

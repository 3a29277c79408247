"""The requests of the load, and what is compared of their answers."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
WORDS = ["the", "river", "house", "green", "light", "under", "seven", "small", "stones", "garden", "paper", "window"]
TEXTS = {
    "arguments", "content", "delta", "finish_reason", "name", "partial_json", "reasoning", "reasoning_content",
    "stop_reason", "text", "thinking",
}  # fmt: skip
COUNTS = {"completion_tokens", "output_tokens"}
PLACE = {
    "type": "object",
    "properties": {"km": {"type": "integer", "minimum": 0, "maximum": 99}, "where": {"enum": ["here", "there"]}},
    "required": ["km", "where"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "go", "parameters": PLACE}}
CODE = {"type": "object", "properties": {"code": {"type": "string", "pattern": "^[a-f]{3}-[0-9]{2}$"}}}
GREEDY, SEEDED = {"temperature": 0}, {"temperature": 1.0, "seed": 7}


@dataclass(frozen=True)
class Case:
    """A request whose answer is known. `kind` is what it is counted as."""

    name: str
    kind: str
    path: str
    body: dict[str, Any] = field(hash=False)

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))


def words(count: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def make_cases() -> list[Case]:
    """Return requests of every kind, each with a greedy and a seeded one, in streams and without."""
    cases: list[Case] = []

    def add(kind: str, path: str, **body: Any) -> None:
        for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED)):
            values = {
                key: value for key, value in sampling.items() if path not in (RESPONSES, MESSAGES) or key != "seed"
            }
            if len(values) == len(sampling):
                cases.append(Case(f"{len(cases)} {kind} {name}", kind, path, {**body, **values}))

    for number in range(4):
        text = words(6 + 20 * number, number)
        add("stream", CHAT, messages=user(text), max_tokens=12 + 12 * number, stream=True)
        add("chat", CHAT, messages=user(text[::-1]), max_tokens=8 + 8 * number)
    document = words(500, 99)
    for number in range(3):  # they begin alike, so that they share what is cached, on the device and on the disk
        question = f"{document[: 1200 * (number + 1)]} {words(8, number)}?"
        add("long prefill", CHAT, messages=user(question), max_tokens=8, stream=number == 1)
    add("several answers", COMPLETIONS, prompt=[words(9, 5), words(70, 6)], n=2, max_tokens=12)
    add("tool", CHAT, messages=user("how far is it?"), tools=[TOOL], tool_choice="required", max_tokens=60)
    add("tool", CHAT, messages=user("where?"), tools=[TOOL], tool_choice="required", max_tokens=60, stream=True)
    for name, schema in (("place", PLACE), ("code", CODE)):
        shape = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
        add("schema", CHAT, messages=user(f"a {name}"), response_format=shape, max_tokens=60)
    add("responses", RESPONSES, input=words(30, 8), max_output_tokens=12, stream=True, store=False)
    add("messages", MESSAGES, messages=user(words(30, 9)), max_tokens=12, stream=True)
    return cases


DEEP = "[" * 200 + "]" * 200
BAD: list[tuple[str, bytes]] = [
    (CHAT, b"{"),
    (CHAT, b"\xff\xfe{}"),
    (CHAT, b'{"messages": []}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "no_such_field": 1}'),
    (CHAT, json.dumps({"messages": user("x" * 30_000)}).encode()),
    (COMPLETIONS, b'{"prompt": [1, 99999999]}'),
    (COMPLETIONS, b'{"prompt": "x", "n": 100000}'),
    (RESPONSES, b'{"input": 5}'),
    (MESSAGES, b'{"messages": ' + DEEP.encode() + b"}"),
    (CHAT, json.dumps({"messages": user("x"), "tools": [{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"a": {"type": "string", "pattern": "(" * 50}}}}}],
        "tool_choice": "required"}).encode()),
    (CHAT, json.dumps({"messages": user("x"), "response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"$ref": "#"}}}}).encode()),
    (CHAT, json.dumps({"messages": [{"role": "tool", "content": [{"type": "image_url"}]}]}).encode()),
    ("/v1/models/download", b'{"repo_id": "../../etc"}'),
    ("/v1/models/load", b'{"model": "no-such-model"}'),
]  # fmt: skip


def read(is_stream: bool, text: str) -> list[Any]:
    """Return the JSON documents of an answer; the last one of a chat's stream is `[DONE]`."""
    if not is_stream:
        return [json.loads(text)]
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def reduce(documents: list[Any]) -> dict[str, Any]:
    """Return what must not depend on the load: texts by place, whatever their pieces, and numbers of tokens."""
    found: dict[str, Any] = {}
    for document in documents:
        _walk(document, "", found)
    found["end"] = documents[-1] if documents[-1:] == ["[DONE]"] else ""
    return found


def _walk(value: Any, place: str, found: dict[str, Any]) -> None:
    if isinstance(value, list):
        for item in value:
            _walk(item, place, found)
    elif isinstance(value, dict):
        place = f"{place}/{value['index']}" if isinstance(value.get("index"), int) else place
        for key, item in value.items():
            if key in TEXTS and isinstance(item, str):
                found[f"{place}.{key}"] = found.get(f"{place}.{key}", "") + item
            elif key in COUNTS:
                found[f"{place}.{key}"] = item
            elif key != "logprobs":
                _walk(item, place, found)

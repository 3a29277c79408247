"""The openai package on the server: conversations of several turns, whose answers are sent back as they came."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

from tests.server.conftest import Server

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
FUNCTION = {
    "name": "book",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"code": {"type": "string", "pattern": "^[A-Z]{3}$"}, "kind": {"const": "flight"}},
        "required": ["code", "kind"],
        "additionalProperties": False,
    },
}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]


class Answer(BaseModel):
    is_capital: bool


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_turns(client: OpenAI) -> None:
    options: Any = {"model": "tiny", "max_tokens": 40, "temperature": 0}
    messages = [*HELLO, client.chat.completions.create(messages=HELLO, **options).choices[0].message, *HELLO]
    parsed = client.chat.completions.parse(messages=messages, response_format=Answer, **options).choices[0].message
    assert isinstance(parsed.parsed, Answer)
    messages += [parsed, *HELLO]
    assert client.chat.completions.create(messages=messages, **options).choices[0].message.content


def test_turns_with_tools(client: OpenAI) -> None:
    options: Any = {"model": "tiny", "max_tokens": 200, "tools": TOOLS, "parallel_tool_calls": False, "seed": 2}
    with client.chat.completions.stream(messages=HELLO, tool_choice="required", **options) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    call = choice.message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    assert arguments["kind"] == "flight"
    assert len(arguments["code"]) == 3
    messages = [*HELLO, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    assert client.chat.completions.create(messages=messages, **options).choices[0].finish_reason


def test_a_turn_after_a_cut_call(client: OpenAI, say: Callable[[str], None]) -> None:
    say('<function name="book"><param name="code">ABC</param>')
    options: Any = {"model": "tiny", "max_tokens": 43, "tools": TOOLS}
    choice = client.chat.completions.create(messages=HELLO, **options).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    assert choice.message.tool_calls is not None
    call: Any = choice.message.tool_calls[0]
    assert call.function.arguments == '{"code": "AB'
    messages = [*HELLO, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "it was cut"}]
    assert client.chat.completions.create(messages=messages, **options).choices[0].finish_reason
    answer = client.responses.create(
        model="tiny", input="hello", max_output_tokens=43, tools=[{"type": "function", **FUNCTION}]
    )
    item: Any = answer.output[0]
    assert (answer.status, item.type, item.status) == ("incomplete", "function_call", "incomplete")
    result: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "it was cut"}
    again: Any = [{"role": "user", "content": "hello"}, item, result]
    assert client.responses.create(model="tiny", input=again, max_output_tokens=4).output_text


def test_a_prompt_that_is_too_long(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="This model's maximum context length is 2048 tokens") as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 3000}])
    assert caught.value.code == "context_length_exceeded"

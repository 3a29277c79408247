"""Answers that are cut in a tool call or repeat one; in all three APIs, whole and streamed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Server, join_calls, read_events

HELLO = [{"role": "user", "content": "hello"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
CITY, DAYS = '<param name="city">', '<param name="days">'
CALL = f'<function name="weather">{CITY}Rome</param>{DAYS}3</param></function>'
OTHER = CALL.replace("Rome", "Oslo")
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
FORMAT = {"type": "json_schema", "json_schema": {"schema": PARAMETERS}}
CUTS = {
    "<func": None,
    '<function name="wea': None,
    '<function name="weather">': "{",
    f'<function name="weather">{CITY}Ro': '{"city": "Ro',
    f'<function name="weather">{CITY}<![CDATA[a<b]]': '{"city": "a<b',
    f'<function name="weather">{CITY}Rome</param><par': '{"city": "Rome"',
    f'<function name="weather">{CITY}Rome</param>{DAYS}1': '{"city": "Rome", "days": 1',
    CALL[:-5]: '{"city": "Rome", "days": 3',
}


def chat(server: Server, **fields: Any) -> tuple[Any, list[tuple[str, str]], str]:
    """Return content, calls and finish reason, after a check that the stream gives the same."""
    body = {"messages": HELLO, "tools": TOOLS, "temperature": 0, **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in choice["message"].get("tool_calls", ())]
    events = read_events(server.post("/v1/chat/completions", {**body, "stream": True}).text)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    sent = [one["function"] for one in join_calls(events)]
    assert [(one["name"], one["arguments"]) for one in sent] == calls
    assert "".join(delta.get("content") or "" for delta in deltas) == (choice["message"]["content"] or "")
    assert events[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
    return choice["message"]["content"], calls, choice["finish_reason"]


def stream_named(server: Server, path: str, body: Any) -> list[Any]:
    text = server.post(path, body).text
    return read_events("\n\n".join(one[one.index("data: ") :] for one in text.split("\n\n") if "data: " in one))


@pytest.mark.parametrize("text", CUTS)
def test_a_call_that_is_cut_is_no_text(server: Server, say: Callable[[str], None], text: str) -> None:
    say(f"Look:\n{text} and so on")
    arguments = CUTS[text]
    calls = [] if arguments is None else [("weather", arguments)]
    length = len(f"Look:\n{text}")
    assert chat(server, max_tokens=length) == ("Look:" if calls else "Look:\n", calls, "length")
    say(f"{CALL}\n{text} and so on")
    length = len(f"{CALL}\n{text}")
    whole = [("weather", '{"city": "Rome", "days": 3}')]
    assert chat(server, max_tokens=length) == (None, [*whole, *calls], "length")
    assert chat(server, max_tokens=length, parallel_tool_calls=False) == (None, whole, "length")


def test_arguments_arrive_while_they_are_written(server: Server, say: Callable[[str], None]) -> None:
    """In all APIs; together they are the arguments of the whole answer."""
    text = 'First\nsecond < third "quoted" \\ é🙂 ' * 4
    say(f'<function name="weather">{CITY}<![CDATA[{text}]]></param>{DAYS}12</param></function>')
    wanted = json.dumps({"city": text, "days": 12}, ensure_ascii=False)
    assert chat(server, max_tokens=400) == (None, [("weather", wanted)], "tool_calls")
    more = {"max_tokens": 400, "stream": True}
    chunks = read_events(server.post("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS, **more}).text)
    assert sum("tool_calls" in one["choices"][0]["delta"] for one in chunks[:-1]) > len(text) // 2

    body = {"input": "hello", "tools": [{"type": "function", "name": "weather", "parameters": PARAMETERS}]}
    events = stream_named(server, "/v1/responses", {**body, "max_output_tokens": 400, "stream": True})
    deltas = [one["delta"] for one in events if one["type"] == "response.function_call_arguments.delta"]
    done = next(one for one in events if one["type"] == "response.function_call_arguments.done")
    assert "".join(deltas) == done["arguments"] == events[-1]["response"]["output"][0]["arguments"] == wanted
    assert len(deltas) > len(text) // 2

    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    events = stream_named(server, "/v1/messages", {"messages": HELLO, "tools": tools, **more})
    given = [one["delta"] for one in events if one["type"] == "content_block_delta"]
    assert "".join(one["partial_json"] for one in given) == wanted
    assert len(given) > len(text) // 2


@pytest.mark.parametrize("begun", [f"{CITY}Ro", f"{CITY}Rome</par", f"{CITY}Rome</param>{DAYS}3"])
def test_a_call_that_the_model_breaks_off(server: Server, say: Callable[[str], None], begun: str) -> None:
    """It must not be run, as if the answer had been cut."""
    say(f'Look:\n<function name="weather">{begun}')
    wanted = '{"city": "Rome", "days": 3' if DAYS in begun else '{"city": "Rome' if "Rome" in begun else '{"city": "Ro'
    assert chat(server, max_tokens=200) == ("Look:", [("weather", wanted)], "length")
    body = {"input": "hello", "tools": [{"type": "function", **TOOLS[0]["function"]}], "max_output_tokens": 200}
    answer = server.post("/v1/responses", body).json()
    assert (answer["status"], answer["output"][-1]["status"]) == ("incomplete", "incomplete")


def test_a_stop_string_in_a_call(server: Server, say: Callable[[str], None]) -> None:
    say(CALL)
    assert chat(server, max_tokens=200, stop="me<") == (None, [("weather", '{"city": "Ro')], "stop")


def test_without_tools_a_cut_call_is_text(server: Server, say: Callable[[str], None]) -> None:
    say(CALL)
    assert chat(server, max_tokens=30, tools=None) == (CALL[:30], [], "length")


@pytest.mark.parametrize("length", [9, 30, 60])
def test_a_forced_call_never_leaks(server: Server, length: int) -> None:
    for seed in range(3):
        fields = {"tool_choice": "required", "max_tokens": length, "seed": seed, "temperature": 1.5}
        content, calls, reason = chat(server, **fields)
        assert not (content or "").strip()
        assert reason == "length" or [json.loads(arguments) for _, arguments in calls]


def test_a_cut_call_in_responses(server: Server, say: Callable[[str], None]) -> None:
    say(CALL)
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS}
    body = {"input": "hello", "tools": [tool], "max_output_tokens": 48}
    answer = server.post("/v1/responses", body).json()
    assert answer["status"] == "incomplete"
    assert [(one["type"], one["status"]) for one in answer["output"]] == [("function_call", "incomplete")]
    assert answer["output"][0]["arguments"] == '{"city": "Rome'
    events = read_events(server.post("/v1/responses", {**body, "stream": True}).text.replace("event: ", "\n\nevent: "))
    assert not [event for event in events if "output_text" in event["type"]]
    history = [{"role": "user", "content": "hello"}, *answer["output"]]
    history.append({"type": "function_call_output", "call_id": answer["output"][0]["call_id"], "output": "cut"})
    assert server.post("/v1/responses", {**body, "input": history}).status_code == 200


def test_a_cut_call_in_messages(server: Server, say: Callable[[str], None]) -> None:
    text = CALL[: CALL.index("3</param>") + 1]
    say(text + "000")
    tool = {"name": "weather", "input_schema": PARAMETERS}
    body = {"messages": HELLO, "tools": [tool], "max_tokens": len(text), "tool_choice": {"type": "auto"}}
    answer = server.post("/v1/messages", body).json()
    assert answer["stop_reason"] == "max_tokens"
    assert [(block["type"], block["input"]) for block in answer["content"]] == [("tool_use", {"city": "Rome"})]
    assert "text_delta" not in server.post("/v1/messages", {**body, "stream": True}).text


def test_forced_calls_end_with_a_repetition(server: Server, say: Callable[[str], None]) -> None:
    rome, oslo = ("weather", '{"city": "Rome", "days": 3}'), ("weather", '{"city": "Oslo", "days": 3}')
    for calls, wanted in (([CALL, CALL, OTHER], [rome]), ([CALL, OTHER, CALL, CALL], [rome, oslo])):
        say("\n".join([*calls, '<function name="wea']))
        assert chat(server, max_tokens=400, tool_choice="required") == (None, wanted, "tool_calls")
    say(f"{CALL}\n{CALL}")
    assert chat(server, max_tokens=400) == (None, [rome, rome], "tool_calls")
    tool = {"name": "weather", "input_schema": PARAMETERS}
    body = {"messages": HELLO, "tools": [tool], "max_tokens": 400, "tool_choice": {"type": "any"}}
    answer = server.post("/v1/messages", body).json()
    assert (answer["stop_reason"], len(answer["content"])) == ("tool_use", 1)


@pytest.mark.parametrize("wanted", [{"tools": TOOLS, "tool_choice": "required"}, {"response_format": FORMAT}])
def test_the_models_penalty_does_not_count_in_enforced_answers(
    make_server: Callable[..., Server], tiny: Path, tmp_path: Path, wanted: Any
) -> None:
    """It would punish the tags and quotes that end a string. One that the request asks for counts."""
    shutil.copytree(tiny, tmp_path / "punished")
    (tmp_path / "punished" / "generation_config.json").write_text('{"repetition_penalty": 5.0, "eos_token_id": 259}')
    server = make_server(tmp_path / "punished")

    def greedy(**fields: Any) -> Any:
        body = {"messages": HELLO, "temperature": 0, "max_tokens": 120, **fields}
        message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        return message["content"], [call["function"] for call in message.get("tool_calls", ())]

    assert greedy(**wanted) == greedy(**wanted, repetition_penalty=1) != greedy(**wanted, repetition_penalty=5)
    assert greedy() == greedy(repetition_penalty=5) != greedy(repetition_penalty=1)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(server: Server, mode: str) -> None:
    others = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("rain", "sun")]
    names = [{"type": "function", "function": {"name": "weather"}}, {"type": "function", "function": {"name": "sun"}}]
    chosen = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
    body = {"messages": HELLO, "tools": [*TOOLS, *others], "tool_choice": chosen, "max_tokens": 150}
    offered = {"messages": HELLO, "tools": [TOOLS[0], others[1]]}
    counts = [server.post("/v1/chat/completions/input_tokens", one).json()["input_tokens"] for one in (body, offered)]
    assert counts[0] == counts[1]
    for seed in range(4):
        answer = server.post("/v1/chat/completions", {**body, "temperature": 3.0, "seed": seed}).json()["choices"][0]
        called = {call["function"]["name"] for call in answer["message"].get("tool_calls", ())}
        assert called <= {"weather", "sun"}
        assert called or mode == "auto" or answer["finish_reason"] == "length"
    names.append({"type": "function", "function": {"name": "snow"}})
    assert server.post("/v1/chat/completions", body).json()["error"]["param"] == "tool_choice"


def test_allowed_tools_of_responses(server: Server) -> None:
    tools = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in ("weather", "rain")]
    chosen = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "rain"}]}
    body = {"input": "hello", "tools": tools, "tool_choice": chosen, "max_output_tokens": 60}
    answer = server.post("/v1/responses", body).json()
    assert answer["tool_choice"] == chosen
    assert {item["name"] for item in answer["output"]} == {"rain"}


@pytest.mark.parametrize("is_strict", [True, False])
def test_strict_calls_where_the_model_decides(server: Server, is_strict: bool) -> None:
    """The answer begins with an opening tag: its arguments follow the schema of a strict tool."""
    schema = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"]}
    function = {"name": "count", "strict": is_strict, "parameters": schema}
    begun = [*HELLO, {"role": "assistant", "content": 'Yes: <function name="count">'}]
    more = {"temperature": 0, "max_tokens": 40}
    chat_body = {"messages": begun, "tools": [{"type": "function", "function": function}], **more}
    text = server.post("/v1/chat/completions", chat_body).json()["choices"][0]["message"]["content"]
    assert text.startswith('<param name="n">7</param></function>') == is_strict
    tool = {"name": "count", "strict": is_strict, "input_schema": schema}
    content = server.post("/v1/messages", {"messages": begun, "tools": [tool], **more}).json()["content"]
    assert content[0]["text"] == text
    body = {"input": begun, "continue_final_message": True, "temperature": 0, "max_output_tokens": 40}
    answer = server.post("/v1/responses", {**body, "tools": [{"type": "function", **function}]}).json()
    assert answer["output"][0]["content"][0]["text"] == text
    assert answer["tools"][0]["strict"] == is_strict
    counts = [
        server.post("/v1/chat/completions/input_tokens", {**chat_body, "tools": tools}).json()
        for tools in (chat_body["tools"], [{"type": "function", "function": {"name": "count", "parameters": schema}}])
    ]
    assert counts[0] == counts[1], "the flag is not shown to the model"

"""Anthropic's Messages over HTTP: blocks in, blocks out, whole and as events, errors in their envelope."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sala.server.api import anthropic
from sala.server.app import create_app
from sala.server.settings import Settings
from tests.server.conftest import END, Puppet, Server, wait_for
from tests.server.live import Answer, read_answer, request, serving

URL = "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
BASE: dict[str, Any] = {"messages": HELLO, "max_tokens": 12, "temperature": 0}
WEATHER = {
    "name": "get_weather",
    "description": "Tells it.",
    "input_schema": {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}, "unit": {"enum": ["c", "f"]}},
        "required": ["days", "unit"],
    },
    "cache_control": {"type": "ephemeral"},
}
USE = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {}}
CALL = '<function name="get_weather"><param name="days">3</param><param name="unit">c</param></function>'


def ask(server: Server, **fields: Any) -> Any:
    response = server.post(URL, {**BASE, **fields}, headers={"anthropic-version": "2023-06-01"})
    assert response.status_code == 200, response.text
    return response.json()


def read(text: str) -> list[Any]:
    blocks = [block.split("\n") for block in text.split("\n\n") if block]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in events]
    return events


def stream(server: Server, **fields: Any) -> list[Any]:
    response = server.post(URL, {**BASE, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return read(response.text)


def error_of(response: Any, status: int, kind: str) -> Any:
    assert response.status_code == status, response.text
    answer = response.json()
    assert (answer["type"], answer["error"]["type"]) == ("error", kind)
    return answer["error"]


def refused(server: Server, **fields: Any) -> str:
    return str(error_of(server.post(URL, {**BASE, **fields}), 400, "invalid_request_error")["message"])


def build(events: list[Any]) -> Any:
    """The message that a client puts together from its events."""
    message: Any = None
    raw: dict[int, str] = {}
    for event in events:
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            elif delta["type"] == "thinking_delta":
                block["thinking"] += delta["thinking"]
            else:
                raw[event["index"]] = raw.get(event["index"], "") + delta["partial_json"]
        elif event["type"] == "content_block_stop" and event["index"] in raw:
            message["content"][event["index"]]["input"] = json.loads(raw[event["index"]])
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    return message


def nameless(message: Any) -> Any:
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {**{k: v for k, v in message.items() if k not in ("id", "usage")}, "content": content}


def test_shape_of_an_answer(server: Server) -> None:
    answer = ask(server)
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    assert answer["content"][0]["type"] == "text"
    assert len(answer["content"][0]["text"]) == 12
    first, second = answer["usage"], ask(server)["usage"]
    assert first["output_tokens"] == 12
    assert second["cache_read_input_tokens"] > 0
    total = first["input_tokens"] + first["cache_read_input_tokens"]
    assert total == second["input_tokens"] + second["cache_read_input_tokens"]
    assert server.post(f"{URL}/count_tokens", {"messages": HELLO}).json() == {"input_tokens": total}


def test_stream_is_the_answer_in_pieces(server: Server) -> None:
    whole = ask(server)
    events = stream(server)
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    assert kinds == [
        "message_start", "ping", "content_block_start", "content_block_stop", "message_delta", "message_stop"
    ]  # fmt: skip
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] > 12
    built = build(events)
    assert nameless(built) == nameless(whole)
    assert built["usage"]["output_tokens"] == 12


def test_thinking(server: Server, say: Callable[[str], None]) -> None:
    say("<think>\nhmm, so\n</think>\n\nüber 😀")
    answer = ask(server, max_tokens=100)
    assert answer["stop_reason"] == "end_turn"
    thinking, text = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "hmm, so", "signature": ""}
    assert text["text"] == "über 😀"
    assert nameless(build(stream(server, max_tokens=100))) == nameless(answer)
    hidden = ask(server, max_tokens=100, thinking={"type": "adaptive", "display": "omitted"})
    assert [block["type"] for block in hidden["content"]] == ["text"]


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 4}, {"type": "disabled"}])
def test_thought_can_be_limited(server: Server, say: Callable[[str], None], thinking: Any) -> None:
    say("<think>" + "hm " * 300)
    answer = ask(server, max_tokens=60, thinking=thinking)
    assert answer["content"][-1]["type"] == "text"
    assert all(len(block.get("thinking", "")) <= 5 for block in answer["content"])


def test_tool_use(server: Server, say: Callable[[str], None]) -> None:
    say(f"Let me see.\n{CALL}\n{CALL}")
    answer = ask(server, max_tokens=300, tools=[WEATHER])
    assert answer["stop_reason"] == "tool_use"
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use", "tool_use"]
    assert answer["content"][0]["text"] == "Let me see."
    assert answer["content"][1]["input"] == {"days": 3, "unit": "c"}
    assert answer["content"][1]["id"] != answer["content"][2]["id"]
    events = stream(server, max_tokens=300, tools=[WEATHER])
    assert nameless(build(events)) == nameless(answer)
    single = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(ask(server, max_tokens=300, tools=[WEATHER], tool_choice=single)["content"]) == 2
    free = ask(server, max_tokens=300, tools=[WEATHER], tool_choice={"type": "none"})
    assert [block["type"] for block in free["content"]] == ["text"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_calls_can_be_enforced(server: Server, choice: Any) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    answer = ask(server, max_tokens=200, tools=[WEATHER], tool_choice=choice)
    assert [block["type"] for block in answer["content"]] == ["tool_use"]
    assert 1 <= answer["content"][0]["input"]["days"] <= 9


def test_json_answers(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    answer = ask(server, max_tokens=400, temperature=100, output_config={"format": form, "effort": "max"})
    assert isinstance(json.loads(answer["content"][0]["text"])["a"], bool)


@pytest.mark.parametrize(("stops", "found"), [(["€5 "], "€5 "), (["zzz", "5 😀"], "5 😀"), (["zzz"], None)])
def test_stop_sequences(server: Server, say: Callable[[str], None], stops: list[str], found: str | None) -> None:
    text = "über €5 😀 fin"
    say(text)
    answer = ask(server, max_tokens=100, stop_sequences=stops)
    assert answer["stop_sequence"] == found
    assert answer["stop_reason"] == ("stop_sequence" if found else "end_turn")
    assert answer["content"][0]["text"] == text.partition(found or "zzz")[0]
    assert nameless(build(stream(server, max_tokens=100, stop_sequences=stops))) == nameless(answer)


@pytest.mark.parametrize(
    ("given", "meant"), [(None, {}), ("", {}), ([1], {"arguments": "[1]"}), (3, {"arguments": "3"})]
)
def test_inputs_of_the_past_that_are_no_objects(given: Any, meant: Any) -> None:
    said = {"role": "assistant", "content": [{**USE, "input": given}]}
    told = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "1"}]}
    body = anthropic.MessagesRequest.model_validate({**BASE, "messages": [*BASE["messages"], said, told]})
    calls = [message["tool_calls"] for message in anthropic.as_messages(body) if "tool_calls" in message]
    assert calls[0][0]["function"]["arguments"] == meant


def test_a_conversation(server: Server) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "weather?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look.", "citations": None},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"days": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "warm"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                {"type": "text", "text": "and?"},
                {"type": "text", "text": "well?"},
            ],
        },
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "now"},
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "help"}]
    body = anthropic.MessagesRequest.model_validate({**BASE, "messages": messages, "system": system})
    chat = list(anthropic.as_messages(body))
    assert [message["role"] for message in chat] == [
        "system", "user", "assistant", "tool", "tool", "user", "system", "user"
    ]  # fmt: skip
    assert chat[0]["content"] == "help"
    assert (chat[2]["reasoning_content"], chat[2]["content"]) == ("hm", "I look.")
    assert chat[2]["tool_calls"][0]["function"]["arguments"] == {"days": 1}
    assert [message["content"] for message in chat[3:6]] == ["warm", "", "and?\nwell?"]
    ask(server, messages=messages, system=system, tools=[WEATHER])


def test_an_answer_can_be_sent_back(server: Server, say: Callable[[str], None]) -> None:
    say(f"<think>hm</think>I look.\n{CALL}")
    content = ask(server, max_tokens=300, tools=[WEATHER])["content"]
    result = {"type": "tool_result", "tool_use_id": content[2]["id"], "content": "warm"}
    messages = [*HELLO, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    ask(server, messages=messages, tools=[WEATHER])


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "messages[0].content"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [USE]}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "hiccup"}}}}, "output_config.format"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_bad_fields_are_named(server: Server, fields: dict[str, Any], start: str) -> None:
    assert refused(server, **fields).startswith(start)


def test_what_is_harmless_is_ignored(server: Server) -> None:
    ask(server, metadata={"user_id": "me"}, service_tier="auto", cache_control={"type": "ephemeral"}, top_k=5)
    ask(server, thread={"id": "t"}, store=True, moderation={}, foo=None)
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}, "foo": 1}
    ask(server, messages=[{"role": "user", "content": [part], "foo": 1}])
    assert server.post(f"{URL}?beta=true", BASE, headers={"anthropic-beta": "x"}).status_code == 200


def test_what_means_no_more_than_nothing(server: Server) -> None:
    """What other servers' programs send although it says nothing."""
    greedy = ask(server, temperature=0)["content"]
    assert ask(server, temperature=0, top_k=-1, mcp_servers=[])["content"] == greedy


def test_threads_are_not_kept(server: Server) -> None:
    """Anthropic's client sends only what is new, without tools, and everything again if it gets this error."""
    ask(server, thread={"type": "create"})
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    body = {**BASE, "messages": [], "thread": thread, "tool_choice": {"type": "any"}}
    response = server.post(URL, body)
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["type"], error["details"]) == ("not_found_error", {"error_code": "thread_not_found"})


@pytest.mark.parametrize("is_stream", [False, True])
def test_context_too_long(server: Server, is_stream: bool) -> None:
    long = [{"role": "user", "content": "x" * 2030}]
    assert refused(server, messages=long, stream=is_stream) == "prompt is too long: 2049 tokens > 2048 maximum"
    assert server.post(f"{URL}/count_tokens", {"messages": long}).json() == {"input_tokens": 2049}


def test_count_tokens(server: Server) -> None:
    def count(**fields: Any) -> int:
        return int(server.post(f"{URL}/count_tokens", {"messages": HELLO, **fields}).json()["input_tokens"])

    assert count() < count(system="be brief")
    error_of(server.post(f"{URL}/count_tokens", {}), 400, "invalid_request_error")


def test_errors_of_other_kinds(server: Server) -> None:
    error_of(server.post(URL, {**BASE, "model": "nothing"}), 404, "not_found_error")
    with server.client() as client:
        error_of(
            client.post(URL, content=b"{", headers={"content-type": "application/json"}), 400, "invalid_request_error"
        )
        error_of(client.post(URL, content=b"{}"), 415, "invalid_request_error")


def test_errors_of_http_itself(tiny: Path, tmp_path: Path) -> None:
    """Whoever refuses, the middlewares, the connection or the server that ends: the envelope is the same."""
    place = {"port": 0, "model": str(tiny), "models_dir": tmp_path, "device": "cpu", "ctx": 512}
    settings = Settings(**place, body_deadline_s=0.3, drain_s=5)
    json_of = {"content_type": "application/json"}

    def check(answer: Answer, status: int, kind: str = "invalid_request_error") -> None:
        body = json.loads(answer.body)
        assert (answer.status, body["type"], body["error"]["type"]) == (status, "error", kind), body

    with serving(settings, create_app(settings)) as live:
        for path in (URL, f"{URL}/count_tokens", "/messages"):
            check(live.talk(request("POST", path, content_length=str(1 << 40), **json_of)), 413, "request_too_large")
        check(live.ask("POST", URL, b"{}", **{**json_of, "host": "evil.com"}), 421)
        check(live.ask("POST", URL, b"{}", origin="http://evil.com", **json_of), 403, "permission_error")
        check(live.ask("POST", URL, b"{}", content_encoding="gzip", **json_of), 415)
        check(live.ask("POST", URL, b"{}", x="y" * 65_500, **json_of), 431)
        check(live.ask("GET", URL), 405)
        with live.connect() as slow:
            slow.sendall(request("POST", URL, content_length="10", **json_of))
            check(read_answer(slow), 408)
            assert "error" in json.loads(live.ask("GET", "/nowhere").body)  # another place, the other envelope
        with live.connect() as busy:
            busy.sendall(request("POST", URL, content_length="10", **json_of))  # keeps the server from ending at once
            wait_for(lambda: live.server.front.num_running == 1)
            live.server.drain()
            check(live.ask("POST", URL, b"{}", **json_of), 503, "overloaded_error")


def test_unexpected_failures(server: Server, puppet: Puppet) -> None:
    puppet.error = RuntimeError("secret")
    error = error_of(server.post(URL, BASE), 500, "api_error")
    assert "secret" not in error["message"]


def test_failure_in_a_stream(server: Server, puppet: Puppet) -> None:
    puppet.script = [*b"abcdef", END]
    puppet.delay_s = 0.05
    with server.client() as client, client.stream("POST", URL, json={**BASE, "stream": True}) as response:
        lines = response.iter_lines()
        next(line for line in lines if "text_delta" in line)
        puppet.error = RuntimeError("secret")
        rest = [line for line in lines if line]
    assert rest[-2] == "event: error"
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["type"] == "api_error"
    assert "secret" not in rest[-1]


@pytest.mark.parametrize("is_stream", [False, True])
def test_leaving_cancels(server: Server, puppet: Puppet, is_stream: bool) -> None:
    puppet.delay_s = 0.02
    body = {**BASE, "max_tokens": 1500, "stream": is_stream}
    if is_stream:
        with server.client() as client, client.stream("POST", URL, json=body) as response:
            next(response.iter_lines())
    else:
        with server.client() as client, pytest.raises(Exception, match="timed out"):
            client.post(URL, json=body, timeout=0.3)
    server.wait_idle()


def test_full_queue(make_server: Callable[..., Server]) -> None:
    server = make_server(max_queue=1, max_batch=1)
    engine = server.llm.engine
    engine._executor = Puppet(engine._executor)
    engine._executor.delay_s = 0.05
    body = {**BASE, "max_tokens": 40}
    threads = []
    for count in (1, 2):
        threads.append(threading.Thread(target=server.post, args=(URL, body)))
        threads[-1].start()
        wait_for(lambda count=count: server.service.num_requests == count)
    wait_for(lambda: server.service.status().running == 1)
    response = server.post(URL, {**body, "stream": True})
    error_of(response, 429, "rate_limit_error")
    assert response.headers["retry-after"]
    engine._executor.delay_s = 0
    for thread in threads:
        thread.join(20)


def test_silence_is_broken(make_server: Callable[..., Server]) -> None:
    server = make_server(ping_s=0.05)
    engine = server.llm.engine
    engine._executor = Puppet(engine._executor)
    engine._executor.delay_s = 0.3
    kinds = [event["type"] for event in stream(server, max_tokens=2)]
    assert kinds[:4] == ["message_start", "ping", "ping", "ping"]


def test_keys(make_server: Callable[..., Server]) -> None:
    server = make_server(api_key="k" * 32)
    error_of(server.post(URL, BASE), 401, "authentication_error")
    error_of(server.post(f"{URL}/count_tokens", BASE, headers={"x-api-key": "z"}), 401, "authentication_error")
    assert server.post(URL, BASE, headers={"x-api-key": "k" * 32}).status_code == 200
    assert server.post(URL, BASE, headers={"Authorization": "Bearer " + "k" * 32}).status_code == 200

"""OpenAI's Responses over HTTP: items in, items out, whole and as events."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sala.server.api import responses
from tests.server.conftest import END, Puppet, Server, wait_for

URL = "/v1/responses"
BASE: dict[str, Any] = {"input": "hello", "max_output_tokens": 12, "temperature": 0}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}, "unit": {"enum": ["c", "f"]}},
        "required": ["days", "unit"],
    },
}
CALL = '<function name="get_weather"><param name="days">3</param><param name="unit">c</param></function>'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


def ask(server: Server, **fields: Any) -> Any:
    response = server.post(URL, {**BASE, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: Server, **fields: Any) -> list[Any]:
    response = server.post(URL, {**BASE, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in response.text.split("\n\n") if block.startswith("event: ")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def refused(server: Server, **fields: Any) -> Any:
    response = server.post(URL, {**BASE, **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def kinds(events: list[Any]) -> list[str]:
    """The types of events, equal ones in a row once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for at, name in enumerate(names) if at == 0 or name != names[at - 1]]


def joined(events: list[Any], kind: str = "output_text") -> str:
    return "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")


def texts(answer: Any) -> str:
    return "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])


def nameless(answer: Any) -> Any:
    """What of an answer does not change from one time to the next."""
    output = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in answer["output"]]
    changing = ("id", "created_at", "completed_at", "usage")
    return {**{k: v for k, v in answer.items() if k not in changing}, "output": output}


def test_shape_of_an_answer(server: Server) -> None:
    answer = ask(server, metadata={"a": "b"}, instructions="be brief")
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["model"], answer["status"]) == ("response", "tiny", "incomplete")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["metadata"] == {"a": "b"}
    assert answer["instructions"] == "be brief"
    assert answer["store"] is True
    assert (answer["temperature"], answer["top_p"]) == (0, 1)
    item = answer["output"][0]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert item["content"][0]["annotations"] == []
    assert len(item["content"][0]["text"]) == 12
    usage = answer["usage"]
    assert usage["output_tokens"] == 12
    assert usage["total_tokens"] == usage["input_tokens"] + 12
    assert ask(server, instructions="be brief")["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_stream_is_the_answer_in_pieces(server: Server) -> None:
    whole = ask(server)
    events = stream(server)
    assert kinds(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert joined(events) == texts(whole)
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    assert nameless(events[-1]["response"]) == nameless(whole)
    assert events[-1]["response"]["output"][0] == events[-2]["item"]


def test_a_whole_answer(server: Server, say: Callable[[str], None]) -> None:
    say("<think>\nhmm, so\n</think>\n\nüber 😀")
    answer = ask(server, max_output_tokens=100)
    assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert answer["output"][0]["content"] == [{"type": "reasoning_text", "text": "hmm, so"}]
    assert answer["output"][0]["summary"] == []
    assert texts(answer) == "über 😀"
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 5
    events = stream(server, max_output_tokens=100)
    assert joined(events, "reasoning_text") == "hmm, so"
    assert joined(events) == "über 😀"
    assert nameless(events[-1]["response"]) == nameless(answer)
    assert kinds(events)[2:8] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
    ]  # fmt: skip


def test_reasoning_that_was_never_opened_is_text(server: Server, say: Callable[[str], None]) -> None:
    say("thought</think>Yes.")
    answer = ask(server, max_output_tokens=100)
    assert [item["content"][0]["text"] for item in answer["output"]] == ["thought</think>Yes."]


def test_tool_calls(server: Server, say: Callable[[str], None]) -> None:
    say(f"Let me see.\n{CALL}\n{CALL}\nDone.\n")
    answer = ask(server, max_output_tokens=400, tools=[WEATHER])
    assert [item["type"] for item in answer["output"]] == ["message", "function_call", "function_call", "message"]
    assert answer["status"] == "completed"
    assert [item["content"][0]["text"] for item in answer["output"][::3]] == ["Let me see.", "Done."]
    call = answer["output"][1]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"days": 3, "unit": "c"})
    assert len({item["id"] for item in answer["output"]}) == 4
    events = stream(server, max_output_tokens=400, tools=[WEATHER])
    assert nameless(events[-1]["response"]) == nameless(answer)
    done = next(event for event in events if event["type"] == "response.function_call_arguments.done")
    assert (done["output_index"], done["arguments"]) == (1, call["arguments"])
    assert joined(events, "function_call_arguments") == call["arguments"] * 2
    single = ask(server, max_output_tokens=400, tools=[WEATHER], parallel_tool_calls=False)
    assert [item["type"] for item in single["output"]].count("function_call") == 1
    assert single["parallel_tool_calls"] is False


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_calls_can_be_enforced(server: Server, choice: Any) -> None:
    answer = ask(server, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, max_output_tokens=200)
    assert [item["type"] for item in answer["output"]] == ["function_call"]
    assert 1 <= json.loads(answer["output"][0]["arguments"])["days"] <= 9
    assert answer["tool_choice"] == choice


def test_json_answers(server: Server) -> None:
    form = {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}
    answer = ask(server, max_output_tokens=400, temperature=100, text={"format": form})
    assert isinstance(json.loads(texts(answer))["a"], bool)
    assert answer["text"]["format"] == form
    answer = ask(server, max_output_tokens=4, text={"format": {**form, "strict": False}})
    assert answer["text"]["format"]["strict"] is False
    assert ask(server, text={"format": {"type": "json_object"}})["output"][0]["content"][0]["text"].startswith("{")
    form = {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}
    assert texts(ask(server, text={"format": form}, max_output_tokens=8)).startswith("[")
    refused = server.post("/v1/responses", {"input": "hello", "text": {"format": {**form, "strict": True}}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text.format")


def test_a_conversation(server: Server) -> None:
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "get_weather", "arguments": '{"days": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "warm"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "cold"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"},
        {"role": "user", "content": "and?"},
    ]  # fmt: skip
    body = responses.ResponseRequest.model_validate({"input": items, "instructions": "help"})
    messages = list(responses.as_messages(body))
    assert [message["role"] for message in messages] == [
        "system", "system", "user", "assistant", "tool", "tool", "user"
    ]  # fmt: skip
    assert messages[3]["reasoning_content"] == "hm"
    assert messages[3]["content"] == "I look."
    assert [call["id"] for call in messages[3]["tool_calls"]] == ["c1", "c2"]
    assert (messages[4]["content"], messages[5]["content"]) == ("warm", "cold")
    ask(server, input=items, instructions="help", tools=[WEATHER])
    one = ask(server)
    assert (
        ask(server, input=[{"role": "user", "content": "hello"}])["output"][0]["content"] == one["output"][0]["content"]
    )


def test_an_answer_can_be_sent_back(server: Server, say: Callable[[str], None]) -> None:
    say(f"<think>hm</think>I look.\n{CALL}")
    answer = ask(server, max_output_tokens=300, tools=[WEATHER])
    result = {"type": "function_call_output", "call_id": answer["output"][2]["call_id"], "output": "warm"}
    ask(server, input=[{"role": "user", "content": "hello"}, *answer["output"], result], tools=[WEATHER])


LONG = "x" * 4097
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input[0].arguments"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "hiccup"}}}}, "text.format"),
        ({"reasoning": {"summary": "loud"}}, "reasoning.summary"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True, "store": False}, "background"),
        ({"truncation": "middle"}, "truncation"),
        ({"include": [5]}, "include[0]"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"stop": ""}, "stop"),
        ({"top_k": -2}, "top_k"),
        ({"colour": "red"}, "colour"),
        ({"tools": [{**WEATHER, "description": "x" * (1 << 20) + "x"}]}, "tools[0].description"),
        ({"tools": [{"type": "custom", "name": "f", "description": "x" * (1 << 21)}]}, "tools[0].description"),
        (
            {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "definition": "x" * (1 << 21)}}]},
            "tools[0].format.definition",
        ),
        ({"tools": [WEATHER, {"type": "web_search" + "x" * 64}]}, "tools[1].type"),
        ({"input": [{**CALLED, "call_id": LONG}]}, "input[0].call_id"),
        ({"input": [{**CALLED, "name": LONG}]}, "input[0].name"),
        ({"input": [{**CALLED, "namespace": LONG}]}, "input[0].namespace"),
        ({"input": [{"type": "custom_tool_call", "call_id": LONG, "name": "f", "input": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": LONG, "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "local_shell_call_output", "id": LONG, "output": "x"}]}, "input[0].id"),
        ({"input": [{"role": "assistant", "content": "x", "status": LONG}]}, "input[0].status"),
        ({"include": [LONG]}, "include[0]"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ],
)
def test_bad_fields_are_named(server: Server, fields: dict[str, Any], param: str) -> None:
    assert refused(server, **fields)["param"] == param


def test_what_is_not_stored_is_said(server: Server) -> None:
    assert "conversations are not stored" in refused(server, conversation="conv_1")["message"]
    error = refused(server, previous_response_id="resp_1")
    assert "not stored" in error["message"]
    assert error["code"] == "previous_response_not_found"


def test_what_is_harmless_is_ignored(server: Server) -> None:
    ask(
        server, user="me", store=True, service_tier="auto", include=["reasoning.encrypted_content"], background=False,
        truncation="disabled", prompt_cache_key="x", text={"verbosity": "low"}, reasoning={"effort": "low"},
        previous_response_id=None, stream_options=None, top_p=0, top_k=-1, context_management=[{"type": "compaction"}],
        moderation={}, prompt_cache_options={}, foo=None,
    )  # fmt: skip
    part = {"type": "input_text", "text": "hi", "prompt_cache_breakpoint": {}}
    ask(server, input=[{"type": "message", "role": "user", "content": [part], "foo": 1}])


def test_effort_is_a_budget(server: Server, say: Callable[[str], None]) -> None:
    say("<think>" + "hm " * 300)
    answer = ask(server, max_output_tokens=60, reasoning={"effort": "minimal"})
    assert answer["reasoning"] == {"effort": "minimal", "summary": None}
    assert texts(answer)


@pytest.mark.parametrize("is_stream", [False, True])
def test_context_too_long(server: Server, is_stream: bool) -> None:
    error = refused(server, input="x" * 2030, stream=is_stream)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (2049, 2048)


def test_unknown_model(server: Server) -> None:
    assert server.post(URL, {**BASE, "model": "nothing"}).json()["error"]["code"] == "model_not_found"


def test_failure_in_a_stream(server: Server, puppet: Puppet) -> None:
    puppet.script = [*b"abcdef", END]
    puppet.delay_s = 0.05
    with server.client() as client, client.stream("POST", URL, json={**BASE, "stream": True}) as response:
        lines = response.iter_lines()
        next(line for line in lines if "output_text.delta" in line)
        puppet.error = RuntimeError("secret")
        last = [line for line in lines if line.startswith("data: ")][-1]
    event = json.loads(last.removeprefix("data: "))
    assert event["type"] == "response.failed"
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"]["code"] == "server_error"
    assert "secret" not in last


@pytest.mark.parametrize("is_stream", [False, True])
def test_leaving_cancels(server: Server, puppet: Puppet, is_stream: bool) -> None:
    puppet.delay_s = 0.02
    body = {**BASE, "max_output_tokens": 1500, "stream": is_stream}
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
    body = {**BASE, "max_output_tokens": 40}
    threads = []
    for count in (1, 2):
        threads.append(threading.Thread(target=server.post, args=(URL, body)))
        threads[-1].start()
        wait_for(lambda count=count: server.service.num_requests == count)
    wait_for(lambda: server.service.status().running == 1)
    response = server.post(URL, {**body, "stream": True})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert response.headers["retry-after"]
    engine._executor.delay_s = 0
    for thread in threads:
        thread.join(20)


def test_silence_is_broken(make_server: Callable[..., Server]) -> None:
    server = make_server(ping_s=0.05)
    engine = server.llm.engine
    engine._executor = Puppet(engine._executor)
    engine._executor.delay_s = 0.3
    text = server.post(URL, {**BASE, "stream": True, "max_output_tokens": 2}).text
    assert text.index("response.in_progress") < text.index(": ping") < text.index("output_text.delta")


def test_keys(make_server: Callable[..., Server]) -> None:
    server = make_server(api_key="k" * 32)
    assert server.post(URL, BASE).status_code == 401
    assert server.post(URL, BASE, headers={"Authorization": "Bearer " + "k" * 32}).status_code == 200

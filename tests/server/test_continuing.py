"""Answers that have been begun are continued, in every API: the answer holds only what is new."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sala.errors import InputError
from sala.llm import LLM
from sala.text.tokenizer import Tokenizer
from tests.server.conftest import Server, read_events

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = {"role": "user", "content": "hello"}
BEGUN = {"role": "assistant", "content": "The capital of"}
RELEASED = Path(__file__).parents[1] / "data" / "released" / "chat_template.jinja"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = '<function name="look"></function>'


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny, device="cpu", ctx=2048)


def ask(server: Server, url: str, status: int = 200, **body: Any) -> Any:
    response = server.post(url, body)
    assert response.status_code == status, response.text
    return response.json() if status == 200 else response.json()["error"]


def prompt(llm: LLM, *messages: Any, **more: Any) -> str:
    return llm.tokenizer.decode(llm.encode_chat(messages, **more), skip_special=False)


def test_the_prompt_ends_with_the_answer_so_far(llm: LLM) -> None:
    opened = prompt(llm, HELLO, BEGUN, continue_final=True)
    assert opened == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nThe capital of"
    assert prompt(llm, HELLO, BEGUN, add_generation_prompt=False).startswith(opened + "<|im_end|>")
    spaced = {**BEGUN, "content": "<|im_end|> "}
    assert prompt(llm, HELLO, spaced, continue_final=True).endswith("assistant\n<|im_end|> ")
    assert llm.tokenizer.token_id("<|im_end|>") not in llm.encode_chat([BEGUN], continue_final=True)
    ids = llm.tokenizer.encode("as it was", bos=False)
    assert llm.encode_chat([HELLO, {**BEGUN, "token_ids": ids}], continue_final=True)[-len(ids) :] == ids
    for messages in ([HELLO], [{**BEGUN, "tool_calls": [{}]}]):
        with pytest.raises(InputError, match="do not end with an answer that can be continued"):
            llm.encode_chat(messages, continue_final=True)


def test_the_released_template(tiny: Path) -> None:
    inner = Tokenizer.load(tiny)._inner.to_str()
    tokenizer = Tokenizer(inner, {}, RELEASED.read_text())

    def end(**last: str) -> str:
        ids = tokenizer.encode_chat([HELLO, {"role": "assistant", **last}], continue_final=True)
        return tokenizer.decode(ids, skip_special=False).partition("assistant\n")[2]

    assert end(content="Paris is ") == "Paris is "
    assert end(content="Paris", reasoning_content="hm") == "<think>\nhm\n</think>\n\nParis"
    assert end(content="<think>\nhm") == "<think>\nhm"
    tokenizer.close()


def test_the_rest_of_an_answer_is_the_same(llm: LLM) -> None:
    form: dict[str, Any] = {"regex": "[a-z ]{24}", "temperature": 0}
    whole = llm.chat([HELLO], **form).text
    begun = [HELLO, {"role": "assistant", "content": whole[:9]}]
    assert llm.chat(begun, continue_final=True, **form).text == whole[9:]
    assert "".join(event.text for event in llm.stream_chat(begun, continue_final=True, **form)) == whole[9:]
    with pytest.raises(InputError, match="form"):
        llm.chat([HELLO, {"role": "assistant", "content": "A"}], continue_final=True, **form)
    with pytest.raises(InputError, match="complete"):
        llm.chat([HELLO, {"role": "assistant", "content": whole}], continue_final=True, **form)


def test_chats(server: Server, say: Callable[[str], None]) -> None:
    say(" France is Paris. <think> Indeed.")
    body: dict[str, Any] = {"messages": [HELLO, BEGUN], "max_tokens": 100}
    answer = ask(server, CHAT, **body)
    assert answer["choices"][0]["message"]["content"] == " France is Paris. <think> Indeed."
    assert answer["usage"]["prompt_tokens"] == ask(server, f"{CHAT}/input_tokens", **body)["input_tokens"]
    pieces = read_events(server.post(CHAT, {**body, "stream": True, "stop": " Indeed"}).text)[:-1]
    text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    assert text == " France is Paris. <think>"
    vllm = {"continue_final_message": True, "add_generation_prompt": False}
    count = ask(server, f"{CHAT}/input_tokens", **body, **vllm)["input_tokens"]
    assert count == answer["usage"]["prompt_tokens"]
    assert ask(server, "/tokenize", messages=[HELLO, BEGUN], **vllm)["count"] == count
    for anew in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        assert ask(server, f"{CHAT}/input_tokens", **body, **anew)["input_tokens"] > count


def test_reasoning_that_has_been_begun(server: Server, say: Callable[[str], None]) -> None:
    say(" think</think>Yes.")
    for begun in ("<think>\nI", "<think>"):
        messages = [HELLO, {"role": "assistant", "content": begun}]
        message = ask(server, CHAT, messages=messages, max_tokens=100)["choices"][0]["message"]
        wanted = " think" if begun.endswith("I") else "think"  # white space after the tag belongs to neither side
        assert (message["reasoning_content"], message["content"]) == (wanted, "Yes.")
    say(" and so on" * 20)
    body = {"messages": [HELLO, BEGUN], "thinking_budget": 3, "max_tokens": 30}
    assert ask(server, CHAT, **body)["choices"][0]["message"]["content"] == (" and so on" * 20)[:30]


def test_calls_and_schemas(server: Server, say: Callable[[str], None]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}}}
    messages = [HELLO, {"role": "assistant", "content": '{"a": fa'}]
    answer = ask(server, CHAT, messages=messages, response_format=form, temperature=1, seed=1)
    assert "".join(answer["choices"][0]["message"]["content"].split()) == "lse}"
    messages[1]["content"] = '{"b'
    assert ask(server, CHAT, 400, messages=messages, response_format=form)["param"] == "messages"
    say(f" it. {CALL}")
    answer = ask(server, CHAT, messages=[HELLO, BEGUN], tools=[TOOL], max_tokens=100)
    assert answer["choices"][0]["message"]["content"].strip() == "it."
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [HELLO], "continue_final_message": True}, "continue_final_message"),
        ({"messages": [HELLO], "add_generation_prompt": False}, "add_generation_prompt"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_excludes_a_beginning(server: Server, fields: dict[str, Any], param: str) -> None:
    assert ask(server, CHAT, 400, **{"messages": [HELLO, BEGUN], **fields})["param"] == param


def test_messages(server: Server, say: Callable[[str], None]) -> None:
    say(" France.")
    body: dict[str, Any] = {"messages": [HELLO, BEGUN], "max_tokens": 50}
    assert ask(server, MESSAGES, **body)["content"][0]["text"] == " France."
    count = ask(server, f"{MESSAGES}/count_tokens", messages=body["messages"])["input_tokens"]
    assert count == ask(server, f"{CHAT}/input_tokens", **body)["input_tokens"]
    thinking = {"type": "enabled", "budget_tokens": 20}
    assert "thinking" in ask(server, MESSAGES, 400, **body, thinking=thinking)["message"]


def test_responses(server: Server, say: Callable[[str], None]) -> None:
    say(" France.")
    count = ask(server, f"{CHAT}/input_tokens", messages=[HELLO, BEGUN])["input_tokens"]
    for status, is_continued in ((None, True), ("incomplete", True), ("completed", False)):
        items = [HELLO, {**BEGUN, "status": status}]
        answer = ask(server, RESPONSES, input=items, max_output_tokens=50)
        assert answer["output"][0]["content"][0]["text"] == " France."
        assert (answer["usage"]["input_tokens"] == count) is is_continued

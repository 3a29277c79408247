"""Bodies that are no bodies, values that no field can have, and JSON of a shape that only a machine would write."""

import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from pydantic import BaseModel

from sala.server.api.anthropic import MessagesRequest
from sala.server.api.chat import ChatRequest
from sala.server.api.completions import CompletionRequest
from sala.server.api.responses import ResponseRequest
from sala.server.api.routes import TokenizeRequest
from sala.server.http import body as limits
from sala.server.http import large_json
from sala.server.http.body import MAX_JSON_BRANCHES, MAX_JSON_VALUES, find_excess
from sala.server.http.security import LARGE
from tests.integrity import integrity
from tests.server.conftest import Server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
OTHERS = ("/v1/responses", *ANTHROPIC, "/v1/models/load", "/v1/models/unload", "/v1/models/download")
USER: dict[str, Any] = {"role": "user", "content": "hi"}
BASE: dict[str, Any] = {"messages": [USER], "max_tokens": 2, "seed": 1}
TURN: dict[str, Any] = {"role": "assistant", "content": "hi"}
TEXT = "a b " * 5000
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx2.Client]:
    with server.client() as one:
        yield one


def send(client: httpx2.Client, path: str, body: Any) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(path, content=content, headers={"content-type": "application/json"})


def padded(body: Any) -> bytes:
    """The same, so large that it is read elsewhere."""
    return json.dumps(body).ljust(LARGE + 1).encode()


def error_of(response: httpx2.Response, status: int = 400) -> Any:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return error


def with_field(body: dict[str, Any], name: str, literal: str) -> bytes:
    """A body in which a field has a value that Python would not write."""
    rest = json.dumps({key: value for key, value in body.items() if key != name})
    return f'{rest[:-1]}, "{name}": {literal}}}'.encode()


@pytest.mark.parametrize("path", OTHERS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"42",
        b'"x"',
        b"[]",
        b"{",
        b"\xff\xfe{}",
        b'{"model":"\xff"}',
        b'{"model":"\\ud800"}',
        b'{"\\udfff":1}',
        b'{"model":NaN}',
        b'{"temperature":Infinity}',
        b'{"model":1e999}',
        b'{"model":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"model":1' + b"0" * 400 + b"}",
        b'{"model":1' + b"0" * 5000 + b"}",
        b'{"model":"tiny"} {}',
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda body: body[:20].decode("ascii", "replace"),
)
def test_no_body_breaks_the_other_routes(client: httpx2.Client, path: str, body: bytes) -> None:
    response = send(client, path, body)
    error_of(response)
    assert (response.json().get("type") == "error") == (path in ANTHROPIC)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": "\\ud800"}',
        '{"\\u0000": "\\u0000\\u001b"}',
        '{"a": NaN, "b": -Infinity, "c": 1e999}',
        '{"a": ' + "[" * 900 + "]" * 900 + "}",
        '{"a": 1' + "0" * 1500 + "}",
    ],
    ids=lambda text: text[:16],
)
def test_strange_arguments_of_earlier_calls_do_no_harm(client: httpx2.Client, arguments: str) -> None:
    """A model may have written them itself: a conversation does not end for that."""
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": "c", "content": "\x00"}
    response = send(client, CHAT, {**BASE, "messages": [USER, said, told]})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "arguments", ["{", '{"a": 1' + "0" * 5000 + "}", "\ud7ff{}", '{"city": "Par', "[{" * 500, "[1]"]
)
def test_arguments_that_are_no_json_are_rendered(client: httpx2.Client, arguments: str) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    history = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "no"}]
    response = send(client, f"{CHAT}/input_tokens", {"messages": history})
    assert response.status_code == 200, response.text
    assert response.json()["input_tokens"] < 8000


@pytest.mark.parametrize(
    ("name", "literal", "param"),
    [
        *((name, "1" + "0" * 400, name) for name in ("n", "max_tokens", "seed", "top_k", "temperature", "top_p")),
        *((name, str(2**63), name) for name in ("n", "max_tokens", "seed", "top_k", "min_tokens", "thinking_budget")),
        *((name, "-0", name) for name in ("n", "max_tokens", "repetition_penalty")),
        *((name, "5.5", name) for name in ("n", "max_tokens", "seed", "top_k")),
        *((name, "true", name) for name in ("n", "max_tokens", "seed", "temperature", "min_p", "top_logprobs")),
        *((name, '"1"', name) for name in ("n", "max_tokens", "seed", "temperature", "min_p", "logprobs")),
        ("temperature", "1E400", "temperature"),
        ("logprobs", "1", "logprobs"),
        ("frequency_penalty", "-2.01", "frequency_penalty"),
        ("logit_bias", '{"-1": 1}', "logit_bias"),
        ("logit_bias", '{"1e3": 1}', "logit_bias"),
        ("logit_bias", '{"\\u0663": 1}', "logit_bias"),
        ("logit_bias", '{"1": true}', "logit_bias.1"),
        ("logit_bias", '{"1": 1' + "0" * 400 + "}", "logit_bias.1"),
        ("logit_bias", "[1]", "logit_bias"),
        ("stop", '["a", ""]', "stop[1]"),
        ("stop", '["' + "x" * 257 + '"]', "stop[0]"),
        ("stop", "[null]", "stop[0]"),
        ("messages", "null", "messages"),
        ("messages", "[null]", "messages[0]"),
        ("messages", "[[]]", "messages[0]"),
        ("messages", '[{"role": "user", "content": [null]}]', "messages[0].content[0]"),
        ("messages", '[{"role": "user", "content": [{}]}]', "messages[0].content[0].type"),
        ("messages", '[{"role": "user", "content": {"type": "text"}}]', "messages[0].content"),
    ],
    ids=lambda value: value[:20],
)
def test_numbers_and_shapes_that_do_not_fit_are_named(
    client: httpx2.Client, name: str, literal: str, param: str
) -> None:
    assert error_of(send(client, CHAT, with_field(BASE, name, literal)))["param"] == param


def test_all_keys_that_are_not_token_ids_are_named(client: httpx2.Client) -> None:
    message = error_of(send(client, CHAT, {**BASE, "logit_bias": {"one": 1, "7": 1, "two": 1}}))["message"]
    assert message.startswith("logit_bias")
    assert "'one', 'two'" in message
    assert "7" not in message
    message = error_of(send(client, CHAT, {**BASE, "logit_bias": {f"x{i}": 1 for i in range(9)}}))["message"]
    assert "'x4' and 4 more" in message


def test_what_is_missing_is_named(client: httpx2.Client) -> None:
    for path, field in ((CHAT, "messages"), (COMPLETIONS, "prompt"), ("/v1/responses", "input")):
        error = error_of(send(client, path, {"model": ""}))
        assert (error["param"], error["code"]) == (field, "missing_required_parameter")


@pytest.mark.parametrize("literal", ["-0", "-0.0", "0e5", "1e-999"])
def test_every_zero_is_zero(client: httpx2.Client, literal: str) -> None:
    wanted = send(client, CHAT, {**BASE, "temperature": 0}).json()["choices"]
    assert send(client, CHAT, with_field(BASE, "temperature", literal)).json()["choices"] == wanted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [1, 2**63]}, "prompt[1]"),
        ({"prompt": [1, None]}, "prompt[1]"),
        ({"min_tokens": 3000}, "min_tokens"),
        ({"stream": 1}, "stream"),
    ],
)
def test_completions_have_the_same_bounds(client: httpx2.Client, fields: dict[str, Any], param: str) -> None:
    assert error_of(send(client, COMPLETIONS, {"prompt": "x", **fields}))["param"] == param


@pytest.mark.parametrize(
    ("name", "literal"),
    [
        ("top_logprobs", "false"),
        ("top_logprobs", "0.5"),
        ("top_logprobs", "21"),
        ("background", "0"),
        ("background", '"true"'),
        ("max_output_tokens", "5.5"),
        ("max_output_tokens", str(2**31)),
        ("temperature", "1" + "0" * 400),
    ],
)
def test_responses_take_no_value_for_another(client: httpx2.Client, name: str, literal: str) -> None:
    assert error_of(send(client, "/v1/responses", with_field({"input": "x"}, name, literal)))["param"] == name


def test_responses_take_what_says_nothing(client: httpx2.Client) -> None:
    body = {"input": "x", "max_output_tokens": 2, "top_logprobs": 0, "background": False}
    assert send(client, "/v1/responses", body).status_code == 200


def test_an_answer_ends_where_the_context_does(client: httpx2.Client) -> None:
    body = {"prompt": "x" * 2040, "max_tokens": 2**31 - 1, "ignore_eos": True, "seed": 1}
    answer = send(client, COMPLETIONS, body).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 2049  # the last token is not read again


def test_parts_of_text_are_joined(client: httpx2.Client) -> None:
    parts = [{"type": "text", "text": text} for text in ("one", "", "two")]
    whole = {"messages": [{"role": "user", "content": "one\n\ntwo"}]}
    tokens = send(client, "/tokenize", whole).json()["tokens"]
    assert send(client, "/tokenize", {"messages": [{"role": "user", "content": parts}]}).json()["tokens"] == tokens


# Large bodies.


@pytest.mark.parametrize(
    ("path", "body", "start"),
    [
        (CHAT, {**BASE, "n": 0}, "n: "),
        (CHAT, {**BASE, "messages": [USER, {"role": "wizard", "content": "x"}]}, "messages[1].role: "),
        (CHAT, {**BASE, "top_logprobs": 1}, "top_logprobs: "),
        (COMPLETIONS, {"prompt": [1, -1]}, "prompt[1]: "),
        ("/v1/responses", {"input": "x", "tool_choice": "required"}, "tool_choice"),
        ("/v1/messages", {"messages": [USER], "max_tokens": 0}, "max_tokens: "),
    ],
)
def test_in_a_large_body_the_same_is_wrong(client: httpx2.Client, path: str, body: Any, start: str) -> None:
    error = error_of(send(client, path, padded(body)))
    assert error["message"].startswith(start)
    assert error == error_of(send(client, path, body))


def test_a_large_body_is_answered_as_a_small_one(client: httpx2.Client) -> None:
    for fields in ({}, {"stream": True}, {"logprobs": True, "top_logprobs": 2}):
        body = {**BASE, "temperature": 0, **fields}
        small, large = send(client, CHAT, body), send(client, CHAT, padded(body))
        assert large.status_code == 200, large.text
        assert large.headers["content-type"] == small.headers["content-type"]
        if not fields.get("stream"):
            assert large.json()["choices"] == small.json()["choices"]


@pytest.mark.parametrize(
    "filler",
    [b"[]," * (MAX_JSON_BRANCHES + 1), b'{"":0},' * (MAX_JSON_BRANCHES + 1), b"0," * (MAX_JSON_VALUES + 1)],
    ids=["lists", "objects", "numbers"],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/models/load"])
def test_too_many_small_values_are_not_read(client: httpx2.Client, path: str, filler: bytes) -> None:
    began = time.monotonic()
    error = error_of(send(client, path, b'{"metadata":[' + filler[:-1] + b"]}"))
    assert "more than 131,072 objects and lists, or 4,194,304 values" in error["message"]
    assert time.monotonic() - began < 10


def test_brackets_and_commas_of_a_text_do_not_count(client: httpx2.Client) -> None:
    text = '[{"\\",' * 50_000
    body = {**BASE, "metadata": {"code": text * 16}}
    assert send(client, CHAT, body).status_code == 200


def test_excess_is_found_wherever_the_text_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a reader of single characters, on texts of quotes, escapes, brackets and commas."""
    monkeypatch.setattr(limits, "MAX_JSON_DEPTH", 3)
    monkeypatch.setattr(limits, "MAX_JSON_BRANCHES", 5)
    monkeypatch.setattr(limits, "MAX_JSON_VALUES", 7)
    rng = random.Random(0)
    found = set()
    for number in range(3000):
        monkeypatch.setattr(large_json, "BLOCK", rng.choice([1, 2, 3, 7, 100]))
        text = nested(rng, 0) if number % 2 else tangled(rng)
        depth, num_branches, num_values = read_slowly(text)
        excess = find_excess(text.encode())
        found.add(excess)
        if num_branches > 5 or num_values > 7:
            assert excess is not None, text
            assert "values" in excess, text
        else:
            assert (excess is not None) == (depth > 3), text
    assert len(found) == 3


def nested(rng: random.Random, depth: int) -> str:
    if depth > 5 or rng.random() < 0.3:
        return rng.choice(["1", '"["', r'"\"]"', r'"\\"', '"{,"', r'"\\\","'])
    inner = [nested(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.5:
        return f"[{','.join(inner)}]"
    return "{" + ",".join(f'"{{{index}":{value}' for index, value in enumerate(inner)) + "}"


def tangled(rng: random.Random) -> str:
    """Strings full of what looks like structure, one after the other."""
    strings = ["".join(rng.choices(['\\"', "\\\\", "[", "{", "]", ","], k=rng.randint(0, 9))) for _ in range(3)]
    return "[" + ",".join(f'"{one}"' for one in strings) + "]"


def read_slowly(text: str) -> tuple[int, int, int]:
    """The greatest depth, the number of objects and lists, and one more than the number of commas."""
    depth = deepest = num_branches = is_inside = is_escaped = 0
    num_values = 1
    for char in text:
        if is_inside:
            is_inside, is_escaped = is_escaped or char != '"', char == "\\" and not is_escaped
            continue
        is_inside = char == '"'
        depth += (char in "[{") - (char in "]}")
        deepest = max(deepest, depth)
        num_branches += char in "[{"
        num_values += char == ","
    return deepest, num_branches, num_values


def answers_meanwhile(client: httpx2.Client, work: Callable[[], httpx2.Response]) -> tuple[httpx2.Response, float]:
    """What comes of some work, and the longest that anybody waited for /health meanwhile."""
    longest = 0.0
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        while not future.done():
            began = time.monotonic()
            assert client.get("/health").status_code == 200
            longest = max(longest, time.monotonic() - began)
            time.sleep(0.01)
        return future.result(), longest


def test_checking_many_messages_holds_up_nobody(client: httpx2.Client) -> None:
    one = b'{"role":"user","content":"x"},'
    body = b'{"messages":[' + one * 125_000 + b'{"role":"wizard","content":"x"}]}'
    response, longest = answers_meanwhile(client, lambda: send(client, CHAT, body))
    assert error_of(response)["param"] == "messages[125000].role"
    assert longest < 2.5


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": TEXT}]}),
        (CompletionRequest, {"prompt": TEXT}),
        (
            MessagesRequest,
            {"messages": [{"role": "user", "content": TEXT}, {**TURN, "content": TEXT}], "max_tokens": 1},
        ),
        (ResponseRequest, {"input": TEXT, "instructions": TEXT}),
        (TokenizeRequest, {"prompt": TEXT}),
    ],
)
def test_texts_are_checked_as_a_whole(kind: type[BaseModel], body: dict[str, Any]) -> None:
    """Not character by character in Python, which takes seconds for a book."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        kind.model_validate(body)
    finally:
        sys.setprofile(None)
    assert 0 < calls < 1000


REFUSED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{**USER, "content": TEXT * 20}]}),
    (CHAT, {"messages": [{**USER, "content": TEXT * 20}], "model": "none"}),
    (CHAT, {"messages": [USER], "metadata": {"a": TEXT * 20}, "n": 0}),
    (CHAT, {"messages": [USER], "metadata": {"a": TEXT * 20}, "logit_bias": {"1000": 1}}),
    (f"{CHAT}/input_tokens", {"messages": [{**USER, "content": TEXT * 20}]}),
    (COMPLETIONS, {"prompt": TEXT * 20}),
    ("/v1/responses", {"input": TEXT * 20}),
    ("/v1/messages", {"messages": [{**USER, "content": TEXT * 20}], "max_tokens": 1}),
    ("/v1/tokenize", {"prompt": TEXT * 20}),
]


def test_nothing_of_a_refused_body_waits_for_the_garbage_collector(client: httpx2.Client) -> None:
    """An error that its own stack refers to would keep the body, for minutes on an idle server."""
    gc.collect()
    gc.disable()
    try:
        for path, body in REFUSED:
            assert 400 <= send(client, path, body).status_code < 500
        assert client.get("/health").status_code == 200  # the event loop has gone round
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        parts = (part for one in gc.garbage for part in gc.get_referents(one))
        sizes = [len(part) for part in parts if isinstance(part, str | bytes)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert max(sizes, default=0) < len(TEXT)


def test_a_hundred_thousand_messages_are_counted(client: httpx2.Client) -> None:
    response = send(client, CHAT, {**BASE, "messages": [{"role": "user", "content": "x"}] * 100_000})
    assert error_of(response)["code"] == "context_length_exceeded"


def test_the_server_lives_on(server: Server, client: httpx2.Client) -> None:
    assert send(client, CHAT, BASE).status_code == 200
    server.wait_idle()
    assert integrity(server.llm.engine) == []

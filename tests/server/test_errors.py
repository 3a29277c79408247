"""Whatever is wrong with a request, the answer is an error in OpenAI's form, and the server lives on."""

from typing import Any

import pytest

from sala.errors import CheckpointError, ContextTooLong, InputError, MissingExtra, NoTokenizer, TemplateError
from sala.server.http.errors import ApiError, from_exception, from_validation, join_path
from tests.server.conftest import Server

URL = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
GOOD = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":2,"seed":1}'
DEEP = 10_000


def send(server: Server, body: bytes, headers: dict[str, str] = JSON, url: str = URL) -> Any:
    with server.client() as client:
        return client.post(url, content=body, headers=headers)


def check_envelope(response: Any, status: int = 400) -> Any:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert error["message"]
    assert "Traceback" not in response.text
    assert "/work" not in response.text
    assert "/tiny" not in response.text
    assert " at 0x" not in response.text
    return error


@pytest.mark.parametrize("url", [URL, "/v1/completions", "/tokenize", "/detokenize", f"{URL}/input_tokens"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"42",
        b'"x"',
        b"[]",
        b"{",
        b"nonsense",
        b"\xff\xfe",
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"user","content":"\\ud800"}],"prompt":"\\ud800","tokens":["\\ud800"]}',
        b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
        b'{"temperature":NaN,"messages":[],"prompt":"","tokens":[]}',
        b'{"temperature":-Infinity}',
        b'{"top_p":1e999,"messages":[{"role":"user","content":"x"}],"prompt":"x","tokens":1}',
        b"[" * DEEP + b"]" * DEEP,
        b'{"metadata":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
        b'{"seed":1' + b"0" * 400 + b',"prompt":"x","messages":[{"role":"user","content":"x"}],"tokens":1}',
        b'{"seed":1' + b"0" * 5000 + b"}",
        b'{"\\ud800":1}',
        '{"übel":1}'.encode(),
    ],
    ids=lambda body: body[:24].decode("ascii", "replace"),
)
def test_bad_bodies(server: Server, url: str, body: bytes) -> None:
    check_envelope(send(server, body, url=url))


def test_the_server_lives_on(server: Server) -> None:
    assert send(server, GOOD).status_code == 200


def test_nul_and_controls_are_text(server: Server) -> None:
    assert send(server, GOOD.replace(b"hi", b"a\\u0000b\\u001b")).status_code == 200


def test_of_two_keys_the_last_counts(server: Server) -> None:
    answer = send(server, GOOD.replace(b'"seed"', b'"max_tokens":5,"seed"')).json()
    assert answer["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_other_content_types(server: Server, kind: str | None) -> None:
    check_envelope(send(server, GOOD, {} if kind is None else {"Content-Type": kind}), 415)


def test_content_type_with_charset(server: Server) -> None:
    assert send(server, GOOD, {"Content-Type": "application/json; charset=utf-8"}).status_code == 200


def test_compressed_bodies_are_refused(server: Server) -> None:
    check_envelope(send(server, GOOD, {**JSON, "Content-Encoding": "gzip"}), 415)


def test_unknown_places(server: Server) -> None:
    with server.client() as client:
        check_envelope(client.get("/v1/nothing"), 404)
        check_envelope(client.get(URL), 405)
        check_envelope(client.put("/v1/completions"), 405)


def test_unknown_model(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    for name in ("gpt-4", "../tiny", "/etc", "x" * 1000):
        error = check_envelope(server.post(URL, {**body, "model": name}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert server.post(URL, {**body, "model": ""}).status_code == 200
    assert server.post(URL, {**body, "model": "tiny"}).status_code == 200
    check_envelope(server.post(URL, {**body, "model": 5}))


def test_a_million_unknown_fields(server: Server) -> None:
    body = b"{" + b",".join(b'"k%d":1' % number for number in range(100_000)) + b"}"
    assert check_envelope(send(server, body))["param"] == "k0"


def test_what_clients_may_know() -> None:
    assert from_exception(ContextTooLong(5, 4)).extra == {"n_prompt_tokens": 5, "n_ctx": 4}
    assert from_exception(InputError("stop", "is bad")).param == "stop"
    assert from_exception(TemplateError("no")).status_code == 400
    assert from_exception(MissingExtra("x", "server")).status_code == 400
    for error in (CheckpointError("/secret/place is broken"), RuntimeError("/secret at 0x12"), NoTokenizer("/secret")):
        assert "secret" not in from_exception(error).message
    error = ApiError(429, "later", headers={"Retry-After": "2"})
    assert error.compose("")[0]["Retry-After"] == "2"
    assert error.type == "rate_limit_error"


def test_paths() -> None:
    assert join_path(("messages", 0, "content", 1, "type")) == "messages[0].content[1].type"
    assert join_path(()) is None
    assert from_validation([]).status_code == 400

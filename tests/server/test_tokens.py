"""Text to tokens and back over HTTP."""

from typing import Any

import pytest

from tests.server.conftest import Server


def test_text(server: Server) -> None:
    answer = server.post("/tokenize", {"prompt": "hé"}).json()
    assert answer == {"tokens": [256, 104, 0xC3, 0xA9], "count": 4, "max_model_len": 2048}
    assert server.post("/v1/tokenize", {"content": "hé"}).json() == answer
    plain = server.post("/tokenize", {"prompt": "hé", "add_special_tokens": False}).json()
    assert plain["tokens"] == answer["tokens"][1:]
    assert server.post("/tokenize", {"prompt": "", "add_special_tokens": False}).json()["count"] == 0


def test_messages(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answer = server.post("/tokenize", body).json()["tokens"]
    assert answer[0] == 258
    shorter = server.post("/tokenize", {**body, "add_generation_prompt": False}).json()["tokens"]
    assert answer[: len(shorter)] == shorter != answer


def test_back(server: Server) -> None:
    answer = server.post("/detokenize", {"tokens": [256, 104, 0xC3, 0xA9, 259]}).json()
    assert answer["prompt"] == answer["content"] == "<s>hé<|im_end|>"


def test_info(server: Server) -> None:
    with server.client() as client:
        info = client.get("/v1/tokenizer_info").json()
    assert info["vocab_size"] == 260
    assert (info["bos_token"], info["bos_token_id"]) == ("<s>", 256)
    assert info["eos_token"] == "</s>"
    assert info["eos_token_ids"] == [257, 259]


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": [260]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**12]}, "tokens[0]"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_bad_requests(server: Server, url: str, body: Any, param: str) -> None:
    response = server.post(url, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param

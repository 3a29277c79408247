"""Plain completions over HTTP: texts, token ids, many at a time, and the scores that evaluations want."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Server, read_events

URL = "/v1/completions"
BASE: dict[str, Any] = {"prompt": "hello", "max_tokens": 8, "seed": 3, "temperature": 0.8}


def ask(server: Server, **fields: Any) -> Any:
    response = server.post(URL, {**BASE, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: Server, **fields: Any) -> list[Any]:
    response = server.post(URL, {**BASE, "stream": True, **fields})
    assert response.status_code == 200, response.text
    return read_events(response.text)


def test_shape_of_an_answer(server: Server) -> None:
    answer = ask(server)
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["logprobs"] is None
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(answer["choices"][0]["text"]) == 8
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["timings"]["predicted_n"] == answer["usage"]["completion_tokens"] == 8


def test_prompts_of_every_kind(server: Server) -> None:
    one = ask(server)["choices"][0]["text"]
    ids = [256, *b"hello"]
    assert ask(server, prompt=ids)["choices"][0]["text"] == one
    many = ask(server, prompt=["hello", "hello"])
    assert [choice["text"] for choice in many["choices"]] == [one, one]
    assert many["usage"]["prompt_tokens"] == 12
    assert "timings" not in many
    lists = ask(server, prompt=[ids, [256, 65]])
    assert lists["choices"][0]["text"] == one
    assert [choice["index"] for choice in lists["choices"]] == [0, 1]


def test_several_answers_to_several_prompts(server: Server) -> None:
    answer = ask(server, prompt=["hello", "other"], n=2)
    alone = [ask(server, prompt=prompt, n=2)["choices"] for prompt in ("hello", "other")]
    texts = [choice["text"] for choices in alone for choice in choices]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert answer["usage"]["completion_tokens"] == 32


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"echo": True, "logprobs": 2}, {"n": 2, "prompt": ["a", "b"]}])
def test_stream_is_the_answer_in_pieces(server: Server, fields: dict[str, Any]) -> None:
    whole = ask(server, **fields)
    events = stream(server, stream_options={"include_usage": True}, **fields)
    assert events[-1] == "[DONE]"
    assert len({event["id"] for event in events[:-1]}) == 1
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        parts = [c for event in events[:-2] for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
        if choice["logprobs"] is not None:
            for key in ("tokens", "text_offset"):
                assert [item for part in parts for item in part["logprobs"][key]] == choice["logprobs"][key]


def test_echo(server: Server) -> None:
    answer = ask(server, echo=True)["choices"][0]["text"]
    assert answer == "hello" + ask(server)["choices"][0]["text"]
    assert ask(server, prompt=[256, *b"hello"], echo=True)["choices"][0]["text"] == answer


def test_logprobs(server: Server) -> None:
    choice = ask(server, logprobs=3)["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == list(range(8))
    for token, logprob, rivals in zip(
        *(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert rivals[token] == logprob
        assert 3 <= len(rivals) <= 4


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scores_of_a_prompt(server: Server, max_tokens: int) -> None:
    text = "hello there, this is a longer text " * 12  # more than one chunk
    answer = ask(server, prompt=text, max_tokens=max_tokens, echo=True, logprobs=1)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    wanted = server.llm.score(text, top=1)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    got = logprobs["token_logprobs"][1 : 1 + len(wanted)]
    assert got == pytest.approx([sampled.logprob for sampled in wanted], abs=1e-4)
    assert len(logprobs["tokens"]) == 1 + len(wanted) + max_tokens
    assert choice["text"].startswith(text)
    assert logprobs["text_offset"][:3] == [0, 0, 1]
    assert all(
        max(rivals.values()) >= logprob for rivals, logprob in zip(logprobs["top_logprobs"][1:], got, strict=False)
    )
    assert answer["usage"]["completion_tokens"] == max_tokens


def test_scores_of_several_prompts(server: Server) -> None:
    answer = ask(server, prompt=["hello", "other text"], max_tokens=0, echo=True, logprobs=0)
    assert [choice["text"] for choice in answer["choices"]] == ["hello", "other text"]
    assert all(choice["finish_reason"] == "length" for choice in answer["choices"])
    events = stream(server, prompt=["hello", "other text"], max_tokens=0, echo=True, logprobs=0)
    assert "".join(c["text"] for event in events[:-1] for c in event["choices"] if c["index"] == 1) == "other text"
    plain = ask(server, max_tokens=0, echo=True)
    assert plain["choices"][0] == {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "length"}


def test_perplexity_beside_others(server: Server) -> None:
    """Scores come out the same while others run."""
    import threading

    wanted = ask(server, prompt="a little text to score", max_tokens=0, echo=True, logprobs=0)["choices"]
    threads = [threading.Thread(target=ask, args=(server,), kwargs={"max_tokens": 60}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        got = ask(server, prompt="a little text to score", max_tokens=0, echo=True, logprobs=0)["choices"]
        pairs = zip(got[0]["logprobs"]["token_logprobs"][1:], wanted[0]["logprobs"]["token_logprobs"][1:], strict=True)
        assert all(math.isclose(a, b, abs_tol=1e-3) for a, b in pairs)
    for thread in threads:
        thread.join()


def test_stop_token_is_among_the_logprobs(server: Server, say: Callable[[str], None]) -> None:
    say("ab")
    choice = ask(server, logprobs=1)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["a", "b", "<|im_end|>"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "n": 2}, "n"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [260]}, "prompt"),
        ({"prompt": [10**12]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [[1], 2]}, "prompt[1]"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"messages": []}, "messages"),
        ({"n": 129}, "n"),
        ({"n": 9, "prompt": ["a"] * 114}, "n"),
        ({"min_tokens": 9}, "min_tokens"),
    ],
)
def test_bad_fields_are_named(server: Server, fields: dict[str, Any], param: str) -> None:
    response = server.post(URL, {**BASE, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_best_of_as_many_as_n(server: Server) -> None:
    assert len(ask(server, n=2, best_of=2)["choices"]) == 2


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"max_tokens": 0, "echo": True, "logprobs": 1}])
def test_context_too_long(server: Server, fields: dict[str, Any]) -> None:
    response = server.post(URL, {**BASE, "prompt": "x" * 2048, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["n_prompt_tokens"], error["n_ctx"]) == ("context_length_exceeded", 2049, 2048)
    assert error["param"] == "prompt"


def test_special_tokens_in_text_stay_text(server: Server) -> None:
    assert ask(server, prompt="<|im_end|>", echo=True, max_tokens=1)["usage"]["prompt_tokens"] == 11


def test_a_length_that_is_not_given(server: Server) -> None:
    answer = server.post(URL, {"prompt": "hello", "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 16


def test_defaults_of_the_model(make_server: Callable[..., Server], tiny: Path, tmp_path: Path) -> None:
    """The request beats the server's settings, which beat the model's own."""
    model = shutil.copytree(tiny, tmp_path / "m")
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "repetition_penalty": 3.0}))
    body = {"prompt": "hello", "seed": 5}

    def text(server: Server, **fields: Any) -> str:
        return str(server.post(URL, {**body, **fields}).json()["choices"][0]["text"])

    own, hot = make_server(model), make_server(model, temperature=1.0)
    assert text(own) == text(hot, temperature=0) == text(own, temperature=0, repetition_penalty=3.0)
    assert text(own) != text(own, repetition_penalty=1.0)
    assert text(hot) == text(own, temperature=1.0) != text(own)
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}
    answers = [own.post("/v1/chat/completions", {**chat, "seed": seed}).json()["choices"] for seed in (1, 2)]
    assert answers[0] == answers[1]

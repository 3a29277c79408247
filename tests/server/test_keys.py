"""Several keys: who gets in, what each may do, and what one user learns of another."""

import json
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sala.checkpoint.random import TINY, write_random
from sala.engine.requests import Call
from sala.engine.stream import Event
from sala.errors import InputError, SalaError
from sala.llm import LLM
from sala.protocol import Row, Sampling
from sala.server.http.keys import KeyFile, KeyRing
from sala.server.serving import serve
from sala.server.settings import Settings, check_listening
from tests.server.conftest import Puppet, Server, wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "a long text that two users happen to send, word for word, " * 8, "max_tokens": 1}


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json")


def header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(server: Server, key: str, body: Any = LONG, path: str = COMPLETIONS) -> Any:
    return server.post(path, body, headers=header(key))


def cached(server: Server, key: str, **more: Any) -> int:
    answer = ask(server, key, {**LONG, **more})
    assert answer.status_code == 200
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_keys_come_and_go_while_the_server_runs(make_server: Callable[..., Server], file: KeyFile) -> None:
    anna = file.add("anna")
    server = make_server(keys_file=file.path)
    assert ask(server, anna).status_code == 200
    assert server.post(COMPLETIONS, LONG).status_code == 401
    assert ask(server, "sala-" + "x" * 43).status_code == 401
    boss = KeyFile(file.path).add("boss", "admin")  # as another process does it
    assert ask(server, boss).status_code == 200
    body = {"model": "none"}
    assert ask(server, anna, body, "/v1/models/load").json()["error"]["code"] == "admin_key_needed"
    assert ask(server, boss, body, "/v1/models/load").status_code == 404
    KeyFile(file.path).revoke("anna")
    assert ask(server, anna).status_code == 401
    file.path.write_text("damaged")
    assert ask(server, boss).status_code == 401


def test_a_server_does_not_start_without_its_keys(tmp_path: Path) -> None:
    with pytest.raises(SalaError, match=r"the keys in .*none\.json cannot be read: No such file"):
        serve(Settings(port=0, models_dir=tmp_path, keys_file=tmp_path / "none.json"), print)


def test_the_file_holds_no_key(file: KeyFile) -> None:
    key = file.add("anna")
    text = file.path.read_text()
    assert key not in text
    assert key.removeprefix("sala-") not in text
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    with pytest.raises(InputError, match="'anna' has a key already; revoke it first"):
        file.add("anna")
    with pytest.raises(InputError, match="'a b' is not valid"):
        file.add("a b")
    file.path.write_text("{}")
    with pytest.raises(SalaError, match="is not a file of keys"):
        KeyFile(file.path).read()


def test_whoever_changes_the_file_keeps_the_changes_of_others(file: KeyFile) -> None:
    """Each with an object of its own, as other processes do it."""
    for number in range(4):
        file.add(f"old{number}")

    def change(number: int) -> str:
        KeyFile(file.path).revoke(f"old{number}")
        return KeyFile(file.path).add(f"new{number}")

    with ThreadPoolExecutor(4) as pool:
        printed = [*pool.map(change, range(4))]
    assert sorted(key.name for key in file.read().values()) == [f"new{number}" for number in range(4)]
    ring = KeyRing(None, None, file.path)
    assert [found and found.name for found in (ring.find([key.encode()]) for key in printed)] == [
        f"new{number}" for number in range(4)
    ]


def test_a_damaged_file_is_logged_once_and_not_for_each_request(
    file: KeyFile, caplog: pytest.LogCaptureFixture
) -> None:
    key = file.add("anna").encode()
    text = file.path.read_text()
    ring = KeyRing(None, None, file.path)

    def log_of_requests() -> list[str]:
        caplog.clear()
        found = [ring.find([key]) for _ in range(20)] + [ring.find_owner("x") for _ in range(20)]
        assert not any(found)
        return [record.message for record in caplog.records]

    for damaged in ("damaged", "damaged in another way"):
        file.path.write_text(damaged)
        assert log_of_requests() == [f"{file.path} is not a file of keys; make one with: sala key add NAME"]
        assert log_of_requests() == []
    file.path.unlink()
    assert [line.partition("keys.json ")[2] for line in log_of_requests()] == [
        "cannot be read: No such file or directory; see: sala key"
    ]
    file.path.write_text(text)
    assert ring.find([key]) is not None
    file.path.write_text("damaged")
    assert len(log_of_requests()) == 1


def test_users_do_not_see_what_others_have_cached(make_server: Callable[..., Server], file: KeyFile) -> None:
    anna, ben = file.add("anna"), file.add("ben")
    clara, dora = file.add("clara", salt="team"), file.add("dora", salt="team")
    server = make_server(keys_file=file.path)
    assert cached(server, anna) == 0
    assert cached(server, anna) > 300
    assert cached(server, ben) == 0
    assert cached(server, clara) == 0
    assert cached(server, dora) > 300
    assert cached(server, anna, cache_salt="x") == 0
    assert cached(server, anna, cache_salt="x") > 300
    assert cached(server, anna) > 300


@pytest.mark.parametrize("has_file", [True, False])
def test_models_are_loaded_for_those_who_manage_them(
    make_server: Callable[..., Server], file: KeyFile, tmp_path: Path, has_file: bool
) -> None:
    anna, boss = "key-of-the-user", "key-of-the-admin"
    if has_file:
        anna, boss = file.add("anna"), file.add("boss", "admin")
    (tmp_path / "models").mkdir()
    write_random(tmp_path / "models" / "other", TINY, seed=5)
    server = make_server(**({"keys_file": file.path} if has_file else {"api_key": anna, "admin_key": boss}))
    body = {**LONG, "model": "other"}
    refused = ask(server, anna, body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_needed")
    with server.client() as client:
        shown = client.get("/v1/tokenizer_info", params={"model": "other"}, headers=header(boss))
        assert (shown.status_code, shown.json()["error"]["code"]) == (409, "model_not_loaded")
        assert list(server.app.state.runtime.loaded) == [server.app.state.runtime.default_id]
        assert ask(server, boss, body).status_code == 200
        assert client.get("/v1/tokenizer_info", params={"model": "other"}, headers=header(anna)).status_code == 200
    assert ask(server, anna, body).status_code == 200
    assert ask(server, anna).status_code == 200  # the default model is loaded again for everyone


def test_limits_of_answers(make_server: Callable[..., Server], file: KeyFile) -> None:
    anna, ben = file.add("anna", max_sequences=3), file.add("ben")
    server = make_server(keys_file=file.path, max_sequences=6)
    many = {"prompt": "x", "max_tokens": 2, "n": 4}
    full = ask(server, anna, many)
    assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
    assert "retry-after" in full.headers
    assert ask(server, anna, {**many, "n": 3}).status_code == 200
    assert ask(server, ben, many).status_code == 200
    refused = ask(server, ben, {**many, "prompt": ["x", "y"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    assert "asks for 8 answers in all; at most 6 are allowed" in refused.json()["error"]["message"]


def test_an_answer_is_cut_in_time(make_server: Callable[..., Server]) -> None:
    server = make_server(max_request_s=0.3)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100_000, "ignore_eos": True, "n": 2}
    choices = server.post(CHAT, body).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
    assert all(choice["message"]["content"] for choice in choices)
    assert server.post(CHAT, {**body, "max_tokens": 2}).status_code == 200


def test_scores_are_cut_in_time(make_server: Callable[..., Server]) -> None:
    """Half of them would mislead, so that they are an error; of a stream too."""
    server = make_server(max_request_s=0.3)
    long = {"prompt": ["x" * 1900] * 128, "max_tokens": 0, "echo": True, "logprobs": 0}
    refused = server.post(COMPLETIONS, long)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "time_limit")
    assert "send fewer or shorter prompts at a time" in refused.json()["error"]["message"]
    assert '"code":"time_limit"' in server.post(COMPLETIONS, {**long, "stream": True}).text


def test_scores_of_one_key_wait_behind_its_own(
    make_server: Callable[..., Server], file: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    anna, ben = file.add("anna"), file.add("ben")
    server = make_server(keys_file=file.path)
    score = {"prompt": "hello world", "max_tokens": 0, "echo": True, "logprobs": 0}
    endless = {**score, "prompt": ["x" * 400] * 128, "stream": True}
    chunks, logits = list[Row](), server.llm.engine.executor.logits

    def score_slowly(row: Row) -> Any:
        time.sleep(0.02)
        chunks.append(row)
        return logits(row)

    monkeypatch.setattr(server.llm.engine.executor, "logits", score_slowly)
    with server.client() as client, client.stream("POST", COMPLETIONS, json=endless, headers=header(anna)):
        wait_for(lambda: chunks)
        assert ask(server, ben, score).status_code == 200
        assert len(chunks) < 200  # of 257
    server.wait_idle(20)


def test_answers_end_where_users_share_a_server(make_server: Callable[..., Server], file: KeyFile) -> None:
    """After an hour, unless the settings say otherwise; not where all that is asked belongs to one key."""
    file.add("anna")
    found = [
        (make_server(**more).service._loop.max_request_s)
        for more in ({}, {"keys_file": file.path}, {"keys_file": file.path, "max_request_s": 0.0})
    ]
    assert found == [0.0, 3600.0, 0.0]


def test_batches_are_not_cut_in_time(tiny: Path) -> None:
    """They wait for all others, so that what counts is how long they take together."""
    llm = LLM(tiny, device="cpu", ctx=256)
    llm.service.limit_time(1e-6)
    call = Call(None, Sampling(temperature=0.0, max_tokens=5, ignore_eos=True), "x")
    found = []
    for is_background in (False, True):
        with llm.service.submit(llm.inputs.submit(call, is_streamed=False), is_background) as stream:
            found += [len(item.completion.token_ids) for item in stream if isinstance(item, Event) and item.completion]
    assert found[0] < found[1] == 5
    llm.close()


def test_two_keys_share_the_queue_of_the_server(make_server: Callable[..., Server], file: KeyFile) -> None:
    """While one key has as much waiting as may, it gets 429 and the other key its answer."""
    anna, ben = file.add("anna"), file.add("ben")
    server = make_server(keys_file=file.path, max_queue=2, max_batch=2)
    endless = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "n": 4, "stream": True}
    puppet = server.llm.engine._executor = Puppet(server.llm.engine._executor)
    puppet.delay_s = 0.01
    with server.client() as client, client.stream("POST", COMPLETIONS, json=endless, headers=header(anna)):
        wait_for(lambda: server.service.status().answers_waiting == 2)
        full = ask(server, anna, {"prompt": "x", "max_tokens": 1})
        assert (full.status_code, full.json()["error"]["message"]) == (429, "2 answers wait already; try again later")
        assert int(full.headers["retry-after"]) > 0
        for path, body in ((COMPLETIONS, {"prompt": "x", "max_tokens": 1}), ("/v1/tokenize", {"prompt": "x"})):
            assert ask(server, ben, body, path).status_code == 200
    server.wait_idle(20)


def test_short_keys_are_refused_where_others_can_guess() -> None:
    check_listening(Settings(api_key="short"))
    with pytest.raises(InputError, match="api_key has fewer than 16 characters"):
        check_listening(Settings(host="0.0.0.0", api_key="short"))  # noqa: S104
    check_listening(Settings(host="0.0.0.0", api_key="k" * 16))  # noqa: S104


def test_the_command(file: KeyFile, capsys: pytest.CaptureFixture[str]) -> None:
    from sala.cli import run

    where = ["--keys-file", str(file.path)]
    assert run(["key", "add", "anna", "--max-sequences", "4", *where]) == 0
    key = capsys.readouterr().out.strip()
    assert next(iter(file.read().values())).name == "anna"
    assert run(["key", "list", "--json", *where]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["name"], listed["role"], listed["max_sequences"]) == ("anna", "user", 4)
    assert key not in str(listed)
    assert run(["key", "revoke", "anna", *where]) == 0
    assert file.read() == {}
    assert run(["key", "revoke", "anna", *where]) != 0

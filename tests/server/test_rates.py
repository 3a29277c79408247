"""Limits per minute of a key: what counts, what a client learns of them, and that nobody gets more."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from sala.backends.torch.executor import TorchExecutor
from sala.protocol import Plan
from sala.server.http import rates
from sala.server.http.errors import ApiError
from sala.server.http.keys import KeyFile, owner_of
from sala.server.http.rates import Rates, as_duration
from tests.server.conftest import Server, read_events
from tests.server.test_batches import begin, connect, line, read, wait_over

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Keyed:
    """A server with keys whose minutes pass only when told to."""

    def __init__(self, make_server: Callable[..., Server], path: Path, **settings: Any) -> None:
        self.file, self.clock = KeyFile(path), Clock()
        self.keys = {"anna": self.file.add("anna", max_tokens_per_minute=1000), "ben": self.file.add("ben")}
        self.server = make_server(keys_file=path, **settings)
        for name in self.keys:
            self.server.app.state.rates[owner_of(name)] = Rates(self.clock)

    def ask(self, name: str, path: str = COMPLETIONS, **body: Any) -> Any:
        body = {"prompt": "x", "max_tokens": 5, "ignore_eos": True, **body}
        return self.server.post(path, body, headers={"Authorization": f"Bearer {self.keys[name]}"})

    @property
    def used(self) -> int:
        return round(self.server.app.state.rates[owner_of("anna")].meters["tokens"].used)


@pytest.fixture
def keyed(make_server: Callable[..., Server], tmp_path: Path) -> Keyed:
    return Keyed(make_server, tmp_path / "keys.json")


def test_a_key_gets_its_tokens_and_no_more(keyed: Keyed) -> None:
    left, answer = 1000, keyed.ask("anna", prompt="a text", max_tokens=300)
    while answer.status_code == 200:
        left -= answer.json()["usage"]["total_tokens"]
        assert answer.headers["x-ratelimit-limit-tokens"] == "1000"
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(left)
        assert answer.headers["x-ratelimit-reset-tokens"] == as_duration((1000 - left) * 0.06)
        answer = keyed.ask("anna", prompt="a text", max_tokens=300)
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("tokens", "rate_limit_exceeded", None)
    assert "on tokens per min (TPM): Limit 1000" in error["message"]
    wait_s = int(answer.headers["retry-after"])
    assert 0 < int(answer.headers["retry-after-ms"]) <= wait_s * 1000 <= 60_000
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(left)
    assert keyed.ask("anna", max_tokens=left - 20).status_code == 200, "what is left can be used"
    others = keyed.ask("ben", prompt="a text", max_tokens=300)
    assert others.status_code == 200
    assert "x-ratelimit-limit-tokens" not in others.headers
    assert keyed.ask("anna", max_tokens=300).status_code == 429
    keyed.clock.now += 60
    assert keyed.ask("anna", max_tokens=300).status_code == 200


def test_what_counts(keyed: Keyed) -> None:
    """All answers to all prompts, each prompt once; what is cached too; nothing of what was not generated."""
    for body in (
        {"prompt": "abc", "n": 4, "max_tokens": 6},
        {"prompt": ["abc", "defg"], "n": 2},
        {"prompt": "abc", "echo": True, "logprobs": 1},
        {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0},
        {"prompt": "abc", "max_tokens": 900, "ignore_eos": False, "logit_bias": {"259": 100}},
    ):
        before = keyed.used
        answer = keyed.ask("anna", **body)
        assert answer.status_code == 200, answer.text
        assert keyed.used - before == answer.json()["usage"]["total_tokens"]
        keyed.clock.now += 60
        keyed.server.app.state.rates[owner_of("anna")].headers()  # drains
    assert keyed.ask("anna", prompt="x", temperature=-1).status_code == 400
    assert keyed.used == 0


def test_a_cancelled_stream_counts_what_was_generated(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_slowly(executor: TorchExecutor, plan: Plan, run: Callable[..., Any] = TorchExecutor.run) -> Any:
        time.sleep(0.005)  # the stream is cancelled long before it ends
        return run(executor, plan)

    monkeypatch.setattr(TorchExecutor, "run", run_slowly)
    statistics = keyed.server.app.state.metrics.statistics
    body = {"prompt": "abc", "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 2}
    headers = {"Authorization": f"Bearer {keyed.keys['anna']}"}
    body["max_tokens"] = 450
    with keyed.server.client() as client, client.stream("POST", COMPLETIONS, json=body, headers=headers) as stream:
        assert int(stream.headers["x-ratelimit-remaining-tokens"]) < 100
        lines = stream.iter_lines()
        for _ in range(6):
            next(lines)
    keyed.server.wait_idle()
    assert statistics.reasons["cancelled"] == 1
    used = statistics.prompt_tokens + statistics.completion_tokens
    assert 5 < used < 900
    assert keyed.used == used


def test_limits_survive_a_change_of_the_file(keyed: Keyed) -> None:
    assert keyed.ask("anna", max_tokens=700).status_code == 200
    used = keyed.used
    keyed.file.add("clara")
    assert keyed.ask("anna", max_tokens=700).status_code == 429
    text = keyed.file.path.read_text()
    keyed.file.path.write_text(text.replace('"max_tokens_per_minute": 1000', '"max_tokens_per_minute": 2000'))
    assert keyed.ask("anna", max_tokens=700).status_code == 200
    assert keyed.used == 2 * used
    keyed.file.path.write_text(text.replace('"max_tokens_per_minute": 1000', '"max_tokens_per_minute": 500'))
    refused = keyed.ask("anna", max_tokens=5)
    assert (refused.status_code, refused.headers["x-ratelimit-remaining-tokens"]) == (429, "0")


def test_a_prompt_that_never_fits_and_an_answer_that_may_be_long(keyed: Keyed) -> None:
    refused = keyed.ask("anna", prompt="x" * 1200)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "Request too large" in refused.json()["error"]["message"]
    assert "retry-after" not in refused.headers
    assert refused.headers["x-should-retry"] == "false"
    answer = keyed.ask("anna", max_tokens=1500)
    assert answer.json()["usage"]["completion_tokens"] == 1500, "of a full minute an answer of any length begins"
    assert keyed.used > 1500
    keyed.clock.now += 30
    assert keyed.ask("anna", max_tokens=5).headers["x-ratelimit-remaining-tokens"] == "0", "the excess is waited for"


def test_batches_wait_and_leave_half_to_others(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MAX_NAP_S", 0.01)
    client = connect(keyed.server, keyed.keys["anna"])
    lines = [line(f"q{number}", max_tokens=300, ignore_eos=True) for number in range(3)]
    batch = begin(client, [*lines, line("large", "x" * 1200)])
    largest = 0
    for _ in range(400):
        largest = max(largest, keyed.used)
        keyed.clock.now += 1
        if client.batches.retrieve(batch.id).status == "completed":
            break
    done = wait_over(client, batch)
    assert (done.request_counts.completed, done.request_counts.failed) == (3, 1)
    assert read(client, done.error_file_id)["large"]["error"]["code"] == "rate_limit_exceeded"
    assert 250 < largest <= 500


def test_requests_per_minute_for_all_keys(make_server: Callable[..., Server], tmp_path: Path) -> None:
    keyed = Keyed(make_server, tmp_path / "keys.json", max_key_requests_per_minute=2)
    assert [keyed.ask("ben").status_code for _ in range(3)] == [200, 200, 429]
    assert keyed.ask("anna").headers["x-ratelimit-remaining-requests"] == "1"
    with pytest.raises(openai.RateLimitError) as caught:
        connect(keyed.server, keyed.keys["ben"]).chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}]
        )
    assert (caught.value.type, caught.value.code) == ("requests", "rate_limit_exceeded")
    assert caught.value.response.headers["x-ratelimit-reset-requests"] == "1m0s"
    error = keyed.ask("ben", "/v1/messages", messages=[{"role": "user", "content": "x"}], prompt=None, ignore_eos=None)
    assert (error.status_code, error.json()["error"]["type"]) == (429, "rate_limit_error")


def test_tokens_of_one_request(make_server: Callable[..., Server]) -> None:
    server = make_server(max_request_tokens=100)
    body = {"prompt": ["x" * 20, "y" * 20], "n": 2, "max_tokens": 5000, "ignore_eos": True, "stream": True}
    events = read_events(server.post(COMPLETIONS, {**body, "stream_options": {"include_usage": True}}).text)
    usage = events[-2]["usage"]
    assert 100 - 4 < usage["total_tokens"] <= 100
    whole = server.post(COMPLETIONS, {**body, "stream": False}).json()
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 4
    refused = server.post(CHAT, {"messages": [{"role": "user", "content": "x" * 100}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert "max_request_tokens" in refused.json()["error"]["message"]


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_ever_negative_and_nobody_gets_more(seed: int) -> None:
    """Whatever is reserved, given back and waited for."""
    rng, clock, limit = random.Random(seed), Clock(), 1000
    own = Rates(clock)
    own.limit(limit, 0)
    meter = own.meters["tokens"]
    open_ones: list[tuple[int, Callable[[int], None]]] = []
    began, total = clock.now, 0
    for _ in range(300):
        clock.now += rng.expovariate(0.3)
        if open_ones and rng.random() < 0.5:
            most, settle = open_ones.pop(rng.randrange(len(open_ones)))
            used = rng.randint(0, most)
            total += used
            settle(used)
        else:
            prompt, answers = rng.randint(1, 300), rng.randint(1, 600)
            try:
                open_ones.append((prompt + answers, own.reserve(prompt, answers)))
            except ApiError as error:
                clock.now += int((error.headers or {})["retry-after-ms"]) / 1000
                open_ones.append((prompt + answers, own.reserve(prompt, answers)))
        assert 0 <= meter.used <= limit
        assert 0 <= meter.remaining <= limit
        assert total <= limit * (1 + (clock.now - began) / 60)


def test_durations_are_written_as_openai_does() -> None:
    assert [as_duration(seconds) for seconds in (0, 0.0171, 1, 1.5, 60, 360, 90.25)] == [
        "0ms", "18ms", "1s", "1.5s", "1m0s", "6m0s", "1m30.25s",
    ]  # fmt: skip


def test_the_command_sets_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sala.cli import run

    where = ["--keys-file", str(tmp_path / "keys.json")]
    limits = ["--max-tokens-per-minute", "5000", "--max-requests-per-minute", "60"]
    assert run(["key", "add", "anna", *limits, *where]) == 0
    capsys.readouterr()
    assert run(["key", "list", "--json", *where]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["max_tokens_per_minute"], listed["max_requests_per_minute"]) == (5000, 60)

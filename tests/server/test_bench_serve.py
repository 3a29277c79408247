"""`sala bench serve` on real servers with a tiny model; times are whatever they are, counts must be right."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sala.cli import run
from tests.server.conftest import Puppet, Server

SMALL = ["--input", "20", "--output", "6", "--warmup", "1"]


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run the command; return its record, with what it printed."""

    def call(*arguments: str) -> Any:
        file = tmp_path / "record.json"
        file.unlink(missing_ok=True)
        assert run(["bench", "serve", "--save", str(file), *arguments]) == 0, capsys.readouterr().err
        record, printed = json.loads(file.read_text()), capsys.readouterr()
        return {**record, "out": printed.out, "err": printed.err}

    return call


def test_closed_loop(server: Server, bench: Any, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    load = ["--concurrency", "3,1", "--requests", "5"]
    found = bench("--url", server.url, *load, *SMALL, "--plot", str(picture))
    assert (found["kind"], found["model"], found["settings"]["prompts"]) == ("serve", "tiny", "token ids")
    assert found["settings"]["temperature"] == 0
    assert [row["concurrency"] for row in found["results"]] == [1, 3]
    for row in found["results"]:
        assert (row["answers"], row["errors"], row["input_tokens"], row["output_tokens"]) == (5, 0, 20, 6)
        assert row["output_per_second"] == pytest.approx(5 * 6 / row["seconds"])
        assert row["input_per_second"] == pytest.approx(5 * 20 / row["seconds"])
        assert 0 < row["first_token_s_p50"] <= row["first_token_s_p90"] <= row["first_token_s_p99"]
        assert 0 <= row["between_tokens_s_p50"] <= row["between_tokens_s_p99"] <= row["longest_stall_s"] + 1e-9
        assert row["cached_share"] < 0.2
    assert "first token, ms" in found["out"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_open_loop_sampled_with_ranges(server: Server, bench: Any, tmp_path: Path) -> None:
    lengths = ["--input", "10-30", "--output", "3,5", "--warmup", "0"]
    found = bench(
        "--url", server.url + "/v1", "--rate", "50", "--requests", "12", *lengths, "-t", "0.9", "--top-k", "5"
    )
    (row,) = found["results"]
    assert (row["rate"], row["concurrency"], row["answers"], row["errors"]) == (50, None, 12, 0)
    assert 10 <= row["input_tokens"] <= 30
    assert 3 < row["output_tokens"] < 5
    assert found["settings"]["top_k"] == 5
    assert "top_p" not in found["settings"]
    page = tmp_path / "page.html"
    assert run(["report", str(tmp_path / "record.json"), "-o", str(page)]) == 0
    assert "requests per second" in page.read_text()


def test_first_tokens_by_length(server: Server, bench: Any) -> None:
    found = bench("--url", server.url, "--lengths", "40,300", "--repeats", "2", "-m", "tiny")
    assert (found["kind"], [row["num_tokens"] for row in found["results"]]) == ("first_token", [40, 300])
    assert all(row["cold_s"] > 0 and 0 < row["warm_s"] <= row["worst_s"] for row in found["results"])
    assert "300: cold" in found["err"]


def test_the_longest_stall_is_seen(server: Server, puppet: Puppet, bench: Any) -> None:
    puppet.delay_s = 0.05
    (row,) = bench("--url", server.url, "--concurrency", "1", "--requests", "1", *SMALL)["results"]
    assert row["longest_stall_s"] >= 0.05
    assert row["between_tokens_s_p50"] >= 0.02


def test_refused_requests_are_counted_and_named(make_server: Callable[..., Server], bench: Any) -> None:
    server = make_server(max_queue=0, max_batch=1)
    puppet = Puppet(server.llm.engine._executor)
    puppet.delay_s, server.llm.engine._executor = 0.02, puppet
    found = bench("--url", server.url, "--concurrency", "4", "--requests", "8", *SMALL)
    (row,) = found["results"]
    assert row["errors"] >= 1
    assert row["answers"] + row["errors"] == 8
    assert "429" in row["error"]
    assert "some requests failed" in found["err"]


def test_a_server_of_its_own(tiny: Path, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SALA_API_KEY", "k" * 32)
    options = ["-m", str(tiny), "--device", "cpu", "--ctx", "1K", "--no-packed"]
    found = bench("--concurrency", "2", "--requests", "3", *SMALL, *options)
    assert found["results"][0]["answers"] == 3
    assert found["settings"]["flags"] == ["--device", "cpu", "--no-packed", "--ctx", "1K"]
    assert found["settings"]["ready_s"] > 0
    assert "k" * 32 not in json.dumps(found)


def test_a_server_that_does_not_start_says_why(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", "-m", str(tiny), "--device", "nonsense"]) == 1
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--url", "http://127.0.0.1:9"], 1, "start one (sala serve"),
        (["--url", "127.0.0.1:9"], 2, "write it as http://localhost:8000/v1"),
        (["--rate", "2", "--concurrency", "2"], 2, "keep one of them"),
        (["--rate", "fast"], 2, "write it as 2.5 or 1,2,4"),
        (["--rate", "0"], 2, "write it as 2.5 or 1,2,4"),
        (["--input", "9-3"], 2, "write it as 2048, 512,2048 or 100-4000"),
        (["--output", "0"], 2, "output is '0'"),
        (["--concurrency", "many"], 2, "many"),
        (["--save", "/nowhere/at/all.json"], 2, "cannot be written"),
    ],
)
def test_errors(arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", *arguments]) == code
    out = capsys.readouterr()
    assert words in out.err
    assert out.out == ""


def test_the_wrong_key(make_server: Callable[..., Server], capsys: pytest.CaptureFixture[str]) -> None:
    server = make_server(api_key="k" * 32)
    assert run(["bench", "serve", "--url", server.url]) == 1
    assert "set SALA_API_KEY" in capsys.readouterr().err
    assert run(["bench", "serve", "--url", server.url, "--api-key", "k" * 32, "--lengths", "8", "--repeats", "1"]) == 0


def test_prompts_that_are_too_long(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", "--url", server.url, "--concurrency", "1", "--input", "4000", "--requests", "1"]) == 1
    error = capsys.readouterr().err
    assert "no request succeeded: 400" in error
    assert "2048" in error


class ChatOnly(BaseHTTPRequestHandler):
    """A server of another make: chats alone, no `ignore_eos`, four tokens around a message and three in a word."""

    protocol_version = "HTTP/1.0"  # the body ends with the connection

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "other"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/chat/completions":
            return self._answer(404, {"detail": "Not Found"})
        if "ignore_eos" in body:
            return self._answer(400, {"error": {"message": "ignore_eos: unknown field"}})
        num_input = 4 + 3 * len(body["messages"][0]["content"].split())
        deltas = [{"role": "assistant", "content": ""}, *({"content": "x"} for _ in range(body["max_tokens"])), {}]
        events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        usage = {"prompt_tokens": num_input, "completion_tokens": body["max_tokens"]}
        lines = [json.dumps(event) for event in (*events, {"choices": [], "usage": usage})]
        return self._send(200, "text/event-stream", "".join(f"data: {line}\r\n\r\n" for line in (*lines, "[DONE]")))

    def _answer(self, status: int, value: object) -> None:
        self._send(status, "application/json", json.dumps(value))

    def _send(self, status: int, kind: str, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def chat_only() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ChatOnly)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_server_that_takes_chats_only(chat_only: str, bench: Any) -> None:
    found = bench("--url", chat_only, "--concurrency", "2", "--requests", "4", "--input", "1000", "--output", "7")
    (row,) = found["results"]
    assert (found["model"], found["settings"]["prompts"]) == ("other", "chats")
    assert (row["answers"], row["errors"], row["output_tokens"]) == (4, 0, 7)
    assert row["input_tokens"] == pytest.approx(1000, abs=2)
    assert "does not take token ids" in found["err"]


def test_energy_where_nvidia_smi_is_installed(
    server: Server, bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["--url", server.url, "--concurrency", "1", "--requests", "2", *SMALL]
    monkeypatch.setenv("PATH", str(tmp_path))
    found = bench(*command)
    assert found["results"][0]["watts"] is None
    assert "J per 1K" not in found["out"]
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '0, 300.0\\n1, 100.5\\n2, [N/A]\\n'\nexec /bin/sleep 60\n")
    tool.chmod(0o755)
    found = bench(*command)
    (row,) = found["results"]
    assert row["watts"] == 400.5
    assert row["joules_per_1k_output"] >= 400.5 * row["seconds"] / 12 * 1000
    assert "J per 1K" in found["out"]

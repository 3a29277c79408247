"""Beginning and end of a server: addresses, signals, exit codes, and the command itself."""

import ctypes
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sala import cli
from sala.errors import SalaError
from sala.server.serving import OneLine, as_user_error, greet, has_died, open_socket, prepare_models_dir
from sala.server.settings import Settings
from tests.server.live import FakeRuntime, is_closed, make_app, read_answer, request, serving, wait_until

ROOT = Path(__file__).parents[2]
COMMAND = """
import sys
from sala.cli import run
sys.exit(run(["serve", *sys.argv[1:]]))
"""


def test_port_in_use() -> None:
    with open_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SalaError, match=f"port {port} of 127.0.0.1 is in use; choose another with --port"):
            open_socket("127.0.0.1", port)


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid", "300.1.1.1"])
def test_bad_address(host: str) -> None:
    with pytest.raises(SalaError, match="address"):
        open_socket(host, 0)


def test_models_directory(tmp_path: Path) -> None:
    prepare_models_dir(tmp_path / "new" / "models")
    assert (tmp_path / "new" / "models").is_dir()
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "models"):
        with pytest.raises(SalaError, match="is a file; choose another with --models-dir"):
            prepare_models_dir(path)


ARENAS = """
import ctypes, sys, threading
from sala.server.settings import Settings
from sala.server import serving

def stop(_):
    raise SystemExit

serving.check_listening = stop
if "limited" in sys.argv:
    try:
        serving.serve(Settings(), print)
    except SystemExit:
        pass
libc = ctypes.CDLL(None)
libc.fopen.restype = libc.malloc.restype = ctypes.c_void_p
barrier = threading.Barrier(6)

def allocate():
    barrier.wait()
    libc.malloc(1000)
    barrier.wait()

threads = [threading.Thread(target=allocate) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.malloc_info(0, ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w")))
libc.fflush(None)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc has arenas that can be limited")
def test_the_threads_of_a_server_share_two_arenas() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    environment["PYTHONPATH"] = str(ROOT)

    def count(*arguments: str, **more: str) -> int:
        command = [sys.executable, "-c", ARENAS, *arguments]
        done = subprocess.run(command, env={**environment, **more}, capture_output=True, text=True, check=True)
        return done.stdout.count("<heap nr=")

    assert count("limited") <= 2 < count()
    assert count("limited", MALLOC_ARENA_MAX="4") > 2


DESCRIPTORS = """
import resource
from sala.server.serving import fit_descriptors
from sala.server.settings import Settings

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
print(fit_descriptors(Settings(max_connections=64), print).max_connections)
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
print(fit_descriptors(Settings(max_connections=256), print).max_connections)
"""


@pytest.mark.skipif(os.name == "nt", reason="there is no such limit")
def test_connections_fit_into_the_limit_of_open_files() -> None:
    done = subprocess.run([sys.executable, "-c", DESCRIPTORS], capture_output=True, text=True, check=True)
    raised, warning, fitted = done.stdout.splitlines()
    assert (raised, fitted) == ("64", "92")
    assert warning == ("warning: 300 files may be open at a time, so max_connections is 92; raise it with: ulimit -n")


def test_too_many_open_files_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with serving(Settings(port=0)) as live, caplog.at_level(logging.ERROR):
        loop = live.server.servers[0].get_loop()
        error = OSError(errno.EMFILE, "Too many open files")
        for _ in range(100):
            loop.call_soon_threadsafe(loop.call_exception_handler, {"message": "accept", "exception": error})
        loop.call_soon_threadsafe(loop.call_exception_handler, {"message": "another error"})
        wait_until(lambda: "another error" in caplog.text)
    lines = [record.message for record in caplog.records if "accepted" in record.message]
    assert lines == ["a connection could not be accepted: Too many open files"]


def test_greeting() -> None:
    def lines(settings: Settings) -> list[str]:
        out: list[str] = []
        with open_socket(settings.host, 0) as listener:
            greet(settings, listener, out.append)
            return [line.replace(str(listener.getsockname()[1]), "PORT") for line in out]

    assert lines(Settings())[0].startswith(
        "sala listens at http://127.0.0.1:PORT/v1; web page: http://127.0.0.1:PORT/;"
    )
    everywhere = lines(Settings(host="0.0.0.0", allow_remote_without_key=True))  # noqa: S104
    assert "every address of 0.0.0.0" in everywhere[0]
    assert everywhere[1].startswith("warning: no API key is set")


def test_log_lines_cannot_be_forged() -> None:
    record = logging.LogRecord("sala", logging.INFO, "", 0, "%s", ("a\r\nb\x1b[31m\u202e",), None)
    assert OneLine("%(message)s").format(record) == "a\\r\\nb\\x1b[31m\\u202e"


def test_log_has_no_query(caplog: pytest.LogCaptureFixture) -> None:
    with serving(Settings(port=0)) as live, caplog.at_level("INFO", "sala.server"):
        logging.getLogger("sala.server").propagate = True
        assert live.ask("GET", "/health?key=hush").status == 200
        wait_until(lambda: "/health" in caplog.text)
    assert "hush" not in caplog.text
    assert "GET /health 200" in caplog.text


def test_drain() -> None:
    """Running requests end, new ones are turned away, probes are answered."""
    with serving(Settings(port=0, drain_s=10)) as live:
        with live.connect() as busy, live.connect() as kept:
            kept.sendall(request("GET", "/health"))
            assert read_answer(kept).status == 200
            busy.sendall(request("GET", "/slow/1"))
            wait_until(lambda: live.server.front.num_running == 1)
            live.server.drain()
            kept.sendall(request("POST", "/echo", b"x"))
            late = read_answer(kept)
            assert (late.status, late.error["code"]) == (503, "shutting_down")
            assert "retry-after" in late.headers
            assert is_closed(kept, 5)
            assert live.ask("POST", "/echo", b"x").status == 503
            assert json.loads(live.ask("GET", "/health").body)["status"] == "draining"
            assert live.ask("GET", "/health/live").status == 200
            assert read_answer(busy).status == 200
        wait_until(lambda: live.server.should_exit)


def test_drain_has_an_end() -> None:
    with serving(Settings(port=0, drain_s=0.3)) as live, live.connect() as busy:
        busy.sendall(request("GET", "/slow/30"))
        wait_until(lambda: live.server.front.num_running == 1)
        live.server.drain()
        began = time.monotonic()
        assert is_closed(busy, 5)
        wait_until(lambda: live.server.should_exit)
        assert time.monotonic() - began < 3


def test_a_dead_engine_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sala.server.serving.DEAD_S", 0.5)
    with serving(Settings(port=0)) as live:
        live.app.state.runtime.loaded["tiny"].service.change(is_alive=False)
        assert live.ask("GET", "/health").status == 503
        assert not live.server.should_exit
        wait_until(lambda: live.server.should_exit)
        assert live.server.exit_code == 1


def test_a_worker_that_is_replaced_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sala.server.serving.DEAD_S", 1.0)
    with serving(Settings(port=0)) as live:
        worker = live.app.state.runtime.loaded["tiny"].service
        worker.change(is_alive=False)
        assert has_died(live.app.state)
        time.sleep(0.5)
        worker.change(is_alive=True)
        time.sleep(0.9)
        assert not live.server.should_exit
        assert live.server.exit_code == 0


def test_a_model_that_does_not_load_ends_the_server() -> None:
    """Unless none was named and none is there: one can be downloaded."""
    for model, has_failed, code in (("some", False, 1), (None, True, 1), (None, False, 0)):
        settings = Settings(port=0, model=model)
        app = make_app(settings)
        app.state.runtime = FakeRuntime({}, is_loading=True, has_failed=has_failed)
        with serving(settings, app) as live:
            assert live.ask("GET", "/health").status == 503
            app.state.runtime.is_loading = False
            wait_until(lambda live=live: live.server._has_loaded)  # type: ignore[misc]
            assert live.server.exit_code == code


def test_reasons_for_not_starting() -> None:
    known = SalaError("it is so", "do that")
    assert as_user_error(known) is known
    assert "sala estimate" in str(as_user_error(MemoryError()))
    assert "KeyError" in str(as_user_error(KeyError("hush")))
    assert "hush" not in str(as_user_error(KeyError("hush")))


# The command, in a process of its own.


@contextmanager
def command(*arguments: str, program: str = COMMAND, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    with command(*arguments, **environment) as process:
        out, err = process.communicate(timeout=60)
        assert not out
        return process.returncode, err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--host", "0.0.0.0"], 1, "there is no key"),  # noqa: S104
        (["--host", "203.0.113.7", "--api-key", "k" * 16], 1, "203.0.113.7 is not an address of this machine"),
        (["--engine", "sglang"], 2, "port is 0; choose one"),
        (["--port", "x"], 2, "--port is 'x'"),
        (["--config", "/nowhere.toml"], 2, "/nowhere.toml cannot be read"),
        (["--models-dir", "/dev/null"], 1, "cannot be used: is a file"),
    ],
)
def test_refusals_are_one_line(
    arguments: list[str],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SALA_MODELS_DIR", str(tmp_path))
    assert cli.run(["serve", "--port", "0", *arguments]) == code
    text = capsys.readouterr().err
    assert words in text
    assert text.count("\n") == 1


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    code, text = run("--port", "0", "-m", "/nowhere", SALA_MODELS_DIR=str(tmp_path))
    assert (code, "no model at /nowhere" in text, text.count("\n")) == (1, True, 1)


def test_port_in_use_ends_with_one_line(tmp_path: Path) -> None:
    with open_socket("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert run("--port", port, SALA_MODELS_DIR=str(tmp_path)) == (
            1,
            f"sala: port {port} of 127.0.0.1 is in use; choose another with --port, or stop the process that uses it\n",
        )


@contextmanager
def started(tiny: Path, *arguments: str, program: str = COMMAND) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The real server with a tiny model; yields the process and its port."""
    with command(
        "-m", str(tiny), "--port", "0", "--cache-memory", "64M", *arguments,
        program=program, SALA_MODELS_DIR=str(tiny.parent),
    ) as process:  # fmt: skip
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "sala listens at http://127.0.0.1:" in line, line + process.stderr.read()
        port = int(line.split("http://127.0.0.1:")[1].split("/")[0])
        lines: list[str] = []
        stream = process.stderr
        threading.Thread(target=lambda: lines.extend(stream), daemon=True).start()
        yield process, port


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, json.loads(content) if content.startswith(b"{") else content


def is_ready(port: int) -> Callable[[], bool]:
    return lambda: ask(port, "GET", "/health/ready")[0] == 200


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3000, "temperature": 0, "ignore_eos": True}


def test_the_whole_server(tiny: Path) -> None:
    """It loads, answers, counts, and ends on SIGTERM with code 0, letting what runs come to its end."""
    with started(tiny) as (process, port):
        wait_until(is_ready(port), 60)
        status, answer = ask(port, "POST", "/v1/chat/completions", {**CHAT, "max_tokens": 5})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
        status, numbers = ask(port, "GET", "/metrics")
        assert b"sala_completion_tokens_total 5.0" in numbers
        assert b"sala_models_loaded 1.0" in numbers
        status, schema = ask(port, "GET", "/openapi.json")
        assert {"/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= set(schema["paths"])
        assert ask(port, "GET", "/")[0] == 200
        assert ask(port, "GET", "/docs")[0] == 200

        answers: list[tuple[int, Any]] = []
        busy = threading.Thread(
            target=lambda: answers.append(ask(port, "POST", "/v1/chat/completions", {**CHAT, "max_tokens": 200}))
        )
        busy.start()
        wait_until(lambda: b"sala_requests_accepted_total 2.0" in ask(port, "GET", "/metrics")[1])
        process.send_signal(signal.SIGTERM)
        busy.join(60)
        assert answers[0][0] == 200
        assert answers[0][1]["usage"]["completion_tokens"] == 200
        assert process.wait(20) == 0


def test_an_idle_server_ends_quickly(tiny: Path) -> None:
    with started(tiny) as (process, port):
        wait_until(is_ready(port), 60)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert time.monotonic() - began < 4  # a second, on a machine with nothing else to do


def test_a_second_signal_ends_it_at_once(tiny: Path) -> None:
    with started(tiny) as (process, port):
        wait_until(is_ready(port), 60)
        body = json.dumps(CHAT).encode()
        with socket.create_connection(("127.0.0.1", port), timeout=10) as one:
            one.sendall(request("POST", "/v1/chat/completions", body, content_type="application/json"))
            wait_until(lambda: b"sala_requests_accepted_total 1.0" in ask(port, "GET", "/metrics")[1])
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(5) == 0


def test_a_server_that_loads_can_be_ended(tiny: Path) -> None:
    slow = COMMAND.replace(
        "sys.exit(",
        "import time, sala.llm\nold = sala.llm.LLM.__init__\n"
        "sala.llm.LLM.__init__ = lambda *a, **k: (time.sleep(30), old(*a, **k))[1]\nsys.exit(",
    )
    with started(tiny, program=slow) as (process, port):
        status, health = ask(port, "GET", "/health")
        assert (status, health["status"]) == (503, "loading")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_a_model_that_cannot_be_loaded(tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        (broken / file.name).write_bytes(b"{}" if file.suffix == ".safetensors" else file.read_bytes())
    code, text = run("-m", str(broken), "--port", "0", SALA_MODELS_DIR=str(tmp_path / "models"))
    assert code == 1
    assert "cannot be loaded" in text
    assert "sala estimate" in text
    assert "Traceback" not in text

"""Leaving, failing, ending: places are freed, errors are told, a process that is killed leaves nothing broken."""

import asyncio
import gc
import json
import shutil
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from sala.models.download import PARTIAL
from tests.integrity import integrity
from tests.server.conftest import Puppet, Server, read_events, wait_for
from tests.server.fake_hub import COMMIT, FakeHub, serve
from tests.server.live import read_answer, request
from tests.server.test_library import make_weights
from tests.server.test_serving import COMMAND, ask, is_ready, started

HELLO = [{"role": "user", "content": "tell me a story"}]
LONG = {"max_tokens": 1500, "stream": True}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, **LONG, "ignore_eos": True},
    "/v1/completions": {"prompt": "once upon a time", **LONG, "ignore_eos": True},
    "/v1/responses": {"input": "tell me a story", "max_output_tokens": 1500, "stream": True},
    "/v1/messages": {"messages": HELLO, **LONG},
}
CHAT, COMPLETIONS = list(ROUTES)[:2]
needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files cannot be counted here")


def puppet_of(server: Server) -> Puppet:
    engine = server.llm.engine
    engine._executor = Puppet(engine._executor)
    return engine._executor


def send(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """A request on a connection of its own, of which nothing has been read yet."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


def count_ended(server: Server, reason: str) -> float:
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    start = f'sala_requests_total{{reason="{reason}"}} '
    return next(float(line.removeprefix(start)) for line in lines if line.startswith(start))


# Whoever leaves.


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_leaving_frees_the_place_and_is_counted(
    make_server: Callable[..., Server], phase: str, is_stream: bool
) -> None:
    server = make_server(max_batch=1)
    puppet = puppet_of(server)
    puppet.delay_s = 0.1
    body = {**ROUTES[CHAT], "stream": is_stream}
    first = send(server, CHAT, body) if phase == "queue" else None
    wait_for(lambda: server.service.status().running == (first is not None))
    if phase == "prefill":
        body["messages"] = [{"role": "user", "content": "a long prompt " * 120}]
    connection = send(server, CHAT, body)
    scheduler = server.llm.engine.scheduler
    if phase == "queue":
        wait_for(lambda: scheduler.waiting)
    else:
        wait_for(lambda: scheduler.running and scheduler.running[0].is_decoding == (phase == "decode"))
    connection.close()
    wait_for(lambda: count_ended(server, "cancelled") == 1)
    assert server.service.num_requests == (first is not None)
    if first is not None:  # whose turn it was is not disturbed
        assert server.service.status().running == 1
        first.close()
    wait_for(lambda: server.llm.engine.is_idle)
    assert integrity(server.llm.engine) == []


def test_a_client_that_only_stops_reading_gets_its_answer_computed(server: Server) -> None:
    """Nothing of it can be seen from here: the answer is sent, and whoever does not read it loses it alone."""
    ended = count_ended(server, "length")
    connection = send(server, CHAT, {**ROUTES[CHAT], "max_tokens": 20})
    connection.shutdown(socket.SHUT_RD)
    wait_for(lambda: count_ended(server, "length") == ended + 1)
    server.wait_idle()
    connection.close()


@needs_proc
def test_two_hundred_that_come_and_go_leave_nothing(server: Server, puppet: Puppet) -> None:
    def count() -> tuple[int, int]:
        """Pages and slots that are not free, though nothing is to be remembered."""
        server.llm.engine.forget()
        status = server.service.status()
        return status.pages_used, status.slots_used

    paths, process = list(ROUTES), psutil.Process()
    server.post(CHAT, {**ROUTES[CHAT], "max_tokens": 1})
    server.wait_idle()
    num_files, num_threads = process.num_fds(), threading.active_count()
    assert count() == (0, 0)
    accepted = server.app.state.metrics.statistics.num_accepted
    for number in range(200):
        path = paths[number % 4]
        connection = send(server, path, {**ROUTES[path], "stream": number % 8 < 4})
        if number % 5:
            time.sleep(0.002 * (number % 5))
        if number % 3 == 0:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
    wait_for(lambda: server.llm.engine.is_idle and not server.service.num_requests, 20)
    wait_for(lambda: process.num_fds() <= num_files)
    assert server.app.state.metrics.statistics.num_accepted > accepted
    assert count() == (0, 0)
    assert threading.active_count() <= num_threads + 4  # pools grow to their size and stay there
    assert integrity(server.llm.engine) == []
    assert server.post(CHAT, {**ROUTES[CHAT], "stream": False, "max_tokens": 2}).status_code == 200


# Whatever fails.


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_that_breaks_says_so_and_is_not_done(server: Server, puppet: Puppet, path: str) -> None:
    puppet.delay_s = 0.02
    with server.client() as client, client.stream("POST", path, json=ROUTES[path]) as response:
        pieces = response.iter_text()
        text = ""
        while len(read_events(text)) < 5:
            text += next(pieces)
        puppet.error = RuntimeError("a secret of the machine")
        text += "".join(pieces)  # it comes to its end: the connection is not cut
    events = read_events(text)
    assert set(events[-1]) == {"error"}
    assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in text
    assert "[DONE]" not in text
    assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])
    puppet.error = None
    assert server.post(path, {**ROUTES[path], "stream": False, "max_tokens": 2}).status_code == 200


def test_a_failed_request_leaves_its_connection_to_the_next(server: Server, puppet: Puppet) -> None:
    body = json.dumps({**ROUTES[CHAT], "stream": False, "max_tokens": 2}).encode()
    asked = request("POST", CHAT, body, content_type="application/json", x_request_id="mine")
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        for error, status in ((RuntimeError("boom"), 500), (None, 200), (RuntimeError("boom"), 500), (None, 200)):
            puppet.error = error
            connection.sendall(asked)
            answer = read_answer(connection)
            assert (answer.status, answer.headers["x-request-id"]) == (status, "mine")


def test_an_engine_that_is_stuck_is_unhealthy_until_it_moves(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same for the threads that prepare requests."""
    monkeypatch.setattr("sala.server.admin.monitoring.MAX_SILENCE_S", 0.2)
    server = make_server()
    puppet = puppet_of(server)
    puppet.delay_s = 0.6
    with server.client() as client:

        def state() -> tuple[int, str]:
            answer = client.get("/health")
            return answer.status_code, answer.json()["status"]

        assert state() == (200, "ok")
        connection = send(server, CHAT, {**ROUTES[CHAT], "max_tokens": 1})
        wait_for(lambda: state() == (503, "unhealthy"))
        wait_for(lambda: state() == (200, "ok"))
        connection.close()
        puppet.delay_s = 0.0
        server.wait_idle()
        go_on = threading.Event()
        encode = server.llm.inputs.encode_chat
        monkeypatch.setattr(server.llm.inputs, "encode_chat", lambda *a, **k: (go_on.wait(20), encode(*a, **k))[1])
        connection = send(server, CHAT, {**ROUTES[CHAT], "max_tokens": 1})
        wait_for(lambda: state() == (503, "unhealthy"))
        go_on.set()
        wait_for(lambda: state() == (200, "ok"))
    connection.close()


class Lost(Puppet):
    """A device that fails once and for all."""

    def run(self, plan: Any) -> Any:
        raise RuntimeError("CUDA error: unspecified launch failure")

    def probe(self) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")


def test_a_lost_device_is_the_end_of_the_engine(make_server: Callable[..., Server], tiny: Path, tmp_path: Path) -> None:
    """Not of one request after the other, or one model after the other, with a server that calls itself healthy."""
    server = make_server()
    shutil.copytree(tiny, tmp_path / "models" / "second")
    answers: list[Any] = []
    puppet = puppet_of(server)
    puppet.delay_s = 0.05
    body = {**ROUTES[CHAT], "stream": False}
    threads = [threading.Thread(target=lambda: answers.append(server.post(CHAT, body))) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.service.status().running == 3)
    server.llm.engine._executor = Lost(puppet._executor)
    for thread in threads:
        thread.join(20)
    answers += [server.post(CHAT, body), server.post(CHAT, {**body, "model": "second"})]
    assert [(one.status_code, one.json()["error"]["code"]) for one in answers] == [(500, "engine_dead")] * 5
    assert list(server.app.state.runtime.loaded) == ["tiny"]
    with server.client() as client:
        assert (client.get("/health").status_code, client.get("/health/live").status_code) == (503, 200)


def test_a_clock_that_jumps_changes_nothing(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sala.server.runtime.CHECK_S", 0.1)
    server = make_server(idle_unload_s=600, ping_s=0.1)
    puppet_of(server).delay_s = 0.05
    model = server.app.state.runtime.loaded["tiny"]
    real = time.time
    with server.client() as client, client.stream("POST", CHAT, json={**ROUTES[CHAT], "max_tokens": 30}) as response:
        pieces = response.iter_text()
        text = next(pieces)
        for hours in (1, -1):
            monkeypatch.setattr(time, "time", lambda hours=hours: real() + 3600 * hours)
            with server.client() as other:
                assert other.get("/health").json()["status"] == "ok"
                assert other.get("/v1/models").status_code == 200
            time.sleep(0.3)  # the look for idle models has come round
        text += "".join(pieces)
    assert read_events(text)[-1] == "[DONE]"
    assert server.app.state.runtime.loaded["tiny"] is model
    assert model.service.status().heartbeat_s < 60


@needs_proc
def test_fifty_times_loaded_and_unloaded(make_server: Callable[..., Server], tiny: Path, tmp_path: Path) -> None:
    server = make_server(cache_memory=64 << 20)
    shutil.copytree(tiny, tmp_path / "models" / "second")
    process = psutil.Process()

    def count() -> tuple[int, int]:
        """Threads of ours, and programs that render templates."""
        return sum(one.name.startswith("sala") for one in threading.enumerate()), len(process.children())

    with server.client() as client:
        for number in range(51):
            assert client.post("/v1/models/load", json={"model": "second"}).status_code == 200
            body = {"model": "second", "messages": HELLO, "max_tokens": 2}
            if number % 10 == 0:
                assert client.post(CHAT, json=body).json()["model"] == "second"
            assert client.post("/v1/models/unload", json={"model": "second"}).status_code == 200
            if number == 10:
                before, num_files, memory = count(), process.num_fds(), process.memory_info().rss
        assert client.get("/v1/models").json()["data"][-1]["loaded"]
    assert all(now <= then for now, then in zip(count(), before, strict=True))
    assert process.num_fds() <= num_files
    assert process.memory_info().rss < memory + (64 << 20)


@needs_proc
def test_an_unloaded_model_leaves_nothing(make_server: Callable[..., Server], tiny: Path, tmp_path: Path) -> None:
    """Neither its processes, its mapped files nor its caches wait for the garbage to be collected."""
    server = make_server(cache_ram=8 << 20, cache_dir=tmp_path / "cache")
    shutil.copytree(tiny, tmp_path / "models" / "second")
    process = psutil.Process()
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    body = {"model": "second", "messages": HELLO, "max_tokens": 4, "response_format": shape}
    gc.collect()
    gc.disable()
    try:
        with server.client() as client:
            counts = []
            for _ in range(3):
                assert client.post("/v1/models/load", json={"model": "second"}).status_code == 200
                assert client.post(CHAT, json=body).status_code == 200
                engine = server.app.state.runtime.loaded["second"].llm.engine
                caches = [weakref.ref(one) for one in (engine.hybrid, engine.hybrid.host, engine.executor)]
                del engine
                assert client.post("/v1/models/unload", json={"model": "second"}).status_code == 200
                # Threads that end with the model may hold it for a moment longer.
                wait_for(lambda caches=caches: [cache() for cache in caches] == [None] * 3)
                counts.append((process.num_fds(), len(process.children())))
    finally:
        gc.enable()
    assert len(set(counts)) == 1


@pytest.mark.parametrize("path", [CHAT, "/v1/tokenize"])
def test_a_model_that_is_unloaded_before_it_is_used(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The request has found it, and another one needs its memory: it is loaded again."""
    server = make_server()
    runtime = server.app.state.runtime
    find, lost = runtime.get, []

    async def get(*arguments: Any, **options: Any) -> Any:
        model = await find(*arguments, **options)
        if not lost:
            lost.append(model)
            await runtime.unload(model.id)
        return model

    monkeypatch.setattr(runtime, "get", get)
    body = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    assert server.post(path, {**body, **({"max_tokens": 2} if path == CHAT else {})}).status_code == 200
    assert runtime.loaded["tiny"] is not lost[0]


def test_a_request_while_its_model_is_being_unloaded(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unloading has begun and takes a while: what the request is told to wait for is a new copy of the model."""
    server = make_server()
    runtime = server.app.state.runtime
    find, tasks = runtime.get, []

    async def get(*arguments: Any, **options: Any) -> Any:
        model = await find(*arguments, **options)
        if not tasks:
            close = model.llm.close
            monkeypatch.setattr(model.llm, "close", lambda drain_s: (time.sleep(0.5), close(drain_s)))
            tasks.append(asyncio.create_task(runtime.unload(model.id)))
            await asyncio.sleep(0)
        return model

    monkeypatch.setattr(runtime, "get", get)
    answer = server.post(CHAT, {"messages": HELLO, "max_tokens": 1500, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 1500


# The process, and what it leaves behind.


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    files = {"config.json": b"{}", "model.safetensors": make_weights(tmp_path / "source", 2_000_000)}
    with serve(FakeHub(files)) as fake:
        yield fake


@contextmanager
def downloading(tiny: Path, hub: FakeHub, models: Path, *flags: str) -> Iterator[tuple[Any, int]]:
    """A server of its own that has begun to fetch a model, some hundred kilobytes of it."""
    hub.pause = 0.1
    with started(tiny, "--models-dir", str(models), "--hub-url", hub.url, *flags) as (process, port):
        wait_for(is_ready(port), 60)
        assert ask(port, "POST", "/v1/models/download", {"repo_id": "org/model"})[0] == 202
        part = models / PARTIAL / f"org--model@{COMMIT}" / "model.safetensors.part"
        wait_for(lambda: part.exists() and part.stat().st_size > 100_000, 20)
        yield process, port
    hub.pause = 0


def finish_download(tiny: Path, hub: FakeHub, models: Path, *flags: str) -> Any:
    """What a new server makes of what the old one left: the rest is fetched, not the whole. Returns its answer."""
    with started(tiny, "--models-dir", str(models), "--hub-url", hub.url, *flags) as (_, port):
        wait_for(is_ready(port), 60)
        listed = [card["id"] for card in ask(port, "GET", "/v1/models")[1]["data"]]
        assert listed == ["tiny"]
        answer = ask(port, "POST", CHAT, GREEDY)[1]
        job = ask(port, "POST", "/v1/models/download", {"repo_id": "org/model"})[1]["job"]["id"]
        wait_for(lambda: ask(port, "GET", f"/v1/models/download/{job}")[1]["status"] == "done", 20)
        assert "org--model" in [card["id"] for card in ask(port, "GET", "/v1/models")[1]["data"]]
    assert "range" in hub.requests_of("model.safetensors")[-1].headers
    assert (models / "org--model" / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    return answer["choices"][0]["message"]["content"]


GREEDY = {"messages": [{"role": "user", "content": "some words " * 40}], "max_tokens": 8, "temperature": 0}


def test_ended_while_it_downloads(tiny: Path, hub: FakeHub, tmp_path: Path) -> None:
    models = tmp_path / "models"
    with downloading(tiny, hub, models) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finish_download(tiny, hub, models)


def test_killed_while_it_downloads_and_answers(tiny: Path, hub: FakeHub, tmp_path: Path) -> None:
    """The past of a prompt may be on disk, half there or not at all: the answer is the same."""
    models, cache = tmp_path / "models", tmp_path / "cache"
    with downloading(tiny, hub, models, "--cache-dir", str(cache)) as (process, port):
        wanted = ask(port, "POST", CHAT, GREEDY)[1]["choices"][0]["message"]["content"]
        others = [{**GREEDY, "messages": [{"role": "user", "content": f"{n} words " * 60}]} for n in range(8)]
        threads = [threading.Thread(target=try_to_ask, args=(port, other), daemon=True) for other in others]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(list(cache.glob("*.sala"))) > 2)
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        for thread in threads:
            thread.join(20)
    assert finish_download(tiny, hub, models, "--cache-dir", str(cache)) == wanted


def try_to_ask(port: int, body: Any) -> None:
    try:
        ask(port, "POST", CHAT, body)
    except (OSError, HTTPException):
        return  # the server was killed: that is the point


FAILURES = {
    "the engine dies": "raise SystemExit",
    "the device is lost": "raise RuntimeError('CUDA error: unspecified launch failure')",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_the_process_ends_with_its_engine(tiny: Path, failure: str) -> None:
    """With an exit code that tells a supervisor to start another, and 503 as long as it is up."""
    broken = f"""
import sala.server.serving
from sala.backends.torch.executor import TorchExecutor
sala.server.serving.DEAD_S = 0.5
def fail(*_):
    {FAILURES[failure]}
TorchExecutor.run = TorchExecutor.probe = fail
"""
    program = COMMAND.replace("sys.exit(", f"{broken}\nsys.exit(")
    with started(tiny, program=program) as (process, port):
        wait_for(is_ready(port), 60)
        status, answer = ask(port, "POST", CHAT, GREEDY)
        assert (status, answer["error"]["code"]) == (500, "engine_dead")
        assert ask(port, "GET", "/health")[0] == 503
        assert process.wait(30) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to lose")
def test_the_process_ends_with_its_gpu(tiny: Path) -> None:
    """An access out of bounds poisons the device for good; only a new process gets it back."""
    broken = """
import torch
from sala.backends.torch.executor import TorchExecutor
step = TorchExecutor.run
def fail(self, plan):
    torch.zeros(4, device=self.device)[torch.tensor([1 << 40], device=self.device)]
    return step(self, plan)
TorchExecutor.run = fail
"""
    program = COMMAND.replace("sys.exit(", f"{broken}\nsys.exit(")
    with started(tiny, "--device", "cuda", program=program) as (process, port):
        wait_for(is_ready(port), 120)
        status, answer = ask(port, "POST", CHAT, GREEDY)
        assert (status, answer["error"]["code"]) == (500, "engine_dead")
        assert process.wait(60) != 0

"""The engine service under the server: disconnected clients, slow readers, failing requests, loading of models."""

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from sala.engine.requests import Call, Client, Submission
from sala.engine.service import Stream
from sala.engine.stream import Event, PromptScores, Usage
from sala.errors import EngineClosed, EngineDead, QueueFull, SlowReader
from sala.llm import LLM
from sala.protocol import Sampling
from tests.integrity import integrity
from tests.server.conftest import Puppet, Server, read_events, wait_for

CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "tell me a story"}], "max_tokens": 1500, "ignore_eos": True, "seed": 1
}  # fmt: skip
SHORT = {**LONG, "max_tokens": 3}


class Tally:
    """Counts what the service reports."""

    def __init__(self) -> None:
        self.num_accepted = self.num_rejected = 0
        self.reasons: list[str] = []
        self.usages: list[Usage] = []

    def accepted(self) -> None:
        self.num_accepted += 1

    def rejected(self) -> None:
        self.num_rejected += 1

    def finished(self, reason: str, usage: Usage, first_token_s: float, decode_s: float) -> None:
        assert first_token_s >= 0 <= decode_s
        self.reasons.append(reason)
        self.usages.append(usage)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny, device="cpu", ctx=2048, max_batch=2)


def puppet_of(llm: LLM) -> Puppet:
    llm.engine._executor = Puppet(llm.engine._executor)  # type: ignore[assignment]
    return llm.engine._executor  # type: ignore[return-value]


def answers(prompt: str = "hello", n: int = 1, **settings: Any) -> Callable[[LLM], Submission]:
    sampling = Sampling(**{"seed": 1, "max_tokens": 8, "ignore_eos": True, **settings})
    return lambda llm: llm.inputs.submit(Call(None, sampling, prompt, n=n))


async def open_stream(llm: LLM, prepare: Callable[[LLM], Submission], max_pending: int | None = None) -> Stream:
    return await llm.service.open(lambda: prepare(llm), max_pending)


async def read(stream: Stream) -> list[Any]:
    items = []
    try:
        while (item := await stream.aread(20)) is not None:
            items.append(item)
    finally:
        stream.close()
    return items


def run(tiny: Path, work: Callable[[LLM, Puppet, Tally], Any], max_queue: int = 64) -> Tally:
    """Run one test with a model of its own."""
    tally = Tally()

    async def whole() -> None:
        llm = LLM(tiny, device="cpu", ctx=2048, max_batch=2)
        puppet = puppet_of(llm)
        llm.service.max_queue = max_queue
        llm.service.observe(tally)
        llm.service.start()
        try:
            await work(llm, puppet, tally)
        finally:
            puppet.delay_s, puppet.error = 0.0, None
            await asyncio.to_thread(llm.close)
        assert not llm.service.status().is_alive

    asyncio.run(whole())
    return tally


def test_answers_are_those_of_the_model(tiny: Path, llm: LLM) -> None:
    wanted = [one.text for one in llm.generate("hello", seed=1, max_tokens=8, ignore_eos=True, n=3)]

    async def work(llm: LLM, puppet: Puppet, tally: Tally) -> None:
        items = await read(await open_stream(llm, answers(n=3)))
        pieces = [item for item in items if isinstance(item, Event)]
        for index, text in enumerate(wanted):
            mine = [piece for piece in pieces if piece.index == index]
            assert "".join(piece.text for piece in mine) == text
            assert mine[-1].completion is not None
            assert sum(len(piece.sampled) for piece in mine) == 8

    tally = run(tiny, work)
    assert tally.reasons == ["length"]
    assert (tally.usages[0].prompt_tokens, tally.usages[0].completion_tokens) == (6, 24)


def test_many_at_a_time(tiny: Path, llm: LLM) -> None:
    prompts = [f"prompt number {number}" for number in range(12)]
    wanted = [one.text for one in llm.generate(prompts, seed=1, max_tokens=8, ignore_eos=True)]

    async def work(llm: LLM, puppet: Puppet, tally: Tally) -> None:
        async def one(prompt: str) -> str:
            items = await read(await open_stream(llm, answers(prompt)))
            return "".join(item.text for item in items)

        assert await asyncio.gather(*(one(prompt) for prompt in prompts)) == wanted
        assert llm.service.num_requests == 0

    tally = run(tiny, work)
    assert tally.num_accepted == len(tally.reasons) == 12


def test_a_full_queue(tiny: Path) -> None:
    async def work(llm: LLM, puppet: Puppet, tally: Tally) -> None:
        puppet.delay_s = 0.02
        streams = [await open_stream(llm, answers(max_tokens=50)) for _ in range(2)]
        while llm.service.status().running < 2:
            await asyncio.sleep(0.01)
        streams += [await open_stream(llm, answers()) for _ in range(3)]
        status = llm.service.status()
        assert (status.running, status.waiting) == (2, 3)
        with pytest.raises(QueueFull) as caught:
            await open_stream(llm, answers())
        assert caught.value.num_waiting == 3
        puppet.delay_s = 0.0
        for stream in streams:
            assert await read(stream)
        await read(await open_stream(llm, answers()))

    tally = run(tiny, work, max_queue=3)
    assert (tally.num_accepted, tally.num_rejected) == (6, 1)
    assert tally.reasons == ["length"] * 6


ANNA, BEN = Client("anna"), Client("ben")


def test_what_one_client_waits_for_does_not_count_for_another(tiny: Path) -> None:
    """Answers are counted, of each client alone: one has three places to wait, and two answers run."""

    async def work(llm: LLM, puppet: Puppet, tally: Tally) -> None:
        puppet.delay_s = 0.02

        async def ask(client: Client, n: int = 1) -> Stream:
            return await llm.service.open(lambda: answers(n=n, max_tokens=1500)(llm), client=client)

        streams = [await ask(ANNA, 4)]
        while llm.service.status().answers_running < 2:
            await asyncio.sleep(0.01)
        status = llm.service.status()
        assert (status.running, status.waiting) == (1, 0)
        assert (status.answers_running, status.answers_waiting) == (2, 2)
        streams.append(await ask(ANNA, 100))  # two wait: one more request may, whatever it asks for
        with pytest.raises(QueueFull, match="102 answers wait already") as caught:
            await ask(ANNA)
        assert caught.value.num_waiting == 102
        streams += [await ask(BEN) for _ in range(3)]
        while not any(handle.num_running for handle in (stream.handle for stream in streams[2:])):
            await asyncio.sleep(0.01)  # it has taken the place of one of the others
        streams.append(await ask(BEN))
        with pytest.raises(QueueFull, match="3 answers wait already"):
            await ask(BEN)
        with pytest.raises(QueueFull, match="103 answers wait already"):  # the preempted one waits again
            await ask(ANNA)
        for stream in streams:
            stream.close()
        while llm.service.status().answers_waiting or not llm.engine.is_idle:
            await asyncio.sleep(0.01)
        puppet.delay_s = 0.0
        await read(await ask(ANNA))

    tally = run(tiny, work, max_queue=3)
    assert (tally.num_accepted, tally.num_rejected) == (7, 3)


def test_without_places_to_wait_each_client_has_its_share(tiny: Path) -> None:
    async def work(llm: LLM, puppet: Puppet, tally: Tally) -> None:
        puppet.delay_s = 0.02
        opening = partial(llm.service.open, lambda: answers(max_tokens=1500)(llm))
        streams = [await opening(client=ANNA) for _ in range(2)]
        with pytest.raises(QueueFull):
            await opening(client=ANNA)
        streams.append(await opening(client=BEN))  # it runs instead of one of the others
        while not streams[-1].handle.num_running:
            await asyncio.sleep(0.01)
        with pytest.raises(QueueFull):
            await opening(client=BEN)
        for stream in streams:
            stream.close()

    run(tiny, work, max_queue=0)


def test_prompts_of_one_client_wait_behind_its_own(tiny: Path) -> None:
    """However many of its requests are being prepared, those of another one are, and age is that of the work alone."""
    is_free = threading.Event()

    def slow(llm: LLM) -> Submission:
        assert is_free.wait(60)
        return answers()(llm)

    async def work(llm: LLM, puppet: Puppet, tally: Tally) -> None:
        crowd = [asyncio.create_task(llm.service.open(partial(slow, llm), client=ANNA)) for _ in range(20)]
        counting = [asyncio.create_task(llm.service.call(is_free.wait, 60, owner="anna")) for _ in range(20)]
        while llm.service.status().preparing < 40:
            await asyncio.sleep(0)
        for _ in range(3):
            assert await read(await llm.service.open(lambda: answers()(llm), client=BEN))
            assert await llm.service.call(len, "abc", owner="ben") == 3
        assert llm.service.status().preparing == 40
        is_free.set()
        for stream in await asyncio.gather(*crowd):
            assert await read(stream)
        assert all(await asyncio.gather(*counting))
        status = llm.service.status()
        assert (status.preparing, status.preparing_s) == (0, 0.0)

    run(tiny, work)


def test_grammars_of_one_client_wait_behind_its_own(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that compiles goes round the clients: of two clients, each has every other turn."""
    is_free = threading.Event()
    order: list[str] = []

    async def work(llm: LLM, puppet: Puppet, tally: Tally) -> None:
        worker = llm.inputs._grammars._worker
        exchange = worker._exchange

        def watch(request: bytes, seconds: float) -> dict[str, Any]:
            if b'"task": "grammar"' in request:
                assert is_free.wait(60)
                order.append("anna" if b"anna" in request else "ben")
            return exchange(request, seconds)

        monkeypatch.setattr(worker, "_exchange", watch)

        def ask(client: Client, number: int) -> "asyncio.Task[Stream]":
            prepare = partial(answers(regex=f"{client.owner}{number}"), llm)
            return asyncio.create_task(llm.service.open(prepare, client=client))

        tasks = [ask(ANNA, number) for number in range(8)]
        while worker.num_waiting < 1:
            await asyncio.sleep(0)
        tasks += [ask(BEN, number) for number in range(2)]
        while worker.num_waiting < 3:  # two threads for each client
            await asyncio.sleep(0)
        is_free.set()
        for task in tasks:
            assert await read(await task)

    run(tiny, work)
    assert sorted(order) == ["anna"] * 8 + ["ben"] * 2
    assert order[:4] == ["anna", "ben", "anna", "ben"]


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_cancel(tiny: Path, phase: str) -> None:
    async def work(llm: LLM, puppet: Puppet, tally: Tally) -> None:
        puppet.delay_s = 0.1
        others = [await open_stream(llm, answers(max_tokens=500)) for _ in range(2 if phase == "queue" else 0)]
        prompt = "a long prompt " * 120 if phase == "prefill" else "hello"
        stream = await open_stream(llm, answers(prompt, max_tokens=1000))
        if phase == "decode":
            await stream.aread(5)
        await asyncio.sleep(0.15)
        began = time.monotonic()
        for one in (stream, *others):
            one.close()
        while len(tally.reasons) < 1 + len(others) or llm.engine.scheduler.running:
            await asyncio.sleep(0.01)
        assert time.monotonic() - began < 2
        assert llm.engine.is_idle
        assert integrity(llm.engine) == []

    assert set(run(tiny, work).reasons) == {"cancelled"}


def test_a_slow_reader_is_dropped(tiny: Path) -> None:
    async def work(llm: LLM, puppet: Puppet, tally: Tally) -> None:
        slow = await open_stream(llm, answers(max_tokens=1500), max_pending=2000)
        assert len(await read(await open_stream(llm, answers(max_tokens=20)))) >= 20
        await asyncio.wait_for(slow.overflowed.wait(), 5)
        while "cancelled" not in tally.reasons:
            await asyncio.sleep(0.01)
        with pytest.raises(SlowReader):
            await slow.aread()
        slow.close()

    assert sorted(run(tiny, work).reasons) == ["cancelled", "length"]


def test_an_error_stays_with_its_request(tiny: Path) -> None:
    async def work(llm: LLM, puppet: Puppet, tally: Tally) -> None:
        puppet.error = RuntimeError("boom")
        with pytest.raises(RuntimeError, match="boom"):
            await read(await open_stream(llm, answers()))
        puppet.error = None
        assert await read(await open_stream(llm, answers()))
        with pytest.raises(ZeroDivisionError):
            await open_stream(llm, lambda llm: 1 // 0)  # type: ignore[arg-type,return-value]
        assert llm.service.num_requests == 0

    assert run(tiny, work).reasons == ["error", "length"]


def test_a_dead_engine_answers_everybody(tiny: Path) -> None:
    async def work(llm: LLM, puppet: Puppet, tally: Tally) -> None:
        puppet.delay_s = 0.02
        waiting = [await open_stream(llm, answers(max_tokens=500)) for _ in range(4)]
        assert llm.service.status().is_alive
        puppet.error = SystemExit()  # type: ignore[assignment]
        for stream in waiting:
            with pytest.raises(EngineDead) as caught:
                await read(stream)
            assert isinstance(caught.value.__cause__, SystemExit)
        assert not llm.service.status().is_alive
        with pytest.raises(EngineDead, match="engine has stopped"):
            await open_stream(llm, answers())

    assert run(tiny, work).reasons == ["error"] * 4


def test_closing_lets_requests_end(tiny: Path) -> None:
    async def work(llm: LLM, puppet: Puppet, tally: Tally) -> None:
        puppet.delay_s = 0.01
        stream = await open_stream(llm, answers(max_tokens=30))
        reader = asyncio.create_task(read(stream))
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(asyncio.to_thread(llm.close, 10))
        await asyncio.sleep(0.05)
        with pytest.raises(EngineClosed):
            await open_stream(llm, answers())
        assert len(await reader) >= 30
        await closing

    assert run(tiny, work).reasons == ["length"]


def test_closing_does_not_wait_for_ever(tiny: Path) -> None:
    async def work(llm: LLM, puppet: Puppet, tally: Tally) -> None:
        puppet.delay_s = 0.05
        stream = await open_stream(llm, answers(max_tokens=1000))
        began = time.monotonic()
        await asyncio.to_thread(llm.close, 0.2)
        assert time.monotonic() - began < 2
        with pytest.raises(EngineClosed):
            await read(stream)

    assert run(tiny, work).reasons == ["error"]


def test_scores_wait_for_room(tiny: Path, llm: LLM) -> None:
    ids = llm.encode("a text to score " * 40)
    wanted = [sampled.logprob for sampled in llm.score(ids)]

    async def work(llm: LLM, puppet: Puppet, tally: Tally) -> None:
        others = [asyncio.create_task(read(await open_stream(llm, answers(max_tokens=40)))) for _ in range(4)]
        stream = await open_stream(llm, lambda llm: Submission(scores=[llm.token_scoring(ids, 0, 256)]))
        items = await read(stream)
        assert isinstance(items[0], PromptScores)
        assert [sampled.logprob for part in items[0].parts for sampled in part] == pytest.approx(wanted, abs=1e-4)
        await asyncio.gather(*others)
        assert integrity(llm.engine) == []

    assert run(tiny, work).reasons.count("stop") == 1


def test_the_heart_beats(tiny: Path) -> None:
    async def work(llm: LLM, puppet: Puppet, tally: Tally) -> None:
        assert llm.service.status().heartbeat_s < 2
        puppet.delay_s = 0.5
        stream = await open_stream(llm, answers(max_tokens=1))
        await asyncio.sleep(0.4)
        assert llm.service.status().heartbeat_s > 0.2
        await read(stream)

    run(tiny, work)


# From here on over the network.


def open_socket(server: Server, body: dict[str, Any], connection: socket.socket | None = None) -> socket.socket:
    data = json.dumps(body).encode()
    lines = ("Host: 127.0.0.1", "Content-Type: application/json", f"Content-Length: {len(data)}", "", "")
    connection = connection or socket.socket()
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(f"POST {CHAT} HTTP/1.1\r\n".encode() + "\r\n".join(lines).encode() + data)
    return connection


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("how", ["close", "reset", "shut_wr"])
def test_who_leaves_is_forgotten(server: Server, puppet: Puppet, is_stream: bool, how: str) -> None:
    puppet.delay_s = 0.02
    connection = open_socket(server, {**LONG, "stream": is_stream})
    wait_for(lambda: server.service.status().running)
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    if how == "shut_wr":
        connection.shutdown(socket.SHUT_WR)
    else:
        connection.close()
    wait_for(lambda: not server.llm.engine.scheduler.running, 2)
    connection.close()
    server.wait_idle(2)


def test_leaving_while_the_prompt_is_encoded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """And while it is encoded, others are answered."""
    release = threading.Event()
    encode = server.llm.inputs.encode_chat

    def slowly(messages: Any, **options: Any) -> Any:
        if messages[0]["content"] == "slow":
            release.wait(10)
        return encode(messages, **options)

    monkeypatch.setattr(server.llm.inputs, "encode_chat", slowly)
    connection = open_socket(server, {**LONG, "messages": [{"role": "user", "content": "slow"}]})
    wait_for(lambda: server.service.status().waiting)
    with server.client() as client:
        began = time.monotonic()
        assert client.get("/health").status_code == 200
        assert time.monotonic() - began < 1
    assert server.post(CHAT, SHORT).status_code == 200
    connection.close()
    server.wait_idle(2)
    release.set()


def test_come_and_go(server: Server, puppet: Puppet) -> None:
    puppet.delay_s = 0.001
    before = threading.active_count()
    used = server.service.status().slots_used
    for number in range(60):
        connection = open_socket(server, {**LONG, "stream": bool(number % 2)})
        if number % 3:
            time.sleep(0.005)
        connection.close()
    wait_for(lambda: server.llm.engine.is_idle, 5)
    server.wait_idle(2)
    assert threading.active_count() <= before + 4
    assert server.service.status().slots_used <= used + 16  # snapshots may be kept
    assert integrity(server.llm.engine) == []
    assert server.post(CHAT, SHORT).status_code == 200


def test_an_error_in_a_stream(server: Server, puppet: Puppet) -> None:
    puppet.error = RuntimeError("secret place /etc at 0x12")
    events = read_events(server.post(CHAT, {**LONG, "stream": True}).text)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1]["error"]["type"] == "server_error"
    assert {"message", "type", "param", "code"} <= events[-1]["error"].keys()
    assert "secret" not in events[-1]["error"]["message"]
    assert "[DONE]" not in events
    response = server.post(CHAT, SHORT)
    assert response.status_code == 500
    assert "secret" not in response.text
    puppet.error = None
    assert server.post(CHAT, SHORT).status_code == 200


def test_signs_of_life(make_server: Callable[..., Server]) -> None:
    server = make_server(ping_s=0.05)
    puppet = puppet_of(server.llm)
    puppet.delay_s = 0.3
    text = server.post(CHAT, {**SHORT, "stream": True}).text
    assert text.count(": ping\n\n") >= 3
    assert read_events(text)[-1] == "[DONE]"


def test_queue_over_http(make_server: Callable[..., Server]) -> None:
    server = make_server(max_queue=1, max_batch=1)
    puppet = puppet_of(server.llm)
    puppet.delay_s = 0.02
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.post, CHAT, {**LONG, "max_tokens": 40})
        wait_for(lambda: server.service.status().running == 1)
        second = pool.submit(server.post, CHAT, SHORT)
        wait_for(lambda: server.service.status().waiting == 1)
        third = server.post(CHAT, SHORT)
        assert third.status_code == 429
        assert int(third.headers["retry-after"]) > 0
        assert third.json()["error"]["code"] == "queue_full"
        assert (first.result().status_code, second.result().status_code) == (200, 200)
    with server.client() as client:
        numbers = client.get("/metrics").text
    assert "sala_requests_accepted_total 2.0" in numbers
    assert "sala_requests_rejected_total 1.0" in numbers


def test_a_reader_of_one_byte_a_second(make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sala.server.api.routes.MAX_PENDING", 20_000)
    server = make_server()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    wordy = {"n": 8, "stream": True, "logprobs": True, "top_logprobs": 20}
    open_socket(server, {**LONG, "max_tokens": 1900, **wordy}, connection)
    statistics = server.app.state.metrics.statistics
    wait_for(lambda: statistics.num_accepted)  # it may not run for long
    assert server.post(CHAT, SHORT).status_code == 200
    server.wait_idle(15)
    assert statistics.reasons["cancelled"] == 1
    connection.close()


def test_a_dead_engine_over_http(make_server: Callable[..., Server]) -> None:
    server = make_server()
    puppet_of(server.llm).error = SystemExit()  # type: ignore[assignment]
    response = server.post(CHAT, SHORT)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_dead"
    assert server.post(CHAT, {**SHORT, "stream": True}).status_code == 500
    with server.client() as client:
        assert client.get("/health").status_code == 503


def test_idle_models_go_and_come_back(make_server: Callable[..., Server]) -> None:
    server = make_server(idle_unload_s=0.2)
    runtime = server.app.state.runtime
    assert server.post(CHAT, SHORT).status_code == 200
    wait_for(lambda: not runtime.loaded, 5)
    assert server.post(CHAT, SHORT).status_code == 200


def test_load_and_unload(make_server: Callable[..., Server], tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "other").symlink_to(tiny)  # a link is not a model
    server = make_server()
    runtime = server.app.state.runtime
    shutil.copytree(tiny, tmp_path / "models" / "second")
    assert server.post(CHAT, {**SHORT, "model": "other"}).status_code == 404
    assert server.post(CHAT, {**SHORT, "model": "second"}).json()["model"] == "second"
    assert set(runtime.loaded) == {"second"}
    assert server.post("/v1/models/load", {"model": "tiny"}).status_code == 200
    assert set(runtime.loaded) == {"second", "tiny"}
    puppet = puppet_of(runtime.loaded["tiny"].llm)
    puppet.delay_s = 0.05
    with httpx2.stream(
        "POST", server.url + CHAT, json={**LONG, "stream": True, "model": "tiny"}, trust_env=False
    ) as out:
        lines = out.iter_lines()
        next(lines)
        assert server.post("/v1/models/unload", {"model": "tiny"}).status_code == 409
    server.wait_idle(5)
    assert server.post("/v1/models/unload", {"model": "tiny"}).status_code == 200
    assert set(runtime.loaded) == {"second"}


def test_a_model_that_cannot_be_loaded(make_server: Callable[..., Server], tiny: Path, tmp_path: Path) -> None:
    server = make_server()
    shutil.copytree(tiny, tmp_path / "models" / "broken")
    weights = next((tmp_path / "models" / "broken").glob("*.safetensors"))
    weights.write_bytes(b"nonsense")
    response = server.post(CHAT, {**SHORT, "model": "broken"})
    assert response.status_code == 503
    assert str(tmp_path) not in response.text
    assert server.post(CHAT, SHORT).status_code == 200


def test_openapi_is_whole(server: Server) -> None:
    paths = server.app.openapi()["paths"]
    for path in (CHAT, "/v1/completions", "/v1/tokenize", "/v1/detokenize", "/v1/tokenizer_info"):
        for operation in paths[path].values():
            assert {"200", "400", "401", "404", "413", "415", "429", "503"} <= operation["responses"].keys()
    assert CHAT.removeprefix("/v1") not in paths

"""Requests that take long, need much or come in crowds: the numbers are told before the work, and nobody else pays."""

import gc
import json
import math
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sala.checkpoint.random import TINY, write_random
from sala.config import SparseConfig
from sala.models.embedded import EMBEDDED
from sala.protocol import Plan, Result
from tests.integrity import integrity
from tests.server.conftest import Puppet, Server, read_events, wait_for
from tests.server.live import read_answer, request
from tests.server.test_serving import COMMAND, command, run

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SHORT: dict[str, Any] = {"prompt": "hello", "max_tokens": 3, "seed": 1, "temperature": 0.8, "ignore_eos": True}
LONG = "z" * 1500  # several chunks
MARK = ord("z")


class Fragile(Puppet):
    """Comes to its end in the third chunk of a long prompt; all else it can do."""

    def __init__(self, executor: Any, fail: Callable[[], Any]) -> None:
        super().__init__(executor)
        self._fail = fail
        self.allocated: list[weakref.ref[torch.Tensor]] = []

    def run(self, plan: Plan) -> Result:
        if any(row.start >= 512 and MARK in row.tokens for row in plan.rows):
            activations = torch.ones(4)
            self.allocated.append(weakref.ref(activations))
            self._fail()
        return super().run(plan)


class Gate(Puppet):
    """Lets nobody through until it is opened."""

    def __init__(self, executor: Any) -> None:
        super().__init__(executor)
        self.is_open = threading.Event()

    def run(self, plan: Plan) -> Result:
        self.is_open.wait(60)
        return super().run(plan)


@contextmanager
def replaced(server: Server, executor: Any) -> Iterator[Any]:
    engine = server.llm.engine
    before = engine._executor
    engine._executor = executor
    try:
        yield executor
    finally:
        server.wait_idle(20)
        engine._executor = before
        engine.forget()


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Without the garbage collector, only what nothing refers to is freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


# Memory.


def allocate_with_torch() -> None:
    torch.empty(1 << 60)


def allocate_with_python() -> None:
    bytearray(1 << 60)


def fail_as_a_gpu_does() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    ("fail", "is_stream"),
    [
        (allocate_with_torch, False),
        (allocate_with_python, False),
        (fail_as_a_gpu_does, False),
        (allocate_with_torch, True),
    ],
)
@pytest.mark.usefixtures("uncollected")
def test_memory_that_runs_out_ends_one_request(server: Server, fail: Callable[[], Any], is_stream: bool) -> None:
    """And what the failed step has allocated is free at once, without the garbage collector."""
    wanted = text_of(server.post(COMPLETIONS, {**SHORT, "max_tokens": 40}))
    server.wait_idle()
    server.llm.engine.forget()
    before = server.service.status()
    fragile = Fragile(server.llm.engine._executor, fail)
    with replaced(server, fragile), ThreadPoolExecutor(3) as pool:
        others = [pool.submit(server.post, COMPLETIONS, {**SHORT, "max_tokens": 40}) for _ in range(3)]
        response = server.post(COMPLETIONS, {**SHORT, "prompt": LONG, "stream": is_stream})
        if is_stream:
            last = read_events(response.text)[-1]
            assert response.status_code == 200  # the answer had begun
        else:
            last = response.json()
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0
        assert last["error"]["code"] == "out_of_memory"
        assert {"message", "type", "param", "code"} <= last["error"].keys()
        assert [text_of(one.result()) for one in others] == [wanted] * 3
    assert fragile.allocated
    assert all(one() is None for one in fragile.allocated)
    after = server.service.status()
    assert (after.pages_used, after.slots_used) == (before.pages_used, before.slots_used)
    assert integrity(server.llm.engine) == []
    assert text_of(server.post(COMPLETIONS, {**SHORT, "prompt": LONG}))


def test_what_the_memory_cannot_hold_is_refused_with_numbers(make_server: Callable[..., Server]) -> None:
    """The past of all sequences is reserved when the model is loaded: what is longer never gets into the queue."""
    server = make_server(ctx=None, cache_memory="1M")
    with server.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
        room = server.llm.ctx
        assert 256 < room < 4096
        assert str(room) in json.dumps(model)
        for is_stream in (False, True):
            response = client.post(COMPLETIONS, json={**SHORT, "prompt": [65] * (room + 1), "stream": is_stream})
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["code"], error["n_prompt_tokens"], error["n_ctx"]) == (
                "context_length_exceeded",
                room + 1,
                room,
            )
        assert "sala_requests_accepted_total 0.0" in client.get("/metrics").text
    assert server.post(COMPLETIONS, {**SHORT, "prompt": [65] * room}).status_code == 200


def test_a_context_beyond_the_memory_ends_the_start(tiny: Path, tmp_path: Path) -> None:
    code, text = run("-m", str(tiny), "--port", "0", "--ctx", "1000000000000", SALA_MODELS_DIR=str(tmp_path))
    assert code == 1
    assert "GiB" in text
    assert "sala estimate" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("is_named", [True, False])
def test_memory_that_runs_out_while_loading_leaves_no_open_port(tiny: Path, tmp_path: Path, is_named: bool) -> None:
    program = COMMAND.replace(
        "sys.exit(", "import sala.llm\nsala.llm.LLM.__init__ = lambda *a, **k: bytearray(1 << 60)\nsys.exit("
    )
    if not is_named:  # the default model is there
        found = f"import pathlib, sala.server.runtime as r\nr.find_model = lambda *_: pathlib.Path({str(tiny)!r})\n"
        program = program.replace("sys.exit(", f"{found}sys.exit(")
    arguments = (*(("-m", str(tiny)) if is_named else ()), "--port", "0")
    with command(*arguments, program=program, SALA_MODELS_DIR=str(tmp_path)) as process:
        _, text = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"sala estimate {tiny if is_named else EMBEDDED}" in text
    assert "cannot be loaded: MemoryError" in text
    assert "Traceback" not in text
    port = int(text.split("http://127.0.0.1:")[1].split("/")[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


# Length.


@pytest.fixture(scope="module")
def released_geometry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small model with the blocks, the window and the dense length of the released one."""
    path = tmp_path_factory.mktemp("models") / "geometry"
    shape = replace(
        TINY, sparse_config=SparseConfig(), num_hidden_layers=2, mixer_types=("minicpm4", "lightning-attn"),
        hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, lightning_nh=2,
        lightning_nkv=2, dim_model_base=8,
    )  # fmt: skip
    write_random(path, shape)
    return path


def test_answers_at_every_border_of_the_released_model(
    make_server: Callable[..., Server], released_geometry: Path
) -> None:
    """A block, the window, the length from which attention is sparse: one token more or less makes no hole."""
    server = make_server(released_geometry, ctx=8300)
    sparse = server.llm.config.sparse_config
    assert (sparse.block_size, sparse.window_size, sparse.dense_len) == (64, 2048, 8192)
    for border in (64, 2048, 8192):
        for length in (border - 1, border, border + 1):
            prompt = [index * 7 % 251 for index in range(length)]
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 5}
            (choice,) = server.post(COMPLETIONS, body).json()["choices"]
            assert choice["finish_reason"] == "length", length
            numbers = choice["logprobs"]["token_logprobs"]
            assert len(numbers) == 4
            assert all(math.isfinite(number) and -100 < number <= 0 for number in numbers), length


def test_an_answer_that_fills_the_context_stays_sound(server: Server) -> None:
    body = {"prompt": [65], "max_tokens": 2048, "ignore_eos": True, "seed": 1, "temperature": 1.5, "logprobs": 0}
    (choice,) = server.post(COMPLETIONS, body).json()["choices"]
    numbers = choice["logprobs"]["token_logprobs"]
    assert (choice["finish_reason"], len(numbers)) == ("length", 2048)
    assert all(math.isfinite(number) and -100 < number <= 0 for number in numbers)


def test_a_text_far_too_long_is_refused_after_a_part_of_it(server: Server) -> None:
    body = {**SHORT, "prompt": "a" * 30_000_000}
    num_answers = 0
    with ThreadPoolExecutor(1) as pool, server.client() as client:
        future = pool.submit(server.post, COMPLETIONS, body)
        while not future.done() or not num_answers:
            assert client.get("/health").status_code == 200
            assert client.post(COMPLETIONS, json=SHORT).status_code == 200
            num_answers += 1
    error = future.result().json()["error"]
    assert (error["code"], error["n_ctx"]) == ("context_length_exceeded", 2048)
    assert 2048 < error["n_prompt_tokens"] < 1_000_000
    assert "more than" in error["message"]


# Time.


def test_a_long_reading_shows_signs_of_life_and_how_far_it_is(make_server: Callable[..., Server]) -> None:
    server = make_server(ping_s=0.05)
    body = {**SHORT, "prompt": LONG, "stream": True, "return_progress": True}
    with replaced(server, Puppet(server.llm.engine._executor)) as puppet:
        puppet.delay_s = 0.12
        text = server.post(COMPLETIONS, body).text
        puppet.delay_s = 0.0
    told: list[Any] = []  # how far it was, and None for every sign of life
    for block in text.split("\n\n"):
        if block == ": ping":
            told.append(None)
        elif '"prompt_progress"' in block:
            told.append(json.loads(block.removeprefix("data: "))["prompt_progress"])
        elif told and '"text":""' not in block:
            break  # the answer begins
    done = [one["processed"] for one in told if one is not None]
    assert done == sorted(done)
    assert len(set(done)) >= 5
    assert {one["total"] for one in told if one is not None} == {done[-1]}
    assert told.count(None) >= len(set(done))  # no chunk was read in silence


def test_a_short_request_does_not_wait_for_a_long_reading(make_server: Callable[..., Server]) -> None:
    server = make_server()
    alone = text_of(server.post(COMPLETIONS, SHORT))
    with replaced(server, Puppet(server.llm.engine._executor)) as puppet, ThreadPoolExecutor(1) as pool:
        puppet.delay_s = 0.1
        ends: list[str] = []

        def ask(name: str, **fields: Any) -> Any:
            answer = server.post(COMPLETIONS, {**SHORT, **fields})
            ends.append(name)
            return answer

        long = pool.submit(ask, "long", prompt="z" * 2000)
        wait_for(lambda: server.service.status().running == 1)
        assert text_of(ask("short")) == alone
        puppet.delay_s = 0.0
        assert text_of(long.result())
        assert ends == ["short", "long"]


# Crowds.


def test_the_request_that_finds_the_queue_full_comes_again(make_server: Callable[..., Server]) -> None:
    """8 run, 64 wait, the next gets 429, and all the others their answers."""
    server = make_server(max_queue=64)
    room = 64 + server.llm.max_batch
    assert room == 72
    data = request("POST", COMPLETIONS, json.dumps(SHORT).encode(), content_type="application/json")
    crowd = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(room)]
    try:
        with replaced(server, Gate(server.llm.engine._executor)) as gate:
            for one in crowd:
                one.sendall(data)
            wait_for(lambda: server.service.num_requests == room, 20)
            for path, body in ((COMPLETIONS, SHORT), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
                late = server.post(path, body)
                assert late.status_code == 429
                assert late.json()["error"]["code"] == "queue_full"
                assert int(late.headers["retry-after"]) > 0
            gate.is_open.set()
            assert [read_answer(one).status for one in crowd] == [200] * room
            assert server.post(COMPLETIONS, SHORT).status_code == 200
    finally:
        for one in crowd:
            one.close()
    with server.client() as client:
        numbers = client.get("/metrics").text
    assert f"sala_requests_accepted_total {room + 1}.0" in numbers
    assert "sala_requests_rejected_total 2.0" in numbers


def test_bodies_of_streams_count_until_they_end(make_server: Callable[..., Server]) -> None:
    """Four bodies of the maximum size are held, also while they are answered: what is read of them may live as long."""
    server = make_server(max_body="64K")
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": True})
    data = request("POST", CHAT, body.ljust(60 << 10).encode(), content_type="application/json")
    streams = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(4)]
    try:
        with replaced(server, Gate(server.llm.engine._executor)) as gate:
            for one in streams:
                one.sendall(data)
                assert read_answer(one).status == 200  # the stream has begun
            with server.client() as client:
                late = client.post(CHAT, content=body.ljust(60 << 10), headers={"content-type": "application/json"})
                assert (late.status_code, late.json()["error"]["code"]) == (503, "bodies_too_large")
                gate.is_open.set()
                wait_for(lambda: server.service.num_requests == 0)
                late = client.post(CHAT, content=body.ljust(60 << 10), headers={"content-type": "application/json"})
                assert late.status_code == 200
    finally:
        for one in streams:
            one.close()

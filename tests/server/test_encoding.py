"""Large answers: the JSON of `dump`, in pieces, made and encoded in a pool that tells how much waits."""

import asyncio
import json
import random
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from sala.server.api.answers import TokenSpeller
from sala.server.http.body import PIECE, LazyList, dump, is_small, pieces
from sala.server.http.encoding import BLOCK, BlocksResponse, encode, split
from sala.text.workers import MonitoredPool
from tests.server.conftest import Server, read_events, wait_for

LETTERS = 'a"\\\n\u00e9\u4e2d\U0001f600\ud800\udc00\x00'


def make_value(rng: random.Random, depth: int = 0) -> Any:
    """Return JSON of every kind, small and large."""
    kind = rng.randrange(8 if depth < 4 else 6)
    if kind == 0:
        return rng.choice([None, True, False, 0, -7, 1.5, 1e300, -9999.0])
    if kind == 1:
        return "".join(
            rng.choice('a"\\\n\u00e9\u4e2d\U0001f600\ud800\udc00\x00') for _ in range(rng.choice([0, 3, 30]))
        )
    if kind == 2:
        return rng.choice(['\U0001f600"', "\ud83d\ude00", "x"]) * rng.choice([PIECE // 2, PIECE, 3 * PIECE + 1])
    if kind == 3:
        return [rng.randrange(1000) for _ in range(rng.choice([0, 1, PIECE]))]
    if kind == 4:
        count = rng.choice([0, 1, 400])
        return LazyList(
            lambda number: {"n": number, "s": "\u00e9" * (number % 90)}, range(count), rng.choice([1, 60, 9000])
        )
    if kind == 5:
        return [[], {}, (), "", [[]], {"": {}}]
    if kind == 6:
        return [make_value(rng, depth + 1) for _ in range(rng.randrange(6))]
    return {f"k{at}\u00e9": make_value(rng, depth + 1) for at in range(rng.randrange(6))}


@pytest.mark.parametrize("seed", range(60))
def test_pieces_are_what_dump_returns(seed: int) -> None:
    value = make_value(random.Random(seed))
    assert b"".join(pieces(value)) == dump(value)


def test_pieces_are_small() -> None:
    many = LazyList(lambda number: {"token": "x" * 40, "bytes": [number] * 9}, range(50_000), 100)
    value = {"a": "x" * 10_000_000, "b": list(range(500_000)), "c": many, "d": {f"k{at}": at for at in range(100_000)}}
    assert not is_small(value)
    assert max(map(len, pieces(value))) < 8 * PIECE
    assert json.loads(b"".join(pieces(value)))["c"][49_999]["bytes"] == [49_999] * 9


def test_items_of_a_large_list_are_made_one_by_one() -> None:
    made: list[int] = []

    def make(number: int) -> str:
        made.append(number)
        return "x" * 1000

    lazy = LazyList(make, range(1000), 1000)
    left = pieces({"a": lazy})
    for _ in range(4):
        next(left)
    assert 0 < len(made) < 100


def test_what_is_no_json_is_an_error() -> None:
    with pytest.raises(TypeError, match="cannot be encoded"):
        dump({"a": object()})


def test_answers_take_turns() -> None:
    """A short answer does not wait for a long one; neither is made on the event loop."""
    threads: set[str] = set()

    def make(size: int) -> Any:
        threads.add(threading.current_thread().name)
        return {"text": "x" * size}

    async def both() -> None:
        pool = MonitoredPool(1, "encoders")
        long = asyncio.create_task(encode(pool, lambda: make(40 * BLOCK)))
        await asyncio.sleep(0)
        short = await encode(pool, lambda: make(10))
        assert not long.done()
        assert short == [b'{"text":"xxxxxxxxxx"}']
        blocks = await long
        assert max(map(len, blocks)) < BLOCK + 8 * PIECE
        assert b"".join(blocks) == dump({"text": "x" * 40 * BLOCK})
        pool.shutdown()

    asyncio.run(both())
    assert all(name.startswith("encoders") for name in threads)


def test_an_error_while_an_answer_is_made_is_raised() -> None:
    async def fail() -> None:
        await encode(MonitoredPool(1, "encoders"), lambda: [][0])

    with pytest.raises(IndexError):
        asyncio.run(fail())


def test_a_pool_tells_what_waits() -> None:
    pool, go = MonitoredPool(1, "test"), threading.Event()
    running: Future[bool] = pool.submit(go.wait)
    wait_for(lambda: pool.num_waiting == 0)
    assert pool.age_s == 0
    waiting, unwanted = pool.submit(int), pool.submit(int)
    assert pool.num_waiting == 2
    assert unwanted.cancel()
    assert pool.num_waiting == 1
    first = pool.age_s
    wait_for(lambda: pool.age_s > first)  # nothing gets on
    go.set()
    assert running.result(5)
    assert waiting.result(5) == 0
    assert pool.num_waiting == 0
    assert pool.age_s == 0
    pool.shutdown()
    with pytest.raises(RuntimeError):
        pool.submit(int)
    assert pool.num_waiting == 0


def test_a_large_response_is_sent_in_blocks() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    data = bytes(range(256)) * (3 * BLOCK // 256) + b"end"
    response = BlocksResponse([*split(data)], {"x-a": "b"})
    asyncio.run(response({"type": "http"}, receive, send))
    assert dict(sent[0]["headers"])[b"content-length"] == str(len(data)).encode()
    assert dict(sent[0]["headers"])[b"x-a"] == b"b"
    assert b"".join(message["body"] for message in sent[1:]) == data
    assert [message["more_body"] for message in sent[1:]] == [True, True, True, False]


def test_log_probabilities_of_an_answer_are_spelt_in_the_pool(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole answers, and of what a stream has many of at once; single tokens of a stream are spelt as they come."""
    names: dict[str, set[str]] = {}
    original = TokenSpeller.text

    def text(self: TokenSpeller, token: int) -> str:
        names.setdefault(kind, set()).add(threading.current_thread().name.rpartition("_")[0])
        return original(self, token)

    monkeypatch.setattr(TokenSpeller, "text", text)
    scored = {"prompt": "x" * 900, "max_tokens": 1, "echo": True, "logprobs": 5}
    bodies: dict[str, tuple[str, Any]] = {
        "chat": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 300, "logprobs": True, "top_logprobs": 20,
             "ignore_eos": True},
        ),
        "completion": ("/v1/completions", scored),
        "response": ("/v1/responses", {"input": "x", "max_output_tokens": 300, "top_logprobs": 20}),
    }  # fmt: skip
    for name, (path, body) in bodies.items():
        kind = name
        assert server.post(path, body).status_code == 200
    kind = "stream"
    events = read_events(server.post("/v1/completions", {**scored, "max_tokens": 0, "stream": True}).text)
    assert len(events[0]["choices"][0]["logprobs"]["tokens"]) > 900
    assert set(names) == {*bodies, "stream"}
    assert set().union(*names.values()) == {"encode"}

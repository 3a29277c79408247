"""Turns of owners: however much one of them has waiting, another one waits for one turn at most."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from sala.text.workers import FairLock, FairPool, FairQueue, SandboxProcess
from tests.server.conftest import wait_for


def take(turns: FairQueue[str]) -> str:
    turn = turns.take()
    assert turn is not None
    return turn[1]


def test_owners_have_turns() -> None:
    turns: FairQueue[str] = FairQueue(1, 1)
    for owner, items in (("a", "123"), ("b", "45"), ("c", "6")):
        for item in items:
            turns.put(owner, item)
    order = []
    while (turn := turns.take()) is not None:
        assert turns.take() is None  # there is one place
        order.append(turn[1])
        turns.give_back(turn[0])
    assert order == ["1", "4", "6", "2", "5", "3"]


def test_who_comes_back_at_once_is_behind_those_who_wait() -> None:
    turns: FairQueue[str] = FairQueue(1, 1)
    turns.put("a", "1")
    assert take(turns) == "1"
    turns.put("a", "2")
    turns.put("b", "3")
    turns.give_back("a")
    assert take(turns) == "3"


def test_an_owner_has_its_share_of_the_places_and_others_have_the_rest() -> None:
    turns: FairQueue[str] = FairQueue(4, 2)
    for item in "123":
        turns.put("a", item)
    assert [take(turns), take(turns)] == ["1", "2"]
    assert turns.take() is None
    turns.put("b", "4")
    assert take(turns) == "4"
    assert turns.remove("a", "3")
    assert not turns.remove("a", "3")
    assert len(turns) == 0


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_overtaken_twice_by_the_same(seed: int) -> None:
    """Under random loads: between two turns of an owner who waits, every other owner has one turn at most."""
    rng = random.Random(seed)
    turns: FairQueue[int] = FairQueue(1, 1)
    waiting: Counter[str] = Counter()
    since: dict[str, Counter[str]] = {}  # turns of others since an owner began to wait, or had a turn
    for number in range(2000):
        owner = rng.choice("aaaabcd")
        turns.put(owner, number)
        waiting[owner] += 1
        since.setdefault(owner, Counter())
        for _ in range(rng.choice((0, 1, 1))):
            turn = turns.take()
            assert turn is not None
            turns.give_back(turn[0])
            waiting[turn[0]] -= 1
            del since[turn[0]]
            for counts in since.values():
                counts[turn[0]] += 1
            assert all(count == 1 for counts in since.values() for count in counts.values())
            if waiting[turn[0]]:
                since[turn[0]] = Counter()
            if not waiting.total():
                break


def run(work: Callable[[FairPool], Any], num_threads: int = 4, share: int = 2) -> None:
    pool = FairPool(num_threads, share, "test")
    try:
        asyncio.run(work(pool))
    finally:
        pool.close()


def test_work_of_one_owner_waits_behind_its_own() -> None:
    is_free = threading.Event()

    async def work(pool: FairPool) -> None:
        many = [asyncio.create_task(pool.run("anna", is_free.wait, 60)) for _ in range(20)]
        await asyncio.sleep(0)
        assert (pool.num_running + pool.num_waiting, pool.num_waiting) == (20, 18)
        assert [await pool.run("ben", str, number) for number in range(5)] == list("01234")
        assert pool.num_waiting == 18
        is_free.set()
        assert all(await asyncio.gather(*many))

    run(work)


def test_a_queue_does_not_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in a queue is not time at work: many short tasks of one owner are not a stuck thread."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("sala.text.workers.time", clock)
    steps = [threading.Event() for _ in range(40)]

    async def work(pool: FairPool) -> None:
        tasks = [asyncio.create_task(pool.run("anna", step.wait, 60)) for step in steps]
        for number, (step, task) in enumerate(zip(steps, tasks, strict=True)):
            while pool.num_running != 1:
                await asyncio.sleep(0)
            assert pool.num_waiting == 39 - number
            clock.now += 2.0
            assert pool.age_s == 2.0
            step.set()
            await task
        assert (pool.age_s, pool.num_waiting, pool.num_running) == (0.0, 0, 0)

    run(work, 1, 1)


def test_what_is_cancelled_leaves_the_queue() -> None:
    is_free = threading.Event()
    done: list[str] = []

    async def work(pool: FairPool) -> None:
        first = asyncio.create_task(pool.run("anna", is_free.wait, 60))
        second = asyncio.create_task(pool.run("anna", done.append, "never"))
        await asyncio.sleep(0)
        assert pool.num_waiting == 1
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert pool.num_waiting == 0
        is_free.set()
        assert await first
        assert await pool.run("anna", len, done) == 0

    run(work, 1, 1)


def test_a_pool_that_closes_cancels_what_waits() -> None:
    is_free = threading.Event()

    async def work(pool: FairPool) -> None:
        first = asyncio.create_task(pool.run("anna", is_free.wait, 60))
        second = asyncio.create_task(pool.run("anna", len, ""))
        await asyncio.sleep(0)
        pool.close()
        for late in (second, asyncio.create_task(pool.run("anna", len, ""))):
            with pytest.raises(asyncio.CancelledError):
                await late
        is_free.set()
        assert await first

    run(work, 1, 1)


def test_errors_come_back() -> None:
    async def work(pool: FairPool) -> None:
        with pytest.raises(ZeroDivisionError):
            await pool.run("anna", lambda: 1 // 0)
        assert await pool.run("anna", len, "fine") == 4

    run(work, 1, 1)


def served(tasks: list[tuple[str, Callable[[], Any]]], begin: threading.Event, waiting: Callable[[], int]) -> None:
    """Do the tasks of owners in the threads of a pool, all at once; let the first one go on when all others wait."""

    async def work(pool: FairPool) -> None:
        running = []
        for number, (owner, task) in enumerate(tasks):
            running.append(asyncio.create_task(pool.run(owner, task)))
            while waiting() < number:  # the first has it
                await asyncio.sleep(0.001)
        begin.set()
        await asyncio.gather(*running)

    run(work, len(tasks), len(tasks))


def test_a_lock_goes_round_the_owners() -> None:
    lock, begin = FairLock(), threading.Event()
    order: list[str] = []

    def use(name: str) -> None:
        with lock:
            assert begin.wait(60)
            order.append(name)

    names = [("anna", "a1"), ("anna", "a2"), ("anna", "a3"), ("ben", "b1"), ("ben", "b2"), ("cora", "c1")]
    served([(owner, lambda name=name: use(name)) for owner, name in names], begin, lambda: lock.num_waiting)  # type: ignore[misc]
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_threads_of_no_pool_are_one_owner() -> None:
    lock, order = FairLock(), []

    def use(number: int) -> None:
        with lock:
            order.append(number)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(50)))
    assert sorted(order) == list(range(50))


def test_a_lock_that_is_not_waited_for_any_more_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while it is waited for."""
    lock, is_held, is_free = FairLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            is_free.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), lock:
            pass
    assert lock.num_waiting == 0
    is_free.set()
    thread.join()
    with lock:
        pass


def test_templates_of_one_key_wait_behind_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for untrusted input goes round the keys, and nobody is refused for what others have tried."""
    worker, begin = SandboxProcess(), threading.Event()
    order: list[str] = []
    exchange = worker._exchange

    def watch(request: bytes, seconds: float) -> dict[str, Any]:
        assert begin.wait(60)
        order.append("anna" if b"anna" in request else "ben")
        return exchange(request, seconds)

    monkeypatch.setattr(worker, "_exchange", watch)
    found: list[str] = []
    tasks = [("anna", f"anna{number}") for number in range(4)] + [("ben", "ben")]

    def render(text: str) -> None:
        found.append(worker.ask("render", {"source": text, "variables": {}, "limit": 99}, 60.0)["text"])

    try:
        served(
            [(owner, partial(render, text)) for owner, text in tasks],
            begin,
            lambda: worker.num_waiting,
        )
    finally:
        worker.close()
    assert order == ["anna", "ben", "anna", "anna", "anna"]
    assert sorted(found) == sorted(text for _, text in tasks)


def test_waiting_is_counted() -> None:
    worker = SandboxProcess()
    with worker._turn:
        thread = threading.Thread(target=worker.ask, args=("render", {"source": "x", "variables": {}, "limit": 9}, 60))
        thread.start()
        wait_for(lambda: worker.num_waiting == 1)
    thread.join()
    assert worker.num_waiting == 0
    worker.close()

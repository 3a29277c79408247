"""Cyclic garbage is collected in a thread, freed memory returned when nobody asks for anything.

What libraries and models consist of is exempt from collections as long as it is used.
"""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sala.server import serving
from sala.server.serving import GarbageCollector, IdleMemory


class Cycle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    thresholds, callbacks = gc.get_threshold(), [*gc.callbacks]
    yield
    gc.callbacks[:] = callbacks
    gc.unfreeze()
    gc.set_threshold(*thresholds)


async def tick(collector: GarbageCollector, runtime: Any) -> None:
    collector.tick(runtime)
    if collector._running is not None:
        await collector._running


def test_models_are_exempt_while_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "COLLECT_S", 0.0)
    threads: set[str] = set()

    def note(_: str, facts: dict[str, int]) -> None:
        if facts["generation"] == 2:
            threads.add(threading.current_thread().name)

    gc.callbacks.append(note)

    async def live() -> None:
        collector, model = GarbageCollector(), Cycle()
        runtime = SimpleNamespace(loaded={"a": model}, is_loading=False)
        await tick(collector, runtime)
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold()[2] == serving.NEVER
        threads.clear()
        garbage = weakref.ref(Cycle())
        assert garbage() is not None
        collector._due = 0.0
        await tick(collector, runtime)
        assert garbage() is None
        assert threads
        assert threading.main_thread().name not in threads

        unloaded = weakref.ref(model)
        runtime.loaded, model = {}, None
        runtime.is_loading = True  # another one, which would be exempt halfway
        collector._due = 0.0
        await tick(collector, runtime)
        assert unloaded() is not None
        runtime.is_loading = False
        await tick(collector, runtime)
        assert unloaded() is None

    asyncio.run(live())


def test_collecting_takes_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many objects a collection takes long, so the next one is far away."""
    times = iter([10.0, 10.5])
    monkeypatch.setattr(serving, "time", SimpleNamespace(monotonic=lambda: 1000.0, thread_time=lambda: next(times)))
    collector = GarbageCollector()
    collector._collect(is_new=False)
    assert collector._due == 1050.0


def test_memory_is_returned_once_after_the_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[str] = []
    monkeypatch.setattr(serving, "trim_memory", lambda: returned.append(threading.current_thread().name))
    service = SimpleNamespace(num_requests=0)
    runtime = SimpleNamespace(loaded={"a": SimpleNamespace(service=service)})

    async def live() -> None:
        memory, now = IdleMemory(), 100.0

        async def count(num_requests: int, num_accepted: int, seconds: float) -> int:
            nonlocal now
            now += seconds
            service.num_requests = num_requests
            memory.tick(runtime, num_accepted)
            if memory._running is not None:
                await memory._running
            return len(returned)

        monkeypatch.setattr(serving, "time", SimpleNamespace(monotonic=lambda: now))
        assert await count(0, 0, 5.0) == 0  # there was no request
        assert await count(1, 1, 5.0) == 0
        assert await count(0, 1, 0.0) == 0
        assert await count(0, 1, 0.5) == 0
        assert await count(1, 2, 0.6) == 0  # another one
        assert await count(0, 2, 5.0) == 0
        assert await count(0, 2, 1.0) == 1
        assert await count(0, 2, 5.0) == 1
        assert await count(0, 3, 5.0) == 1  # one that has come and gone meanwhile
        assert await count(0, 3, 5.0) == 2

    asyncio.run(live())
    assert threading.main_thread().name not in returned

"""Cyclic garbage: collected in a thread; what libraries and models consist of is exempt as long as it is used."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sala.server import serving
from sala.server.serving import GarbageCollector


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

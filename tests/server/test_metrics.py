"""Metrics: what goes in comes out, in Prometheus' format."""

import asyncio
import threading
import time

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from sala.engine.loop import RequestStatistics
from sala.engine.stream import Usage
from sala.server.admin.monitoring import REASONS, Metrics, is_stuck
from sala.server.settings import Settings
from tests.server.live import FakeModel, FakeRuntime, make_app


def read(text: str) -> dict[str, float]:
    """{name{labels}: value}; what Prometheus cannot read fails here."""
    families = text_string_to_metric_families(text)
    return {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def numbers(metrics: Metrics, runtime: FakeRuntime | None = None) -> dict[str, float]:
    return read(metrics.render(runtime or FakeRuntime()).decode())  # type: ignore[arg-type]


def test_it_is_an_observer(metrics: Metrics) -> None:
    observer: RequestStatistics = metrics.statistics
    observer.accepted()
    observer.rejected()
    assert numbers(metrics)["sala_requests_accepted_total"] == 1
    assert numbers(metrics)["sala_requests_rejected_total"] == 1


def test_requests(metrics: Metrics) -> None:
    metrics.statistics.finished("stop", Usage(100, 11, 60), first_token_s=0.2, decode_s=1.0)
    metrics.statistics.finished("length", Usage(10, 1, 0), first_token_s=2.0, decode_s=0.0)
    metrics.statistics.finished("cancelled", Usage(10, 0, 0), first_token_s=9.0, decode_s=0.0)
    found = numbers(metrics)
    assert [found[f"sala_requests_total{{{reason}}}"] for reason in REASONS] == [1, 1, 0, 0, 0, 1]
    assert found["sala_prompt_tokens_total"] == 120
    assert found["sala_cached_tokens_total"] == 60
    assert found["sala_completion_tokens_total"] == 12
    assert found["sala_time_to_first_token_seconds_count"] == 2  # the cancelled one never had a token
    assert found["sala_time_to_first_token_seconds_sum"] == pytest.approx(2.2)
    assert found["sala_inter_token_seconds_count"] == 1
    assert found["sala_inter_token_seconds_sum"] == pytest.approx(0.1)


def test_the_state_of_the_models(metrics: Metrics) -> None:
    runtime = FakeRuntime({"a": FakeModel(), 'odd"name\n': FakeModel()})
    runtime.loaded["a"].service.change(waiting=3, running=2, pages_used=7, num_preemptions=4, heartbeat_s=1.5)
    found = numbers(metrics, runtime)
    assert found["sala_models_loaded"] == 2
    assert found["sala_requests_waiting{a}"] == 3
    assert found["sala_requests_running{a}"] == 2
    assert (found["sala_pages_used{a}"], found["sala_pages{a}"]) == (7, 10)
    assert (found["sala_slots_used{a}"], found["sala_slots{a}"]) == (0, 4)
    assert found["sala_preemptions_total{a}"] == 4
    assert found["sala_heartbeat_age_seconds{a}"] == 1.5
    assert found['sala_snapshots{odd"name\n}'] == 0
    assert "sala_requests_waiting{a}" not in numbers(metrics, FakeRuntime({}))


def test_the_event_loop_is_watched(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sala.server.admin.monitoring.LAG_EVERY_S", 0.01)

    async def block() -> None:
        watching = asyncio.create_task(metrics.watch_loop())
        await asyncio.sleep(0.05)
        time.sleep(0.3)  # what must not happen
        await asyncio.sleep(0.05)
        watching.cancel()

    assert numbers(metrics)["sala_event_loop_lag_seconds"] == 0
    asyncio.run(block())
    assert numbers(metrics)["sala_event_loop_lag_seconds"] > 0.2


def test_a_request_that_is_never_prepared_is_not_healthy() -> None:
    model = FakeModel()
    assert not is_stuck(model.service.status())
    model.service.change(preparing=1, preparing_s=61.0)
    assert is_stuck(model.service.status())


def test_the_process(metrics: Metrics) -> None:
    found = numbers(metrics)
    assert found["process_resident_memory_bytes"] > 1 << 20
    assert found["process_threads"] >= 1


def test_two_servers_in_a_process_do_not_mix(metrics: Metrics) -> None:
    metrics.statistics.accepted()
    assert numbers(Metrics())["sala_requests_accepted_total"] == 0


def test_many_threads(metrics: Metrics) -> None:
    def work() -> None:
        for _ in range(500):
            metrics.statistics.accepted()
            metrics.statistics.finished("stop", Usage(1, 2, 0), 0.1, 0.1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        numbers(metrics)
    for thread in threads:
        thread.join()
    assert numbers(metrics)["sala_requests_accepted_total"] == 2000
    assert numbers(metrics)["sala_requests_total{stop}"] == 2000


def test_route() -> None:
    caller = TestClient(make_app(Settings()), base_url="http://localhost")
    answer = caller.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert read(answer.text)["sala_models_loaded"] == 1

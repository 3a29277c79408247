"""Metrics for Prometheus: requests and tokens of all engines, the state of the models, and the process.

Every accepted request is counted once in `sala_requests_total`, with one reason, so that the sums add up.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from sala.engine.stream import Usage

if TYPE_CHECKING:
    from sala.server.runtime import Runtime

router = APIRouter(tags=["metrics"])

REASONS = ("stop", "length", "tool_calls", "repetition", "error", "cancelled")

FIRST_TOKEN_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
INTER_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)

# kind, name, help text, field of the engine's status
PER_MODEL: tuple[tuple[Any, str, str, str], ...] = (
    (GaugeMetricFamily, "sala_requests_waiting", "Requests in the queue.", "waiting"),
    (GaugeMetricFamily, "sala_requests_running", "Requests that are running.", "running"),
    (GaugeMetricFamily, "sala_pages_used", "KV cache pages in use.", "pages_used"),
    (GaugeMetricFamily, "sala_pages", "KV cache pages.", "num_pages"),
    (GaugeMetricFamily, "sala_slots_used", "State slots in use.", "slots_used"),
    (GaugeMetricFamily, "sala_slots", "State slots.", "num_slots"),
    (GaugeMetricFamily, "sala_snapshots", "Snapshots of prefixes that can be reused.", "num_snapshots"),
    (GaugeMetricFamily, "sala_heartbeat_age_seconds", "Time since the engine's loop last turned.", "heartbeat_s"),
    (CounterMetricFamily, "sala_preemptions", "Requests preempted because the cache was full.", "num_preemptions"),
)


class RequestMetrics:
    """Requests and tokens since the start: the observer of all engines of a server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        make = partial(Counter, registry=registry)
        self._accepted = make("sala_requests_accepted", "Requests accepted into the queue.")
        self._rejected = make("sala_requests_rejected", "Requests refused because the queue was full.")
        self._prompt = make("sala_prompt_tokens", "Prompt tokens.")
        self._cached = make("sala_cached_tokens", "Prompt tokens taken from the cache.")
        self._completion = make("sala_completion_tokens", "Generated tokens.")
        self._finished = make("sala_requests", "Requests that have finished, by reason.", ("reason",))
        for reason in REASONS:
            self._finished.labels(reason)
        first, between = (
            "From the arrival of a request to its first token.",
            "Mean time between two tokens of an answer.",
        )
        histogram = partial(Histogram, registry=registry)
        self._first_token = histogram("sala_time_to_first_token_seconds", first, buckets=FIRST_TOKEN_SECONDS)
        self._inter_token = histogram("sala_inter_token_seconds", between, buckets=INTER_TOKEN_SECONDS)

    def accepted(self) -> None:
        self._accepted.inc()

    def rejected(self) -> None:
        self._rejected.inc()

    def finished(self, reason: str, usage: Usage, first_token_s: float, decode_s: float) -> None:
        self._finished.labels(reason).inc()
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._completion.inc(usage.completion_tokens)
        if usage.completion_tokens > 0:
            self._first_token.observe(first_token_s)
        if usage.completion_tokens > 1:
            self._inter_token.observe(decode_s / (usage.completion_tokens - 1))


class Metrics(Collector):
    """The metrics of one server: what its engines have counted, the state of its models, and its process."""

    def __init__(self) -> None:
        self._runtime: Runtime | None = None
        self._process = psutil.Process()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.statistics = RequestMetrics(self.registry)

    def render(self, runtime: "Runtime") -> bytes:
        """Return all metrics in the text format, with the state of these models."""
        self._runtime = runtime
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._collect_models()
        yield from self._collect_process()

    def _collect_models(self) -> Iterator[Metric]:
        """Yield the state of every loaded model."""
        loaded = {} if self._runtime is None else dict(self._runtime.loaded)
        statuses = {name: each.service.status() for name, each in loaded.items()}
        yield GaugeMetricFamily("sala_models_loaded", "Models in memory.", value=len(statuses))
        for kind, name, words, attribute in PER_MODEL:
            family = kind(name, words, labels=["model"])
            for model, status in statuses.items():
                family.add_metric([model], getattr(status, attribute))
            yield family

    def _collect_process(self) -> Iterator[Metric]:
        """Yield memory, open files and CPU time of this process."""
        process, gauge = self._process, GaugeMetricFamily
        with process.oneshot():
            times, started = process.cpu_times(), process.create_time()
            yield gauge("process_resident_memory_bytes", "Resident memory.", value=process.memory_info().rss)
            yield gauge(
                "process_start_time_seconds", "Start time of the process, in seconds since 1970.", value=started
            )
            yield CounterMetricFamily("process_cpu_seconds", "CPU time.", value=times.user + times.system)
            if hasattr(process, "num_fds"):
                yield gauge("process_open_fds", "Open files.", value=process.num_fds())
            yield gauge("process_threads", "Threads.", value=process.num_threads())


@router.get("/metrics", response_class=Response, summary="Metrics for Prometheus")
async def show_metrics(request: Request) -> Response:
    metrics: Metrics = request.app.state.metrics
    return Response(
        metrics.render(request.app.state.runtime),
        headers={"content-type": CONTENT_TYPE_LATEST, "cache-control": "no-store"},
    )

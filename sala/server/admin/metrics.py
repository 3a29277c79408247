"""Metrics for Prometheus: the engines count requests and tokens; this module exports the numbers when scraped.

Every accepted request is counted once in `sala_requests_total`, with one reason, so that the sums add up.
"""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from sala.engine.loop import Histogram, RequestStatistics

if TYPE_CHECKING:
    from sala.server.runtime import Runtime

router = APIRouter(tags=["metrics"])

REASONS = ("stop", "length", "tool_calls", "repetition", "error", "cancelled")

# name, help text, field of the engine's status
GAUGES = (
    ("sala_requests_waiting", "Requests in the queue.", "waiting"),
    ("sala_requests_running", "Requests that are running.", "running"),
    ("sala_pages_used", "KV cache pages in use.", "pages_used"),
    ("sala_pages", "KV cache pages.", "num_pages"),
    ("sala_slots_used", "State slots in use.", "slots_used"),
    ("sala_slots", "State slots.", "num_slots"),
    ("sala_snapshots", "Snapshots of prefixes that can be reused.", "num_snapshots"),
    ("sala_heartbeat_age_seconds", "Time since the engine's loop last turned.", "heartbeat_s"),
)


class Metrics:
    """The metrics of one server: what its engines have counted, and the state of its models."""

    def __init__(self) -> None:
        self.statistics = RequestStatistics()
        self._models = ModelMetrics()
        self.registry = CollectorRegistry()
        for collector in (RequestMetrics(self.statistics), self._models, ProcessMetrics()):
            self.registry.register(collector)

    def render(self, runtime: "Runtime") -> bytes:
        """Return all metrics in the text format, with the state of these models."""
        self._models.runtime = runtime
        return generate_latest(self.registry)


class RequestMetrics(Collector):
    """Requests and tokens since the start."""

    def __init__(self, statistics: RequestStatistics) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        counted = self._statistics
        for name, words, value in (
            ("sala_requests_accepted", "Requests accepted into the queue.", counted.num_accepted),
            ("sala_requests_rejected", "Requests refused because the queue was full.", counted.num_rejected),
            ("sala_prompt_tokens", "Prompt tokens.", counted.prompt_tokens),
            ("sala_cached_tokens", "Prompt tokens taken from the cache.", counted.cached_tokens),
            ("sala_completion_tokens", "Generated tokens.", counted.completion_tokens),
        ):
            yield CounterMetricFamily(name, words, value=value)
        finished = CounterMetricFamily("sala_requests", "Requests that have finished, by reason.", labels=["reason"])
        for reason in REASONS:
            finished.add_metric([reason], counted.reasons[reason])
        yield finished
        yield _histogram(
            "sala_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            counted.first_token_s,
        )
        yield _histogram(
            "sala_inter_token_seconds", "Mean time between two tokens of an answer.", counted.inter_token_s
        )


def _histogram(name: str, words: str, histogram: Histogram) -> Metric:
    bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(name, words, buckets=buckets, sum_value=histogram.total)


class ModelMetrics(Collector):
    """The state of every loaded model when the metrics are scraped."""

    def __init__(self) -> None:
        self.runtime: Runtime | None = None

    def collect(self) -> Iterator[Metric]:
        loaded = {} if self.runtime is None else dict(self.runtime.loaded)
        statuses = {name: each.service.status() for name, each in loaded.items()}
        yield GaugeMetricFamily("sala_models_loaded", "Models in memory.", value=len(statuses))
        for name, words, attribute in GAUGES:
            yield self._fill(GaugeMetricFamily(name, words, labels=["model"]), statuses, attribute)
        preemptions = CounterMetricFamily(
            "sala_preemptions", "Requests preempted because the cache was full.", labels=["model"]
        )
        yield self._fill(preemptions, statuses, "num_preemptions")

    def _fill(self, family: Any, statuses: dict[str, Any], attribute: str) -> Any:
        for model, status in statuses.items():
            family.add_metric([model], getattr(status, attribute))
        return family


class ProcessMetrics(Collector):
    """Memory, open files and CPU time of this process."""

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()

    def collect(self) -> Iterator[Metric]:
        with self._process.oneshot():
            memory, times = self._process.memory_info(), self._process.cpu_times()
            yield GaugeMetricFamily("process_resident_memory_bytes", "Resident memory.", value=memory.rss)
            yield GaugeMetricFamily(
                "process_start_time_seconds",
                "Start time of the process, in seconds since 1970.",
                value=self._process.create_time(),
            )
            yield CounterMetricFamily("process_cpu_seconds", "CPU time.", value=times.user + times.system)
            if hasattr(self._process, "num_fds"):
                yield GaugeMetricFamily("process_open_fds", "Open files.", value=self._process.num_fds())
            yield GaugeMetricFamily("process_threads", "Threads.", value=self._process.num_threads())


@router.get("/metrics", response_class=Response, summary="Metrics for Prometheus")
async def show_metrics(request: Request) -> Response:
    metrics: Metrics = request.app.state.metrics
    return Response(
        metrics.render(request.app.state.runtime),
        headers={"content-type": CONTENT_TYPE_LATEST, "cache-control": "no-store"},
    )

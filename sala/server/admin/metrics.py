"""Metrics for Prometheus: requests and tokens are counted as they happen, the current state is read when scraped.

Every accepted request is counted once in `sala_requests_total`, with one reason, so that the sums add up.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from sala.engine.stream import Usage
    from sala.server.runtime import Runtime

router = APIRouter(tags=["metrics"])

FIRST_TOKEN_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
INTER_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
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
    """The counters of one server. The methods are cheap and may be called from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._accepted = self._counter("sala_requests_accepted", "Requests accepted into the queue.")
        self._rejected = self._counter("sala_requests_rejected", "Requests refused because the queue was full.")
        self._finished = Counter(
            "sala_requests", "Requests that have finished, by reason.", ["reason"], registry=self.registry
        )
        self._prompt = self._counter("sala_prompt_tokens", "Prompt tokens.")
        self._cached = self._counter("sala_cached_tokens", "Prompt tokens taken from the cache.")
        self._completion = self._counter("sala_completion_tokens", "Generated tokens.")
        self._first_token = self._histogram(
            "sala_time_to_first_token_seconds", "From the arrival of a request to its first token.", FIRST_TOKEN_BUCKETS
        )
        self._inter_token = self._histogram(
            "sala_inter_token_seconds", "Mean time between two tokens of an answer.", INTER_TOKEN_BUCKETS
        )
        for reason in REASONS:
            self._finished.labels(reason)
        self._snapshot = Snapshot()
        self.registry.register(self._snapshot)
        self.registry.register(ProcessMetrics())

    def accepted(self) -> None:
        self._accepted.inc()

    def rejected(self) -> None:
        self._rejected.inc()

    def finished(self, reason: str, usage: "Usage", first_token_s: float, decode_s: float) -> None:
        self._finished.labels(reason).inc()
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._completion.inc(usage.completion_tokens)
        if usage.completion_tokens > 0:
            self._first_token.observe(first_token_s)
        if usage.completion_tokens > 1:
            self._inter_token.observe(decode_s / (usage.completion_tokens - 1))

    def render(self, runtime: "Runtime") -> bytes:
        """Return all metrics in the text format, with the state of these models."""
        self._snapshot.runtime = runtime
        return generate_latest(self.registry)

    def _counter(self, name: str, words: str) -> Counter:
        return Counter(name, words, registry=self.registry)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, words, registry=self.registry, buckets=buckets)


class Snapshot(Collector):
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

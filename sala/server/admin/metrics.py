"""Numbers for Prometheus: what was asked and answered, counted as it happens; what is going on, looked up when asked.

Every accepted request ends in `sala_requests_total` with one reason, so that the sums add up.
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

# name, what it is, and the field of a worker's status
GAUGES = (
    ("sala_requests_waiting", "Requests in the queue.", "waiting"),
    ("sala_requests_running", "Requests being computed.", "running"),
    ("sala_pages_used", "Pages of the cache in use.", "pages_used"),
    ("sala_pages", "Pages of the cache.", "num_pages"),
    ("sala_slots_used", "Slots of recurrent state in use.", "slots_used"),
    ("sala_slots", "Slots of recurrent state.", "num_slots"),
    ("sala_snapshots", "Pasts that are kept for reuse.", "num_snapshots"),
    ("sala_heartbeat_age_seconds", "Since the engine last went round.", "heartbeat_s"),
)


class Metrics:
    """Counts for one server. The methods are cheap and may be called from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._accepted = self._counter("sala_requests_accepted", "Requests taken into the queue.")
        self._rejected = self._counter("sala_requests_rejected", "Requests turned away because the queue was full.")
        self._finished = Counter(
            "sala_requests", "Requests that have ended, and how.", ["reason"], registry=self.registry
        )
        self._prompt = self._counter("sala_prompt_tokens", "Tokens of prompts.")
        self._cached = self._counter("sala_cached_tokens", "Tokens of prompts that needed no computing.")
        self._completion = self._counter("sala_completion_tokens", "Tokens of answers.")
        self._first_token = self._histogram(
            "sala_time_to_first_token_seconds", "From the arrival of a request to its first token.", FIRST_TOKEN_BUCKETS
        )
        self._inter_token = self._histogram(
            "sala_inter_token_seconds", "Between two tokens of an answer, its mean.", INTER_TOKEN_BUCKETS
        )
        for reason in REASONS:
            self._finished.labels(reason)
        self._snapshot = Snapshot()
        self.registry.register(self._snapshot)
        self.registry.register(ProcessNumbers())

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
        """All numbers in the text format, with the state of these models."""
        self._snapshot.runtime = runtime
        return generate_latest(self.registry)

    def _counter(self, name: str, words: str) -> Counter:
        return Counter(name, words, registry=self.registry)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, words, registry=self.registry, buckets=buckets)


class Snapshot(Collector):
    """The state of every loaded model at the moment of asking."""

    def __init__(self) -> None:
        self.runtime: Runtime | None = None

    def collect(self) -> Iterator[Metric]:
        loaded = {} if self.runtime is None else dict(self.runtime.loaded)
        statuses = {name: each.worker.status() for name, each in loaded.items()}
        yield GaugeMetricFamily("sala_models_loaded", "Models in memory.", value=len(statuses))
        for name, words, attribute in GAUGES:
            yield self._fill(GaugeMetricFamily(name, words, labels=["model"]), statuses, attribute)
        preemptions = CounterMetricFamily("sala_preemptions", "Requests put back for want of room.", labels=["model"])
        yield self._fill(preemptions, statuses, "num_preemptions")

    def _fill(self, family: Any, statuses: dict[str, Any], attribute: str) -> Any:
        for model, status in statuses.items():
            family.add_metric([model], getattr(status, attribute))
        return family


class ProcessNumbers(Collector):
    """Memory, open files and time of this process."""

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()

    def collect(self) -> Iterator[Metric]:
        with self._process.oneshot():
            memory, times = self._process.memory_info(), self._process.cpu_times()
            yield GaugeMetricFamily("process_resident_memory_bytes", "Resident memory.", value=memory.rss)
            yield GaugeMetricFamily("process_start_time_seconds", "Since 1970.", value=self._process.create_time())
            yield CounterMetricFamily("process_cpu_seconds", "Processor time.", value=times.user + times.system)
            if hasattr(self._process, "num_fds"):
                yield GaugeMetricFamily("process_open_fds", "Open files.", value=self._process.num_fds())
            yield GaugeMetricFamily("process_threads", "Threads.", value=self._process.num_threads())


@router.get("/metrics", response_class=Response, summary="Numbers for Prometheus")
async def show_metrics(request: Request) -> Response:
    metrics: Metrics = request.app.state.metrics
    return Response(
        metrics.render(request.app.state.runtime),
        headers={"content-type": CONTENT_TYPE_LATEST, "cache-control": "no-store"},
    )

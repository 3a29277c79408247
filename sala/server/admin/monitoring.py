"""Monitoring: health checks for load balancers, containers and people, and metrics for Prometheus.

Health checks need no key and reveal nothing. `/health` checks that the engine makes progress: a process that is up but
stuck is not healthy. The engines count requests and tokens; the numbers are exported when they are scraped. Every
accepted request is counted once in `sala_requests_total`, with one reason, so that the sums add up.
"""

import itertools
from collections.abc import Iterator
from typing import Any, Literal

import psutil
from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field

from sala.engine.loop import Histogram, RequestStatistics
from sala.server.runtime import Runtime

health_router = APIRouter(tags=["health"])
metrics_router = APIRouter(tags=["metrics"])
MAX_SILENCE_S = 60.0  # an engine with work whose loop has not turned for this long is stuck

State = Literal["ok", "idle", "loading", "draining", "unhealthy"]
NOT_READY: dict[int | str, dict[str, Any]] = {503: {"description": "The server cannot answer now; `status` says why."}}
REASONS = ("stop", "length", "tool_calls", "repetition", "error", "cancelled")

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


class Health(BaseModel):
    status: State = Field(description="ok; idle: no model is loaded; loading; draining: shutting down; unhealthy.")


@health_router.get("/health", responses=NOT_READY, summary="Can the server answer?")
async def check_health(request: Request, response: Response) -> Health:
    """200 if requests can be answered, at once or after loading a model; otherwise 503."""
    return _answer(response, find_state(request.app.state), healthy={"ok", "idle"})


@health_router.get("/health/live", summary="Is the process up?")
async def check_live() -> Health:
    """Always 200. To decide whether to restart the server, use `/health`."""
    return Health(status="ok")


@health_router.get("/health/ready", responses=NOT_READY, summary="Is a model loaded and its engine running?")
async def check_ready(request: Request, response: Response) -> Health:
    """200 if a model is loaded, or was unloaded because it was idle: the next request loads it again."""
    may_be_idle = request.app.state.settings.idle_unload_s > 0
    return _answer(response, find_state(request.app.state), healthy={"ok", "idle"} if may_be_idle else {"ok"})


def find_state(state: Any) -> State:
    if getattr(state, "is_draining", False):
        return "draining"
    runtime = getattr(state, "runtime", None)
    if runtime is None:
        return "loading"
    statuses = [each.service.status() for each in list(runtime.loaded.values())]
    if any(is_stuck(status) for status in statuses):
        return "unhealthy"
    if statuses:
        return "ok"
    return "loading" if runtime.is_loading else "idle"


def is_stuck(status: Any) -> bool:
    """Return whether an engine is dead, or has work and makes no progress. An idle engine may sleep."""
    has_work = status.waiting + status.running > 0
    return not status.is_alive or (has_work and status.heartbeat_s > MAX_SILENCE_S)


def _answer(response: Response, state: State, healthy: set[str]) -> Health:
    response.headers["cache-control"] = "no-store"
    if state not in healthy:
        response.status_code = 503
        response.headers["retry-after"] = "5"
    return Health(status=state)


class Metrics(Collector):
    """The metrics of one server: what its engines have counted, the state of its models, and its process."""

    def __init__(self) -> None:
        self.statistics = RequestStatistics()
        self._runtime: Runtime | None = None
        self._process = psutil.Process()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def render(self, runtime: Runtime) -> bytes:
        """Return all metrics in the text format, with the state of these models."""
        self._runtime = runtime
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield requests and tokens since the start, the state of every loaded model, and what the process uses."""
        counted = self.statistics
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
        first = "From the arrival of a request to its first token."
        yield _histogram("sala_time_to_first_token_seconds", first, counted.first_token_s)
        between = "Mean time between two tokens of an answer."
        yield _histogram("sala_inter_token_seconds", between, counted.inter_token_s)
        loaded = {} if self._runtime is None else dict(self._runtime.loaded)
        statuses = {name: each.service.status() for name, each in loaded.items()}
        yield GaugeMetricFamily("sala_models_loaded", "Models in memory.", value=len(statuses))
        for kind, name, words, attribute in PER_MODEL:
            family = kind(name, words, labels=["model"])
            for model, status in statuses.items():
                family.add_metric([model], getattr(status, attribute))
            yield family
        process, gauge = self._process, GaugeMetricFamily
        started = "Start time of the process, in seconds since 1970."
        with process.oneshot():
            times = process.cpu_times()
            yield gauge("process_resident_memory_bytes", "Resident memory.", value=process.memory_info().rss)
            yield gauge("process_start_time_seconds", started, value=process.create_time())
            yield CounterMetricFamily("process_cpu_seconds", "CPU time.", value=times.user + times.system)
            if hasattr(process, "num_fds"):
                yield gauge("process_open_fds", "Open files.", value=process.num_fds())
            yield gauge("process_threads", "Threads.", value=process.num_threads())


def _histogram(name: str, words: str, histogram: Histogram) -> Metric:
    bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(name, words, buckets=buckets, sum_value=histogram.total)


@metrics_router.get("/metrics", response_class=Response, summary="Metrics for Prometheus")
async def show_metrics(request: Request) -> Response:
    metrics: Metrics = request.app.state.metrics
    return Response(
        metrics.render(request.app.state.runtime),
        headers={"content-type": CONTENT_TYPE_LATEST, "cache-control": "no-store"},
    )

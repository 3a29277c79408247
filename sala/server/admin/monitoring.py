"""Monitoring: health checks for load balancers, containers and people, and metrics for Prometheus.

Health checks need no key, and reveal nothing to those without one. `/health` checks that the engine and the threads
beside it make progress: a process that is up but stuck is not healthy. The engines count requests and tokens; the
numbers are exported when they are scraped. Every accepted request is counted once in `sala_requests_total`, with one
reason, so that the sums add up.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol

import psutil
from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field

from sala.engine.loop import Histogram, RequestStatistics
from sala.engine.service import PrefixUse
from sala.server.http.security import find_key
from sala.server.runtime import Runtime
from sala.text.control import num_compiling

health_router = APIRouter(tags=["health"])
metrics_router = APIRouter(tags=["metrics"])
LAG_EVERY_S = 0.05  # a delay is measured this much too short at most
LAG_KEPT_S = 60.0
MAX_SILENCE_S = 60.0  # an engine with work whose loop has not turned for this long is stuck

State = Literal["ok", "idle", "loading", "draining", "unhealthy"]
NOT_READY: dict[int | str, dict[str, Any]] = {503: {"description": "The server cannot answer now; `status` says why."}}
REASONS = ("stop", "length", "tool_calls", "repetition", "error", "cancelled")

# kind, name, help text, field of the engine's status
PER_MODEL: tuple[tuple[Any, str, str, str], ...] = (
    (GaugeMetricFamily, "sala_requests_waiting", "Requests in the queue.", "waiting"),
    (GaugeMetricFamily, "sala_requests_running", "Requests that are running.", "running"),
    (GaugeMetricFamily, "sala_answers_waiting", "Answers in the queue.", "answers_waiting"),
    (GaugeMetricFamily, "sala_answers_running", "Answers in the batch.", "answers_running"),
    (GaugeMetricFamily, "sala_pages_used", "KV cache pages in use.", "pages_used"),
    (GaugeMetricFamily, "sala_pages", "KV cache pages.", "num_pages"),
    (GaugeMetricFamily, "sala_slots_used", "State slots in use.", "slots_used"),
    (GaugeMetricFamily, "sala_slots", "State slots.", "num_slots"),
    (GaugeMetricFamily, "sala_snapshots", "Snapshots of prefixes that can be reused.", "num_snapshots"),
    (GaugeMetricFamily, "sala_heartbeat_age_seconds", "Time since the engine's loop last turned.", "heartbeat_s"),
    (GaugeMetricFamily, "sala_requests_preparing", "Requests that are rendered, encoded or compiled.", "preparing"),
    (GaugeMetricFamily, "sala_preparation_age_seconds", "Age of the oldest of them.", "preparing_s"),
    (CounterMetricFamily, "sala_preemptions", "Requests preempted because the cache was full.", "num_preemptions"),
)


class ServerLoad(BaseModel):
    """What else the server is busy with, for those who have a key or need none."""

    event_loop_lag_s: float = Field(description="Longest delay of the event loop in the last minute.")
    jobs_waiting: dict[str, int] = Field(description="Jobs that wait for a thread or a process, by pool.")
    compilations: int = Field(description="Grammars and patterns of schemas that are compiled, or wait for that.")


class Health(BaseModel):
    status: State = Field(description="ok; idle: no model is loaded; loading; draining: shutting down; unhealthy.")
    load: ServerLoad | None = Field(default=None, description="Only with a key, or where none is needed.")


@health_router.get("/health", responses=NOT_READY, summary="Can the server answer?", response_model_exclude_none=True)
async def check_health(request: Request, response: Response) -> Health:
    """200 if requests can be answered, at once or after loading a model; otherwise 503."""
    health = _answer(response, find_state(request.app.state), healthy={"ok", "idle"})
    settings = request.app.state.settings
    if not settings.needs_key or find_key(request, settings) is not None:
        health.load = request.app.state.metrics.load()
    return health


@health_router.get("/health/live", summary="Is the process up?", response_model_exclude_none=True)
async def check_live() -> Health:
    """Always 200. To decide whether to restart the server, use `/health`."""
    return Health(status="ok")


@health_router.get(
    "/health/ready", responses=NOT_READY, summary="Is a model loaded and its engine running?",
    response_model_exclude_none=True,
)  # fmt: skip
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
    if any(is_stuck(status) for status in statuses) or state.metrics.has_stuck_pool:
        return "unhealthy"
    if statuses:
        return "ok"
    return "loading" if runtime.is_loading else "idle"


def is_stuck(status: Any) -> bool:
    """Return whether an engine is dead, or has work and makes no progress. An idle engine may sleep.

    Requests that are never prepared are no progress either: the threads that prepare them are stuck.
    """
    has_work = status.waiting + status.running > 0
    is_silent = has_work and status.heartbeat_s > MAX_SILENCE_S
    return not status.is_alive or is_silent or status.preparing_s > MAX_SILENCE_S


def _answer(response: Response, state: State, healthy: set[str]) -> Health:
    response.headers["cache-control"] = "no-store"
    if state not in healthy:
        response.status_code = 503
        response.headers["retry-after"] = "5"
    return Health(status=state)


class JobQueue(Protocol):
    """Threads or processes, jobs that wait for them, and for how long they have not got on although they should."""

    @property
    def num_waiting(self) -> int: ...

    @property
    def age_s(self) -> float: ...


class Metrics(Collector):
    """The metrics of one server: what its engines have counted, the state of its models, and its process."""

    def __init__(self, pools: Mapping[str, JobQueue] | None = None) -> None:
        """`pools` are the server's threads, by name."""
        self.statistics = RequestStatistics()
        self._pools = {**(pools or {})}
        self._count_others: Callable[[], Mapping[str, int]] = dict
        self._runtime: Runtime | None = None
        self._process = psutil.Process()
        self._lags: deque[tuple[float, float]] = deque()  # when it was measured, and seconds
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def watch_pools(self, pools: Mapping[str, JobQueue], count_others: Callable[[], Mapping[str, int]]) -> None:
        """Watch more pools; `count_others` returns how many jobs wait in queues that are watched elsewhere, by name."""
        self._pools.update(pools)
        self._count_others = count_others

    async def watch_loop(self) -> None:
        """Measure how late the event loop is, forever."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.sleep(LAG_EVERY_S)
            now = loop.time()
            self._lags.append((now, now - began - LAG_EVERY_S))
            while self._lags[0][0] < now - LAG_KEPT_S:
                self._lags.popleft()

    @property
    def has_stuck_pool(self) -> bool:
        """Whether jobs wait for threads that have made no progress for too long."""
        return any(pool.age_s > MAX_SILENCE_S for pool in self._pools.values())

    def load(self) -> ServerLoad:
        return ServerLoad(
            event_loop_lag_s=max((seconds for _, seconds in list(self._lags)), default=0.0),
            jobs_waiting={name: pool.num_waiting for name, pool in self._pools.items()} | {**self._count_others()},
            compilations=num_compiling(),
        )

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
        load, words = self.load(), "Longest delay of the event loop in the last minute."
        yield GaugeMetricFamily("sala_event_loop_lag_seconds", words, value=load.event_loop_lag_s)
        jobs = GaugeMetricFamily("sala_jobs_waiting", "Jobs that wait, by pool.", labels=["pool"])
        for pool, count in load.jobs_waiting.items():
            jobs.add_metric([pool], count)
        yield jobs
        words = "Grammars and patterns of schemas that are compiled, or wait for that."
        yield GaugeMetricFamily("sala_compilations", words, value=load.compilations)
        loaded = {} if self._runtime is None else dict(self._runtime.loaded)
        statuses = {name: each.service.status() for name, each in loaded.items()}
        yield GaugeMetricFamily("sala_models_loaded", "Models in memory.", value=len(statuses))
        for kind, name, words, attribute in PER_MODEL:
            family = kind(name, words, labels=["model"])
            for model, status in statuses.items():
                family.add_metric([model], getattr(status, attribute))
            yield family
        yield from _prefix_metrics({model: status.prefix for model, status in statuses.items()})
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


def _prefix_metrics(uses: Mapping[str, PrefixUse]) -> Iterator[Metric]:
    """Yield what the prefix caches of the models have found, and how full their tiers are."""
    for name, words, label in (
        ("hit", "Prompt tokens found in the cache, by the tier that held them.", "tier"),
        (
            "missed",
            "Prompt tokens not found: new, evicted, or of the other regime (dense, sparse).",
            "cause",
        ),
    ):
        tokens = CounterMetricFamily(f"sala_prefix_{name}_tokens", words, labels=["model", label])
        for model, use in uses.items():
            for key, count in getattr(use, name).items():
                tokens.add_metric([model, key], count)
        yield tokens
    evicted = CounterMetricFamily("sala_prefix_evicted", "Snapshots evicted from the device.", labels=["model"])
    for model, use in uses.items():
        evicted.add_metric([model], use.num_evicted)
    yield evicted
    for name, words, field in (
        ("sala_prefix_cached", "Prefixes in a tier of the cache.", "prefixes"),
        ("sala_prefix_bytes", "Bytes in use in a tier; on the device also by running requests.", "used"),
        ("sala_prefix_limit_bytes", "Bytes of a tier.", "size"),
    ):
        gauge = GaugeMetricFamily(name, words, labels=["model", "tier"])
        for model, use in uses.items():
            for tier, held in use.tiers.items():
                gauge.add_metric([model, tier], getattr(held, field))
        yield gauge


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

"""A server under load: 64 streams at a time and one long prompt after the other, on a CPU with a tiny random model.

    python benchmarks/serve_load.py            writes benchmarks/serve_load.json

The model is too small for its speed to mean anything; what counts is that nothing fails, that the health check is
answered meanwhile, and that memory and open files are the same afterwards as before.
"""

import asyncio
import json
import os
import platform
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sala import __version__
from sala.checkpoint.random import TINY, write_random
from sala.lab.bench.client import Endpoint
from sala.lab.bench.load import Target
from sala.lab.bench.meters import percentile
from sala.lab.bench.server import own_server

HERE = Path(__file__).parent
NUM_STREAMS = 64
WARM_UP_S = 20.0
LOAD_S = 30.0
NUM_ROUNDS = 3
REST_S = 3.0
POLL_S = 0.05
SHORT_PROMPT = (12, 48)  # words of a chat, and tokens of its answer
LONG_PROMPT = 24_000  # tokens
CTX = 32_768


@dataclass
class Counts:
    """What became of the requests of one kind."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    num_events: int = 0

    @property
    def num_errors(self) -> int:
        return sum(count for outcome, count in self.outcomes.items() if outcome != "ok")


@dataclass
class Load:
    """Chats in streams, one long prompt after the other, and health checks, all at the same time."""

    target: Target
    until: float = 0.0
    streams: Counts = field(default_factory=Counts)
    prompts: Counts = field(default_factory=Counts)
    health: Counts = field(default_factory=Counts)

    async def run(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        await asyncio.gather(*(self._stream(seed) for seed in range(NUM_STREAMS)), self._read_long(), self._poll())

    async def _stream(self, seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < self.until:
            await self._ask(self.streams, *self.target.chat(*SHORT_PROMPT, rng))

    async def _read_long(self) -> None:
        rng = random.Random(-1)
        while time.monotonic() < self.until:
            await self._ask(self.prompts, *self.target.request(LONG_PROMPT, 1, rng))

    async def _ask(self, counts: Counts, path: str, body: bytes) -> None:
        began = time.perf_counter()
        timeline = await self.target.ask(path, body, 0)
        counts.outcomes[timeline.error or "ok"] += 1
        counts.seconds.append(time.perf_counter() - began)
        counts.num_events += len(timeline.events)

    async def _poll(self) -> None:
        health = Endpoint(self.target.endpoint.url.removesuffix("/v1") + "/health")
        while time.monotonic() < self.until:
            began = time.perf_counter()
            response = await health.send("")
            self.health.outcomes["ok" if response.status == 200 else str(response.status)] += 1
            self.health.seconds.append(time.perf_counter() - began)
            await asyncio.sleep(max(0.0, began + POLL_S - time.perf_counter()))


def measure(server: psutil.Process) -> dict[str, float]:
    return {"rss_mb": server.memory_info().rss / 1e6, "open_files": server.num_fds(), "threads": server.num_threads()}


def run(directory: Path) -> dict[str, object]:
    write_random(directory / "tiny", TINY)
    flags = ["--device", "cpu", "-m", str(directory / "tiny"), "--models-dir", str(directory / "models")]
    flags += ["--ctx", str(CTX), "--max-batch", str(NUM_STREAMS), "--cache-memory", "64M", "--threads", "1"]
    with own_server(flags) as (endpoint, pid, _):
        target = Target(endpoint, "tiny", {"ignore_eos": True}, vocabulary=256)
        process = psutil.Process(pid)
        asyncio.run(Load(target).run(WARM_UP_S))
        time.sleep(REST_S)
        measured = [measure(process)]
        load = Load(target)
        for _ in range(NUM_ROUNDS):  # a leak grows from round to round
            asyncio.run(load.run(LOAD_S))
            time.sleep(REST_S)
            measured.append(measure(process))
    return report(load, measured)


def report(load: Load, measured: list[dict[str, float]]) -> dict[str, object]:
    before, after = measured[0], measured[-1]
    return {
        "streams": {
            "at_a_time": NUM_STREAMS, "answers": len(load.streams.seconds), "errors": load.streams.num_errors,
            "outcomes": dict(load.streams.outcomes),
            "events_per_second": load.streams.num_events / (NUM_ROUNDS * LOAD_S),
        },
        "long_prompts": {
            "tokens": LONG_PROMPT, "answers": len(load.prompts.seconds), "errors": load.prompts.num_errors,
            "seconds_p50": percentile(load.prompts.seconds, 50),
        },
        "health": {
            "polls": len(load.health.seconds), "errors": load.health.num_errors,
            "p50_ms": 1000 * (percentile(load.health.seconds, 50) or 0.0),
            "p99_ms": 1000 * (percentile(load.health.seconds, 99) or 0.0),
            "max_ms": 1000 * max(load.health.seconds),
        },
        "server": {name: [one[name] for one in measured] for name in before},  # before, and after each round
        "growth_percent": {name: 100 * (after[name] / before[name] - 1) for name in before},
    }  # fmt: skip


def main() -> None:
    machine = {"processor": platform.machine(), "cores": os.cpu_count(), "sala": __version__}
    machine["seconds"] = NUM_ROUNDS * LOAD_S
    with tempfile.TemporaryDirectory() as directory:
        results = {"machine": machine, **run(Path(directory))}
    (HERE / "serve_load.json").write_text(json.dumps(results, indent=2) + "\n")
    for name, values in results.items():
        print(name)
        for key, value in values.items():
            print(f"    {key:<20}{value:,.1f}" if isinstance(value, float) else f"    {key:<20}{value}")


if __name__ == "__main__":
    main()

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
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sala import __version__
from sala.checkpoint.random import TINY, write_random

HERE = Path(__file__).parent
NUM_STREAMS = 64
WARM_UP_S = 20.0
LOAD_S = 30.0
NUM_ROUNDS = 3
REST_S = 3.0
POLL_S = 0.05
LONG_PROMPT = 24_000  # characters, and tokens: the tiny model reads bytes
CTX = 32_768
START = "import sys; from sala.cli import run; sys.exit(run(['serve', *sys.argv[1:]]))"
GREETING = re.compile(r"sala listens at http://([^:/]+):(\d+)/v1")


@dataclass
class Counts:
    """What came of the requests of one kind."""

    statuses: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    num_chunks: int = 0

    @property
    def num_errors(self) -> int:
        return sum(count for status, count in self.statuses.items() if status != "ok")


@dataclass
class Load:
    host: str
    port: int
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
            words = " ".join(str(rng.random()) for _ in range(4))
            body = {"messages": [{"role": "user", "content": words}], "max_tokens": 48, "ignore_eos": True}
            await self._ask(self.streams, "/v1/chat/completions", {**body, "stream": True}, b"data: [DONE]")

    async def _read_long(self) -> None:
        rng = random.Random(-1)
        while time.monotonic() < self.until:
            text = "".join(rng.choices("abcdefgh ", k=LONG_PROMPT))
            await self._ask(self.prompts, "/v1/completions", {"prompt": text, "max_tokens": 1}, b'"text_completion"')

    async def _poll(self) -> None:
        while time.monotonic() < self.until:
            await asyncio.gather(self._ask(self.health, "/health", None, b'"ok"'), asyncio.sleep(POLL_S))

    async def _ask(self, counts: Counts, path: str, body: object, wanted: bytes) -> None:
        """One request on a connection of its own; good is 200 with `wanted` somewhere in the answer."""
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
        head += f"Connection: close\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        began = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
            writer.write(head.encode() + data)
            answer = await reader.read(-1)
            writer.close()
            await writer.wait_closed()
        except OSError as error:
            counts.statuses[type(error).__name__] += 1
            return
        status = answer[9:12].decode()
        counts.statuses["ok" if status == "200" and wanted in answer else status] += 1
        counts.seconds.append(time.perf_counter() - began)
        counts.num_chunks += answer.count(b"data: {")


def measure(server: psutil.Process) -> dict[str, float]:
    return {"rss_mb": server.memory_info().rss / 1e6, "open_files": server.num_fds(), "threads": server.num_threads()}


def percentile(values: list[float], percent: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(len(ranked) * percent / 100))]


def start(room: Path) -> tuple[subprocess.Popen[bytes], str, int]:
    write_random(room / "tiny", TINY)
    flags = ["--port", "0", "--device", "cpu", "-m", str(room / "tiny"), "--models-dir", str(room / "models")]
    flags += ["--ctx", str(CTX), "--max-batch", str(NUM_STREAMS), "--cache-memory", "64M"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (room / "log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-c", START, *flags], stdout=log, stderr=log, env=environment)
    while (found := GREETING.search((room / "log").read_text())) is None:
        if server.poll() is not None:
            sys.exit((room / "log").read_text())
        time.sleep(0.1)
    return server, found[1], int(found[2])


async def wait_until_ready(host: str, port: int) -> None:
    while True:
        load = Load(host, port)
        await load._ask(load.health, "/health/ready", None, b'"ok"')
        if not load.health.num_errors:
            return
        await asyncio.sleep(0.1)


def run(room: Path) -> dict[str, object]:
    server, host, port = start(room)
    try:
        asyncio.run(wait_until_ready(host, port))
        process = psutil.Process(server.pid)
        asyncio.run(Load(host, port).run(WARM_UP_S))
        time.sleep(REST_S)
        measured = [measure(process)]
        load = Load(host, port)
        for _ in range(NUM_ROUNDS):  # a leak grows from round to round
            asyncio.run(load.run(LOAD_S))
            time.sleep(REST_S)
            measured.append(measure(process))
    finally:
        server.terminate()
        server.wait(60)
    return report(load, measured)


def report(load: Load, measured: list[dict[str, float]]) -> dict[str, object]:
    before, after = measured[0], measured[-1]
    return {
        "streams": {
            "at_a_time": NUM_STREAMS, "answers": len(load.streams.seconds), "errors": load.streams.num_errors,
            "outcomes": dict(load.streams.statuses),
            "chunks_per_second": load.streams.num_chunks / (NUM_ROUNDS * LOAD_S),
        },
        "long_prompts": {
            "tokens": LONG_PROMPT, "answers": len(load.prompts.seconds), "errors": load.prompts.num_errors,
            "seconds_p50": percentile(load.prompts.seconds, 50),
        },
        "health": {
            "polls": len(load.health.seconds), "errors": load.health.num_errors,
            "p50_ms": 1000 * percentile(load.health.seconds, 50), "p99_ms": 1000 * percentile(load.health.seconds, 99),
            "max_ms": 1000 * max(load.health.seconds),
        },
        "server": {name: [one[name] for one in measured] for name in before},  # before, and after each round
        "growth_percent": {name: 100 * (after[name] / before[name] - 1) for name in before},
    }  # fmt: skip


def main() -> None:
    machine = {"processor": platform.machine(), "cores": os.cpu_count(), "sala": __version__}
    machine["seconds"] = NUM_ROUNDS * LOAD_S
    with tempfile.TemporaryDirectory() as room:
        results = {"machine": machine, **run(Path(room))}
    (HERE / "serve_load.json").write_text(json.dumps(results, indent=2) + "\n")
    for name, values in results.items():
        print(name)
        for key, value in values.items():
            print(f"    {key:<20}{value:,.1f}" if isinstance(value, float) else f"    {key:<20}{value}")


if __name__ == "__main__":
    main()

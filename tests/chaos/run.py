"""A run: the answers of a quiet server, then load and faults, pauses in which everything is counted, and the ends."""

import asyncio
import json
import math
import os
import platform
import random
import re
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from sala import __version__
from sala.checkpoint.random import TINY, write_random
from sala.engine.service import NUM_PREPARERS
from sala.server.app import NUM_PARSERS
from sala.server.http.encoding import NUM_ENCODERS
from sala.server.http.keys import KeyFile
from sala.server.serving import IDLE_S
from tests.chaos.load import MAX_IDLE, SECOND, Load
from tests.chaos.server import HurtServer, small_disk
from tests.server.fake_hub import FakeHub, serve

USERS = ("anna", "ben", "cora")
DISK = 64 << 20
FAULTS = ("workers", "full disk", "clock", "read-only disk")
SETTLE_S = 20.0  # for what has been cancelled to end
HOUR = 3600
ENDED = "sala_requests_total"
HITS = "sala_prefix_hit_tokens_total"
HEAP = ("in_use_mb", "kept_free_mb")  # of malloc, where it tells
MEMORY = ("rss_mb", "allocated_mb", "python_blocks", "worker_rss_mb")
COUNTED = (*MEMORY, "open_files", "threads", "processes")
STEADY = ("rss_mb", "allocated_mb", "open_files", "threads")  # of the server itself: workers are killed and begin anew
MOST_SPREAD = 0.05
POOLS = {  # threads that begin when they are first needed, and how many there may be
    "AnyIO": 40,
    "asyncio": min(32, (os.cpu_count() or 1) + 4),
    "bodies": NUM_PARSERS,
    "encode": NUM_ENCODERS,
    "prepare": NUM_PREPARERS,
}
SLACK = 4  # threads or files of a kind that may come and go; what is lost with every request is many more


@dataclass(frozen=True)
class Plan:
    """How long and how hard."""

    load_s: float = 3600.0
    pause_s: float = 1.5  # of a client between two requests, on average
    num_users: int = 6
    fault_s: float = 20.0  # between two faults, on average
    hold_s: float = 4.0  # for which a fault lasts
    rest_s: float = 1.0  # of load before each end of the server, and after it
    counts_at: tuple[float, ...] = (600.0, 1800.0, 3600.0)
    num_ends: int = 3  # of each kind
    seed: int = 0


@dataclass
class Run:
    plan: Plan
    server: HurtServer
    load: Load
    faults: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)
    counts: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.plan.seed)

    async def run(self) -> None:
        await self.load.learn(SECOND)
        await self.load.learn(None)
        await self.load.learn_fetched()
        clients = [self.load.user(USERS[number % len(USERS)], number) for number in range(self.plan.num_users)]
        clients.append(self.load.administrator(-1, 3 * self.plan.pause_s))
        tasks = [asyncio.create_task(client) for client in clients]
        try:
            await self._hurt()
            await self._end()
        finally:
            self.load.is_over = True
            self.load.go_on()
            await asyncio.gather(*tasks)
        await self._count(time.monotonic(), "end")

    # faults that the server survives

    async def _hurt(self) -> None:
        began = time.monotonic()
        counts_at = [*self.plan.counts_at]
        faults: list[str] = []
        while time.monotonic() < began + self.plan.load_s or counts_at:
            if not faults:
                faults = self.rng.sample(FAULTS, len(FAULTS))
            due = min([*counts_at, self.plan.load_s]) + began - time.monotonic()
            await asyncio.sleep(max(0.0, min(due, self.plan.fault_s * self.rng.uniform(0.5, 1.5))))
            if counts_at and time.monotonic() >= began + counts_at[0]:
                del counts_at[0]
                await self._count(began)
            elif time.monotonic() < began + self.plan.load_s:
                await self._make(faults.pop())
        for fault in FAULTS:  # however slow the machine is
            if not self.faults[fault]:
                await self._make(fault)

    async def _make(self, fault: str) -> None:
        server, hold = self.server, self.plan.hold_s
        self.faults[fault] += 1
        if fault == "workers":
            await asyncio.to_thread(server.kill_workers)
            await asyncio.sleep(hold)  # a task is tried again once, so that two kills at a time are too many
        elif fault == "clock":
            for seconds in (HOUR, -HOUR, 0):
                await asyncio.to_thread(server.ask, f"clock {seconds}")
                await asyncio.sleep(hold / 3)
        elif fault == "full disk":
            self.load.disk_hurt_at = math.inf
            await asyncio.to_thread(server.fill_disk)
            await asyncio.sleep(hold)
            await asyncio.to_thread(server.empty_disk)
            self.load.disk_hurt_at = time.monotonic()
        else:
            await self._protect(hold)

    async def _protect(self, hold: float) -> None:
        if not self.server.has_own_disk:
            self.skipped["read-only disk"] = "no disk may be mounted here"
            return
        while not await asyncio.to_thread(self.server.protect_disk, True):
            await asyncio.sleep(0.1)  # a file is being written
        self.load.disk_hurt_at = math.inf
        await asyncio.sleep(hold)
        await asyncio.to_thread(self.server.protect_disk, False)
        self.load.disk_hurt_at = time.monotonic()

    # the ends of the server

    async def _end(self) -> None:
        for _ in range(self.plan.num_ends):
            for how in ("SIGTERM", "SIGKILL", "lost device"):
                await asyncio.sleep(self.plan.rest_s)
                await self._end_once(how)
        await asyncio.sleep(self.plan.rest_s)

    async def _end_once(self, how: str) -> None:
        load, server = self.load, self.server
        load.ending_since, load.ending = time.monotonic(), how
        load.outcomes["ends"] += 1
        if how == "lost device":
            await asyncio.to_thread(server.ask, "lose")
            code = await asyncio.to_thread(server.end, None)
        else:
            code = await asyncio.to_thread(server.end, getattr(signal, how))
        wanted = {"SIGTERM": 0, "SIGKILL": -signal.SIGKILL, "lost device": 1}[how]
        if code != wanted:
            load.wrong.append(f"exit code {code} after {how}")
        self.faults[how] += 1
        await asyncio.to_thread(server.start)
        load.connect()
        await asyncio.sleep(0.2)  # for what the end has broken to be noticed
        load.ending = ""

    # counting

    async def _count(self, began: float, name: str = "") -> None:
        """Let all clients pause, and see whether everything is where it was."""
        await self.load.quiet()
        await self.load.send("POST", "/v1/models/unload", json={"model": SECOND})
        for case in self.load.cases:  # so that the same workers run at every count
            await self.load.compare(case, "admin")
        await self.load.disconnect()
        numbers = await self._settle()
        await asyncio.sleep(IDLE_S + 1.0)  # for the server to notice, and to return what it has freed
        accepted = numbers["sala_requests_accepted_total"]
        ended = sum(value for key, value in numbers.items() if key.startswith(ENDED + "{"))
        checked = await asyncio.to_thread(self.server.ask, "check")
        if accepted != ended:
            self.load.wrong.append(f"{accepted} requests were accepted and {ended} have ended")
        self.load.wrong += checked["problems"]
        count = {"minute": round((time.monotonic() - began) / 60, 1), **await asyncio.to_thread(self.server.usage)}
        count |= {name: checked[name] for name in (*HEAP, "python_blocks") if name in checked}
        count |= {"accepted": accepted, "ended": ended}
        count |= {"threads_by_name": checked["threads"], "files_by_kind": checked["files"]}
        count["hit_tokens"] = {key[-8:]: value for key, value in numbers.items() if key.startswith(HITS)}
        self.counts.append({"at": name, **count} if name else count)
        print(json.dumps({"wrong": len(self.load.wrong), **self.counts[-1]}), file=sys.stderr, flush=True)
        self.load.go_on()

    async def _settle(self) -> dict[str, float]:
        """Return the metrics when no request is left, or after a while."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            numbers = await asyncio.to_thread(self.server.metrics, self.load.keys["admin"])
            busy = {key: value for key, value in numbers.items() if key.startswith(BUSY) and value}
            if not busy:
                return numbers
            if time.monotonic() > deadline:
                self.load.wrong.append(f"still busy: {busy}")
                return numbers
            await asyncio.sleep(0.05)

    def report(self) -> dict[str, Any]:
        names = sorted(self.load.outcomes)
        return {
            "requests": sum(self.load.statuses.values()),
            "statuses": dict(sorted(self.load.statuses.items())),
            "server_errors": dict(sorted(self.load.server_errors.items())),
            "outcomes": {name: self.load.outcomes[name] for name in names},
            "faults": dict(self.faults),
            "skipped": self.skipped,
            "spread": spread([count for count in self.counts if "at" not in count]),
            "counts": self.counts,
            "wrong": self.load.wrong,
        }


BUSY = ("sala_requests_waiting", "sala_requests_running", "sala_requests_preparing")


def spread(counts: list[dict[str, Any]]) -> dict[str, float]:
    """Return how far the counts under load are from their middle at most, as a share of it."""
    shares = {}
    for name in COUNTED:
        values = [count[name] for count in counts]
        middle = (min(values) + max(values)) / 2 or 1
        shares[name] = round((max(values) - middle) / middle, 4)
    return shares


def find_unsteady(counts: list[dict[str, Any]]) -> list[str]:
    """Return what did not stay under load: memory, threads or open files beyond ± 5 % and ± 1 of their middle.

    Pages of libraries and weights that the system has dropped count as if they were still in memory: it drops and
    reads them as it likes. What a server maps anew and keeps counts in addition.
    """
    counts = [count for count in counts if "at" not in count]
    found = [text for count in counts for text in find_overfull(count)]
    files = accumulate((count["rss_mb"] - count["allocated_mb"] for count in counts), max)
    resident = [count["allocated_mb"] + most for count, most in zip(counts, files, strict=True)]
    for name in STEADY:
        values = resident if name == "rss_mb" else [count[name] for count in counts]
        values = [own_threads(count) for count in counts] if name == "threads" else values
        least, most = min(values), max(values)
        middle = (least + most) / 2
        if most - middle > max(1, MOST_SPREAD * middle):
            found.append(f"{name} from {least:g} to {most:g} (± {(most - middle) / middle:.1%})")
    return found


def find_lost(first: dict[str, Any], last: dict[str, Any]) -> list[str]:
    """Return of which threads and open files there are more at the last of two counts than there may be.

    The server may not have noticed yet that the clients have closed their idle connections.
    """
    found = find_overfull(last)
    if own_threads(last) > own_threads(first) + SLACK:
        found.append(f"threads: {own_threads(first)}, then {own_threads(last)}")
    for kind, number in last["files_by_kind"].items():
        before = first["files_by_kind"].get(kind, 0)
        if number > before + (MAX_IDLE if kind.startswith("socket:") else SLACK):
            found.append(f"{kind}: {before}, then {number}")
    return found


def own_threads(count: dict[str, Any]) -> int:
    """Return how many threads there are outside pools, which fill only as they are needed."""
    pooled = sum(number for name, number in count["threads_by_name"].items() if name in POOLS)
    return int(count["threads"]) - pooled


def find_overfull(count: dict[str, Any]) -> list[str]:
    """Return the pools that have more threads than they may have."""
    names = count["threads_by_name"].items()
    return [f"{number} threads {name}" for name, number in names if number > POOLS.get(name, number)]


def chaos(directory: Path, plan: Plan) -> dict[str, Any]:
    """Run in this directory and return what happened; `wrong` lists what should not have."""
    began = time.monotonic()
    write_random(directory / "fetched", TINY, 2)
    files = {file.name: file.read_bytes() for file in (directory / "fetched").iterdir()}
    keyfile = KeyFile(directory / "keys.json")
    keys = {name: keyfile.add(name, "admin" if name == "admin" else "user") for name in ("admin", *USERS)}
    disk = directory / "disk"
    with small_disk(disk, DISK) as has_own_disk, serve(FakeHub(files, pause=0.02)) as hub:
        server = HurtServer(_flags(directory, disk, hub.url), disk, has_own_disk)
        run = Run(plan, server, Load(server.url, keys, plan.pause_s))
        server.start()
        try:
            asyncio.run(run.run())
        finally:
            server.end(signal.SIGKILL)
    (directory / "server.log").write_text("".join(server.log))
    machine = {"processor": platform.machine(), "cores": os.cpu_count(), "sala": __version__}
    seconds = {"seconds": round(time.monotonic() - began), "load_seconds": plan.load_s, "own_disk": has_own_disk}
    return {"machine": machine, **seconds, **run.report(), "log": _summary(server.log)}


def _flags(directory: Path, disk: Path, hub_url: str) -> list[str]:
    """Write the models; return the settings of a server with a small cache in three tiers, on a small disk."""
    models, cache = disk / "models", disk / "cache"
    cache.mkdir(mode=0o700)
    write_random(directory / "tiny", TINY)
    write_random(models / SECOND, TINY, 1)
    flags = ["-m", str(directory / "tiny"), "--models-dir", str(models), "--hub-url", hub_url, "--device", "cpu"]
    flags += ["--keys-file", str(directory / "keys.json"), "--users-load", "--files-dir", str(directory / "files")]
    flags += ["--ctx", "8192", "--cache-memory", "24M", "--cache-ram", "8M", "--threads", "1", "--max-batch", "8"]
    return [*flags, "--cache-dir", str(cache), "--cache-disk", "24M", "--drain-s", "20", "--log-level", "warning"]


def _summary(log: list[str]) -> dict[str, int]:
    """Return the messages of a log without their times and numbers, and how often each came."""
    lines = [re.fullmatch(r"[\d:]{8} ((?:WARNING|ERROR) .*)\n", line) for line in log]
    shapes = Counter(re.sub(r"\S*\d\S*", "#", line[1])[:160] for line in lines if line)
    return dict(shapes.most_common(20))

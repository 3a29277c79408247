"""Threads and processes that work for several owners in turn, and processes in which untrusted input is worked on.

An owner is the client that sent the request: on a server, a key. The next turn goes to the owner with the fewest jobs
running, however many it has waiting; ties go to the owner that was served longest ago.

Chat templates and grammars of clients are tried in a `SandboxProcess`, which can be killed; a thread cannot.
"""

import asyncio
import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from sala.errors import SalaError

LARGE_REQUEST = 1 << 20  # bytes
SANDBOX = Path(__file__).with_name("sandbox.py")
START_S = 60.0  # for a worker to report that it is ready
SECRETS = re.compile("TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)  # variables that a worker does not get
T = TypeVar("T")
_owner = ContextVar("owner", default="")  # on whose behalf this thread works


class FairQueue(Generic[T]):
    """What waits for one of a number of places, of which an owner may have `share` at a time. Not thread-safe."""

    def __init__(self, num_places: int, share: int) -> None:
        self._num_places = num_places
        self._share = share
        self._waiting: dict[str, dict[T, None]] = {}  # by owner, in the order of arrival
        self._in_hand: Counter[str] = Counter()
        self._last_turn: dict[str, int] = {}  # numbers of the turns that owners had
        self._num_turns = 0

    def __len__(self) -> int:
        """Return how many wait."""
        return sum(map(len, self._waiting.values()))

    def put(self, owner: str, item: T) -> None:
        self._waiting.setdefault(owner, {})[item] = None

    def take(self) -> tuple[str, T] | None:
        """Return whose turn it is, and what gets a place now; None if nothing does."""
        if self._in_hand.total() >= self._num_places:
            return None
        owners = (owner for owner in self._waiting if self._in_hand[owner] < self._share)
        owner = min(owners, key=lambda one: (self._in_hand[one], self._last_turn.get(one, 0)), default=None)
        if owner is None:
            return None
        item = next(iter(self._waiting[owner]))
        self.remove(owner, item)
        self._in_hand[owner] += 1
        self._num_turns += 1
        self._last_turn[owner] = self._num_turns
        return owner, item

    def give_back(self, owner: str) -> None:
        """Free the place of something that was taken."""
        self._in_hand[owner] -= 1
        if not self._in_hand[owner]:
            del self._in_hand[owner]
        if not self._in_hand and not self._waiting:
            self._last_turn.clear()  # so that owners who never come back are forgotten

    def remove(self, owner: str, item: T) -> bool:
        """Drop something that waits; return whether it did."""
        items = self._waiting.get(owner, {})
        if item not in items:
            return False
        del items[item]
        if not items:
            del self._waiting[owner]
        return True

    def clear(self) -> list[T]:
        """Drop and return all that waits."""
        items = [item for each in self._waiting.values() for item in each]
        self._waiting.clear()
        return items


@dataclass(eq=False)
class _TurnJob:
    work: Callable[[], Any]
    future: "Future[Any]" = field(default_factory=Future)


class MonitoredPool(ThreadPoolExecutor):
    """A thread pool that knows how many jobs wait, and for how long it has made no progress."""

    def __init__(self, num_threads: int | None, name: str) -> None:
        super().__init__(num_threads, name)
        self.num_waiting = 0
        self._counting = threading.Lock()
        self._moved_at = time.monotonic()  # when a job last began or ended, or came to an empty queue

    def submit(self, work: Callable[..., T], /, *arguments: Any, **named: Any) -> "Future[T]":
        with self._counting:
            if not self.num_waiting:
                self._moved_at = time.monotonic()
            self.num_waiting += 1
        try:
            future = super().submit(self._run, work, *arguments, **named)
        except RuntimeError:  # the pool is closed
            self._leave_queue()
            raise
        future.add_done_callback(self._forget)
        return future

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return what a function returns, without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self, functools.partial(work, *arguments))

    @property
    def age_s(self) -> float:
        """For how many seconds jobs have been waiting while none began or ended."""
        return time.monotonic() - self._moved_at if self.num_waiting else 0.0

    def _run(self, work: Callable[..., T], /, *arguments: Any, **named: Any) -> T:
        self._leave_queue()
        try:
            return work(*arguments, **named)
        finally:
            self._moved_at = time.monotonic()

    def _forget(self, future: "Future[Any]") -> None:
        if future.cancelled():  # before it began
            self._leave_queue()

    def _leave_queue(self) -> None:
        with self._counting:
            self.num_waiting -= 1
            self._moved_at = time.monotonic()


class FairPool:
    """Threads that work for owners in turn; an owner has at most `share` of them at a time."""

    def __init__(self, num_threads: int, share: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._turns: FairQueue[_TurnJob] = FairQueue(num_threads, share)
        self._lock = threading.Lock()
        self._ready: deque[tuple[str, _TurnJob]] = deque()  # as many as threads are on their way
        self._began: dict[_TurnJob, float] = {}
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """How many have no thread yet."""
        with self._lock:
            return len(self._turns)

    @property
    def num_running(self) -> int:
        return len(self._began)

    @property
    def age_s(self) -> float:
        """How many seconds ago the oldest work in progress began; the time in which it waited does not count."""
        return max((time.monotonic() - began for began in list(self._began.values())), default=0.0)

    async def run(self, owner: str, work: Callable[..., T], *arguments: Any) -> T:
        """Run a function in a thread when it is its owner's turn. Cancelled if the pool is closed before."""
        job = _TurnJob(partial(work, *arguments))
        with self._lock:
            if self._is_closed:
                job.future.cancel()
            else:
                self._turns.put(owner, job)
                self._serve()
        try:
            result: T = await asyncio.wrap_future(job.future)
            return result
        finally:
            with self._lock:
                self._turns.remove(owner, job)  # what is not wanted any more
            del job  # its error refers to this frame: with the future in it, the request would stay in memory

    def close(self) -> None:
        """Cancel what waits; what has begun goes on."""
        with self._lock:
            self._is_closed, waiting = True, self._turns.clear()
            self._threads.shutdown(wait=False)
        for job in waiting:
            job.future.cancel()

    def _serve(self) -> None:
        """Hand what has its turn to the threads. The caller holds the lock."""
        while (turn := self._turns.take()) is not None:
            self._ready.append(turn)
            self._threads.submit(self._do)  # as an argument the job would stay in a frame; see `run`

    def _do(self) -> None:
        owner, job = self._ready.popleft()
        name = _owner.set(owner)
        if is_wanted := job.future.set_running_or_notify_cancel():
            self._began[job] = time.monotonic()
        tell = _try(job) if is_wanted else partial(str)
        _owner.reset(name)
        with self._lock:
            self._began.pop(job, None)
            self._turns.give_back(owner)
            self._serve()
        tell()
        del job, tell  # see `run`


def _try(job: _TurnJob) -> Callable[[], Any]:
    """Start the work; return a callback that delivers its result or raises its error."""
    try:
        return partial(job.future.set_result, job.work())
    except BaseException as error:
        return partial(job.future.set_exception, error)
    finally:
        del job  # see `run`


class FairLock:
    """A lock that owners get in turn: those that threads of a FairPool work for; all other threads are one owner."""

    def __init__(self) -> None:
        self._turns: FairQueue[threading.Event] = FairQueue(1, 1)
        self._lock = threading.Lock()
        self._holder = ""

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return len(self._turns)

    def __enter__(self) -> Self:
        owner, turn = _owner.get(), threading.Event()
        with self._lock:
            self._turns.put(owner, turn)
            self._serve()
        try:
            turn.wait()
        except BaseException:  # such as Ctrl-C
            with self._lock:
                if not self._turns.remove(owner, turn):
                    self._turns.give_back(owner)
                    self._serve()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._turns.give_back(self._holder)
            self._serve()

    def _serve(self) -> None:
        if (turn := self._turns.take()) is not None:
            self._holder, event = turn
            event.set()


class WorkerKilled(Exception):
    """A task did not finish within `seconds` or ran out of memory; its process is gone."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class _WorkerLost(WorkerKilled):
    """The process was killed from outside, for example because the machine ran out of memory."""


@dataclass(frozen=True)
class SandboxTask:
    """A task of `sandbox`, and the seconds it may take; more if its arguments are long."""

    name: str
    arguments: Mapping[str, Any]
    seconds: float
    seconds_per_mib: float = 0.0

    def encode(self) -> tuple[bytes, float]:
        """Return what is sent to the process, and the seconds after which it is killed."""
        body = json.dumps(self.arguments)
        seconds = self.seconds + self.seconds_per_mib * len(body) / (1 << 20)
        return f'{{"task": "{self.name}", "seconds": {seconds}, "arguments": {body}}}\n'.encode(), seconds


class SandboxProcess:
    """A process for tasks of `sandbox`, one at a time; started when first needed, and again after it was killed.

    Those who wait for it take turns, by owner. `program` may be another script that serves its own tasks with
    `sandbox.serve`.
    """

    def __init__(self, program: Path = SANDBOX) -> None:
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = FairLock()

    @property
    def num_waiting(self) -> int:
        """How many tasks wait for others."""
        return self._turn.num_waiting

    def ask(
        self, task: str, arguments: Mapping[str, Any], seconds: float, seconds_per_mib: float = 0.0
    ) -> dict[str, Any]:
        """Return the reply to a task. Raises WorkerKilled, and what `json.dumps` raises."""
        return self.ask_all(SandboxTask(task, arguments, seconds, seconds_per_mib))

    def ask_all(self, *tasks: SandboxTask) -> dict[str, Any]:
        """Like `ask`, for tasks that need the same process, with nothing between them; return the last reply."""
        requests = [task.encode() for task in tasks]
        with self._turn:
            with contextlib.suppress(_WorkerLost):
                return self._exchange_all(requests)
            return self._exchange_all(requests)  # the tasks were not to blame, so they get another process, once

    def _exchange_all(self, requests: Sequence[tuple[bytes, float]]) -> dict[str, Any]:
        return [self._exchange(*request) for request in requests][-1]

    def _exchange(self, request: bytes, seconds: float) -> dict[str, Any]:
        process = self._start()
        is_late = threading.Event()

        def stop() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(seconds, stop)
        try:
            if process.stdin is None or process.stdout is None:
                raise WorkerKilled(seconds)
            timer.start()
            process.stdin.write(request)
            process.stdin.flush()
            reply: dict[str, Any] = json.loads(process.stdout.readline())
        except (OSError, ValueError):  # the process was killed, perhaps in the middle of a line
            self.close()
            kind = WorkerKilled if is_late.is_set() or not _is_killed(process) else _WorkerLost
            raise kind(seconds) from None
        except BaseException:
            self.close()  # a late reply must not be taken for the reply to the next request
            raise
        finally:
            timer.cancel()
        if len(request) > LARGE_REQUEST:
            self.close()  # its memory would stay as large as its largest request
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            command = [sys.executable, "-P", str(self._program)]
            environment = {name: value for name, value in os.environ.items() if not SECRETS.search(name)}
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=environment
            )
            timer = threading.Timer(START_S, self._process.kill)
            timer.start()
            is_ready = self._process.stdout is not None and self._process.stdout.readline()
            timer.cancel()
            if not is_ready:
                process = self._process
                self.close()
                if _is_killed(process):
                    raise _WorkerLost(START_S)
                raise SalaError("the process for untrusted input did not start", "is jinja2 installed?")
        return self._process

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        # the pipe of a killed process may be broken, or closed by the garbage collector before this object is
        with contextlib.suppress(OSError, ValueError):
            process.communicate()
        process.wait()

    def __del__(self) -> None:
        self.close()


def _is_killed(process: "subprocess.Popen[bytes]") -> bool:
    """Whether a process that has ended was killed by SIGKILL; a crash or a deadline of its own is another signal."""
    return process.returncode == -9

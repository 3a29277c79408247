"""How long other programs kept processes from running, so that bounds in seconds hold on a busy machine, too."""

import os
import time
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
NUM_BUSY = (0, 1, 2, 5, 6, 7)  # of the times in /proc/stat: all but those in which a processor had nothing to do


@dataclass
class Withheld:
    """Looks at a server, its workers and this process now and then.

    A thread that could run and had no processor has waited; the kernel counts that for each. Where the processors
    were taken by these processes themselves, that is their own fault: what counts is at most the time that all others
    took. It is nothing on a quiet machine, and where the kernel does not tell.
    """

    pid: int
    _times: list[float] = field(default_factory=list, repr=False)
    _taken: list[float] = field(default_factory=list, repr=False)  # by other programs, of all processors
    _waited: list[dict[str, float]] = field(default_factory=list, repr=False)  # by thread of the server
    _own: list[dict[str, float]] = field(default_factory=list, repr=False)  # by thread of this process

    def look(self) -> None:
        self._times.append(time.monotonic())
        tasks = _tasks(self.pid)
        workers = {int(word) for task in tasks for word in _read(task / "children").split()}
        self._waited.append({task.name: _waited(task) for task in tasks})
        self._own.append({task.name: _waited(task) for task in _tasks(os.getpid())})
        self._taken.append(_busy() - sum(map(_used, {self.pid, os.getpid(), *workers})))

    def seconds(self, begin: float, end: float) -> float:
        """Return how long other programs withheld a processor between two times: from a thread here, and one there."""
        first = max(0, bisect_right(self._times, begin) - 1)
        last = min(len(self._times) - 1, bisect_left(self._times, end))
        waited = sum(_longest(looks[first], looks[last]) for looks in (self._waited, self._own))
        return max(0.0, min(waited, self._taken[last] - self._taken[first], end - begin))


def _longest(before: dict[str, float], after: dict[str, float]) -> float:
    return max((after[name] - before[name] for name in after if name in before), default=0.0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended, or this is another system
        return ""


def _tasks(pid: int) -> list[Path]:
    try:
        return [*(PROC / str(pid) / "task").iterdir()]
    except OSError:
        return []


def _waited(task: Path) -> float:
    """Return the seconds for which a thread has waited for a processor."""
    words = _read(task / "schedstat").split()
    return int(words[1]) / 1e9 if words else 0.0


def _busy() -> float:
    """Return the seconds for which processors have worked."""
    words = _read(PROC / "stat").partition("\n")[0].split()[1:]
    return sum(int(words[at]) for at in NUM_BUSY) / os.sysconf("SC_CLK_TCK") if words else 0.0


def _used(pid: int) -> float:
    """Return the seconds of processors that a process has used, with its children that have ended."""
    words = _read(PROC / str(pid) / "stat").rpartition(")")[2].split()
    return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK") if words else 0.0

"""A thread that does one job after another: it reads and writes the files of the disk tier."""

import queue
import threading
import weakref
from collections.abc import Callable
from itertools import count

CLOSE_S = 60.0  # longest wait for what is left to be done
Jobs = queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]]
READ, WRITE, LAST = range(3)  # in the order in which jobs are done


class Worker:
    """A thread that does one job after another. It ends with its owner, after what was given to it before."""

    def __init__(self, name: str) -> None:
        self._jobs: Jobs = queue.PriorityQueue()
        self._numbers = count()
        thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, self._jobs, self._numbers, thread)  # runs at exit too

    def do(self, job: Callable[[], None], order: int = WRITE) -> None:
        self._jobs.put((order, next(self._numbers), job))

    def flush(self) -> None:
        """Wait until all jobs so far are done."""
        done = threading.Event()
        self.do(done.set, LAST)
        done.wait(CLOSE_S)

    def close(self) -> None:
        self._end()


def _work(jobs: Jobs) -> None:
    while (job := jobs.get()[2]) is not None:
        job()
        del job  # it refers to the request that it was done for


def _end(jobs: Jobs, numbers: "count[int]", thread: threading.Thread) -> None:
    jobs.put((LAST, next(numbers), None))
    if thread is not threading.current_thread():
        thread.join(CLOSE_S)

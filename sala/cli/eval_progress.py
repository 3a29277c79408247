"""How a long evaluation goes on: a bar with the time left on a terminal, and a line per case everywhere."""

import time
from collections.abc import Callable
from typing import Any

from sala.cli import flags as s


class Course:
    """Watches a run of the evaluation. `describe` puts a row into words. Use it as a context."""

    def __init__(self, describe: Callable[[dict[str, Any]], str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self._describe = describe
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("evaluating", total=None, left="")
        self._began = time.perf_counter()
        self._total = 0
        self.num_cases = 0
        self.num_done = 0  # those of earlier runs among them

    def __enter__(self) -> "Course":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def begin(self, num_cases: int, num_known: int, num_tokens: int) -> None:
        self.num_cases, self.num_done, self._total = num_cases, num_known, max(1, num_tokens)
        self._began = time.perf_counter()
        self._bar.update(self._task, total=self._total, description=f"{num_known}/{num_cases}")
        if num_known:
            s.note(f"{num_known} of {num_cases} cases are known from an earlier run")

    def advance(self, num_tokens: int) -> None:
        self._bar.update(self._task, completed=num_tokens, left=self._left(num_tokens))

    def tell(self, row: dict[str, Any]) -> None:
        self.num_done += 1
        self._bar.update(self._task, description=f"{self.num_done}/{self.num_cases}")
        line = f"[{self.num_done}/{self.num_cases}] {self._describe(row)}"
        if self._console.is_terminal:
            self._bar.console.print(line, markup=False)
        else:
            left = self._left(int(self._bar.tasks[0].completed))
            s.note(f"{line}, {left}" if left else line)

    def _left(self, num_tokens: int) -> str:
        if not num_tokens or num_tokens >= self._total:
            return ""
        seconds = (time.perf_counter() - self._began) / num_tokens * (self._total - num_tokens)
        return f"{duration(seconds)} left"


def duration(seconds: float) -> str:
    """45 s, 12 min, 3 h 20 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"

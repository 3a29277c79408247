"""The bar of work that has stages: one line for each on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any

from sala.cli import flags as s

PLAIN_SECONDS = 20.0  # between lines when the output is no terminal


class StageBar:
    """Use it as a context; call it with the stage, what is done of it, and how much it is in all."""

    def __init__(self) -> None:
        self._has_bar = sys.stderr.isatty()
        self._tasks: dict[str, Any] = {}
        self._last = 0.0

    def __enter__(self) -> "StageBar":
        if self._has_bar:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description:>16}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=Console(stderr=True))
            self._progress.start()
        return self

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._has_bar:
            if stage not in self._tasks:
                self._tasks[stage] = self._progress.add_task(stage, total=total)
            self._progress.update(self._tasks[stage], completed=done, total=total)
        elif done == total or time.monotonic() - self._last > PLAIN_SECONDS:
            self._last = time.monotonic()
            s.note(f"{stage:>16}  {done:,}/{total:,}")

    def close(self) -> None:
        """Before something else is written."""
        if self._has_bar:
            self._progress.stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

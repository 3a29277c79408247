"""The bar that a long prefill shows: tokens, speed, time left. Short ones show nothing."""

import sys
import threading
import time
from types import TracebackType

PATIENCE = 2.0  # seconds before a wait deserves a bar


class PrefillBar:
    """Use it as a context, pass it as `on_progress`; it goes away when the first token is there."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            SpinnerColumn,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("reading"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
            TextColumn("{task.fields[speed]:,.0f} tok/s"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("reading", total=None, visible=True, speed=0.0)
        self._timer = threading.Timer(PATIENCE, self._show)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._is_closed = False
        self._first: tuple[float, int] | None = None
        self._is_shown = sys.stderr.isatty()

    def __enter__(self) -> "PrefillBar":
        return self

    def __call__(self, done: int, total: int) -> None:
        if done >= total:
            self.close()
            return
        now = time.perf_counter()
        if self._first is None:
            self._first = (now, done)
            self._progress.update(self._task, total=total, completed=done)
            if self._is_shown:
                self._timer.start()
            return
        began, at = self._first
        speed = (done - at) / (now - began) if now > began else 0.0
        self._progress.update(self._task, total=total, completed=done, speed=speed)

    def _show(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._progress.start()

    def close(self) -> None:
        self._timer.cancel()
        with self._lock:
            if not self._is_closed and self._progress.live.is_started:
                self._progress.stop()
            self._is_closed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""The one progress display: a bar per task on a terminal, a line now and then elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from sala.cli.flags import escape_controls, note

if TYPE_CHECKING:
    from sala.lab.train.loop import Progress

PLAIN_SECONDS = 20.0  # between lines when the output is not a terminal
TEXT_WIDTH = 66  # characters beside the bar: task, per cent, tokens, speed, time left
PATIENCE = 2.0  # seconds before a prefill deserves a bar

OnProgress = Callable[[int, int], None]
Item = TypeVar("Item")


class ProgressBar:
    """A context; call it with a task, what is done of it and how much it is in all.

    `unit` adds counts and speed: "tokens", or "B" for bytes. With `patience` the bar appears after so many seconds.
    """

    def __init__(self, unit: str = "", patience: float = 0.0, is_kept: bool = True, is_quiet: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True, highlight=False)
        self.is_shown = sys.stderr.isatty()
        self._progress = Progress(
            TextColumn("{task.description:>10}", markup=False),
            BarColumn(min(40, max(5, self._console.width - TEXT_WIDTH))),
            TaskProgressColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
            transient=not is_kept,
        )
        self._unit, self._is_quiet = unit, is_quiet
        self._tasks: dict[str, Any] = {}
        self._first: dict[str, tuple[float, int]] = {}
        self._last = 0.0
        self._lock = threading.Lock()
        self._is_closed = not self.is_shown
        self._timer = threading.Timer(patience, self._start)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, task: str, done: int, total: int, text: str = "") -> None:
        text = _line(text or self._measure(task, done, total))
        if not self.is_shown:
            is_due = done == total or time.monotonic() - self._last > PLAIN_SECONDS
            if is_due and not self._is_quiet:
                self._last = time.monotonic()
                note(f"{task:>16}  {done:,}/{total:,}" + (f"  {text}" if text else ""))
            return
        if task not in self._tasks:
            self._tasks[task] = self._progress.add_task(task, total=total, text=text)
            if len(self._tasks) == 1:
                self._timer.start()
        self._progress.update(self._tasks[task], completed=done, total=total, text=text)

    def rename(self, task: str, description: str) -> None:
        if task in self._tasks:
            self._progress.update(self._tasks[task], description=_line(description))

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        if self._progress.live.is_started:
            self._console.print(escape_controls(line), markup=False)
        else:
            note(line)

    def close(self) -> None:
        """Take the bar away, before something else is written."""
        self._timer.cancel()
        with self._lock:
            if self._progress.live.is_started:
                self._progress.stop()
            self._is_closed = True

    def _start(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._progress.start()

    def _measure(self, task: str, done: int, total: int) -> str:
        """Return counts and speed; what was done before the first call is not part of the speed."""
        if not self._unit:
            return ""
        now = time.perf_counter()
        began, at = self._first.setdefault(task, (now, done))
        speed = (done - at) / (now - began) if now > began else 0.0
        if self._unit == "B":
            return f"{done / 1e6:,.0f}/{total / 1e6:,.0f} MB, {speed / 1e6:,.1f} MB/s"
        return f"{done:,}/{total:,} tokens, {speed:,.0f} tok/s"


@contextmanager
def prefill_bar() -> Iterator[OnProgress]:
    """Show the progress of a long prefill; the bar goes away when the first token is there."""
    with ProgressBar("tokens", PATIENCE, is_kept=False, is_quiet=True) as bar:
        yield lambda done, total: bar("reading", done, total) if done < total else bar.close()


@contextmanager
def training_bar() -> Iterator[Callable[[str, "Progress | str"], None]]:
    """Show the steps of training stages with their losses, and what the stages have to say."""
    with ProgressBar() as bar:

        def on_news(stage: str, news: "Progress | str") -> None:
            if isinstance(news, str):
                bar.print(f"{stage:>10}  {news}")
            else:
                values = "  ".join(f"{name} {value:.4g}" for name, value in news.values.items())
                bar(stage, news.step, news.num_steps, values)

        yield on_news


class EvaluationProgress(ProgressBar):
    """Follows an evaluation: a bar with the time left on a terminal, and a line per case everywhere."""

    def __init__(self, describe: Callable[[dict[str, Any]], str]) -> None:
        super().__init__(is_kept=False, is_quiet=True)
        self._describe = describe
        self._began = time.perf_counter()
        self._total = self._num_tokens = 0
        self.num_cases = 0
        self.num_done = 0  # including those of earlier runs

    def begin(self, num_cases: int, num_known: int, num_tokens: int) -> None:
        self.num_cases, self.num_done, self._total = num_cases, num_known, max(1, num_tokens)
        self._began = time.perf_counter()
        self.advance(0)
        if num_known:
            note(f"{num_known} of {num_cases} cases are known from an earlier run")

    def advance(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self("evaluating", num_tokens, self._total, self._left())
        self.rename("evaluating", f"{self.num_done}/{self.num_cases}")

    def tell(self, row: dict[str, Any]) -> None:
        self.num_done += 1
        line, left = f"[{self.num_done}/{self.num_cases}] {self._describe(row)}", self._left()
        self.print(line if self.is_shown or not left else f"{line}, {left}")
        self.advance(self._num_tokens)

    def _left(self) -> str:
        if not 0 < self._num_tokens < self._total:
            return ""
        seconds = (time.perf_counter() - self._began) / self._num_tokens * (self._total - self._num_tokens)
        return f"{duration(seconds)} left"


def _line(text: str) -> str:
    """Return text, such as the name of a file, as one line that the terminal does not obey."""
    return escape_controls(text.replace("\n", " "))


def duration(seconds: float) -> str:
    """Show seconds as 45 s, 12 min or 3 h 20 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def each_in_turn(
    items: Sequence[Item], label: Callable[[Item], str]
) -> Iterator[tuple[Item, str, Callable[[str], None]]]:
    """Yield what is to be measured under a progress bar, with its turn and a function that prints the result."""
    with ProgressBar(is_kept=False, is_quiet=True) as bar:
        for index, item in enumerate(items):
            bar("measuring", index, len(items), label(item))
            yield item, f"({index + 1} of {len(items)})", bar.print

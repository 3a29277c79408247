"""The bar of a training run: the stage, its step, its losses, the time left; plain lines where there is no terminal."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sala.lab.train.loop import Progress

PLAIN_SECONDS = 20.0  # between lines when the output is no terminal


class TrainingBar:
    """Use it as a context and pass it as `note`."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description:>10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._tasks: dict[str, Any] = {}
        self._last = 0.0

    def __enter__(self) -> "TrainingBar":
        if sys.stderr.isatty():
            self._progress.start()
        return self

    def __call__(self, stage: str, news: "Progress | str") -> None:
        if isinstance(news, str):
            self._console.print(f"{stage:>10}  {news}", highlight=False)
            return
        values = "  ".join(f"{name} {value:.4g}" for name, value in news.values.items())
        if not sys.stderr.isatty():
            is_last = news.step == news.num_steps
            if is_last or time.monotonic() - self._last > PLAIN_SECONDS:
                self._last = time.monotonic()
                print(f"{stage:>10}  {news.step}/{news.num_steps}  {values}", file=sys.stderr, flush=True)
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=news.num_steps, values="")
        self._progress.update(self._tasks[stage], completed=news.step, values=values)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if sys.stderr.isatty():
            self._progress.stop()

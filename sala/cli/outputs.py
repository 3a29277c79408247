"""What commands write: tables on stdout, and files that are checked before the work begins."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sala.cli import flags as s
from sala.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from sala.lab.report.record import Log, Record, ResultRow


def size(count: float) -> str:
    """Show a number of bytes."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def print_json(value: Any) -> None:
    """Print JSON; characters that could control the terminal are escaped."""
    print(s.CONTROLS.sub(lambda found: json.dumps(found[0])[1:-1], json.dumps(value, ensure_ascii=False)))


def print_table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], is_left: Sequence[bool] = ()
) -> None:
    """Print a title, unless it is empty, and a table; `is_left` says which of the first columns are aligned left.

    Characters that could control the terminal are dropped.
    """
    if title:
        s.write_out(title)
    for line in table_lines(headings, rows, is_left):
        print(line)


def table_lines(headings: Sequence[str], rows: Iterable[Sequence[str]], is_left: Sequence[bool] = ()) -> Iterator[str]:
    """Yield the lines of a table as `print_table` prints it."""
    lines = [["".join(filter(str.isprintable, cell)) for cell in line] for line in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [*is_left, *(False for _ in headings)]
    for line in lines:
        cells = zip(line, widths, sides, strict=False)
        yield "  ".join(cell.ljust(width) if left else cell.rjust(width) for cell, width, left in cells).rstrip()


def print_facts(title: str, facts: Mapping[str, str]) -> None:
    """Print a title and indented lines, each a name and a value."""
    s.write_out(title)
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"  {name:<{width}}  {value}")


def check_writable(file: Path) -> None:
    """Refuse a file that cannot be written, before any work is done."""
    parent = file.absolute().parent
    if not parent.is_dir():
        raise InputError("output", f"{file} cannot be written", f"its directory does not exist: {parent}")
    if not os.access(file if file.exists() else parent, os.W_OK):
        raise InputError("output", f"{file} cannot be written", f"change its permissions or those of {parent}")


def check_new(file: Path, remedy: str = "choose another name, or remove it yourself") -> None:
    """Refuse a file that exists or cannot be written, before any work is done."""
    if file.exists() or file.is_symlink():
        raise InputError("output", f"{file} exists already", remedy)
    check_writable(file)


def output_file(output: Path | None, name: str, suffix: str = ".json") -> Path:
    """Return the file to write: `output`, or `name` in a directory; raise InputError if it cannot be written."""
    path = Path(name) if output is None else output.expanduser()
    path = path / name if path.is_dir() else path
    if path.suffix != suffix:
        raise InputError("output", f"{path} does not end in {suffix}", f"call it {path.name}{suffix}")
    check_writable(path)
    return path


def plot_file(plot: Path | None, output: Path) -> Path | None:
    """Return the picture to write: `plot`, or a PNG beside `output` if matplotlib is installed."""
    from sala.lab.report import charts

    if plot is not None:
        plot = plot.expanduser()
        return plot / output.with_suffix(".png").name if plot.is_dir() else plot
    try:
        charts.need_matplotlib()
    except MissingExtra as error:
        s.note(f"there will be no picture: {error}")
        return None
    return output.with_suffix(".png")


class Run:
    """A run that ends in a record: what identifies it, and its files, which never replace those of another run.

    `learn` adds settings when more is known, and compares them once more with a record that exists.
    """

    def __init__(
        self,
        kind: str,
        model: str,
        settings: dict[str, Any],
        record: Path | None,
        plot: Path | None,
        force: bool,
        *more: Path,
        is_new: bool = False,
    ) -> None:
        """Raise InputError if a file cannot be written or belongs to another run; with `is_new` also if it exists."""
        self.kind, self.model, self.settings = kind, model, settings
        self.record, self.plot, self.force = record, plot, force
        self.log = None if record is None else record.with_suffix(".jsonl")
        self._others = [*more] if plot is None else [*more, plot]
        if plot is not None:
            from sala.lab.report.charts import check_plot

            check_plot(plot)
        for file in (*self._others, *filter(None, (record, self.log))):
            check_writable(file)
            if is_new and not force and file != self.log:
                check_new(file, "choose another name, or --force")
        self.learn()

    def open_log(self) -> "Log":
        from sala.lab.report.record import Log

        return Log(self.log)

    def learn(self, **settings: Any) -> None:
        """Add settings; raise InputError if the files belong to another run, as far as can be determined."""
        self.settings |= settings
        if self.force:
            return
        if self.record is not None and self.record.exists():
            self.to_record([]).check(self.record)
            return
        for file in self._others:
            if file.exists():
                message = f"{file} exists and belongs to something else"
                raise InputError("output", message, "choose another name, or --force")

    def to_record(self, results: "list[ResultRow]") -> "Record":
        from sala.lab.report.record import Record

        return Record(self.kind, self.model, self.settings, results)

    @contextmanager
    def resumable(self) -> Iterator[None]:
        """Say after Ctrl-C how to continue."""
        try:
            yield
        except KeyboardInterrupt:
            if self.log is not None and self.log.is_file():
                s.note(f"stopped; the results so far are in {self.log}, and the same command continues from there")
            raise

    def finish(self, record: "Record", title: str, is_shown: bool = True, **extra: Any) -> None:
        """Print and plot the results, and write them with `extra` keys at the top."""
        from sala.lab.report.kinds import plot_record, table_of

        if is_shown:
            print_table(title, *table_of(record))
        if self.plot is not None:
            plot_record(record, self.plot, title)
            if self.record is not None:
                record.plots = [Path(os.path.relpath(self.plot, self.record.parent)).as_posix()]
        if self.record is not None:
            record.save(self.record, self.force, **extra)
        written = [str(file) for file in (self.record, *self._others) if file is not None]
        if written:
            s.note(f"wrote {', '.join(written)}")

"""Output files: checked before the work begins, so that nothing is measured in vain."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sala.cli import flags as s
from sala.errors import InputError, MissingExtra


def output_file(output: Path | None, name: str, suffix: str) -> Path:
    """Return the file to write: `output`, or `name` in a directory; raise InputError if it cannot be written."""
    path = Path(name) if output is None else output.expanduser()
    path = path / name if path.is_dir() else path
    if path.suffix != suffix:
        raise InputError("output", f"{path} does not end in {suffix}", f"call it {path.name}{suffix}")
    if not path.absolute().parent.is_dir():
        raise InputError("output", f"{path} cannot be written", "its directory does not exist")
    return path


def check_readable(file: Path) -> None:
    """Refuse an input file that is missing or cannot be read, before a model is loaded."""
    try:
        with file.open("rb"):
            pass
    except OSError as error:
        raise InputError("file", f"{file} cannot be read: {error.strerror}", "check the path") from None


def check_new(output: Path) -> None:
    """Refuse an output that exists or whose directory cannot be written, before any work is done."""
    parent = output.absolute().parent
    if output.exists() or output.is_symlink():
        raise InputError("output", f"{output} exists already", "choose another name, or remove it yourself")
    if not parent.is_dir():
        raise InputError("output", f"{output} cannot be written", f"its directory {parent} does not exist")
    if not os.access(parent, os.W_OK):
        raise InputError("output", f"{output} cannot be written", f"you may not write to {parent}")


def plot_file(plot: Path | None, output: Path) -> Path | None:
    """Return the picture to write: `plot`, or a PNG beside `output` if matplotlib is installed."""
    from sala.lab.report import charts

    if plot is not None:
        plot = plot.expanduser()
        plot = plot / output.with_suffix(".png").name if plot.is_dir() else plot
        charts.check_plot(plot)
        return plot
    try:
        charts.need_matplotlib()
    except MissingExtra as error:
        s.note(f"there will be no picture: {error}")
        return None
    return output.with_suffix(".png")


@contextmanager
def resumable(log: Path | None) -> Iterator[None]:
    """Say after Ctrl-C how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        if log is not None and log.is_file():
            s.note(f"stopped; the results so far are in {log}, and the same command continues from there")
        raise


def relative(file: Path, directory: Path) -> str:
    return Path(os.path.relpath(file.absolute(), directory.absolute())).as_posix()

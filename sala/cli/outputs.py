"""Where results go: checked before the work begins, so that nothing is measured in vain."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sala.cli import flags as s
from sala.errors import InputError, MissingExtra


def place(output: Path | None, name: str, suffix: str) -> Path:
    """The file that is meant; a directory, or nothing, gets one of that name."""
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


def picture(plot: Path | None, output: Path) -> Path | None:
    """Where to draw: as asked, or beside the results if there is something to draw with."""
    from sala.lab.bench.plots import need_matplotlib

    try:
        need_matplotlib()
    except MissingExtra as error:
        if plot is not None:
            raise
        s.note(f"there will be no picture: {error}")
        return None
    return output.with_suffix(".png") if plot is None else place(plot, output.with_suffix(".png").name, ".png")


@contextmanager
def going_on(log: Path | None) -> Iterator[None]:
    """Ctrl-C keeps what is measured and says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if log is not None and log.is_file():
            s.note(f"stopped; what is measured is in {log}, and the same command goes on from there")
        raise


def relative(file: Path, directory: Path) -> str:
    return Path(os.path.relpath(file.absolute(), directory.absolute())).as_posix()

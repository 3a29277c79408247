"""`sala report`: the records of runs as one page."""

from pathlib import Path
from typing import Annotated

import typer

from sala.cli import flags as s
from sala.errors import InputError


def report(
    runs: Annotated[list[Path], typer.Argument(help="Records of runs (JSON), or directories of them.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.html", help="Where the page goes.")] = Path(
        "report.html"
    ),
    title: Annotated[str, typer.Option(help="What the page is called.")] = "Evaluation",
    force: Annotated[bool, typer.Option("--force", help="Replace a page that is there.")] = False,
) -> None:
    from sala.cli.outputs import place
    from sala.lab.eval.record import today, write_atomically
    from sala.lab.eval.report import read_runs, to_page

    file = place(output, "report.html", ".html")
    if file.exists() and not force:
        raise InputError("output", f"{file} exists already", "choose another name, or --force")
    found = read_runs([path.expanduser() for path in runs])
    write_atomically(file, to_page(found, title, today()[:10]).encode())
    s.note(f"wrote {file}: {len(found)} run{'s' if len(found) > 1 else ''}")

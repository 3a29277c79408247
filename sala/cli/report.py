"""`sala report`: records of runs as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from sala.cli import flags as s
from sala.errors import InputError


def report(
    runs: Annotated[list[Path], typer.Argument(help="Records of runs (JSON), or directories of them.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.html", help="Page to write.")] = Path(
        "report.html"
    ),
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Evaluation",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing page.")] = False,
) -> None:
    from sala.cli.outputs import output_file
    from sala.errors import MissingExtra
    from sala.lab.report.charts import need_matplotlib
    from sala.lab.report.page import read_runs, to_page
    from sala.lab.report.record import today, write_atomically

    file = output_file(output, "report.html", ".html")
    if file.exists() and not force:
        raise InputError("output", f"{file} exists already", "choose another name, or --force")
    found = read_runs([path.expanduser() for path in runs])
    has_charts = True
    try:
        need_matplotlib()
    except MissingExtra as error:
        has_charts = False
        s.note(f"there will be no charts: {error}")
    write_atomically(file, to_page(found, title, today()[:10], has_charts).encode())
    s.note(f"wrote {file}: {len(found)} run{'s' if len(found) > 1 else ''}")

"""`sala report`: records of runs as one HTML page."""

from pathlib import Path
from typing import Annotated

from sala.cli import flags as s


def report(
    runs: Annotated[list[Path], s.argument("Records of runs (JSON), or directories of them.")],
    output: Annotated[Path, s.flag("Page to write.", "--output", "-o", metavar="FILE.html")] = Path("report.html"),
    title: Annotated[str, s.flag("Title of the page.")] = "Evaluation",
    force: Annotated[bool, s.flag("Replace an existing page.", "--force")] = False,
) -> None:
    from sala.cli.outputs import check_new, output_file
    from sala.errors import MissingExtra
    from sala.lab.report.charts import need_matplotlib
    from sala.lab.report.page import read_runs, to_page
    from sala.lab.report.record import today, write_atomically

    file = output_file(output, "report.html", ".html")
    if not force:
        check_new(file, "choose another name, or --force")
    found = read_runs([path.expanduser() for path in runs])
    has_charts = True
    try:
        need_matplotlib()
    except MissingExtra as error:
        has_charts = False
        s.note(f"there will be no charts: {error}")
    write_atomically(file, to_page(found, title, today()[:10], has_charts).encode())
    s.note(f"wrote {file}: {len(found)} run{'s' if len(found) > 1 else ''}")

"""`sala report`: the records of runs as one page, and its charts as files."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sala.cli import flags as s
from sala.cli.outputs import check_new, check_writable, output_file
from sala.errors import MissingExtra

if TYPE_CHECKING:
    from sala.lab.report.page import ReportSection


def report(
    runs: Annotated[list[Path], s.argument("Records of runs (JSON), or directories of them.")],
    output: Annotated[Path, s.flag("Page to write.", "--output", "-o", metavar="FILE.html")] = Path("report.html"),
    plot: Annotated[
        Path | None, s.flag("Charts as pictures too: .png, .pdf or .svg, one for each kind of run.", metavar="FILE")
    ] = None,
    title: Annotated[str, s.flag("Title of the page.")] = "Evaluation",
    force: Annotated[bool, s.flag("Replace an existing page and pictures.", "--force")] = False,
) -> None:
    from sala.checkpoint.writer import write_atomically
    from sala.lab.report import charts
    from sala.lab.report.page import read_runs, sections_of, to_page
    from sala.lab.report.record import today

    file = output_file(output, "report.html", ".html")
    if plot is not None:
        plot = plot.expanduser()
        plot = plot / file.with_suffix(".png").name if plot.is_dir() else plot
        charts.check_plot(plot)
    if not force:
        check_new(file, "choose another name, or --force")
    found = read_runs([path.expanduser() for path in runs])
    has_charts = True
    try:
        charts.need_matplotlib()
    except MissingExtra as error:
        has_charts = False
        s.note(f"there will be no charts: {error}")
    pictures = [] if plot is None else [*_pictures(sections_of(found), plot)]
    for one in (file, *(picture for picture, _ in pictures)):
        if force:
            check_writable(one)
        else:
            check_new(one, "choose another name, or --force")
    write_atomically(file, to_page(found, title, today()[:10], has_charts))
    for picture, section in pictures:
        charts.plot(section.charts, picture, section.kind.title if len(section.charts) > 1 else "")
    if plot is not None and not pictures:
        s.note("there are no pictures: runs of these kinds have no charts")
    names = ", ".join(str(one) for one in (file, *(picture for picture, _ in pictures)))
    s.note(f"wrote {names}: {len(found)} run{'s' if len(found) > 1 else ''}")


def _pictures(sections: "Sequence[ReportSection]", plot: Path) -> "Iterator[tuple[Path, ReportSection]]":
    """Yield a file for each section with charts; if there are several, the section's name is part of the file's."""
    shown = [section for section in sections if section.charts]
    for section in shown:
        yield plot if len(shown) == 1 else plot.with_stem(f"{plot.stem}-{section.name}"), section

"""Records of runs → one HTML page with charts, tables, machine, versions and settings.

The page (`page.html`) has no script, loads nothing, and is a single file.
"""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined

from sala.errors import InputError
from sala.lab.report.charts import Chart, to_svg
from sala.lab.report.kinds import KINDS, RecordKind, heading, is_number, minute
from sala.lab.report.official import SideBySide, from_lm_eval, is_lm_eval, published_records, side_by_side
from sala.lab.report.record import Record, broken, read_json

PNG = b"\x89PNG\r\n\x1a\n"
MAX_PICTURE = 8 << 20
MAX_OPEN = 12  # rows; a longer table is folded if a heat map shows the same


@dataclass(frozen=True)
class RunFile:
    """A record that was read and checked, and the pictures that it names."""

    file: Path
    record: Record
    pictures: list[tuple[str, bytes]] = field(default_factory=list)


def read_runs(paths: Sequence[Path]) -> list[RunFile]:
    """Read records, and results of lm-eval, from files or directories; raise InputError with the name of a broken one.

    JSON files of other kinds in a directory are left out.
    """
    found: dict[Path, None] = {}
    for path in paths:
        inner = [
            file for file in sorted(path.glob("*.json")) if "kind" in (data := read_json(file)) or is_lm_eval(data)
        ]
        if path.is_dir() and not inner:
            raise InputError("record", f"{path} holds no record of a run", "give the JSON files of runs")
        found |= dict.fromkeys(inner or [path])
    order = list(KINDS)
    return sorted(map(_read_run, found), key=lambda run: order.index(run.record.kind))


def _read_run(file: Path) -> RunFile:
    data = read_json(file)
    record = from_lm_eval(data) if is_lm_eval(data) else Record.load(file)
    if not record.results:
        raise broken(file, "has no results")
    for number, row in enumerate(record.results, 1):
        _check_row(file, KINDS[record.kind], number, row)
    return RunFile(file, record, [found for name in record.plots if (found := _picture(file, name)) is not None])


def _check_row(file: Path, kind: RecordKind, number: int, row: Any) -> None:
    if not isinstance(row, dict):
        raise broken(file, f"has a result that is not an object (number {number})")
    lacking = [name for name in kind.texts if not isinstance(row.get(name), str)]
    lacking += [name for name in kind.numbers if not is_number(row.get(name))]
    if lacking:
        raise broken(file, f"has no {lacking[0]} in result {number}")
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise broken(file, f"has {name} = {value} in result {number}")
    for column in kind.columns:
        value = column.value(row) if column.is_number else None
        if value is not None and not is_number(value):
            raise broken(file, f"has {column.key} = {str(value)[:40]!r} in result {number}")


def _picture(file: Path, name: Any) -> tuple[str, bytes] | None:
    """Return a PNG of the run; None if it is missing, a PDF or an SVG. Raise InputError if it is anything else."""
    if not isinstance(name, str):
        raise broken(file, "names a picture that is not text")
    path = file.parent / name
    if not path.is_file() or path.suffix in (".pdf", ".svg"):
        return None
    with path.open("rb") as handle:
        data = handle.read(MAX_PICTURE + 1)
    if not data.startswith(PNG) or len(data) > MAX_PICTURE:
        raise broken(file, f"names {name}, which is not a PNG of at most {MAX_PICTURE >> 20} MiB")
    return name, data


class ReportSection(NamedTuple):
    """All runs of a kind, the charts that they share, and tables of them side by side."""

    name: str
    kind: RecordKind
    charts: list[Chart]
    tables: list[SideBySide]
    runs: list[RunFile]


def sections_of(runs: Sequence[RunFile], has_charts: bool = True) -> list[ReportSection]:
    """Return the sections of the page; charts need matplotlib."""
    sections = []
    for name, kind in KINDS.items():
        chosen = [run for run in runs if run.record.kind == name]
        charts = kind.charts([run.record for run in chosen]) if has_charts and chosen else []
        tables = side_by_side([run.record for run in chosen]) if name == "official" else []
        if name == "official":
            chosen += [
                RunFile(Path("published.toml"), one) for one in published_records([run.record for run in chosen])
            ]
        if chosen:
            sections.append(ReportSection(name, kind, charts, tables, chosen))
    return sections


def to_page(runs: Sequence[RunFile], title: str = "Evaluation", today: str = "", has_charts: bool = True) -> str:
    """Return the whole page; charts need matplotlib."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters |= {
        "base64": lambda data: base64.b64encode(data).decode(),
        "heading": heading,
        "minute": minute,
        "svg": to_svg,
    }
    template = environment.from_string((files(__package__) / "page.html").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        style=(files(__package__) / "page.css").read_text(encoding="utf-8"),
        overview=[(KINDS[run.record.kind], run.record) for run in runs],
        sections=sections_of(runs, has_charts),
        max_open=MAX_OPEN,
        today=today,
    )

"""Records of runs → one HTML page with charts, tables, machine, versions and settings.

The page has no script, loads nothing, and is a single file.
"""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from sala.errors import InputError
from sala.lab.report.charts import Chart, to_svg
from sala.lab.report.kinds import KINDS, Column, RecordKind, heading, is_number, minute
from sala.lab.report.record import Record, broken, read_json

PNG = b"\x89PNG\r\n\x1a\n"
MAX_PICTURE = 8 << 20
MAX_OPEN = 12  # rows of a table beyond which it is folded if a heat map shows them
DASH = "–"
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark"><title>{title}</title><style>{style}</style></head>
<body><main>{body}</main></body></html>
"""


@dataclass(frozen=True)
class RunFile:
    """A record that was read and checked, and the pictures that it names."""

    file: Path
    record: Record
    pictures: list[tuple[str, bytes]] = field(default_factory=list)


def read_runs(paths: Sequence[Path]) -> list[RunFile]:
    """Read records from files or directories; raise InputError with the name of a broken one."""
    found: dict[Path, None] = {}
    for path in paths:
        records = _records_in(path) if path.is_dir() else [path]
        if not records:
            raise InputError("record", f"{path} holds no record of a run", "give the JSON files of runs")
        found |= dict.fromkeys(records)
    order = list(KINDS)
    return sorted((read_run(file) for file in found), key=lambda run: order.index(run.record.kind))


def _records_in(directory: Path) -> list[Path]:
    """Return the records of a directory, without JSON files of other kinds; raise if one cannot be read."""
    return [file for file in sorted(directory.glob("*.json")) if "kind" in read_json(file)]


def read_run(file: Path) -> RunFile:
    record = Record.load(file)
    if not record.results:
        raise broken(file, "has no results")
    for number, row in enumerate(record.results, 1):
        _check_row(file, KINDS[record.kind], number, row)
    return RunFile(file, record, [found for name in record.plots if (found := _picture(file, name)) is not None])


def _check_row(file: Path, kind: RecordKind, number: int, row: Any) -> None:
    if not isinstance(row, dict):
        raise broken(file, f"has a result that is not an object (number {number})")
    for name in kind.texts:
        if not isinstance(row.get(name), str):
            raise broken(file, f"has no {name} in result {number}")
    for name in kind.numbers:
        if not is_number(row.get(name)):
            raise broken(file, f"has no {name} in result {number}")
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise broken(file, f"has {name} = {value} in result {number}")
    for column in kind.columns:
        value = column.value(row) if column.is_number else None
        if value is not None and not is_number(value):
            raise broken(file, f"has {column.key} = {str(value)[:40]!r} in result {number}")


def _picture(file: Path, name: Any) -> tuple[str, bytes] | None:
    """Return a picture of the run, None if it is gone or not a PNG by its name; raise if it only claims to be one."""
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


def to_page(runs: Sequence[RunFile], title: str = "Evaluation", today: str = "", has_charts: bool = True) -> str:
    """Return the whole page; charts need matplotlib."""
    parts = [f"<h1>{escape(title)}</h1>", _overview([run.record for run in runs])]
    for name, kind in KINDS.items():
        chosen = [run for run in runs if run.record.kind == name]
        if chosen:
            charts = kind.charts([run.record for run in chosen]) if has_charts else []
            shown = "".join(map(_figure, charts))
            tables = "".join(_run(kind, run) for run in chosen)
            head = f'<h2 id="{name}">{escape(kind.title)}</h2><p>{escape(kind.about)}</p>'
            parts.append(f'<section>{head}<div class="charts">{shown}</div>{tables}</section>')
    made = f"<footer>Made {escape(today)} by sala.</footer>" if today else ""
    style = (files(__package__) / "page.css").read_text(encoding="utf-8")
    return PAGE.format(title=escape(title), style=style, body="".join(parts) + made)


def _figure(chart: Chart) -> str:
    width = round(120 * chart.size[0])
    return f'<figure style="width:{width}px"><figcaption>{escape(chart.title)}</figcaption>{to_svg(chart)}</figure>'


def _overview(records: Sequence[Record]) -> str:
    rows = "".join(
        f'<tr><td class="left"><a href="#{one.kind}">{escape(KINDS[one.kind].title)}</a></td>'
        f'<td class="left">{escape(one.model)}</td><td class="left">{escape(_machine(one))}</td>'
        f'<td class="left">{escape(minute(one.date))}</td><td class="left">{escape(_commit(one))}</td></tr>'
        for one in records
    )
    names = "".join(f'<th class="left">{name}</th>' for name in ("run", "model", "machine", "date", "version"))
    return f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table></div>'


def _machine(record: Record) -> str:
    gpus = record.machine.get("gpus")
    if isinstance(gpus, list) and gpus:
        return ", ".join(map(str, gpus))
    return str(record.machine.get("processor") or record.machine.get("system") or DASH)


def _commit(record: Record) -> str:
    version, commit = str(record.versions.get("sala", "")), record.commit
    return f"{version} {commit[:10]}{'+' if commit.endswith('+') else ''}" if commit else version or DASH


def _run(kind: RecordKind, run: RunFile) -> str:
    record = run.record
    columns = kind.columns_of(record)
    head = "".join(f"<th{_left(one)}>{escape(heading(one.name, record))}</th>" for one in columns)
    body = "".join("<tr>" + "".join(_data(one, row) for one in columns) + "</tr>" for row in record.results)
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    if len(record.results) > MAX_OPEN and kind.is_mapped:
        table = f"<details><summary>all {len(record.results):,} rows</summary>{table}</details>"
    pictures = "".join(
        f'<img alt="{escape(name)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
        for name, data in run.pictures
    )
    plotted = f"<details><summary>pictures of this run</summary>{pictures}</details>" if pictures else ""
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in record.notes)
    return (
        f"<article><h3>{escape(record.model)} <small>{escape(minute(record.date))}</small></h3>{table}"
        f"{notes}{plotted}{_facts(run)}</article>"
    )


def _left(one: Column) -> str:
    return ' class="left"' if one.is_left else ""


def _data(one: Column, row: dict[str, Any]) -> str:
    text = escape(one.text(row)) or DASH
    if one.is_bar and is_number(one.value(row)):
        width = 100 * min(max(one.value(row), 0.0), 1.0)
        text = f'<span class="bar"><b style="width:{width:.1f}%"></b></span><span>{text}</span>'
    return f"<td{_left(one)}>{text}</td>"


def _facts(run: RunFile) -> str:
    record = run.record
    groups = {"settings": record.settings, "machine": record.machine, "versions": record.versions}
    lines = [f"<dt>{name}</dt><dd>{_list(facts)}</dd>" for name, facts in groups.items() if facts]
    where = f"<dt>record</dt><dd>{escape(run.file.name)}, {escape(record.date)}"
    commit = f", commit {escape(record.commit)}" if record.commit else ""
    return f"<dl>{''.join(lines)}{where}{commit}</dd></dl>"


def _list(facts: dict[str, Any]) -> str:
    return "; ".join(
        f"{escape(str(key))} <b>{escape(_fact(key, value))}</b>"
        for key, value in facts.items()
        if value not in (None, [], "")
    )


def _fact(key: object, value: Any) -> str:
    if key == "memory" and is_number(value):
        return f"{value / 2**30:.1f} GiB"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)

"""Records of runs → one page: charts, tables, machine, versions, settings. No network, no script, no other file."""

import base64
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from sala.errors import InputError
from sala.lab.eval.charts import draw_bar
from sala.lab.eval.kinds import KINDS, Column, Kind, Run, day, is_number
from sala.lab.eval.style import PAGE, STYLE

PNG = b"\x89PNG\r\n\x1a\n"
MAX_RECORD = 64 << 20
MAX_PICTURE = 8 << 20
MAX_OPEN = 12  # rows of a table that a map shows already
DASH = "–"
FIELDS = {
    "model": str,
    "settings": dict,
    "machine": dict,
    "versions": dict,
    "results": list,
    "plots": list,
    "date": str,
}


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Records from files, or all of a directory; one that is broken is refused by its name."""
    files: dict[Path, None] = {}
    for path in paths:
        found = _records_in(path) if path.is_dir() else [path]
        if not found:
            raise InputError("record", f"{path} holds no record of a run", "give the JSON files of runs")
        files |= dict.fromkeys(found)
    order = list(KINDS)
    return sorted((read_run(file) for file in files), key=lambda run: order.index(run.kind))


def _records_in(directory: Path) -> list[Path]:
    """JSON files of other kinds may lie there too; one that cannot be read is not passed over."""
    return [file for file in sorted(directory.glob("*.json")) if "kind" in _read(file)]


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_RECORD:
            raise _broken(file, f"is larger than {MAX_RECORD >> 20} MiB")
        data = json.loads(file.read_bytes())
    except OSError as error:
        raise _broken(file, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise _broken(file, "is no JSON") from None
    if not isinstance(data, dict):
        raise _broken(file, "is no record")
    return data


def _broken(file: Path, what: str) -> InputError:
    return InputError("record", f"{file} {what}", "give the JSON files of runs; leave this one out, or run it again")


def read_run(file: Path) -> Run:
    data = _read(file)
    name = data.get("kind")
    if not isinstance(name, str) or name not in KINDS:
        raise _broken(file, f"is of kind {name!r}"[:200])
    kind = KINDS[name]
    for key, wanted in FIELDS.items():
        if not isinstance(data.get(key), wanted):
            raise _broken(file, f"has no {key}, or not as {wanted.__name__}")
    rows = data["results"]
    if not rows:
        raise _broken(file, "has no results")
    for index, row in enumerate(rows):
        _check_row(file, kind, index, row)
    commit = data.get("commit")
    return Run(
        file, data["kind"], data["model"], data["settings"], data["machine"], data["versions"],
        commit if isinstance(commit, str) else None, data["date"], rows,
        [found for name in data["plots"] if (found := _picture(file, name)) is not None],
    )  # fmt: skip


def _check_row(file: Path, kind: Kind, index: int, row: Any) -> None:
    if not isinstance(row, dict):
        raise _broken(file, f"has a result that is no object (number {index + 1})")
    for name in kind.texts:
        if not isinstance(row.get(name), str):
            raise _broken(file, f"has no {name} in result {index + 1}")
    for name in kind.numbers:
        if not is_number(row.get(name)):
            raise _broken(file, f"has no {name} in result {index + 1}")
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise _broken(file, f"has {name} = {value} in result {index + 1}")
    for column in kind.columns:
        value = row.get(column.key)
        if value is not None and column.is_number and not is_number(value):
            raise _broken(file, f"has {column.key} = {str(value)[:40]!r} in result {index + 1}")


def _picture(file: Path, name: Any) -> tuple[str, bytes] | None:
    """A picture that the run drew; None if it is not there any more. Anything but a PNG is refused."""
    if not isinstance(name, str):
        raise _broken(file, "names a picture that is no text")
    path = file.parent / name
    if not path.is_file():
        return None
    with path.open("rb") as handle:
        data = handle.read(MAX_PICTURE + 1)
    if not data.startswith(PNG) or len(data) > MAX_PICTURE:
        raise _broken(file, f"names {name}, which is no PNG of at most {MAX_PICTURE >> 20} MiB")
    return name, data


def to_page(runs: Sequence[Run], title: str = "Evaluation", today: str = "") -> str:
    """The whole page as text."""
    parts = [f"<h1>{escape(title)}</h1>", _overview(runs)]
    for name, kind in KINDS.items():
        chosen = [run for run in runs if run.kind == name]
        if chosen:
            tables = "".join(_run(kind, run) for run in chosen)
            head = f'<h2 id="{name}">{escape(kind.title)}</h2><p>{escape(kind.about)}</p>'
            parts.append(f'<section>{head}<div class="charts">{kind.draw(chosen)}</div>{tables}</section>')
    made = f"<footer>Made {escape(today)} by sala.</footer>" if today else ""
    return PAGE.format(title=escape(title), style=STYLE, body="".join(parts) + made)


def _overview(runs: Sequence[Run]) -> str:
    rows = "".join(
        f'<tr><td class="left"><a href="#{run.kind}">{escape(KINDS[run.kind].title)}</a></td>'
        f'<td class="left">{escape(run.model)}</td><td class="left">{escape(_machine(run))}</td>'
        f'<td class="left">{escape(day(run.date))}</td><td class="left">{escape(_commit(run))}</td></tr>'
        for run in runs
    )
    names = "".join(f'<th class="left">{name}</th>' for name in ("run", "model", "machine", "date", "version"))
    return f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table></div>'


def _machine(run: Run) -> str:
    gpus = run.machine.get("gpus")
    if isinstance(gpus, list) and gpus:
        return ", ".join(map(str, gpus))
    return str(run.machine.get("processor") or run.machine.get("system") or DASH)


def _commit(run: Run) -> str:
    version = str(run.versions.get("sala", ""))
    has_changes = bool(run.commit) and str(run.commit).endswith("+")
    return f"{version} {run.commit[:10]}{'+' if has_changes else ''}" if run.commit else version or DASH


def _run(kind: Kind, run: Run) -> str:
    columns = [one for one in kind.columns if any(row.get(one.key) is not None for row in run.results)]
    head = "".join(f"<th{_left(one)}>{escape(one.name)}</th>" for one in columns)
    body = "".join("<tr>" + "".join(_data(one, row.get(one.key)) for one in columns) + "</tr>" for row in run.results)
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    if len(run.results) > MAX_OPEN and kind.is_mapped:
        table = f"<details><summary>all {len(run.results):,} rows</summary>{table}</details>"
    pictures = "".join(
        f'<img alt="{escape(name)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
        for name, data in run.pictures
    )
    drawn = f"<details><summary>pictures of this run</summary>{pictures}</details>" if pictures else ""
    return (
        f"<article><h3>{escape(run.model)} <small>{escape(day(run.date))}</small></h3>{table}"
        f"{drawn}{_facts(run)}</article>"
    )


def _left(one: Column) -> str:
    return ' class="left"' if one.is_left else ""


def _data(one: Column, value: Any) -> str:
    text = DASH if value is None else escape(one.show(value))
    if one.is_bar and is_number(value):
        text = f"{draw_bar(value)}<span>{text}</span>"
    return f"<td{_left(one)}>{text}</td>"


def _facts(run: Run) -> str:
    groups = {"settings": run.settings, "machine": run.machine, "versions": run.versions}
    lines = [f"<dt>{name}</dt><dd>{_list(facts)}</dd>" for name, facts in groups.items() if facts]
    where = f"<dt>record</dt><dd>{escape(run.file.name)}, {escape(run.date)}"
    commit = f", commit {escape(run.commit)}" if run.commit else ""
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

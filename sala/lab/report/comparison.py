"""Two models side by side: a record, a table and a picture, for conversion and quantization alike."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sala.errors import MissingExtra
from sala.lab.report.kinds import plot_record, table_of
from sala.lab.report.record import Record, ResultRow, write_atomically


def pair(
    measure: str, before: float | None, after: float | None, on: str | int | None = None, unit: str = ""
) -> ResultRow:
    """Return a row of a comparison. `on` is a text, a task or a length; the unit "share" is shown in percent."""
    return {"measure": measure, "on": on, "before": before, "after": after, "unit": unit}


def comparison(model: str, before: str, after: str, settings: Mapping[str, Any], results: list[ResultRow]) -> Record:
    """Return the record of a comparison; `before` and `after` are the headings of the two models."""
    return Record("comparison", model, {"names": {"before": before, "after": after}, **settings}, results)


def save(record: Record, directory: Path, name: str) -> bool:
    """Write NAME.json and NAME.png; return whether matplotlib was there for the picture."""
    picture = directory / f"{name}.png"
    try:
        plot_record(record, picture, record.model)
        record.plots = [picture.name]
    except MissingExtra:
        pass
    record.save(directory / f"{name}.json", force=True)
    return bool(record.plots)


def write_markdown(record: Record, file: Path, title: str) -> None:
    headings, rows, _ = table_of(record)
    lines = [headings, ["---"] * len(headings), *rows]
    table = "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
    write_atomically(file, f"# {title}\n\n{table}".encode())

"""Draws the pictures of records of `sala eval` and `sala bench`, for `make figures`."""

import json
import tempfile
from pathlib import Path

from docs.figures.provenance import DPI
from sala.lab.report.kinds import plot_record
from sala.lab.report.record import Record

RESULTS = Path(__file__).parents[2] / "benchmarks"


def draw(name: str, title: str) -> bytes:
    """Return the picture of a record as a PNG."""
    data = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    if "settings" in data:
        record = Record.load(RESULTS / name)
    else:  # of an older version: its settings stand beside the results
        settings = {key: value for key, value in data.items() if key not in ("kind", "results")}
        record = Record(data["kind"], "", settings, data["results"])
    with tempfile.TemporaryDirectory() as room:
        plot_record(record, Path(room) / "picture.png", title, DPI)
        return (Path(room) / "picture.png").read_bytes()

"""Alias of sala.lab.report.charts."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sala.lab.report.charts import length_label as label
from sala.lab.report.charts import need_matplotlib
from sala.lab.report.kinds import plot_record
from sala.lab.report.record import Record

__all__ = ["label", "need_matplotlib", "plot_against", "plot_kernels", "plot_latency", "plot_throughput"]


def _plot(kind: str, rows: Sequence[Any], file: Path, title: str) -> None:
    results = [row if isinstance(row, dict) else asdict(row) for row in rows]
    plot_record(Record(kind, "ours", {}, results), file, title)


def plot_latency(rows: Sequence[Any], file: Path, title: str) -> None:
    _plot("latency", rows, file, title)


def plot_throughput(rows: Sequence[Any], file: Path, title: str) -> None:
    _plot("throughput", rows, file, title)


def plot_kernels(rows: Sequence[Any], file: Path, title: str) -> None:
    _plot("kernels", rows, file, title)


def plot_against(rows: Sequence[Any], file: Path, title: str) -> None:
    _plot("against", rows, file, title)

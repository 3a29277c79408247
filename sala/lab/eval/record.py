"""Alias of sala.lab.report.record."""

from sala.lab.report.record import Record, Row, commit, machine, today, versions, write_atomically

__all__ = ["Record", "Row", "commit", "machine", "today", "versions", "write_atomically"]

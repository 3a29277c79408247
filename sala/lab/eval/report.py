"""Alias of sala.lab.report.page."""

from sala.lab.report.page import read_runs, to_page

__all__ = ["read_runs", "to_page"]

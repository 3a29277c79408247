"""Cases of a suite that are left out, each for a reason; what the plugins share."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest


class Report:
    """Counts the cases that pass, and writes all counts into the file that `SALA_REPORT` names."""

    def __init__(self, counts: dict[str, Any]) -> None:
        self.counts = counts

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.counts["passed"] += report.when == "call" and report.passed

    def pytest_sessionfinish(self) -> None:
        Path(os.environ["SALA_REPORT"]).write_text(json.dumps(self.counts))


def sort_out(config: pytest.Config, items: list[pytest.Item], left_out: Mapping[str, Sequence[str]]) -> None:
    """Keep the cases that no pattern matches, and count how many each reason leaves out.

    A case counts for the first reason. Raises pytest.UsageError for a pattern without a case.
    """
    patterns = {pattern: re.compile(pattern) for patterns in left_out.values() for pattern in patterns}
    reasons = {pattern: reason for reason, patterns in left_out.items() for pattern in patterns}
    met: set[str] = set()
    kept, dropped, counts = [], [], dict.fromkeys(left_out, 0)
    for item in items:
        found = [pattern for pattern, compiled in patterns.items() if compiled.match(f"{item.path.name}::{item.name}")]
        met.update(found)
        (dropped if found else kept).append(item)
        if found:
            counts[reasons[found[0]]] += 1
    if unmet := patterns.keys() - met:
        raise pytest.UsageError(f"no case has these names: {sorted(unmet)}")
    report = {"collected": len(items), "run": len(kept), "passed": 0, "left_out": counts}
    config.pluginmanager.register(Report(report))
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept

"""What real clients and the suites of others gave, in `benchmarks/foreign_suites.json`.

The tables of docs/guides/clients.md are made from it. Only what is run on demand is written there.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "foreign_suites.json"


def record(section: str, name: str, entry: dict[str, Any]) -> None:
    """Replace an entry of `suites` or `clients`, and write down the day and the commit of this repository."""
    dated = {**entry, "date": datetime.now(UTC).date().isoformat(), "sala_commit": commit_of(ROOT)}
    with FileLock(Path(tempfile.gettempdir()) / "sala_foreign_suites.lock"):
        found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
        found.setdefault(section, {})[name] = dated
        RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def recorded(client: str, versions: dict[str, str]) -> Iterator[None]:
    """Write down whether a client passes, if it was demanded."""
    outcome = "failed"
    try:
        yield
        outcome = "passed"
    finally:
        if os.environ.get("SALA_TEST_CLIENTS", "") not in ("", "0"):
            record("clients", client, {"versions": versions, "outcome": outcome})


def commit_of(checkout: Path) -> str:
    """The commit that is checked out; "unknown" if it is no Git repository."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout.strip() or "unknown"

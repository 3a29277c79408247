"""SIGKILL at random moments: of a server with a cache, a session, a quantization, a fine-tuning run and a download.

    python benchmarks/kills.py [--kills 20] [--output kills.json]

Runs `tests/chaos/test_killed.py` with so many kills of each kind: after every kill nothing half written may be visible,
and the same command must end with the same bytes, losses or answers. Results go to kills.json beside this file: how
many kills met a job before it wrote, after it began to write, or when it had ended.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).parent
TESTS = "tests/chaos/test_killed.py"


def read(report: Path) -> dict[str, Any]:
    """Return, for each test of a JUnit report, whether it passed and what it has recorded."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314  # our own file
        recorded = {item.attrib["name"]: int(item.attrib["value"]) for item in case.iter("property")}
        is_passed = all(case.find(tag) is None for tag in ("failure", "error", "skipped"))
        found[case.attrib["name"]] = {"passed": is_passed, "seconds": round(float(case.attrib["time"])), **recorded}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--output", type=Path, default=HERE / "kills.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS]
        command += ["-o", "junit_family=xunit1", f"--junit-xml={report}"]
        environment = os.environ | {"SALA_TEST_KILLS": str(options.kills)}
        code = subprocess.run(command, cwd=HERE.parent, env=environment).returncode
        results = {"kills_of_each_kind": options.kills, "exit_code": code, **read(report)}
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))
    return code


if __name__ == "__main__":
    sys.exit(main())

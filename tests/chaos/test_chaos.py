"""Seconds of the load and the faults to which `benchmarks/chaos.py` exposes a server for an hour."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.cases import make_cases

ROOT = Path(__file__).parents[2]
FAULTS = {"workers", "full disk", "clock", "read-only disk", "SIGTERM", "SIGKILL", "lost device"}


@pytest.mark.parametrize("wrong", [[], ["ask: another answer"]])
def test_the_script_fails_if_anything_was_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: list[str]
) -> None:
    spec = importlib.util.spec_from_file_location("chaos_script", ROOT / "benchmarks" / "chaos.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    file = tmp_path / "results.json"
    monkeypatch.setattr(script, "own_namespace", lambda: None)
    monkeypatch.setattr(script, "chaos", lambda *_: {"wrong": wrong})
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--smoke", "--output", str(file)])
    if wrong:
        with pytest.raises(SystemExit, match="1 answers or counts are wrong"):
            script.main()
    else:
        script.main()
    assert json.loads(file.read_text()) == {"wrong": wrong}


@pytest.mark.skipif(sys.platform != "linux", reason="some faults are made by means of Linux")
def test_nothing_is_lost_leaked_or_changed(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = [sys.executable, "benchmarks/chaos.py", "--smoke", "--output", str(file)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["wrong"] == []
    assert set(found["skipped"]) <= {"read-only disk"}
    assert {name for name, count in found["faults"].items() if count} == FAULTS
    assert all(count["accepted"] == count["ended"] > 0 for count in found["counts"])
    outcomes = found["outcomes"]
    assert {f"{case.kind}: equal" for case in make_cases()} <= set(outcomes)
    assert all(outcomes[name] for name in ("cancelled", "download: used", "switch", "broken by an announced end"))

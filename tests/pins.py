"""Resolve the pins on the public index: minutes of waiting, which a run of all tests spends beside other tests."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INDEPENDENT = ("server", "train", "eval", "documents", "dev", "cuda", "mlx", "mcp")  # extras that share constraints.txt
LIMIT_S = 540
Process = subprocess.Popen[bytes]
VARIABLE = "SALA_TEST_PINS"  # the file with the result, or where it is going to be


def resolve() -> dict[str, Any]:
    """Return exit code and errors of pip alone, with no further sources, metadata only; no code if it took too long."""
    wanted = f"{ROOT}[{','.join(INDEPENDENT)}]"
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--use-feature=fast-deps", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"), wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"code": None, "errors": ""}
    return {"code": done.returncode, "errors": done.stderr}


def start() -> Process:
    """Start to resolve in a process of its own; `result`, in any process started after this, waits for it."""
    os.environ[VARIABLE] = str(Path(tempfile.mkdtemp()) / "pins.json")
    command = [sys.executable, "-m", "tests.pins", os.environ[VARIABLE]]
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True)


def stop(process: Process) -> None:
    """End what `start` has started, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        process.wait()


def result() -> dict[str, Any]:
    """Return what a process that was started has found, or resolve now."""
    if VARIABLE not in os.environ:
        return resolve()
    file, deadline = Path(os.environ[VARIABLE]), time.monotonic() + LIMIT_S + 30
    while not file.is_file():
        if time.monotonic() > deadline:
            return {"code": None, "errors": ""}
        time.sleep(0.2)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


if __name__ == "__main__":
    target = Path(sys.argv[1])
    draft = target.with_suffix(".draft")
    draft.write_text(json.dumps(resolve()))
    draft.replace(target)

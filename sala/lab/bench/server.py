"""Run `sala serve` in a process of its own while it is measured."""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sala.errors import SalaError
from sala.lab.bench.client import Endpoint

GREETING = re.compile(r"sala listens at (http://\S+/v1)")
ERROR = re.compile(r"^[\d:]+ ERROR (.+)$", re.MULTILINE)
MAX_CLIENTS = "4096"  # more than a load has, so that none is refused
POLL_S = 0.05
STOP_S = 60.0


@contextmanager
def own_server(flags: Sequence[str], key: str | None = None) -> Iterator[tuple[Endpoint, int, float]]:
    """Run `sala serve` with these flags on a free port.

    Yield its endpoint once it is ready, its process id, and the seconds that it took to start. Raise SalaError with
    the end of its log if it does not start.
    """
    command = [sys.executable, "-m", "sala", "serve", "--host", "127.0.0.1", "--port", "0", "--drain-s", "1"]
    command += ["--max-queue", MAX_CLIENTS, "--max-connections", MAX_CLIENTS, *flags]
    environment = {**os.environ, **({"SALA_API_KEY": key} if key else {})}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        with log.open("w") as file:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        try:
            endpoint = _wait(process, log, key)
            yield endpoint, process.pid, time.perf_counter() - began
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: "subprocess.Popen[bytes]", log: Path, key: str | None) -> Endpoint:
    """Return the endpoint when the server is ready."""
    while process.poll() is None:
        found = GREETING.search(log.read_text(errors="replace"))
        if found is not None and asyncio.run(_is_ready(Endpoint(found[1].removesuffix("/v1") + "/health", key))):
            return Endpoint(found[1], key)
        time.sleep(POLL_S)
    text = log.read_text(errors="replace")
    lines = ERROR.findall(text) or text.splitlines()[-1:]  # later errors follow from the first
    raise SalaError(lines[0].removeprefix("sala: ") if lines else "the server did not start")


async def _is_ready(endpoint: Endpoint) -> bool:
    try:
        return (await endpoint.send("/ready", timeout_s=10)).status == 200
    except OSError:
        return False

"""The server under test: started, hurt, measured, and started again as a supervisor would."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil

ROOT = Path(__file__).parents[2]
START_S = 120.0
POLL_S = 0.05


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class HurtServer:
    """A server in a process of its own. Every way to hurt it is a method; `restart` makes up for those that end it."""

    def __init__(self, flags: list[str], disk: Path, has_own_disk: bool) -> None:
        self.disk = disk
        self.has_own_disk = has_own_disk  # the cache and the models are on a small disk of our own
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log: list[str] = []
        self._flags = [*flags, "--port", str(self.port)]
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.chaos.host", *self._flags]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=environment
        )
        threading.Thread(target=self.log.extend, args=(self.process.stderr,), daemon=True).start()
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not start: " + "".join(self.log[-5:]))
            time.sleep(POLL_S)

    def _is_ready(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/health/ready", trust_env=False, timeout=10).status_code == 200
        except httpx2.TransportError:
            return False

    def ask(self, command: str) -> Any:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    @property
    def info(self) -> psutil.Process:
        assert self.process is not None
        return psutil.Process(self.process.pid)

    def end(self, sig: int | None = signal.SIGTERM, seconds: float = 60.0) -> int:
        """Send a signal, wait for the end, and return the exit code."""
        assert self.process is not None
        if sig is not None:
            self.process.send_signal(sig)
        try:
            code = self.process.wait(seconds)
        finally:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                with contextlib.suppress(OSError):
                    stream.close()  # type: ignore[union-attr]
        return code

    # faults

    def kill_workers(self) -> int:
        """Kill the processes that render templates and compile grammars; return how many there were."""
        workers = self.info.children()
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        return len(workers)

    def fill_disk(self) -> None:
        """Leave no space for the cache. Without a disk of our own, no file may grow in this process."""
        if not self.has_own_disk:
            self._limit_files(0)
            return
        with contextlib.suppress(OSError), (self.disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))

    def empty_disk(self) -> None:
        if self.has_own_disk:
            (self.disk / "filler").unlink(missing_ok=True)
        else:
            self._limit_files(resource.RLIM_INFINITY)

    def _limit_files(self, size: int) -> None:
        assert self.process is not None
        _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (size, hard))

    def protect_disk(self, is_protected: bool) -> bool:
        """Mount the disk read-only, or writable again; return whether that worked: not while a file is written."""
        command = ["mount", "-o", f"remount,{'ro' if is_protected else 'rw'}", str(self.disk)]
        return subprocess.run(command, capture_output=True).returncode == 0

    # measurements

    def metrics(self, key: str) -> dict[str, float]:
        """Return every metric by its name and labels."""
        headers = {"authorization": f"Bearer {key}"}
        text = httpx2.get(f"{self.url}/metrics", headers=headers, trust_env=False, timeout=30).text
        found = re.findall(r"^([a-z_]+(?:\{[^}]*\})?) ([-+.0-9eE]+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def usage(self) -> dict[str, float]:
        process = self.info
        children = process.children(recursive=True)
        return {
            "rss_mb": round(process.memory_info().rss / 1e6, 1),
            "allocated_mb": round(allocated(process.pid) / 1e6, 1),
            "worker_rss_mb": round(sum(child.memory_info().rss for child in children) / 1e6, 1),
            "open_files": process.num_fds(),
            "threads": process.num_threads(),
            "processes": 1 + len(children),
            "cpu_s": round(sum(process.cpu_times()[:2]), 1),
        }


def allocated(pid: int) -> int:
    """Return the bytes that a process has allocated, wherever they are.

    The resident size has pages of libraries and weights too, which the system drops and reads again as it likes.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(1024 * int(size) for size in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB$", status, re.MULTILINE))


def own_namespace(marker: str = "SALA_CHAOS_NAMESPACE") -> None:
    """Run this program again where it may mount disks of its own, without privileges; go on without if it may not."""
    if marker in os.environ or shutil.which("unshare") is None:
        return
    command = ["unshare", "--mount", "--map-root-user"]
    test = [*command, "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs "$0"', os.environ.get("TMPDIR", "/tmp")]  # noqa: S108
    if subprocess.run(test, capture_output=True).returncode == 0:
        os.environ[marker] = "1"
        os.execvp(command[0], [*command, sys.executable, *sys.argv])  # noqa: S606


@contextlib.contextmanager
def small_disk(path: Path, size: int) -> Iterator[bool]:
    """Mount a small disk here if we may; yield whether that worked."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(path)]
    is_mounted = "SALA_CHAOS_NAMESPACE" in os.environ and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", str(path)], check=True)

"""What the process that reads files cannot do on Linux: nothing but reading files is left to it."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from sala.documents import confinement, reader
from sala.documents.reader import read_documents
from sala.text.workers import SandboxProcess
from tests.documents import files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these are mechanisms of Linux")
FILES = {
    "create": "open(place + '/new', 'x')",
    "append": "open(place + '/file', 'a')",
    "truncate": "os.truncate(place + '/file', 0)",
    "delete": "os.unlink(place + '/file')",
    "rename": "os.rename(place + '/file', place + '/other')",
    "make a directory": "os.mkdir(place + '/inner')",
    "link": "os.symlink('file', place + '/link')",
}
OTHERS = {
    "TCP": "socket.socket()",
    "UDP": "socket.socket(type=socket.SOCK_DGRAM)",
    "a local socket": "socket.socket(socket.AF_UNIX)",
    "fork": "os.fork()",
    "exec": "os.execv('/bin/sh', ['sh', '-c', 'exit'])",
    "signal": "os.kill(os.getppid(), 0)",
    "change a mode": "os.chmod(place + '/file', 0o777)",
    "change a time": "os.utime(place + '/file', (0, 0))",
}
SECRETS = {"variables of others": "open(f'/proc/{os.getppid()}/environ').read()"}
WAYS = {  # which attempts each mechanism stops alone
    "landlock": ("confinement._restrict_files(libc)", {*FILES}),
    "seccomp": ("confinement._filter_calls(libc)", {*FILES, *OTHERS}),
    "both": ("confinement.confine() == {'landlock', 'seccomp'}", {*FILES, *OTHERS, *SECRETS}),
}
SCRIPT = """
import ctypes, json, os, socket, sys
from sala.documents import confinement
place, way, attempts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
libc = ctypes.CDLL(None)
assert libc.prctl(confinement.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
holds, refused = eval(way), []
for name, attempt in attempts.items():
    try:
        eval(attempt)
    except PermissionError:
        refused.append(name)
print(json.dumps([holds, refused, open(place + '/file').read(), os.listdir(place)]))
"""


@pytest.mark.parametrize("way", WAYS)
def test_what_is_refused(way: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    code, expected = WAYS[way]
    attempts = {name: attempt for name, attempt in {**FILES, **OTHERS, **SECRETS}.items() if name in expected}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), code, json.dumps(attempts)]
    environment = {**os.environ, "PYTHONPATH": str(Path(reader.__file__).parents[2])}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=60).stdout
    holds, refused, text, names = json.loads(output)
    if not holds:
        pytest.skip("this system lacks the mechanism")
    assert set(refused) == expected
    assert (text, names) == ("text", ["file"])


def test_the_process_that_reads_files_is_confined(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    worker = SandboxProcess(program=reader.CHILD)
    try:
        worker.ask("read", {"path": str(tmp_path / "a.txt"), "name": "a.txt"}, 10)
        assert worker._process is not None
        lines = Path(f"/proc/{worker._process.pid}/status").read_text().splitlines()
    finally:
        worker.close()
    status = dict(line.split(":\t", 1) for line in lines)
    assert status["NoNewPrivs"] == "1"
    assert int(status["CapEff"], 16) & ~confinement.READ_ANYTHING == 0
    if platform.machine() in confinement.MACHINES and "Seccomp" in status:
        assert status["Seccomp"] == "2"


def test_spreadsheets_are_read_where_no_thread_can_start(tmp_path: Path) -> None:
    """numpy, which openpyxl imports if it is there, starts threads, and ends the process if it cannot."""
    (tmp_path / "a.xlsx").write_bytes(files.xlsx())
    assert [one.name for one in read_documents([tmp_path / "a.xlsx"]).documents] == ["a.xlsx"]

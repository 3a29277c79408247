"""A disk that is really full, and one that is really read-only: small file systems in a mount namespace."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.test_library import make

UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]
MOUNT = 'mount -t tmpfs -o size=4M none "$1/small" && mount -t tmpfs none "$1/closed" && mkdir "$1/closed/models" && '
MOUNT += 'cp -r "$1/kept" "$1/closed/models/kept" && '
MOUNT += 'mount -o remount,ro none "$1/closed" && cd "$2" && shift 2 && exec "$@"'
ROOT = Path(__file__).parents[2]


def test_what_does_not_fit_says_so_and_leaves_nothing_half(tmp_path: Path) -> None:
    """Runs the tests of `full_disk.py` where these file systems are."""
    make(tmp_path / "kept")
    for name in ("small", "closed"):
        (tmp_path / name).mkdir()
    inside = [*UNSHARE, "sh", "-c", MOUNT, "sh", str(tmp_path), str(ROOT)]
    try:
        is_permitted = subprocess.run([*inside, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        is_permitted = False
    if not is_permitted:
        pytest.skip("needs permission to mount file systems in a namespace")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/e2e/full_disk.py"]
    done = subprocess.run([*inside, "env", f"DISKS={tmp_path}", *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout

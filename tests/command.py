"""The command in this process: what it writes and returns, without the seconds that a process takes to start."""

import io
import os
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

from sala import cli


def sala(
    *arguments: str, stdin: str | bytes = b"", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    data = io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin)
    out, errors = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, env or {}),
        patch("sys.stdin", io.TextIOWrapper(data, "utf-8")),
        redirect_stdout(out),
        redirect_stderr(errors),
    ):
        code = cli.run([*arguments])
    return subprocess.CompletedProcess(["sala", *arguments], code, out.getvalue(), errors.getvalue())

"""Record a real run of the command line as a picture, for `make figures`."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

WIDTH = 100
COMMANDS = [
    'sala generate "What is the capital of France?" --temperature 0',
    'sala generate "Who was Isaac Newton?" --temperature 0 -n 90',
    "sala estimate --shape 9b --bits 4 --memory 24G --ctx 1M",
]


def record() -> str:
    """Run the commands, and return the picture of what they print."""
    # the picture must work offline: no web fonts
    svg_format = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    console = Console(record=True, width=WIDTH, force_terminal=True, file=Path(os.devnull).open("w"))
    env = {
        **os.environ,
        "COLUMNS": str(WIDTH),
        "FORCE_COLOR": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
            out = subprocess.run(
                ["bash", "-c", f"{command} 2>&1"], cwd=folder, env=env, capture_output=True, text=True, check=True
            )
            for line in out.stdout.rstrip().splitlines():
                console.print(Text.from_ansi(line.rstrip()))
    return console.export_svg(title="sala", code_format=svg_format)

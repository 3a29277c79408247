"""lm-eval in one process with the model: `sala eval lm`, in an environment that has lm-eval but not us.

Arguments: directories that hold us and what we need, with colons between; then those of the command.
"""

import sys

sys.path += sys.argv[1].split(":")  # at the end: what this environment has comes first

import typer

from sala.cli.eval import lm

app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command()(lm)
app(sys.argv[2:])

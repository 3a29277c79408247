"""Write the option tables of the reference pages from the options table and the commands.

    python docs/reference/make_reference.py

A table stands between `<!-- table: KIND NAME -->` and `<!-- end of table -->`; the rest of a page is written by hand.
"""

import re
from pathlib import Path
from typing import Any

import typer

from sala.cli import app
from sala.lab.finetune.options import FinetuneOptions
from sala.options import CommandOptions, Options, Sampling
from sala.options.schema import Option, table
from sala.server.settings import Settings

HERE = Path(__file__).parent
PAGES = ("cli.md", "server.md", "python.md")
TABLE = re.compile(r"(<!-- table: (\w+) ([\w ]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def rows_of(scope: str) -> list[Option]:
    classes = (Options, Sampling, Settings, CommandOptions, FinetuneOptions)
    return list({row.name: row for cls in classes for row in table(cls).values() if row.scope == scope}.values())


def show_flags(scope: str) -> list[str]:
    lines = ["| flag | default | |", "|---|---|---|"]
    for row in rows_of(scope):
        if row.is_flag:
            value = "" if not row.kind.metavar else " " + ("|".join(row.choices) or row.kind.metavar)
            names = ", ".join([*(flag for flag in row.flags if len(flag) == 2), row.flag])
            names += "".join(f", {flag}" for flag in (*row.flags, row.off) if len(flag) > 2)
            lines.append(line(f"{names}{value}", row.shown_default, row.help))
    return lines


def show_settings(scope: str) -> list[str]:
    lines = ["| setting | default | |", "|---|---|---|"]
    return lines + [line(row.name, row.shown_default, row.help) for row in rows_of(scope)]


def show_arguments(scope: str) -> list[str]:
    lines = ["| argument | default | |", "|---|---|---|"]
    return lines + [line(row.name, row.shown_default, f"{row.help}{choices(row)}") for row in rows_of(scope)]


def choices(row: Option) -> str:
    return "" if not row.choices else f" One of {', '.join(f'`{name}`' for name in row.choices)}."


def show_command(name: str) -> list[str]:
    """The flags of a command that are its own; the derived ones stand in tables of their own."""
    command: Any = typer.main.get_command(app)
    for part in name.split():
        command = command.get_command(None, part) if hasattr(command, "get_command") else command
    lines = ["| flag | default | |", "|---|---|---|"]
    for each in command.params:
        if each.name in {"help", "config", "show_config"} or each.rich_help_panel is not None:
            continue
        names = (
            ", ".join(sorted(each.opts, key=len))
            if each.param_type_name == "option"
            else each.metavar or each.name.upper()
        )
        names += "".join(f", {name}" for name in each.secondary_opts)
        value = f" {each.metavar}" if each.param_type_name == "option" and each.metavar else ""
        default = "" if each.default in (None, False, ()) or callable(each.default) else str(each.default)
        lines.append(line(names + value, "" if "Sentinel" in default else default, each.help or ""))
    return lines


def line(name: str, default: str, words: str) -> str:
    cells = (f"`{name}`", default, words)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


SHOWN = {"flags": show_flags, "settings": show_settings, "arguments": show_arguments, "command": show_command}


def render(text: str) -> str:
    """Return a page with its tables written anew."""
    return TABLE.sub(lambda found: "\n".join([found[1], *SHOWN[found[2]](found[3]), "", found[4]]), text)


if __name__ == "__main__":
    for page in PAGES:
        file = HERE / page
        file.write_text(render(file.read_text(encoding="utf-8")), encoding="utf-8")

"""The command `sala`: a file per command or group of small ones; heavy imports are made when a command runs."""

import os
import signal
import sys
import tomllib
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from sala.errors import InputError, SalaError, explain_write_error

_TABLE = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))
COMMANDS: dict[str, str] = {name: entry["help"] for name, entry in _TABLE.items() if "help" in entry}


class Commands(TyperGroup):
    """Loads the module of a command when it is called, and suggests one for a misspelt name."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _TABLE:
            return None
        cmd_name = _TABLE[cmd_name].get("command", cmd_name)
        target = getattr(import_module(f"sala.cli.{_TABLE[cmd_name].get('module', cmd_name)}"), cmd_name)
        if isinstance(target, typer.Typer):
            group = typer.main.get_command(target)
            group.help = COMMANDS[cmd_name]
            return group
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name=cmd_name, help=COMMANDS.get(cmd_name, target.__doc__))(target)
        return typer.main.get_command(alone)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in _TABLE and not args[0].startswith("-"):
            from sala.options.schema import suggest

            hint = suggest(args[0], COMMANDS, "sala --help lists them")
            ctx.fail(f"there is no command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):  # in full: click would cut the lines to the width of the terminal
            formatter.write_dl([*COMMANDS.items()])


# Some versions of typer carry a click of their own: ask it for the class that it raises.
UsageProblem: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

app = typer.Typer(
    cls=Commands, rich_markup_mode=None, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from sala import __version__

        typer.echo(f"sala {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", is_eager=True, callback=_show_version
    ),
) -> None:
    """Run MiniCPM-SALA on your machine."""


def main() -> None:
    """Exit codes: 0 done, 1 failed, 2 usage error, 130 interrupted."""
    warnings.showwarning = _show_warning
    code = run(sys.argv[1:])
    if processes := sys.modules.get("sala.lab.train.processes"):  # the command has trained, perhaps as one of several
        processes.exit_process(code)
    sys.exit(code)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Show a warning in one line, without the line of code that it comes from."""
    from sala.cli.flags import note

    note(f"warning: {message}")


def run(arguments: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a narrow locale shows "?" instead of failing
    try:
        result: Any = typer.main.get_command(app).main(arguments, prog_name="sala", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # the reader has gone (`| head`); keep Python from complaining about it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + getattr(signal, "SIGPIPE", 13)
    except UsageProblem as error:
        error.show(file=sys.stderr)  # type: ignore[attr-defined]
        return error.exit_code  # type: ignore[attr-defined, no-any-return]
    except InputError as error:
        fail(error)
        return 2
    except OSError as error:
        fail(explain_write_error(error) or error)
        return 1
    except SalaError as error:
        fail(error)
        return 1


def fail(error: Exception) -> None:
    from sala.cli.flags import note

    note("sala: " + " ".join(str(error).splitlines()))

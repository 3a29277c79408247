"""The command `sala`: one file per verb; whatever is heavy is imported inside the command."""

import os
import signal
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from sala.errors import InputError, SalaError

VERBS = {
    "generate": "Answer one prompt.",
    "chat": "Talk to a model in the terminal.",
    "serve": "Answer over HTTP, as OpenAI's API does, with a web chat.",
    "pull": "Fetch a model from the hub.",
    "list": "The models that are here.",
    "show": "Describe a checkpoint: layers, sizes, memory.",
    "rm": "Remove a model.",
    "ps": "What a running server has loaded.",
    "batch": "Answer a file of requests.",
    "session": "Read a long text once, ask about it any time.",
    "estimate": "What a context costs, and what fits here.",
    "doctor": "What this machine has, what will be used, and whether it computes right.",
    "bench": "How fast a model runs here.",
    "eval": "What a model can do: needles, long-context tasks, reasoning, tasks of lm-eval.",
    "needle": "Hide one fact in a long text and ask for it.",
    "perplexity": "How well a model predicts a text, by context length.",
    "report": "Gather the records of runs into one page.",
    "setup": "Put the embedded model together.",
    "quantize": "Store a model in fewer bits.",
    "convert": "Turn a dense model into a hybrid.",
    "train": "Train a model through the stages of a recipe.",
    "finetune": "Teach a model from your own examples: all of it, LoRA or QLoRA.",
    "fuse": "Merge an adapter into its model.",
    "llamafactory": "Run LLaMA-Factory on our models.",
    "export": "Write a model as transformers loads it with remote code.",
    "init": "Make a checkpoint with random weights.",
}


class Verbs(TyperGroup):
    """Loads the module of a verb when that verb is called, and not before."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        target = getattr(import_module(f"sala.cli.{cmd_name}"), cmd_name)
        if isinstance(target, typer.Typer):
            group = typer.main.get_command(target)
            group.help = VERBS[cmd_name]
            return group
        verb = typer.Typer(add_completion=False, rich_markup_mode=None)
        verb.command(name=cmd_name, help=VERBS[cmd_name])(target)
        return typer.main.get_command(verb)


# Some versions of typer carry a click of their own: ask it for the class that it raises.
UsageProblem: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

app = typer.Typer(
    cls=Verbs, rich_markup_mode=None, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}
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
    """Exit codes: 0 done, 1 failed, 2 asked wrongly, 130 interrupted."""
    sys.exit(run(sys.argv[1:]))


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
    except (SalaError, OSError) as error:
        fail(error)
        return 1


def fail(error: Exception) -> None:
    from sala.cli.flags import note

    note("sala: " + " ".join(str(error).splitlines()))

"""`sala finetune`: a model learns from examples. Every option is a flag, and a key of a TOML file."""

import inspect
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from sala.cli.flags import count, note
from sala.lab.finetune.options import FinetuneOptions, read_options

SHORT = {"output": ["-o"]}
COUNTS = ("max_length", "loss_rows")
OFF = {"packing": "--no-packing", "checkpointing": "--no-checkpointing"}


def finetune(model: str | None, config: Path | None, **flags: Any) -> None:
    from sala.cli.training import TrainingBar
    from sala.errors import InputError
    from sala.lab.finetune.dialogues import BadData
    from sala.lab.finetune.run import Ears, finetune, is_first_process

    options = read_options(config, {"model": model, **flags})
    try:
        with TrainingBar() as bar:
            ears = Ears(say=note, progress=lambda news: bar("finetune", news))
            finetune(options, ears if is_first_process() else Ears())
    except BadData as error:
        if is_first_process():
            note(error.message)
        raise InputError("data", f"has {len(error.problems):,} bad records", error.remedy) from None
    if is_first_process():
        note(_next(options))


def _next(options: FinetuneOptions) -> str:
    if options.has_adapter:
        return f"try it: sala chat -m {options.model} --adapter {options.output}"
    return f"try it: sala chat -m {options.output}"


def _signature() -> inspect.Signature:
    """The flags: fields of the options, and the file that may hold them."""
    file = typer.Option("--config", help="TOML file with options.", metavar="FILE")
    name = typer.Argument(help="Checkpoint directory, or the name of a model that is here.")
    flags = [
        _flag("model", Annotated[str | None, name], None),
        _flag("config", Annotated[Path | None, file], None),
    ]
    for each in fields(FinetuneOptions):
        if each.name == "model":
            continue
        flag = "--" + each.name.replace("_", "-")
        names = [f"{flag}/{OFF[each.name]}" if each.name in OFF else flag, *SHORT.get(each.name, [])]
        option = typer.Option(
            *names,
            help=each.metadata["help"],
            show_default=_default(each),
            parser=count if each.name in COUNTS else None,
            metavar="COUNT" if each.name in COUNTS else None,
        )
        flags.append(_flag(each.name, Annotated[_kind(each) | None, option], None))
    return inspect.Signature(flags)


def _kind(each: Any) -> Any:
    words = str(each.type)
    kinds = {"Path": Path, "bool": bool, "float": float, "int": int, "str": str}
    return next(kind for name, kind in kinds.items() if name in words)


def _default(each: Any) -> Any:
    if each.default is MISSING or each.default in (None, Path(), False):
        return False
    return str(each.default)


def _flag(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


# typer reads the flags from here: they are written down once, in FinetuneOptions
finetune.__signature__ = _signature()  # type: ignore[attr-defined]
finetune.__annotations__ = {name: each.annotation for name, each in finetune.__signature__.parameters.items()}  # type: ignore[attr-defined]

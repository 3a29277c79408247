"""The flags of commands: derived from the options table, or shared by several commands."""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from sala.backends import wait_passively
from sala.errors import InputError, SalaError
from sala.options import LOOP_GUARD, CommandOptions, Options, Sampling, sources
from sala.options.schema import SWITCH, Option, read_count, table
from sala.options.sources import Given, build, check_variables, from_environment, from_file, from_flags, show

if TYPE_CHECKING:
    from sala.llm import LLM

T = TypeVar("T")
SHOW_CONFIG = "Show the options as they add up, and exit."
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def flag(help: str, *names: str, **more: Any) -> Any:
    """Declare a flag that a command has besides those of the options table."""
    return typer.Option(*names, help=help, **more)


def argument(help: str, **more: Any) -> Any:
    return typer.Argument(help=help, **more)


def count(text: str | int) -> int:
    """Read a count given as a flag."""
    try:
        return read_count(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def count_flag(help: str, *names: str) -> Any:
    """Declare a flag whose value is a count such as 4096 or 128K."""
    return flag(help, *names, parser=count, metavar="COUNT")


AsJson = Annotated[bool, flag("Print JSON instead of text.", "--json")]
Force = Annotated[bool, flag("Replace the results of another run.", "--force")]
Model = Annotated[str, argument("Checkpoint directory, or the name of a local model.")]
ModelFirst = Annotated[str | None, argument("Model, as with -m.", metavar="MODEL")]  # of a parameter called `place`
NoThink = Annotated[bool, flag("Do not show the model's reasoning.", "--no-think", "--hide-thinking")]
PlotFile = Annotated[Path | None, flag("Picture: .png, .pdf or .svg.", "--plot", metavar="FILE")]
RecordFile = Annotated[
    Path | None, flag("Record of the results; a log is kept beside it.", "--output", "-o", metavar="FILE.json")
]
Seed = Annotated[int, flag("The same seed makes the same text.")]
System = Annotated[str | None, flag("System prompt.", "--system", "-s")]
Verbose = Annotated[bool, flag("Say more about the run on stderr.", "--verbose")]


@dataclass(frozen=True, slots=True)
class Use:
    """The options of a class that a command takes; by default all. `defaults` replace those of the table."""

    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    defaults: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()  # options that are given by position instead of a flag
    spellings: dict[str, str] = field(default_factory=dict)  # further flags of this command

    def rows(self, cls: type) -> dict[str, Option]:
        return {
            name: row
            for name, row in table(cls).items()
            if row.is_flag and name not in self.without and (not self.only or name in self.only)
        }


class GivenNames(frozenset[str]):
    """Parameters of this type receive the names of the options that were set, by whichever source."""


Answering = Annotated[Sampling, Use(defaults={"max_tokens": 1024, "loop_guard": LOOP_GUARD})]
Loading = Annotated[Options, Use()]


def derived(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace each parameter that is an option class by the flags of its options.

    When the command is called, flags beat variables, which beat the file given by `--config` or SALA_CONFIG.
    """
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters
    classes = {name: found for name in own if (found := _find_class(hints[name])) is not None}
    parameters = [each for name in own for each in _parameters(own[name], hints[name], classes.get(name))]
    parameters += [
        _parameter("config", Annotated[Path | None, flag("TOML file with options.", metavar="FILE")], None),
        _parameter("show_config", Annotated[bool, flag(SHOW_CONFIG, "--show-config")], False),
    ]

    @functools.wraps(command)
    def run(config: Path | None, show_config: bool, **flags: Any) -> Any:
        with ExitStack() as restored:
            return run_with(config, show_config, flags, restored)

    def run_with(config: Path | None, show_config: bool, flags: dict[str, Any], restored: ExitStack) -> Any:
        from sala.server.settings import Settings

        tables = (Options, Sampling, Settings, CommandOptions)
        known = {row.name for one in tables for row in table(one).values() if row.is_flag}
        check_variables({*known, "config"}, note, os.environ)
        flags = _take_model(flags)
        found = {name: _resolve(cls, use, config, flags, tables) for name, (cls, use) in classes.items()}
        if any(issubclass(cls, Options) for cls, _ in classes.values()):
            place, is_set = _resolve(Settings, Use(only=("models_dir",)), config, flags, tables)
            if is_set:  # names of models are looked up there, by whoever loads one
                restored.enter_context(_variable(table(Settings)["models_dir"].variable, str(place.models_dir)))
        loading = next((values for values, _ in found.values() if isinstance(values, Options)), None)
        for name, (cls, use) in classes.items():
            if cls is Sampling and loading is not None and not use.only:
                wanted = replace(use, defaults={**use.defaults, **_recommended_sampling(loading)})
                values, is_set = _resolve(cls, wanted, config, flags, tables)
                found[name] = values if "repetition_penalty" in is_set else values.without_model_penalty(), is_set
        if show_config:
            taken = {name: use.rows(cls) for name, (cls, use) in classes.items()}
            print("\n".join(line for name, (values, _) in found.items() for line in show(values, taken[name])))
            raise typer.Exit
        wait_passively(None if loading is None else loading.threads)
        given = GivenNames(name for _, names in found.values() for name in names)
        names = {name: given for name, hint in hints.items() if hint is GivenNames}
        rest = {name: flags[name] for name in own if name in flags}
        return command(**rest, **names, **{name: values for name, (values, _) in found.items()})

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable while a command runs."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _take_model(flags: dict[str, Any]) -> dict[str, Any]:
    """Turn a model that is given by position into its option: `place`, or the first of `words` before a prompt."""
    place, words = flags.get("place"), flags.get("words") or []
    if len(words) > 1 or (words and _is_checkpoint(words[0])):
        place, words = words[0], words[1:]
    if len(words) > 1:
        raise InputError("prompt", f"is {len(words)} arguments", "put it in quotes")
    if place is None:
        return flags
    if flags.get("model") is not None:
        raise InputError("model", f"is given twice: {place[:60]} and -m {flags['model']}", "leave one of them out")
    return {**flags, "place": place, "words": words, "model": place}


def _is_checkpoint(text: str) -> bool:
    try:
        return (Path(text) / "config.json").is_file()
    except (OSError, ValueError):  # a prompt need not be a possible path
        return False


def _find_class(hint: Any) -> tuple[type, Use] | None:
    cls, use = (get_args(hint)[0], get_args(hint)[1]) if get_origin(hint) is Annotated else (hint, Use())
    return (cls, use) if hasattr(cls, "__pydantic_fields__") and isinstance(use, Use) else None


def _parameters(own: inspect.Parameter, hint: Any, found: tuple[type, Use] | None) -> Iterator[inspect.Parameter]:
    if found is None:
        if hint is not GivenNames:
            yield _parameter(own.name, hint, own.default)
        return
    cls, use = found
    for name, row in use.rows(cls).items():
        default = row.spell(use.defaults[name]) if name in use.defaults else row.shown_default
        is_switch = row.kind is SWITCH
        if name in use.arguments:
            yield _parameter(name, Annotated[str | None, argument(row.help, show_default=False)], None)
            continue
        option = flag(
            row.help + (f"  [default: {default}]" if default else ""),
            row.flag + (f"/{row.off}" if is_switch and row.off else ""),
            *row.flags,
            *filter(None, (use.spellings.get(name),)),
            show_default=False,
            rich_help_panel=row.scope,  # marks the derived flags for the reference pages
            metavar=None if is_switch else "|".join(row.choices) or row.kind.metavar,
        )
        value: Any = list[str] if row.is_list else bool if is_switch else str
        yield _parameter(name, Annotated[value | None, option], None)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _resolve(
    cls: type, use: Use, config: Path | None, flags: dict[str, Any], tables: tuple[type, ...]
) -> tuple[Any, set[str]]:
    """Return an option class from all sources, and the names of what was set."""
    from sala.server.settings import one_key

    is_shared = any(issubclass(cls, one) for one in tables)  # its keys stand in the file of all commands
    if config is None and is_shared and os.environ.get("SALA_CONFIG"):
        config = Path(os.environ["SALA_CONFIG"])
    rows = use.rows(cls)
    file = from_file(config, cls, *tables) if is_shared else from_file(config, cls)
    layers = (file, from_environment(cls), from_flags(cls, flags))
    wanted: list[list[Given]] = one_key([given for given in layer if given.name in rows] for layer in layers)
    return build(cls, wanted, **use.defaults), {given.name for layer in wanted for given in layer}


def _recommended_sampling(options: Options) -> dict[str, Any]:
    """Return the sampling parameters that are the defaults of a model; none of one that cannot be found."""
    from sala.config import SalaConfig
    from sala.generation_config import recommended_sampling
    from sala.models.embedded import EMBEDDED, find_base, overlay_dir
    from sala.models.embedded import find_model as find

    try:
        is_named = options.model == EMBEDDED and not Path(EMBEDDED).exists()
        is_embedded = options.model is None or is_named  # it may have to be assembled first
        path = overlay_dir() if is_embedded else find_base(find(options.model), options.merged_adapter)[0]
        return recommended_sampling(path, SalaConfig.load(path))
    except SalaError:  # loading the model will say what is wrong
        return {}


def counts(text: str, name: str, least: int = 1) -> list[int]:
    """Read counts separated by commas, in ascending order."""
    found = sorted({count(part) for part in text.split(",")})
    if found[0] < least:
        raise InputError(name, f"hold {found[0]}", f"they must be at least {least}; 4k is 4,000, 4K is 4,096")
    return found


def one_of(name: str, value: T, known: Iterable[T]) -> T:
    """Return the value of a flag; raise InputError if it is not a known one."""
    if value not in known:
        raise InputError(name, f"is {value!r}", f"use {', '.join(map(str, known))}")
    return value


def find_model(model: str | None) -> Path:
    """Return the directory of a model; the embedded one if none is named."""
    from sala.models.embedded import find_model as find

    return find(model or None, note)


def load(options: Options, verbose: bool = False, **changes: Any) -> "LLM":
    """Load the model, and say so if asked."""
    import time

    _ = options.only_adapter  # raises for adapters with names: a command cannot choose among them
    path = find_model(options.model)
    began = time.perf_counter()
    from sala.llm import LLM

    try:
        with _note_if_slow(f"loading {path.name} …"):
            llm = LLM(path, options=options, **changes)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise
        raise SalaError(f"{path} does not fit into memory", f"see what would: sala estimate {path}") from None
    if llm.attention_changes:
        note(llm.attention_changes)
    if verbose:
        seconds = time.perf_counter() - began
        note(f"{path}: {llm.config.num_hidden_layers} layers, context {llm.ctx:,}, loaded in {seconds:.1f} s")
    return llm


@contextmanager
def _note_if_slow(text: str, seconds: float = 2.0) -> Iterator[None]:
    """Write a note on a terminal if the block takes longer than this."""
    import threading

    timer = threading.Timer(seconds, note, [text])
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def note(text: str) -> None:
    """Write a line that is not part of the answer to stderr; control characters are spelt out."""
    safe = "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
    print(safe, file=sys.stderr)


def escape_controls(text: str) -> str:
    """Return text that a terminal shows and does not obey: control characters and changes of direction spelt out."""
    return CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def write_out(text: str) -> None:
    """Write a line to stdout that a model or a file may have worded, safe for a terminal, as it is for a pipe."""
    print(escape_controls(text) if sys.stdout.isatty() else text)


def read_text(name: str) -> str:
    """Read a text file, or stdin for `-`."""
    if name == "-":
        return sources.decode(sys.stdin.buffer.read(), "standard input")
    return sources.read_text(Path(name).expanduser())


def uses_colour(stream: object) -> bool:
    is_terminal = bool(getattr(stream, "isatty", lambda: False)())
    return is_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"

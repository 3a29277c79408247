"""Where options come from: arguments or flags beat `SALA_*` variables, which beat the keys of a TOML file.

Every source is read by the same table and checked by the same class, so a bad value gives the same message whatever it
came from, apart from the name of the source.
"""

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from sala.errors import InputError
from sala.options import Options
from sala.options.schema import PATH, PREFIX, Option, short, suggest, table

MASK = "***"
MAX_FILE = 1 << 20
TEST_PREFIX = "SALA_TEST_"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Given:
    """A value that was set, and where: `--port`, `SALA_PORT` or `sala.toml, line 3: port`."""

    name: str
    value: Any
    origin: str


def build(cls: type[T], layers: Iterable[Iterable[Given]], **defaults: Any) -> T:
    """Create an option class from layers of values, later ones first in precedence; errors name the source."""
    given = {each.name: each for layer in layers for each in layer}
    try:
        return cls(**defaults | {name: each.value for name, each in given.items()})
    except InputError as error:
        if error.field not in given:
            raise
        raise InputError(given[error.field].origin, error.problem, error.remedy) from None


def models_dir() -> Path:
    """Return the directory of downloaded models."""
    import platformdirs

    named = os.environ.get("SALA_MODELS_DIR")
    return Path(named).expanduser() if named else Path(platformdirs.user_data_path("sala")) / "models"


def files_dir() -> Path:
    """Return the directory of the files that clients upload."""
    import platformdirs

    return Path(platformdirs.user_data_path("sala")) / "files"


def resolve(options: Options | None, arguments: Mapping[str, Any]) -> Options:
    """Return how to load a model: `options` with changes, or arguments over the variables of the environment."""
    if options is not None:
        return replace(options, **arguments)
    unset = [given for given in from_environment(Options) if given.name not in arguments]
    return build(Options, [unset], **arguments)


def from_environment(cls: type, environment: Mapping[str, str] | None = None) -> list[Given]:
    """Return the options of a class among the variables; an empty variable counts as not set.

    A class may name those of its options that variables set.
    """
    variables = os.environ if environment is None else environment
    settable = getattr(cls, "variables", None)
    return [
        Given(row.name, row.parse(variables[row.variable]), row.variable)
        for row in table(cls).values()
        if (settable is None or row.name in settable) and variables.get(row.variable, "").strip()
    ]


def from_flags(cls: type, flags: Mapping[str, Any]) -> list[Given]:
    """Return the flags that were given; `None` and an empty list mean that one was not."""
    rows = table(cls)
    return [
        Given(name, rows[name].parse(value), rows[name].flag)
        for name, value in flags.items()
        if name in rows and value is not None and value != []
    ]


def from_file(file: Path | None, cls: type, *others: type) -> list[Given]:
    """Return the options of a class in a TOML file; keys that belong to `others` are skipped, unknown ones refused.

    A key is the name of an option, or another spelling of its flag.
    """
    if file is None:
        return []
    file = file.expanduser()
    text = read_text(file, MAX_FILE)
    try:
        values = tomllib.loads(text)
    except ValueError as error:  # also a number of thousands of digits
        raise InputError(str(file), f"is not valid TOML: {error}", "correct it there") from None
    rows = table(cls)
    settable = [row for each in (*others, cls) for row in table(each).values() if row.is_flag]
    known = {spelling: row.name for row in settable for spelling in row.keys}
    given: list[Given] = []
    for key, value in values.items():
        spelling, origin = key.replace("-", "_"), f"{file}{_find_line(text, key)}: {short(key)[1:-1]}"
        if spelling not in known:
            raise InputError(origin, "is not an option", suggest(spelling, known, "remove it"))
        name = known[spelling]
        if any(other.name == name for other in given):
            raise InputError(origin, f"means {name}, which is given already", "remove one of them")
        if name in rows:
            is_path = rows[name].kind is PATH and isinstance(value, str) and not value.startswith("~")
            is_relative = is_path and getattr(cls, "has_relative_paths", False)
            given.append(Given(name, file.parent / value if is_relative else value, origin))
    return given


def show(values: Any, rows: Mapping[str, Option]) -> list[str]:
    """Return options as lines of a TOML file; what is not set is a comment, and keys are masked."""
    return [_show(row, getattr(values, name)) for name, row in rows.items()]


def _show(row: Option, value: Any) -> str:
    if value is None:
        return f"# {row.name} is not set" + (f": {row.shown}" if row.shown else "")
    shown = MASK if row.kind.is_secret else str(value) if isinstance(value, Path) else value
    return f"{row.name} = {json.dumps(shown, ensure_ascii=False)}"


def check_variables(known: Iterable[str], warn: Callable[[str], None], environment: Mapping[str, str]) -> None:
    """Refuse a variable that is a likely misspelling of a known one; warn of others that begin with SALA_.

    Variables of the tests (`SALA_TEST_*`) are left alone.
    """
    names = {PREFIX + name.upper() for name in known}
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or variable.startswith(TEST_PREFIX) or variable in names:
            continue
        hint = suggest(variable.removeprefix(PREFIX), [name.removeprefix(PREFIX) for name in names], "")
        if hint:
            raise InputError(variable, "is not an option", hint.replace("mean ", f"mean {PREFIX}"))
        warn(f"{variable} is not an option and has no effect")


def read_text(file: Path, max_bytes: int | None = None) -> str:
    """Read a UTF-8 file; errors name it."""
    try:
        with file.open("rb") as stream:
            data = stream.read(-1 if max_bytes is None else max_bytes + 1)
    except IsADirectoryError:
        raise InputError(str(file), "cannot be read: it is a directory", "read directories with `sala ask`") from None
    except OSError as error:
        raise InputError(str(file), f"cannot be read: {error.strerror}", "check the path and its permissions") from None
    if max_bytes is not None and len(data) > max_bytes:
        raise InputError(str(file), f"has more than {max_bytes:,} bytes", "check that it is the right file")
    return decode(data, str(file))


def decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        remedy = "check that it is the right file; `sala ask` reads PDF, Office files and other encodings"
        raise InputError(name, f"is not UTF-8 text (byte {error.start})", remedy) from None


def _find_line(text: str, key: str) -> str:
    """Return where a key is in a TOML text."""
    wanted = re.compile(rf"""\s*\[*\s*["']?{re.escape(key)}["']?\s*[=.\]]""")
    return next((f", line {number}" for number, line in enumerate(text.splitlines(), 1) if wanted.match(line)), "")

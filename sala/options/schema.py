"""How option classes are declared: frozen dataclasses checked by pydantic, whose fields form the options table.

First the kinds of values and how they are written, then the table.
"""

import difflib
import functools
import ipaddress
import os
import re
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)
from urllib.parse import urlsplit

import pydantic.dataclasses
from pydantic import BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from sala.errors import ConfigError, InputError, UnknownOption

UNITS = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3}
SWITCH_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """What a type is called in help texts, its rule in words, and how its values are read (may raise ValueError).

    `parse` reads the text of a flag or variable. `read` takes any value, before pydantic checks its type.
    """

    metavar: str
    rule: str = ""  # empty: worded from the bounds of the option
    read: Callable[[Any], Any] = lambda value: value
    parse: Callable[[str], Any] = str
    is_secret: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return BeforeValidator(self.read).__get_pydantic_core_schema__(source, handler)


def read_count(text: str | int) -> int:
    """Read a whole number with an optional unit: 128k = 128,000, 128K = 131,072, 1m, 1M. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", str(text).strip(), re.ASCII)
    if found is None or len(found[1]) > 18:
        raise ValueError(f"{str(text)[:40]!r} is not a valid count; use a number such as 4096 or 128K")
    return int(float(found[1]) * UNITS[found[2]])


def show_count(number: int) -> str:
    """Spell a count with the largest unit that divides it."""
    unit = next((unit for unit in ("G", "M", "K") if number and number % UNITS[unit] == 0), "")
    return f"{number // UNITS[unit]}{unit}"


def length_label(count: int) -> str:
    """Return 4K for 4096 and 1M for 1048576; round thousands, which are meant as such, stay numbers."""
    return show_count(count) if count % 1024 == 0 and count % 1000 else f"{count:,}"


def _read_whole(text: str) -> int:
    return int(_match(r"[+-]?[0-9]{1,30}", text.strip()))


def _read_number(text: str) -> float:
    try:
        return _read_whole(text)
    except ValueError:
        return float(text)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


WHOLE = Kind("N", parse=_read_whole)
NUMBER = Kind("X", parse=_read_number)
SWITCH = Kind("", "use true or false", parse=lambda text: SWITCH_WORDS[text.strip().lower()])
CHOICE = Kind("NAME")


# The validators below raise ValueError; `options` words the error by the rule of the kind.


def _strip(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value.strip()


def _match(pattern: str, text: str) -> str:
    if not re.fullmatch(pattern, text):
        raise ValueError
    return text


def _read_count(value: Any) -> Any:
    return read_count(value) if isinstance(value, str) else value


def _read_text(value: Any) -> str:
    text = os.fspath(value) if isinstance(value, Path) else value
    if not _strip(text) or not text.isprintable():
        raise ValueError
    return _strip(text)


def read_secret(value: Any) -> str:
    return _match(r"[\x21-\x7e]+", _strip(value))


def _read_path(value: Any) -> Path:
    if not _strip(str(value) if isinstance(value, Path) else value) or "\0" in str(value):
        raise ValueError
    try:
        return Path(value).expanduser()
    except RuntimeError:  # the home directory of an unknown user
        raise ValueError from None


def _read_address(value: Any) -> str:
    text = _strip(value).lower()
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return bare if is_ip(bare) else _match(r"[a-z0-9_]([a-z0-9_.-]{0,252}[a-z0-9_])?\.?", bare)


def _read_endpoint(value: Any) -> str:
    host, _, port = _strip(value).rpartition(":")
    if not 0 < int(_match(r"[0-9]{1,6}", port)) < 1 << 16:
        raise ValueError
    name = _read_address(host)
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def _read_url(value: Any) -> str:
    text = _match(r"https?://[^\s@\\?#]+", _strip(value))
    parts = urlsplit(text)
    if not parts.hostname or parts.port == 0:  # `port` raises by itself for one that is not a number
        raise ValueError
    return text.rstrip("/")


def _read_origin(value: Any) -> str:
    return _read_url(_match(r"https?://[a-z0-9_.\-\[\]:]+", _strip(value).lower()))


def _read_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _read_names(value: Any) -> Any:
    items = _read_list(value)
    if not isinstance(items, tuple):
        raise ValueError
    return tuple(part for item in items for part in (_split(item) if isinstance(item, str) else (item,)))


def _read_name(value: Any) -> str:
    return _match(r"[^\s,]{1,200}", _read_text(value))


def _read_adapters(value: Any) -> Any:
    return _read_list(str(value) if isinstance(value, Path) else () if value is None else value)


def _read_adapter(value: Any) -> str:
    """Return a directory, perhaps behind a name and a =."""
    text = _strip(value)
    _read_path(text.partition("=")[2] if "=" in text else text)
    return text


def _read_loop_guard(value: Any) -> Any:
    count = _read_count(value)
    if isinstance(count, int) and count and not 32 <= count <= 1 << 20:
        raise ValueError
    return count


def is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def spelling(**aliases: str) -> BeforeValidator:
    """Ignore case and surrounding space, and accept other spellings of a choice (`_0` for 0 and false)."""
    known = {name.lstrip("_"): value for name, value in aliases.items()}

    def read(value: Any) -> Any:
        text = str(int(value)) if isinstance(value, bool) else value
        if not isinstance(text, str):
            return value
        text = text.strip().lower()
        return known.get(text, text)

    return BeforeValidator(read)


Count = Annotated[int, Kind("COUNT", read=_read_count, parse=read_count)]
LoopGuard = Annotated[int, Kind("COUNT", "it must be 0, or from 32 to 1M", _read_loop_guard, read_count)]
Text = Annotated[str, Kind("TEXT", "give printable text", _read_text)]
Plain = Annotated[str, Kind("TEXT", "give it as text")]
Secret = Annotated[str, Kind("KEY", "use letters, digits and signs of ASCII, no spaces", read_secret, is_secret=True)]
PATH = Kind("PATH", "give a path", _read_path)
File = Annotated[Path, PATH]
Address = Annotated[str, Kind("HOST", "give an address or a name such as 127.0.0.1, without port", _read_address)]
Endpoint = Annotated[str, Kind("HOST:PORT", "write it as HOST:PORT, such as 10.0.0.1:29500", _read_endpoint)]
Url = Annotated[str, Kind("URL", "write it as https://example.org", _read_url)]
HubUrl = Annotated[
    str,
    Kind(
        "URL",
        "write it as https://example.org, or modelscope",
        lambda value: value if value == "modelscope" else _read_url(value),
    ),
]
Stops = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Kind("TEXT", "give one or more strings that are not empty", _read_list, _split),
]
Names = Annotated[
    tuple[Annotated[str, BeforeValidator(_read_name)], ...],
    Kind("NAME", "give names without spaces, such as gpt-4o, claude-sonnet-4-5", _read_names, _split),
]
Adapters = Annotated[
    tuple[Annotated[str, BeforeValidator(_read_adapter)], ...],
    Kind("[NAME=]PATH", "give a directory, or NAME=DIRECTORY once for each", _read_adapters, _split),
]
Origins = Annotated[
    tuple[Annotated[str, BeforeValidator(_read_origin)], ...],
    Kind("URL", "give a list such as https://example.org, http://localhost:3000", _read_list, _split),
]
Hosts = Annotated[
    tuple[Address, ...], Kind("HOST", "give a list of names such as example.org, without port", _read_list, _split)
]


PREFIX = "SALA_"
T = TypeVar("T")
REQUIRED: Any = ...  # the default of an option that must be given
FILE_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False)  # `__pydantic_config__` of classes that `validate` reads
_CONFIG = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_BUILT_IN: dict[Any, Kind] = {int: WHOLE, float: NUMBER, bool: SWITCH}


def option(
    default: Any,
    help: str,
    *,
    scope: str = "",
    flags: tuple[str, ...] = (),
    off: str = "",
    shown: str | None = None,
    is_flag: bool = True,
    **bounds: Any,
) -> Any:
    """Declare a field of an option class; `bounds` are pydantic's (ge, gt, le).

    `flags` are further spellings of the flag and `off` the flag that means "no". `shown` stands for the default where
    that is known only at run time.
    """
    extra: dict[str, Any] = {"scope": scope, "flags": flags, "off": off, "shown": shown, "is_flag": is_flag}
    own = {} if default is REQUIRED else {"default_factory" if callable(default) else "default": default}
    return Field(description=help, json_schema_extra=extra, **own, **bounds)


def option_of(cls: Any, name: str, default: Any, *, help: str = "", **changes: Any) -> Any:
    """Declare a field that another option class declares already, here with a default of its own.

    `help` replaces its help text, and `changes` replace its scope, flags or what is shown as its default.
    """
    info: FieldInfo = cls.__pydantic_fields__[name]
    declared: Any = info.json_schema_extra
    return option(default, help or info.description or "", **{**declared, **changes})


@dataclass_transform(frozen_default=True)
def options(cls: type[T]) -> type[T]:
    """Turn a class of annotated fields into a frozen dataclass whose constructor raises errors with a remedy."""
    renamed = dict(getattr(cls, "RENAMED", ()))
    made: Any = pydantic.dataclasses.dataclass(frozen=True, config=_CONFIG)(cls)
    check = made.__init__

    @functools.wraps(check)
    def create(self: Any, *args: Any, **values: Any) -> None:
        for old in renamed.keys() & values:
            values.setdefault(renamed[old], values.pop(old))
        try:
            check(self, *args, **values)
        except ValidationError as error:
            raise _explain(type(self), error) from None

    made.__init__ = create
    return made  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the options table."""

    name: str
    help: str
    default: Any
    kind: Kind
    choices: tuple[str, ...]
    rule: str  # what a valid value is, as the remedy of an error
    is_list: bool
    scope: str
    flags: tuple[str, ...]
    off: str
    is_flag: bool
    shown: str | None

    @property
    def variable(self) -> str:
        return variable_name(self.name)

    @property
    def flag(self) -> str:
        return flag_name(self.name)

    @property
    def keys(self) -> list[str]:
        """Its name in a file, and the other spellings of its flag."""
        return [self.name, *(flag[2:].replace("-", "_") for flag in self.flags if flag.startswith("--"))]

    @property
    def shown_default(self) -> str:
        """The default as people would write it; empty if the option is not set."""
        if self.shown is not None:
            return self.shown
        if isinstance(self.default, bool):
            return "true" if self.default else ""
        return self.spell(self.default)

    def spell(self, value: Any) -> str:
        """Write a value as a user would."""
        if value is None or value == ():
            return ""
        if self.kind.metavar == "COUNT":
            return show_count(value)
        return f"{value:g}" if isinstance(value, float) else str(value)

    def parse(self, value: Any) -> Any:
        """Read a value given as text; the class refuses what cannot be read, with the rule."""
        try:
            return self.kind.parse(value) if isinstance(value, str) else value
        except (ValueError, KeyError):
            return value

    def problem(self, value: object) -> str:
        return "is not valid" if self.kind.is_secret else f"is {short(value)}"


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_name(name: str) -> str:
    return PREFIX + name.upper()


@functools.cache
def table(cls: Any) -> dict[str, Option]:
    """Return the options of a class by name, in the order of their declaration."""
    found: dict[str, FieldInfo] = cls.__pydantic_fields__
    return {name: _describe(name, info) for name, info in found.items()}


def suggest(name: str, known: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]}?" if near else otherwise


def short(value: object) -> str:
    """Show a value in an error message: on one line, and not at any length."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number too long to print"
    return text if len(text) <= 60 else text[:57] + "..."


def _describe(name: str, info: FieldInfo) -> Option:
    inner, metadata = _unwrap(info.annotation, info.metadata)
    kind, choices = _kind_of(inner, metadata, Kind("TEXT", "give a valid value"))
    declared: Any = info.json_schema_extra
    default = None if info.default_factory or info.is_required() else info.default
    rule = kind.rule or _word_rule(kind, choices, metadata)
    is_list = get_origin(inner) is tuple
    return Option(name, info.description or "", default, kind, choices, rule, is_list, **declared)


def _kind_of(inner: Any, metadata: Iterable[Any], otherwise: Kind) -> tuple[Kind, tuple[str, ...]]:
    """Return the kind of a type, and the values of a `Literal`."""
    kind = next((item for item in metadata if isinstance(item, Kind)), None)
    choices = tuple(map(str, get_args(inner))) if get_origin(inner) is Literal else ()
    return kind or (CHOICE if choices else _BUILT_IN.get(inner, otherwise)), choices


def _unwrap(annotation: Any, metadata: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the bare type behind `Annotated` and `| None`, and everything that it is annotated with."""
    flat = [part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else (item,))]
    if get_origin(annotation) in (Union, types.UnionType):
        inner, *more = (part for part in get_args(annotation) if part is not type(None))
    elif get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
    else:
        return annotation, flat
    bare, own = _unwrap(inner, more)
    return bare, flat + own


def _word_rule(kind: Kind, choices: tuple[str, ...], metadata: Any) -> str:
    if choices:
        return "use " + " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))
    limits = {name: getattr(item, name) for item in metadata for name in ("ge", "gt", "le") if hasattr(item, name)}
    show = show_count if kind.metavar == "COUNT" else _show_number
    low = f"above {show(limits['gt'])} and at most" if "gt" in limits else f"from {show(limits['ge'])} to"
    noun = "a number" if kind is NUMBER else "a whole number"
    example = ", such as 4096, 128K or 1M" if kind.metavar == "COUNT" else ""
    return f"it must be {noun} {low} {show(limits['le'])}{example}"


def _show_number(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


@functools.cache
def _adapter(cls: Any) -> "TypeAdapter[Any]":
    return TypeAdapter(cls)


def validate(cls: type[T], values: Any, where: str) -> T:
    """Create a dataclass from a table of a file; a ConfigError names the field that is wrong."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is {short(values)}", "it must be an object")
    try:
        return cast(T, _adapter(cast(Any, cls)).validate_python(values))
    except ValidationError as error:
        raise _locate(cls, error, where) from None


def _locate(cls: type, error: ValidationError, where: str) -> ConfigError:
    first = _first(error)
    hints = get_type_hints(cls, include_extras=True)
    *outer, name = [part for part in first["loc"] if isinstance(part, str)]
    for part in outer:
        where, hints = f"{where}: {part}", get_type_hints(hints[part], include_extras=True)
    if name not in hints:
        hint = suggest(name, hints, "remove it, or update this package if the model is newer")
        return ConfigError(f"{where}: {short(name)} is not a field of this model", hint)
    inner, metadata = _unwrap(hints[name], ())
    kind, choices = _kind_of(inner, metadata, Kind("", "it must be an object"))
    problem = "is missing" if first["type"] == "missing" or first["input"] is None else f"is {short(first['input'])}"
    return ConfigError(f"{where}: {name} {problem}", kind.rule or _word_rule(kind, choices, metadata))


def _first(error: ValidationError) -> Any:
    found = error.errors(include_url=False)
    return next((one for one in found if one["type"] != "missing"), found[0])


def _explain(cls: type, error: ValidationError) -> Exception:
    """Turn the first problem that pydantic found into an error with a remedy."""
    first = _first(error)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InputError):
        return cause
    name = str(first["loc"][0]) if first["loc"] else ""
    known = table(cls)
    if name not in known:
        return UnknownOption(cls.__name__, name, suggest(name, known, f"it takes {', '.join(known)}"))
    row = known[name]
    if first["type"] == "missing":
        return InputError(name, "is missing", row.rule)
    near = suggest(str(first["input"]).lower(), row.choices, "") if row.choices else ""
    return InputError(name, row.problem(first["input"]), row.rule + (f" ({near})" if near else ""))

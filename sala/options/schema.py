"""How option classes are declared: frozen dataclasses checked by pydantic, whose fields form the options table."""

import difflib
import functools
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin

import pydantic.dataclasses
from pydantic import ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from sala.errors import InputError, UnknownOption
from sala.options.kinds import CHOICE, NUMBER, SWITCH, WHOLE, Kind, show_count

PREFIX = "SALA_"
T = TypeVar("T")
REQUIRED: Any = ...  # the default of an option that must be given
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
    scope: str
    help: str
    default: Any
    kind: Kind
    choices: tuple[str, ...]
    rule: str  # what a valid value is, as the remedy of an error
    flags: tuple[str, ...]
    off: str
    is_flag: bool
    is_list: bool
    shown: str | None

    @property
    def variable(self) -> str:
        return variable_name(self.name)

    @property
    def flag(self) -> str:
        return flag_name(self.name)

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
        """Read a value given as text; other values are left to the check."""
        return self.kind.parse(value) if isinstance(value, str) else value

    def problem(self, value: object) -> str:
        return "is not valid" if self.kind.is_secret else f"is {short(value)}"


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_name(name: str) -> str:
    return PREFIX + name.upper()


@functools.cache
def table(cls: type) -> dict[str, Option]:
    """Return the options of a class by name, in the order of their declaration."""
    found: dict[str, FieldInfo] = cls.__pydantic_fields__  # type: ignore[attr-defined]
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
    kind = next((item for item in metadata if isinstance(item, Kind)), None)
    choices = tuple(map(str, get_args(inner))) if get_origin(inner) is Literal else ()
    kind = kind or (CHOICE if choices else _BUILT_IN.get(inner, Kind("TEXT", "give a valid value")))
    extra: Any = info.json_schema_extra
    return Option(
        name=name,
        scope=extra["scope"],
        help=info.description or "",
        default=None if info.default_factory or info.is_required() else info.default,
        kind=kind,
        choices=choices,
        rule=kind.rule or _word_rule(kind, choices, metadata),
        flags=extra["flags"],
        off=extra["off"],
        is_flag=extra["is_flag"],
        is_list=get_origin(inner) is tuple,
        shown=extra["shown"],
    )


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


def _explain(cls: type, error: ValidationError) -> Exception:
    """Turn the first problem that pydantic found into an error with a remedy."""
    found = error.errors(include_url=False)
    first = next((one for one in found if one["type"] != "missing"), found[0])
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
    near = difflib.get_close_matches(str(first["input"]).lower(), row.choices, 1) if row.choices else []
    hint = f" (did you mean {near[0]}?)" if near else ""
    return InputError(name, row.problem(first["input"]), row.rule + hint)

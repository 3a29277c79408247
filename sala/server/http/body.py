"""JSON as clients send and get it: read strictly and within limits, validated by strict models, written compactly.

`pieces` encodes a value a little at a time: a single call of `json.dumps` would hold the interpreter's lock until it
has finished. A `LazyList` makes its items only then, so that they are never all in memory.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Annotated, Any, ClassVar, Generic, TypeVar, get_args

import pydantic_core
from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Tag, model_validator
from pydantic_core import PydanticCustomError

from sala.server.http import large_json

MAX_JSON_DEPTH = 64
MAX_WHOLE = 1 << 53  # a float beyond it may have lost digits
MAX_JSON_BRANCHES = 1 << 17  # objects and lists
MAX_JSON_VALUES = 1 << 22  # enough for a list of the token ids of the longest context
PIECE = 1 << 14  # about the bytes that one call of `dump` encodes
OVERHEAD = 6  # about the bytes of a value besides its text
T = TypeVar("T")
ROUND = bytes.maketrans(b"[{]}", b"(())")
NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))


def dump(value: Any) -> bytes:
    """Return compact JSON in ASCII, so that strings with lone surrogates can be sent too."""
    return json.dumps(value, separators=(",", ":"), default=_as_list).encode()


def _as_list(value: Any) -> list[Any]:
    """Return the items of a list that is made when it is encoded (see `LazyList`)."""
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be encoded as JSON")


class LazyList(Generic[T]):
    """A list in an answer whose items are made of `sources` when they are encoded.

    `item_bytes` is about how long the JSON of one is.
    """

    def __init__(self, make: Callable[[T], Any], sources: Sequence[T], item_bytes: int) -> None:
        self._make, self._sources, self._item_bytes = make, sources, item_bytes

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, self._sources)

    @property
    def num_bytes(self) -> int:
        return len(self._sources) * self._item_bytes


def pieces(value: Any) -> Iterator[bytes]:
    """Yield what `dump` returns, a little at a time."""
    if is_small(value):
        yield dump(value)
    elif isinstance(value, str):
        yield b'"'
        for at in range(0, len(value), PIECE):
            yield dump(value[at : at + PIECE])[1:-1]
        yield b'"'
    elif isinstance(value, dict):
        opening = b"{"
        for key, one in value.items():
            yield opening
            yield from pieces(str(key))
            yield b":"
            yield from pieces(one)
            opening = b","
        yield b"}"
    else:
        yield from _list_pieces(value)


def _list_pieces(values: Iterable[Any]) -> Iterator[bytes]:
    """Encode small items together, and large ones a little at a time."""
    together: list[Any] = []
    opening, size = b"[", 0
    for one in values:
        own = _estimate(one)
        if together and size + own > PIECE:
            yield opening + dump(together)[1:-1]
            opening, together, size = b",", [], 0
        if own <= PIECE:
            together.append(one)
            size += own
        else:
            yield opening
            yield from pieces(one)
            opening = b","
    if together:
        yield opening + dump(together)[1:-1]
    elif opening == b"[":
        yield opening
    yield b"]"


def is_small(value: Any) -> bool:
    """Return whether a value is encoded within a fraction of a millisecond."""
    return _estimate(value) <= PIECE


def _estimate(value: Any) -> int:
    """Return about how many bytes the JSON of a value has; more than PIECE is not counted further."""
    waiting, size = [value], 0
    while waiting and size <= PIECE:
        one = waiting.pop()
        size += OVERHEAD
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, dict):
            size += OVERHEAD * len(one)
            waiting += one
            waiting += one.values()
        elif isinstance(one, list | tuple):
            size += OVERHEAD * len(one)
            waiting += one[:PIECE]
        elif isinstance(one, LazyList):
            size += one.num_bytes
    return size


def read_json(body: bytes | bytearray) -> Any:
    """Parse strict JSON. If a key occurs twice in an object, the last value counts. Raises ValueError."""
    is_long = len(body) > large_json.LONG
    with large_json.one_at_a_time if is_long else nullcontext():
        excess = find_excess(body)
        if excess is not None:
            raise ValueError(f"the body holds {excess}; send less at a time")
        try:
            return large_json.parse(body) if is_long else pydantic_core.from_json(body, **large_json.STRICT)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the body is not valid JSON: {str(error).partition(chr(10))[0][:200]}") from None


def find_excess(data: bytes | bytearray) -> str | None:
    """Return what a JSON text has too much of, if anything; the contents of strings do not count.

    A text of many small values takes a hundred times its size in memory, and parsing it blocks the process. No step
    looks at single characters in Python, so this takes no longer than parsing.
    """
    if data.count(b"[") + data.count(b"{") <= MAX_JSON_DEPTH and data.count(b",") < MAX_JSON_VALUES:
        return None
    brackets, num_values = b"", 1
    for outside in leave_out_strings(data):
        brackets += outside.translate(None, delete=NO_BRACKETS)
        num_values += outside.count(b",")
        if brackets.count(b"[") + brackets.count(b"{") > MAX_JSON_BRANCHES or num_values > MAX_JSON_VALUES:
            return f"more than {MAX_JSON_BRANCHES:,} objects and lists, or {MAX_JSON_VALUES:,} values"
    return f"more than {MAX_JSON_DEPTH} levels" if is_too_deep(brackets) else None


def leave_out_strings(data: bytes | bytearray) -> Iterator[bytes]:
    """Yield a JSON text without its strings, in pieces."""
    is_inside = False
    for block in large_json.split(data, large_json.BLOCK):
        pieces = large_json.leave_out_escapes(block).split(b'"')
        yield b"".join(pieces[is_inside::2])
        is_inside ^= len(pieces) % 2 == 0


def is_too_deep(data: bytes) -> bool:
    """Return whether a JSON text is nested deeper than MAX_JSON_DEPTH.

    Innermost pairs of brackets are removed once per permitted level; anything deeper is left over.
    """
    brackets = b"".join(piece.translate(ROUND, delete=NO_BRACKETS) for piece in leave_out_strings(data))
    for _ in range(MAX_JSON_DEPTH):
        rest = brackets.replace(b"()", b"")
        if len(rest) == len(brackets):
            break
        brackets = rest
    return b"()" in brackets or brackets.count(b"(") > MAX_JSON_DEPTH


def describe(schema: dict[str, Any], model: Any) -> None:
    """Add what `Strict` checks to the JSON schema of a class."""
    schema["additionalProperties"] = True if model.drops_unknown else {"type": "null"}
    rules = list(model.rules)
    for name, flag in model.switches.items():
        rules.append(unless({name: {"enum": [None, False]}}, {flag: {"const": True}}))
    for kind, (name, _) in model.needs.items():
        others = [one for one in get_args(model.model_fields["type"].annotation) if one != kind]
        rules.append(unless({"type": {"enum": others}}, {name: {"not": {"type": "null"}}}))
    if rules:
        schema["allOf"] = rules


def unless(free: Mapping[str, Any], demanded: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema that demands some properties, unless others, where they are given, are such."""
    return {"anyOf": [{"properties": free}, {"properties": demanded, "required": [*demanded]}]}


class Strict(BaseModel):
    """A body, or a part of one: no coercion, no NaN, no unknown field unless it is null. Classes may say:

    - ignored: fields that are accepted and not used, in addition to those of the base classes
    - remedy: what to say if `type` is not one of those that its field lists
    - needs: by `type`, a field that must be there, and what to say otherwise
    - switches: by field, the one that must be true for it
    - rules: what else their JSON schema demands
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, json_schema_extra=describe)
    drops_unknown: ClassVar[bool] = False
    ignored: ClassVar[frozenset[str]] = frozenset()
    remedy: ClassVar[str] = ""
    needs: ClassVar[Mapping[str, tuple[str, str]]] = {}
    switches: ClassVar[Mapping[str, str]] = {}
    rules: ClassVar[tuple[Mapping[str, Any], ...]] = ()

    def __init_subclass__(
        cls,
        ignored: Iterable[str] = (),
        remedy: str = "",
        needs: Mapping[str, tuple[str, str]] | None = None,
        switches: Mapping[str, str] | None = None,
        rules: tuple[Mapping[str, Any], ...] = (),
    ) -> None:
        bases = [base for base in cls.__bases__ if issubclass(base, Strict)]
        cls.ignored = frozenset(ignored).union(*(base.ignored for base in bases))
        cls.switches = {name: flag for base in bases for name, flag in base.switches.items()} | dict(switches or {})
        cls.remedy, cls.needs, cls.rules = remedy, needs or {}, rules

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kind = data.get("type")
        kind = kind if isinstance(kind, str) else ""
        if kind and cls.remedy and kind not in get_args(cls.model_fields["type"].annotation):
            raise problem(cls.remedy, "type")
        if kind in cls.needs and data.get(cls.needs[kind][0]) is None:
            field, message = cls.needs[kind]
            raise problem(message, field, "missing")
        for name, flag in cls.switches.items():
            is_given = data.get(name) is not None and data[name] is not False
            if is_given and data.get(flag) is not True:
                raise problem(f"needs {flag} to be true", name)
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in data.items():
            if not (name in known or name in cls.ignored or value is None or cls.drops_unknown):
                raise problem("this field is not supported; leave it out", name, "unknown_field")
        return {name: _without_fraction(value) for name, value in data.items() if name in known}


def _without_fraction(value: Any) -> Any:
    """Return a whole number as an integer: to JSON, 8.0 is 8."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= MAX_WHOLE
    return int(value) if is_whole else value


class History(Strict):
    """A part of the conversation so far. Unknown fields are dropped: clients send back what their libraries added."""

    model_config = ConfigDict(extra="ignore")
    drops_unknown = True


def problem(message: str, field: str | None = None, kind: str = "value") -> PydanticCustomError:
    """Return a validation error about the value at hand, or about one of its fields."""
    return PydanticCustomError(kind, message, None if field is None else {"field": field})


def union(words: str) -> Discriminator:
    """Tell the members of a union apart by their type, with tags such as ~str: ~ keeps them out of error paths."""
    return discriminate(lambda value: f"~{type(value).__name__}", words)


def discriminate(find: Callable[[Any], str | None], words: str) -> Discriminator:
    """Tell the members of a union apart by `find`; where it finds none, the value "must be `words`"."""
    return Discriminator(find, custom_error_type="value", custom_error_message=f"must be {words}")


class _FirstOnly(FailFast):
    """Stop validating a long list at the first invalid item."""

    __hash__ = object.__hash__


FIRST_ONLY = _FirstOnly()
TextOr = Annotated[str, Tag("~str")] | Annotated[list[T], FIRST_ONLY, Tag("~list")]


def join(content: Any) -> str:
    """Return a text or a list of text parts as one text."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)

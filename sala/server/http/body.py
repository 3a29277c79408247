"""JSON as clients send and get it: read strictly and within limits, validated by strict models, written compactly."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, TypeVar, get_args

import pydantic_core
from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Tag, model_validator
from pydantic_core import PydanticCustomError

MAX_JSON_DEPTH = 64
MAX_JSON_BRANCHES = 1 << 17  # objects and lists
MAX_JSON_VALUES = 1 << 22  # enough for a list of the token ids of the longest context
BLOCK = 1 << 20
ROUND = bytes.maketrans(b"[{]}", b"(())")
NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))


def dump(value: Any) -> bytes:
    """Return compact JSON in ASCII, so that strings with lone surrogates can be sent too."""
    return json.dumps(value, separators=(",", ":")).encode()


def read_json(body: bytes) -> Any:
    """Parse strict JSON. If a key occurs twice in an object, the last value counts. Raises ValueError."""
    excess = find_excess(body)
    if excess is not None:
        raise ValueError(f"the body holds {excess}; send less at a time")
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False, cache_strings="keys")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not valid JSON: {str(error).partition(chr(10))[0][:200]}") from None


def find_excess(data: bytes) -> str | None:
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


def leave_out_strings(data: bytes) -> Iterator[bytes]:
    """Yield a JSON text without its strings, in pieces."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # the remaining quotes begin or end a string
    is_inside = False
    for at in range(0, len(data), BLOCK):
        pieces = data[at : at + BLOCK].split(b'"')
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


class Strict(BaseModel):
    """A body, or a part of one: no coercion, no NaN, no unknown field. Classes may say:

    - ignored: fields that are accepted and not used, in addition to those of the base classes
    - remedy: what to say if `type` is not one of those that its field lists
    - needs: by `type`, a field that must be there, and what to say otherwise
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    remedy: ClassVar[str] = ""
    needs: ClassVar[Mapping[str, tuple[str, str]]] = {}

    def __init_subclass__(
        cls, ignored: Iterable[str] = (), remedy: str = "", needs: Mapping[str, tuple[str, str]] | None = None
    ) -> None:
        cls.ignored = frozenset(ignored).union(*(base.ignored for base in cls.__bases__ if issubclass(base, Strict)))
        cls.remedy, cls.needs = remedy, needs or {}

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
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in data:
            if name not in known and name not in cls.ignored:
                raise problem("this field is not supported; leave it out", name, "unknown_field")
        return {name: value for name, value in data.items() if name in known}


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
T = TypeVar("T")
TextOr = Annotated[str, Tag("~str")] | Annotated[list[T], FIRST_ONLY, Tag("~list")]


def join(content: Any) -> str:
    """Return a text or a list of text parts as one text."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)

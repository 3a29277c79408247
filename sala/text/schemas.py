"""JSON schemas of clients, changed so that a grammar can be made of them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sala.errors import InputError
from sala.text.patterns import FORMATS, NotRegular, PatternError, is_regular, match_whole

DATA = {"const", "default", "enum", "examples"}  # hold values, not schemas
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # hold schemas by names
LENIENT = {"lenient": True, "coerce_one_of": True}  # pass over keywords that are not known; `oneOf` as `anyOf`
MAX_BOUND = 1 << 62  # a number beyond it only says that a type has a limit
MAX_PATTERNS = 1 << 17  # characters of the patterns in a schema


@contextmanager
def explaining(field: str, subject: str = "it") -> Iterator[None]:
    """Turn errors about patterns, and what else cannot be enforced, into InputError."""
    try:
        yield
    except PatternError as error:
        raise InputError(field, f"is not understood: {subject} has {error}", "correct it") from None
    except NotRegular as error:
        raise InputError(field, f"cannot be enforced: {subject} has {error}", "leave that out, or strict") from None


def _rebuild(schema: Any, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Any:
    """Return a schema in which each, from the whole inwards, is replaced by what `change` makes of it."""
    if isinstance(schema, list):
        return [_rebuild(one, change) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value
        if key in DATA
        else {name: _rebuild(one, change) for name, one in value.items()}
        if key in NAMED and isinstance(value, Mapping)
        else _rebuild(value, change)
        for key, value in change(schema).items()
    }


def simplify(schema: Any, is_strict: bool, field: str = "grammar") -> Any:
    """Return a schema without constraints that permit everything: formats that are not known, names that are any text.

    Options of the compiler are left out too and, unless the schema is strict, constraints that no grammar can enforce:
    patterns with look-around, references to other documents, the limits of 64-bit integers. Raises InputError for a
    schema with so long patterns that to read them would take long.
    """
    num_chars = sum(len(one) for one in _texts(schema, "pattern"))
    if num_chars > MAX_PATTERNS:
        raise InputError(field, f"has patterns of {num_chars:,} characters", f"at most {MAX_PATTERNS:,} are allowed")

    def change(one: Mapping[str, Any]) -> Mapping[str, Any]:
        kept = {key: value for key, value in one.items() if not _permits_all(key, value)}
        if is_strict:
            return kept
        named = kept.get("patternProperties")
        if isinstance(named, Mapping):
            kept["patternProperties"] = {key: value for key, value in named.items() if is_regular(key)}
        return {key: value for key, value in kept.items() if _is_enforceable(key, value)}

    return _rebuild(schema, change)


def _permits_all(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in FORMATS
    return key == "x-guidance" or (key == "propertyNames" and value in (True, {}, {"type": "string"}))


def _is_enforceable(key: str, value: Any) -> bool:
    if key == "pattern":
        return not isinstance(value, str) or is_regular(value)
    if key == "$ref":
        return not isinstance(value, str) or value.startswith("#")
    is_number = isinstance(value, int | float)
    return not (is_number and abs(value) > MAX_BOUND and key.lower().endswith(("minimum", "maximum")))


def spell_patterns(schema: Any) -> Any:
    """Return a schema whose patterns are written as the compiler reads them. Raises PatternError and NotRegular."""

    def change(one: Mapping[str, Any]) -> Mapping[str, Any]:
        changed = {**one}
        if isinstance(one.get("pattern"), str):
            changed["pattern"] = f"^(?:{match_whole(one['pattern'])})$"
        if isinstance(one.get("patternProperties"), Mapping):
            named = one["patternProperties"].items()
            changed["patternProperties"] = {f"^(?:{match_whole(key)})$": value for key, value in named}
        return changed

    return _rebuild(schema, change)


def as_lenient(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of which only that is enforced which a grammar can enforce."""
    return {**simplify(schema, False, "json_schema"), "x-guidance": LENIENT}


def refer_into(root: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a schema as one of its own, in which references into the whole still point somewhere."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    if all(path.startswith(tuple(f"#/{key}/" for key in shared)) for path in _texts(root, "$ref")):
        return {**shared, **schema}
    return {**_moved(schema), "$defs": {"root": _moved(root)}}


def _texts(schema: Any, key: str) -> Iterator[str]:
    """Yield the texts that stand anywhere under a key."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            waiting += one.values()
            if isinstance(text := one.get(key), str):
                yield text
        elif isinstance(one, list):
            waiting += one


def _moved(schema: Any) -> Any:
    """Return a schema with references to what will be in `$defs` as `root`."""

    def change(one: Mapping[str, Any]) -> Mapping[str, Any]:
        path = one.get("$ref")
        if not isinstance(path, str) or not path.startswith("#"):
            return one
        return {**one, "$ref": f"#/$defs/root{path[1:]}"}

    return _rebuild(schema, change)

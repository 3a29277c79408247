"""JSON schemas of clients, changed so that a grammar can be made of them."""

from collections.abc import Iterator, Mapping
from typing import Any

from sala.text.patterns import FORMATS, is_regular

DATA = {"const", "default", "enum", "examples"}  # hold values, not schemas
LENIENT = {"lenient": True, "coerce_one_of": True}  # pass over keywords that are not known; `oneOf` as `anyOf`
MAX_BOUND = 1 << 62  # a number beyond it only says that a type has a limit


def simplify(schema: Any, is_strict: bool) -> Any:
    """Return a schema without constraints that permit everything: formats that are not known, names that are any text.

    Options of the compiler are left out too and, unless the schema is strict, constraints that no grammar can enforce:
    patterns with look-around, references to other documents, the limits of 64-bit integers.
    """
    if isinstance(schema, list):
        return [simplify(one, is_strict) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {key: value for key, value in schema.items() if not _permits_all(key, value)}
    if not is_strict:
        kept = {key: value for key, value in kept.items() if _is_enforceable(key, value)}
    return {key: value if key in DATA else simplify(value, is_strict) for key, value in kept.items()}


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


def as_lenient(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of which only that is enforced which a grammar can enforce."""
    return {**simplify(schema, is_strict=False), "x-guidance": LENIENT}


def refer_into(root: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a schema as one of its own, in which references into the whole still point somewhere."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    if all(path.startswith(tuple(f"#/{key}/" for key in shared)) for path in _references(root)):
        return {**shared, **schema}
    return {**_moved(schema), "$defs": {"root": _moved(root)}}


def _references(schema: Any) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            waiting += one.values()
            if isinstance(one.get("$ref"), str):
                yield one["$ref"]
        elif isinstance(one, list):
            waiting += one


def _moved(schema: Any) -> Any:
    """Return a schema with references to what will be in `$defs` as `root`."""
    if isinstance(schema, list):
        return [_moved(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: f"#/$defs/root{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else value
        if key in DATA
        else _moved(value)
        for key, value in schema.items()
    }

"""What the parameters of a tool may be, by its JSON schema: which there are, their types, and what they refer to."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

MAX_FORMS = 16  # of the arguments of one tool
MAX_STEPS = 256  # of references and alternatives that are followed for one parameter
Kinds = frozenset[str]
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "object": (dict,), "array": (list,), "null": (type(None),),
}  # fmt: skip
KINDS: Kinds = frozenset(TYPES)


class Reader:
    """Reads the schema of one parameter; `root` is the schema that references point into.

    A schema that takes too many steps to read counts as one that permits everything.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MAX_STEPS

    def enter(self, schema: Any) -> bool:
        """Return whether a schema is an object, and there are steps left to read it."""
        self._left -= 1
        return self._left >= 0 and isinstance(schema, Mapping)

    def kinds(self, schema: Any) -> Kinds:
        """Return the JSON types that a value may have."""
        if not self.enter(schema):
            return KINDS
        given = schema.get("type")
        names = {name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)}
        found = (names | ({"integer"} if "number" in names else set())) & KINDS or KINDS
        for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
            if isinstance(values, list):
                found &= {kind for kind in KINDS if any(type(value) in TYPES[kind] for value in values)}
        if "$ref" in schema:
            found &= self.kinds(self.resolve(schema["$ref"]))
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                found &= frozenset().union(*map(self.kinds, schema[key]))
        for one in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            found &= self.kinds(one)
        return frozenset(found)

    def resolve(self, path: Any) -> Any:
        """Return what a reference points to; True, which permits everything, if that is not there."""
        if not isinstance(path, str) or not path.startswith("#"):
            return True
        found = self._root
        for part in path.removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name, True) if isinstance(found, Mapping) else True
        return found


@dataclass(frozen=True)
class Form:
    """One form that the arguments of a call may have: the schemas of its parameters, and which of them it needs.

    Unless it `is_exact`, arguments of this form may break the schema of the tool.
    """

    properties: Mapping[str, Any]
    required: tuple[str, ...] = ()
    is_exact: bool = True

    def with_all_of(self, other: "Form") -> "Form":
        """Return the form of arguments that fit both."""
        shared = self.properties.keys() & other.properties.keys()
        both = {name: {"allOf": [self.properties[name], other.properties[name]]} for name in shared}
        names = dict.fromkeys((*self.required, *other.required))
        return Form({**self.properties, **other.properties, **both}, (*names,), self.is_exact and other.is_exact)


def read_forms(parameters: Any) -> list[Form]:
    """Return the forms that the arguments of a tool may have: several where its schema has alternatives.

    Where there are too many, one form that they all fit is returned.
    """
    return _forms(parameters, Reader(parameters)) or [Form({})]


def find_kinds(name: str, parameters: Any) -> Kinds:
    """Return the JSON types that a parameter may have, in any form of the arguments."""
    found = [form.properties[name] for form in read_forms(parameters) if name in form.properties]
    return frozenset().union(*(Reader(parameters).kinds(schema) for schema in found)) if found else KINDS


def find_settled(name: str, parameters: Any) -> Kinds | None:
    """Return the JSON types that a parameter may have whatever the others are; None if they depend on those."""
    forms = [form for form in read_forms(parameters) if name in form.properties]
    found = {Reader(parameters).kinds(form.properties[name]) for form in forms}
    if len(found) > 1 and not all("string" in kinds for kinds in found):
        return None
    return find_kinds(name, parameters)


def convert(raw: Mapping[str, str], parameters: Any) -> dict[str, Any]:
    """Return arguments that are written as text with the types of the first form that they fit.

    If they fit none, each has a type that some form permits for it.
    """
    forms = read_forms(parameters)
    for form in forms if len(forms) > 1 else ():
        kinds = {name: Reader(parameters).kinds(schema) for name, schema in form.properties.items()}
        if not set(form.required) <= raw.keys() <= kinds.keys():
            continue
        arguments = {name: as_typed(text, kinds[name]) for name, text in raw.items()}
        if all(_fits(value, kinds[name], form.properties[name]) for name, value in arguments.items()):
            return arguments
    return {name: as_typed(text, find_kinds(name, parameters)) for name, text in raw.items()}


def as_typed(raw: str, kinds: Kinds) -> Any:
    """Convert a parameter to a type that its schema permits; what does not fit stays text."""
    if "string" in kinds:
        return raw
    text = {"True": "true", "False": "false", "None": "null"}.get(raw.strip(), raw)
    try:
        value = json.loads(text, parse_constant=lambda name: name)
    except (ValueError, RecursionError):
        return raw
    return value if _has_type(value, kinds) else raw


def _has_type(value: Any, kinds: Kinds) -> bool:
    return any(type(value) in TYPES[kind] for kind in kinds)


def _fits(value: Any, kinds: Kinds, schema: Any) -> bool:
    """Return whether a value has one of these types and, where its schema lists values, is one of them."""
    given = schema if isinstance(schema, Mapping) else {}
    values = [given["const"]] if "const" in given else given.get("enum")
    return _has_type(value, kinds) and (not isinstance(values, list) or value in values)


def _forms(schema: Any, reader: Reader) -> list[Form]:
    if not reader.enter(schema):
        return [Form({}, is_exact=schema is True)]
    properties, required = schema.get("properties"), schema.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    found = [Form(properties if isinstance(properties, Mapping) else {}, (*names,))]
    groups = [[reader.resolve(schema["$ref"])]] if "$ref" in schema else []
    groups += [[one] for one in schema["allOf"]] if isinstance(schema.get("allOf"), list) else []
    groups += [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
    for group in groups:
        others = [form for one in group if "object" in reader.kinds(one) for form in _forms(one, reader)]
        if len(others) > 1 and group is schema.get("oneOf"):  # they might fit several
            others = [replace(form, is_exact=False) for form in others]
        if len(found) * len(others) > MAX_FORMS:
            return [_weakest(found + others)]
        found = [form.with_all_of(other) for form in found for other in others or [Form({})]]
    return found


def _weakest(forms: Iterable[Form]) -> Form:
    """Return a form that has the parameters of all, and needs none."""
    return Form({name: True for form in forms for name in form.properties}, is_exact=False)

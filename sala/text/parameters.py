"""What the parameters of a tool may be, by its JSON schema: which there are, their types, and what they refer to."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

MAX_FORMS = 16  # forms of the arguments of one tool
MAX_STEPS = 256  # references and alternatives that are followed for one parameter
NOT_ENFORCED = ("not", "if", "dependentRequired", "dependentSchemas", "dependencies")  # in no grammar of calls
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
    """One form that the arguments of a call may have.

    - properties: the schemas of its parameters
    - required: which of them it needs
    - others: the schema of parameters with other names; None if there need not be any
    - naming: the schema of these names
    - least, most: how many parameters there must and may be
    - unenforced: what else the schema demands
    """

    properties: Mapping[str, Any]
    required: tuple[str, ...] = ()
    others: Any = None
    naming: Any = True
    least: int = 0
    most: int | None = None
    unenforced: tuple[str, ...] = ()

    def find(self, name: str) -> Any:
        """Return the schema of a parameter; None if there is no such one."""
        return self.properties.get(name, None if self.others is False else self.others)

    def with_all_of(self, other: "Form") -> "Form":
        """Return the form of arguments that fit both."""
        shared = self.properties.keys() & other.properties.keys()
        both = {name: {"allOf": [self.properties[name], other.properties[name]]} for name in shared}
        limits = {self.most, other.most} - {None}
        return Form(
            properties={**self.properties, **other.properties, **both},
            required=(*dict.fromkeys((*self.required, *other.required)),),
            others=_both(self.others, other.others, None),
            naming=_both(self.naming, other.naming, True),
            least=max(self.least, other.least),
            most=min((limit for limit in limits if limit is not None), default=None),
            unenforced=self.unenforced + other.unenforced,
        )


def _both(first: Any, second: Any, neutral: Any) -> Any:
    if first is neutral or second is neutral:
        return second if first is neutral else first
    return False if False in (first, second) else {"allOf": [first, second]}


def read_forms(parameters: Any) -> list[Form]:
    """Return the forms that the arguments of a tool may have: several where its schema has alternatives.

    Where there are too many, one form that they all fit is returned.
    """
    return _forms(parameters, Reader(parameters)) or [Form({})]


def find_kinds(name: str, parameters: Any) -> Kinds:
    """Return the JSON types that a parameter may have, in any form of the arguments."""
    found = [Reader(parameters).kinds(schema) for schema in _find_schemas(name, parameters)]
    return frozenset().union(*found) if found else KINDS


def find_settled(name: str, parameters: Any) -> Kinds | None:
    """Return the JSON types that a parameter may have whatever the others are; None if they depend on those."""
    found = {Reader(parameters).kinds(schema) for schema in _find_schemas(name, parameters)}
    if len(found) > 1 and not all("string" in kinds for kinds in found):
        return None
    return find_kinds(name, parameters)


def _find_schemas(name: str, parameters: Any) -> list[Any]:
    """Return the schemas that a parameter has in the forms that know its name or, if none does, that permit it."""
    forms = read_forms(parameters)
    known = [form.properties[name] for form in forms if name in form.properties]
    return known or [form.others for form in forms if form.others not in (None, False)]


def convert(raw: Mapping[str, str], parameters: Any) -> dict[str, Any]:
    """Return arguments that are written as text with the types of the first form that they fit.

    If they fit none, each has a type that some form permits for it.
    """
    forms = read_forms(parameters)
    for form in forms if len(forms) > 1 else ():
        schemas = {name: form.find(name) for name in raw}
        if not set(form.required) <= raw.keys() or None in schemas.values():
            continue
        kinds = {name: Reader(parameters).kinds(schema) for name, schema in schemas.items()}
        arguments = {name: as_typed(text, kinds[name]) for name, text in raw.items()}
        if all(_fits(value, kinds[name], schemas[name]) for name, value in arguments.items()):
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
        return [Form({}, unenforced=() if schema is True else ("parts that cannot be read",))]
    properties, required = schema.get("properties"), schema.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    properties = properties if isinstance(properties, Mapping) else {}
    found = [replace(_read_others(schema, properties), properties=properties, required=(*names,))]
    groups = [[reader.resolve(schema["$ref"])]] if "$ref" in schema else []
    groups += [[one] for one in schema["allOf"]] if isinstance(schema.get("allOf"), list) else []
    groups += [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
    for group in groups:
        others = [form for one in group if "object" in reader.kinds(one) for form in _forms(one, reader)]
        if len(others) > 1 and group is schema.get("oneOf"):  # they might fit several
            others = [replace(form, unenforced=(*form.unenforced, "'oneOf'")) for form in others]
        if len(found) * len(others) > MAX_FORMS:
            return [_weakest(found + others)]
        found = [form.with_all_of(other) for form in found for other in others or [Form({})]]
    return found


def _read_others(schema: Mapping[str, Any], properties: Mapping[str, Any]) -> Form:
    """Return what a schema says about parameters that it does not list, about their number, and what is not enforced.

    Where it lists some, there need not be others unless it says what they look like.
    """
    counts = (schema.get(key) for key in ("minProperties", "maxProperties"))
    least, most = (count if isinstance(count, int) and count >= 0 else None for count in counts)
    unenforced = [repr(key) for key in NOT_ENFORCED if key in schema]
    naming, others = schema.get("propertyNames", True), schema.get("additionalProperties", True if least else None)
    others = others if (isinstance(others, Mapping) and others) or not properties else None
    patterns = schema.get("patternProperties")
    if isinstance(patterns, Mapping) and patterns:
        pattern, others = next(iter(patterns.items()))
        naming, others = _both(naming, {"pattern": pattern}, True), others if len(patterns) == 1 else False
        if any(_may_match(pattern, name) for pattern in patterns for name in properties):
            unenforced.append("'patternProperties'")
    if properties and "propertyNames" in schema:
        unenforced.append("'propertyNames'")
    return Form({}, (), True if others == {} else others, naming, least or 0, most, (*unenforced,))


def _may_match(pattern: str, name: str) -> bool:
    """Return whether a pattern may occur in a name, by what it begins with: to search for it may take very long."""
    begins = re.match(r"\^((?:[\w-](?![?*+{]))*)", pattern)
    return begins is None or "|" in pattern or name.startswith(begins[1])


def _weakest(forms: Iterable[Form]) -> Form:
    """Return a form that has the parameters of all, and needs none."""
    return Form({name: True for form in forms for name in form.properties}, unenforced=("so many alternatives",))

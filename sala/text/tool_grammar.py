"""Grammars of tool calls that fit their schemas, in Lark's syntax and in the form of calls that `tools` parses.

A string stands between its tags as it is, so its constraints (pattern, format, length, values) become a terminal: an
intersection of regular expressions. Every other value is JSON; objects and lists go into CDATA, since they may hold
a `<`.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sala.errors import InputError
from sala.text.control import MAX_GRAMMAR_BYTES
from sala.text.parameters import Form, Kinds, Reader, read_forms
from sala.text.patterns import ANY, FORMATS, is_anchored_inside, match_whole, spell
from sala.text.schemas import LENIENT, refer_into, simplify

TERMINALS = (
    r"TEXT: /[^<]*/",
    r"INSIDE: /([^\]]|\][^\]]|\]\]+[^\]>])*\]*/",  # of CDATA: anything without `]]>`
    r'DATA: INSIDE "]]>"',
)
COMPACT = {"whitespace_flexible": False}  # otherwise a weak model may emit spaces without end
NOT_ENFORCED = ("not", "if", "dependentRequired", "dependentSchemas", "dependencies", "minProperties", "maxProperties")
SIMPLE: Kinds = frozenset({"integer", "number", "boolean", "null"})


def call_grammar(
    functions: Sequence[Mapping[str, Any]],
    is_single: bool,
    answer: Mapping[str, Any] | None = None,
    strict: Collection[str] | None = None,
) -> str:
    """Return a grammar of calls of these functions; with `answer`, a JSON schema, also of such an answer instead.

    Of functions that are not among the `strict` ones (None: all are), constraints that no grammar can enforce are left
    out. Raises InputError for a strict one that has any, and as soon as the grammar is too long.
    """
    names = [f"f{index}" for index in range(len(functions))]
    calls = "call" if is_single else r'call ("\n" call)*'
    rules = [f"start: {calls}" if answer is None else f"start: {calls} | answer"]
    if answer is not None:
        rules.append(f"answer: {_json(answer)}")
    rules.append(f"call: {' | '.join(names)}")
    for name, function in zip(names, functions, strict=True):
        opening = _quote(f'<function name="{function["name"]}">')
        rules += _function_rules(name, function, opening, strict is None or function["name"] in strict)
        _check_length(rules)
    return "\n".join([*rules, *TERMINALS]) + "\n"


def strict_grammar(functions: Sequence[Mapping[str, Any]]) -> str:
    """Return a grammar of any text, in which a call of one of these functions, once it is opened, fits its schema.

    The text up to an opening tag is one lazy lexeme, which ends where the tag is complete. Raises InputError for a
    function that has constraints which no grammar can enforce.
    """
    names = [f"f{index}" for index in range(len(functions))]
    rules = ["start: call* rest", f"rest: /{ANY}/", f"call: {' | '.join(names)}"]
    for name, function in zip(names, functions, strict=True):
        opening = rf'{ANY}<function\s+name="{re.escape(function["name"])}"\s*>'
        rules += [f"{name}open[lazy]: /{opening}/", *_function_rules(name, function, f"{name}open", True)]
        _check_length(rules)
    return "\n".join([*rules, *TERMINALS]) + "\n"


def _check_length(rules: Sequence[str]) -> None:
    """Raise InputError for a grammar that is too long already."""
    count = sum(map(len, rules))
    if count > MAX_GRAMMAR_BYTES:
        raise InputError("grammar", f"has {count:,} characters or more", f"at most {MAX_GRAMMAR_BYTES:,} are allowed")


def _function_rules(name: str, function: Mapping[str, Any], opening: str, is_strict: bool) -> list[str]:
    """Return the rules of a call, which begins with `opening`."""
    schema = simplify(function.get("parameters") or {}, is_strict)
    forms = read_forms(schema)
    if is_strict:
        _check_strict(function["name"], schema, forms)
    known: dict[str, str] = {}  # rules of parameters
    rules, bodies = [], []
    for form in forms:
        parts = []
        for key, value in {**form.properties, **dict.fromkeys(form.required, True), **form.properties}.items():
            if value is False or not _can_be_written(key):
                continue
            given = json.dumps([key, value], allow_nan=False)
            if given not in known:
                rule = known[given] = f"{name}p{len(known)}"
                body, terminals = _value(rule.upper(), value, schema, is_strict)
                tag = _quote(f'<param name="{key}">')
                rules += [f'{rule}: {tag} {body} "</param>"', *terminals]
            parts.append(known[given] if key in form.required else f"{known[given]}?")
        bodies.append(" ".join([*parts, '"</function>"']))
    body = f"({' | '.join(dict.fromkeys(bodies))})" if len(bodies) > 1 else bodies[0]
    return [f"{name}: {opening} {body}", *rules]


def _check_strict(name: str, schema: Mapping[str, Any], forms: Sequence[Form]) -> None:
    """Raise InputError if calls of a function cannot be made to fit its schema.

    Keywords inside of parameters that are not strings are left to the compiler.
    """
    reader, schemas = Reader(schema), [schema]
    schemas += schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    schemas += [one for form in forms for one in form.properties.values() if "string" in reader.kinds(one)]
    found = [key for one in schemas if isinstance(one, Mapping) for key in NOT_ENFORCED if key in one]
    found += [key for form in forms for key in form.required if not _can_be_written(key)]
    if found or not all(form.is_exact for form in forms):
        what = repr(found[0]) if found else "alternatives"
        problem = f"hold the strict function {name!r} with {what}, which cannot be enforced"
        raise InputError("grammar", problem, "leave that out, or strict")


def _can_be_written(key: str) -> bool:
    """Return whether the format of calls can express the name of a parameter."""
    return not any(char in key for char in '"<>')


def _value(name: str, schema: Any, root: Mapping[str, Any], is_strict: bool) -> tuple[str, list[str]]:
    """Return the rule for the text between the tags, and terminals that it uses, whose names begin with `name`."""
    kinds = Reader(root).kinds(schema)
    if "string" in kinds:
        wanted = _strings(schema, Reader(root), is_strict)
        if not wanted:
            return '(TEXT | "<![CDATA[" DATA)', []
        terminals = [f"{name}_TEXT: {wanted} & TEXT", f'{name}_DATA: ({wanted} & INSIDE) "]]>"']
        return f'({name}_TEXT | "<![CDATA[" {name}_DATA)', terminals
    inner = _json({**refer_into(root, schema), **({} if is_strict else {"x-guidance": LENIENT})})
    return inner if kinds <= SIMPLE else f'"<![CDATA[" {inner} "]]>"', []


def _json(schema: Mapping[str, Any]) -> str:
    options = {**schema.get("x-guidance", {}), **COMPACT}
    return f"%json {json.dumps({**schema, 'x-guidance': options}, allow_nan=False)}"


def _strings(schema: Any, reader: Reader, is_strict: bool) -> str:
    """Return a terminal of the strings that a schema permits; empty if it permits any."""
    if not reader.enter(schema):
        return ""
    parts = [_strings(reader.resolve(schema["$ref"]), reader, is_strict)] if "$ref" in schema else []
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            parts.append(f"({' | '.join(_quote(value) for value in values if isinstance(value, str))})")
    least, most = schema.get("minLength"), schema.get("maxLength")
    if least is not None or most is not None:
        parts.append(f"/(?s:.{{{least or 0},{'' if most is None else most}}})/")
    if isinstance(schema.get("pattern"), str):
        whole = match_whole(schema["pattern"])
        if is_strict or not is_anchored_inside(whole):
            parts.append(f"/{spell(whole)}/")
    if isinstance(schema.get("format"), str) and schema["format"] in FORMATS:
        parts.append(f"/{spell(FORMATS[schema['format']])}/")
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found = [_strings(one, reader, is_strict) for one in schema[key] if "string" in reader.kinds(one)]
            parts.append(f"({' | '.join(found)})" if all(found) else "")
    if isinstance(schema.get("allOf"), list):
        parts += [_strings(one, reader, is_strict) for one in schema["allOf"]]
    return " & ".join(filter(None, parts))


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

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
from sala.text.parameters import NOT_ENFORCED, Form, Kinds, Reader, read_forms
from sala.text.patterns import ANY, FORMATS, NotRegular, match_whole
from sala.text.schemas import LENIENT, explaining, refer_into, simplify, spell_patterns

TERMINALS = (
    r"TEXT: /[^<]*/",
    r"INSIDE: /([^\]]|\][^\]]|\]\]+[^\]>])*\]*/",  # of CDATA: anything without `]]>`
    r'DATA: INSIDE "]]>"',
    r'NAME: /[^"<>\x00-\x1f]{1,128}/',  # of a parameter that its schema does not list
)
COMPACT = {"whitespace_flexible": False}  # otherwise a weak model may emit spaces without end
MAX_NAME = 512  # characters of a parameter's name that `tools` reads
MAX_STATES = 2000  # rules that count parameters
SIMPLE: Kinds = frozenset({"integer", "number", "boolean", "null"})
END = '"</function>"'


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
        with explaining("json_schema"):
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
    with explaining("grammar", f"{'the strict ' if is_strict else ''}function {function['name']!r}"):
        schema = simplify(function.get("parameters") or {}, is_strict)
        parameters = _Parameters(name, schema, is_strict)
        bodies: list[str] = []
        rules: list[str] = []
        for index, form in enumerate(read_forms(schema)):
            listed = {key: form.find(key) for key in dict.fromkeys((*form.properties, *form.required))}
            listed = {key: value for key, value in listed.items() if value is not False and _can_be_written(key)}
            parts = [(parameters.add(key, value), key in form.required) for key, value in listed.items()]
            other = parameters.add_other(form)
            counted = [] if _counts_itself(form, parts) else _counted(f"{name}n{index}", form, parts, other)
            if is_strict:
                _check_strict(form, counted is not None)
            bodies.append(f"{name}n{index}_0_0" if counted else _body(form, parts, other))
            rules += counted or ()
    body = f"({' | '.join(dict.fromkeys(bodies))})" if len(bodies) > 1 else bodies[0]
    return [f"{name}: {opening} {body}", *rules, *parameters.rules]


class _Parameters:
    """Rules of parameters: of each one once, whatever forms of the arguments have it."""

    def __init__(self, name: str, schema: Mapping[str, Any], is_strict: bool) -> None:
        self.rules: list[str] = []
        self._name, self._schema, self._is_strict = name, schema, is_strict
        self._known: dict[str, str] = {}

    def add(self, key: str, schema: Any) -> str:
        """Return the rule of a parameter with this name."""
        return self._add([key, schema], _quote(f'<param name="{key}">'))

    def add_other(self, form: Form) -> str | None:
        """Return the rule of a parameter that a form does not list; None if there is no such one."""
        if form.others in (None, False):
            return None
        wanted = _strings(form.naming, Reader(self._schema), self._is_strict)
        listed = " | ".join(map(_quote, dict.fromkeys((*form.properties, *form.required))))
        name = " & ".join(filter(None, ["NAME", wanted, f"~({listed})" if listed else ""]))
        terminal = f"{self._name}o{len(self._known)}".upper()
        definition = rf'''{terminal}: "<param name=\"" ({name}) "\">"'''
        return self._add([form.naming, listed, form.others], terminal, definition)

    def _add(self, given: list[Any], opening: str, *terminals: str) -> str:
        text = json.dumps(given, allow_nan=False)
        if text not in self._known:
            rule = self._known[text] = f"{self._name}p{len(self._known)}"
            body, more = _value(rule.upper(), given[-1], self._schema, self._is_strict)
            self.rules += [f'{rule}: {opening} {body} "</param>"', *terminals, *more]
        return self._known[text]


def _body(form: Form, parts: Sequence[tuple[str, bool]], other: str | None) -> str:
    """Return what follows the opening tag, where parameters need not be counted, or cannot be."""
    words = [rule if is_required else f"{rule}?" for rule, is_required in parts]
    least = max(0, form.least - len(parts))
    most = "" if form.most is None else max(least, form.most - len(parts))
    words += [f"{other}{{{least},{most}}}"] if other is not None and most != 0 else []
    return " ".join([*words, END])


def _counts_itself(form: Form, parts: Sequence[tuple[str, bool]]) -> bool:
    """Return whether there are as many parameters as there must and may be, whichever are left out."""
    return form.least <= sum(is_required for _, is_required in parts) and (form.most is None or len(parts) <= form.most)


def _counted(name: str, form: Form, parts: Sequence[tuple[str, bool]], other: str | None) -> list[str] | None:
    """Return rules `name_INDEX_COUNT` of the parameters from an index on, of which so many have been written.

    None if there are too many, or if no arguments would fit. Names that are not listed might be repeated, so that of
    these one at most is demanded.
    """
    limit = form.least if form.most is None else form.most
    rules, waiting, known = [], [(0, 0)], {(0, 0)}
    while waiting:
        if len(known) > MAX_STATES:
            return None
        at, count = waiting.pop()
        if at == len(parts):
            room = "" if form.most is None else form.most - count
            more = f"{other}{{{max(0, form.least - count)},{room}}} " if other is not None and room != 0 else ""
            rules.append(f"{name}_{at}_{count}: {more}{END}")
            continue
        rule, is_required = parts[at]
        taken = (at + 1, min(count + 1, limit) if form.most is None else count + 1)
        found = {taken: f"{rule} ", **({} if is_required else {(at + 1, count): ""})}
        found = {state: word for state, word in found.items() if _can_end(form, parts, other, *state)}
        branches = [f"{word}{name}_{state[0]}_{state[1]}" for state, word in found.items()]
        rules.append(f"{name}_{at}_{count}: {' | '.join(branches)}")
        waiting += found.keys() - known
        known |= found.keys()
    return rules if _can_end(form, parts, other, 0, 0) else None


def _can_end(form: Form, parts: Sequence[tuple[str, bool]], other: str | None, at: int, count: int) -> bool:
    """Return whether the right number of parameters can be reached."""
    num_needed = count + sum(is_required for _, is_required in parts[at:])
    is_enough = count + len(parts) - at + (other is not None) >= form.least
    return is_enough and (form.most is None or num_needed <= form.most)


def _check_strict(form: Form, is_counted: bool) -> None:
    """Raise NotRegular if calls of a function cannot be made to fit its schema.

    Keywords inside of parameters are left to those who read them.
    """
    found = [*form.unenforced, *(f"the name {key!r}" for key in form.required if not _can_be_written(key))]
    found += [] if is_counted else [repr("minProperties" if form.least else "maxProperties")]
    if found:
        raise NotRegular(found[0])


def _can_be_written(key: str) -> bool:
    """Return whether the format of calls can express the name of a parameter."""
    return len(key) <= MAX_NAME and not any(char in key for char in '"<>')


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
    return f"%json {json.dumps({**spell_patterns(schema), 'x-guidance': options}, allow_nan=False)}"


def _strings(schema: Any, reader: Reader, is_strict: bool) -> str:
    """Return a terminal of the strings that a schema permits; empty if it permits any."""
    if not reader.enter(schema):
        return ""
    if is_strict and (found := [key for key in NOT_ENFORCED if key in schema]):
        raise NotRegular(repr(found[0]))
    parts = [_strings(reader.resolve(schema["$ref"]), reader, is_strict)] if "$ref" in schema else []
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            parts.append(_one_of(values, is_strict))
    least, most = schema.get("minLength"), schema.get("maxLength")
    if least is not None or most is not None:
        parts.append(f"/(?s:.{{{least or 0},{'' if most is None else most}}})/")
    if isinstance(schema.get("pattern"), str):
        parts.append(f"/{match_whole(schema['pattern'])}/")
    form = FORMATS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if form is not None:
        parts.append(f"/{match_whole(f'^({form})$')}/")
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found = [_strings(one, reader, is_strict) for one in schema[key] if "string" in reader.kinds(one)]
            parts.append(f"({' | '.join(f'({one})' for one in found)})" if all(found) else "")
    if isinstance(schema.get("allOf"), list):
        parts += [_strings(one, reader, is_strict) for one in schema["allOf"]]
    return " & ".join(filter(None, parts))


def _one_of(values: Sequence[Any], is_strict: bool) -> str:
    """Return a terminal of the strings among some values. One with both `<` and `]]>` cannot be written."""
    texts = [one for one in values if isinstance(one, str) and not ("<" in one and "]]>" in one)]
    if not texts and is_strict:
        raise NotRegular("no value that can be written")
    return f"({' | '.join(map(_quote, texts))})" if texts else ""


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

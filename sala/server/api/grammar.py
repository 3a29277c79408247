"""Grammars, in Lark's syntax, that force an answer to call tools in the form that `text.tools` parses."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

TEXT = r"TEXT: /[^<]*/"
DATA = r"DATA: /([^\]]|\][^\]])*/"
COMPACT = {"x-guidance": {"whitespace_flexible": False}}  # otherwise a weak model may emit spaces without end
SIMPLE = ("integer", "number", "boolean", "null")


def call_grammar(
    functions: Sequence[Mapping[str, Any]], is_single: bool, answer: Mapping[str, Any] | None = None
) -> str:
    """Return a grammar of calls of these functions; with `answer`, a JSON schema, also of such an answer instead."""
    names = [f"f{index}" for index in range(len(functions))]
    calls = "call" if is_single else r'call ("\n" call)*'
    rules = [f"start: {calls}" if answer is None else f"start: {calls} | answer"]
    if answer is not None:
        rules.append(f"answer: %json {json.dumps({**COMPACT, **answer}, allow_nan=False)}")
    rules.append(f"call: {' | '.join(names)}")
    for name, function in zip(names, functions, strict=True):
        rules += _function_rules(name, function)
    return "\n".join([*rules, TEXT, DATA]) + "\n"


def _function_rules(name: str, function: Mapping[str, Any]) -> list[str]:
    schema = function.get("parameters") or {}
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts, rules = [_quote(f'<function name="{function["name"]}">')], []
    for index, (key, value) in enumerate(properties.items()):
        if any(char in key for char in '"<>'):  # the call format cannot express such a name
            continue
        rule = f"{name}p{index}"
        parts.append(rule if key in required else f"{rule}?")
        opening = _quote(f'<param name="{key}">')
        rules.append(f'{rule}: {opening} {_value(value, shared)} "</param>"')
    parts.append('"</function>"')
    return [f"{name}: {' '.join(parts)}", *rules]


def _value(schema: Any, shared: Mapping[str, Any]) -> str:
    """Return the rule for the text between the tags. Objects and lists go into CDATA, since they may hold a `<`."""
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(schema.get("enum"), list) and all(isinstance(item, str) for item in schema["enum"]):
        texts = (f"<![CDATA[{item}]]>" if "<" in item else item for item in schema["enum"])
        return f"({' | '.join(map(_quote, texts))})"
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if kinds == [None] and ("$ref" in schema or "anyOf" in schema or "oneOf" in schema or "allOf" in schema):
        kinds = ["object"]
    if not all(kind in (*SIMPLE, "object", "array") for kind in kinds):
        return '(TEXT | "<![CDATA[" DATA "]]>")'
    inner = f"%json {json.dumps({**shared, **schema, **COMPACT}, allow_nan=False)}"
    if all(kind in SIMPLE for kind in kinds):
        return inner
    return f'"<![CDATA[" {inner} "]]>"'


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

"""Every forced call fits its schema, whatever the schema demands: random tokens among those that the grammar allows."""

import contextlib
import itertools
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sala.config import SalaConfig
from sala.errors import InputError
from sala.options import Sampling
from sala.text.control import Grammar, GrammarCompiler
from sala.text.patterns import FORMATS, match_whole
from sala.text.tokenizer import Tokenizer
from sala.text.tool_grammar import call_grammar, strict_grammar
from tests.splitting import parse_calls

END = 259
IS_FULL = bool(os.environ.get("SALA_TEST_FULL"))
PATTERNS = (
    r"^[A-Z]{3}$", r"^\d{2}-\w+$", "[aeiou]{2}", "^(red|green|blue)$", "^a|z$", "(?:^x$)|(?:^yy$)", r"^/[a-z]+/\d$",
    r"^\$[0-9]{1,3}\.[0-9]{2}$", "^[^<>]{2,5}$", "^<[a-z]>$", r"\d$", "^[]x]+$", "x{2}",
    "^(qx|zy$)", "(^a|b)c$", "^(?:(^a|x)b)?[0-9]$", "(a$|^b){1,2}", "^(ab?)*(c|$)", "[^a]*?(^|b)c",
)  # fmt: skip
ECMASCRIPT = {  # patterns that Python reads otherwise, or not at all, and what they mean in its words
    r"^(?<year>\d{4})$": r"^[0-9]{4}$",
    "^[^]{2,4}$": r"^[\s\S]{2,4}\Z",
    "^[[a]&&b]$": r"^[a\[]&&b\]$",
    r"^\cA\/[\w-]\W$": r"^\x01/[0-9A-Za-z_-][^0-9A-Za-z_]$",
    r"^\u{e9}\uD83D\uDE00?$": "^é😀?$",
    r"^{[^\x00-\u{ff}]}$": r"^\{[^\x00-\xff]\}$",
    r"^[\p{L}_]+$": r"^[^\W\d]+$",
    "^x.y$": "^x[^\n\r\u2028\u2029]y$",
}
CHECKED = ("date", "email", "ipv4", "ipv6", "uuid")  # formats that jsonschema checks without further packages
CHECKER = jsonschema.FormatChecker(CHECKED)


def check_pattern(_: Any, pattern: str, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(value, str) and not re.search(ECMASCRIPT.get(pattern, pattern), value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern}")


Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": check_pattern})


def make_string(dice: random.Random) -> dict[str, Any]:
    kind = dice.randrange(8)
    if kind == 0:
        return {"type": "string", "pattern": dice.choice([*PATTERNS, *ECMASCRIPT])}
    if kind == 1:
        return {"type": "string", "format": dice.choice(sorted(FORMATS))}
    if kind == 2:
        return {"enum": dice.sample(["a", "a<b", "", "été", 'say "hi"', "]]", "x\ny"], dice.randint(1, 4))}
    if kind == 3:
        return {"const": dice.choice(["flight", "<b>", "1", "null"])}
    least = dice.randrange(4)
    if kind == 4:
        return {"type": "string", "pattern": "^[a-z]+$", "minLength": least, "maxLength": least + 3}
    if kind == 5:
        return {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}
    if kind == 6:
        return {"$ref": "#/$defs/code"}
    return {"type": ["string", "integer"], "minLength": least, "maxLength": least + dice.randrange(5)}


def make_value(dice: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = dice.randrange(9 if depth < 2 else 6)
    if kind < 4:
        return make_string(dice)
    if kind == 4:
        low = dice.randint(-20, 20)
        return {"type": "integer", "minimum": low, "maximum": low + dice.randrange(30)}
    if kind == 5:
        return dice.choice([{"type": "boolean"}, {"const": 5}, {"enum": [1, None]}, {"type": ["number", "null"]}])
    if kind == 6:
        return {"type": "array", "items": make_value(dice, depth + 1), "minItems": 1, "maxItems": 2}
    if kind == 7:
        return {"anyOf": [make_object(dice, depth + 1), {"type": "null"}]}
    return make_object(dice, depth + 1)


def make_object(dice: random.Random, depth: int) -> dict[str, Any]:
    properties = {f"p{index}": make_value(dice, depth) for index in range(dice.randint(1, 3))}
    required = [name for name in properties if dice.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def make_parameters(dice: random.Random) -> dict[str, Any]:
    """Return a schema of arguments: as it is, behind a reference, in parts, with alternatives, or with any names."""
    kind, first, second = dice.randrange(9), make_object(dice, 0), make_object(dice, 0)
    defs = {"code": {"type": "string", "pattern": "^[A-Z]{2}$"}}
    if kind == 0:
        return {"$ref": "#/$defs/first", "$defs": {**defs, "first": first}}
    if kind == 1:
        more = {"properties": {"q": make_value(dice)}, "required": ["q"]}
        return {"allOf": [{**first, "additionalProperties": True}, more], "$defs": defs}
    if kind == 2:
        for name, one in (("a", first), ("b", second)):
            one["properties"]["kind"] = {"const": name}
            one["required"].append("kind")
        return {"type": "object", "anyOf": [first, second, {"type": "null"}], "$defs": defs}
    if kind == 3:
        first["properties"]["far"] = {"$ref": "#/properties/p0"}
        first["required"].append("far")
    if kind == 4:
        num_required, num = len(first["required"]), len(first["properties"])
        first["minProperties"], first["maxProperties"] = dice.randint(0, num), dice.randint(max(1, num_required), 4)
        first["minProperties"] = min(first["minProperties"], first["maxProperties"])
    if kind == 5:
        names = dice.choice(["^x-", "[aeiou]$", "^(a|b$)"])
        others = {"patternProperties": {names: make_value(dice)}, "additionalProperties": False}
        return {"type": "object", **others, "minProperties": dice.randrange(2), "maxProperties": 3, "$defs": defs}
    if kind == 6:
        first["additionalProperties"], first["minProperties"] = (
            make_value(dice),
            dice.randrange(len(first["properties"]) + 2),
        )
    return {**first, "$defs": defs}


def write(grammar: Grammar, dice: random.Random, limit: int) -> str | None:
    """Return what random allowed tokens spell; None if it does not end within the limit."""
    text = bytearray()
    for _ in range(limit):
        mask = grammar.mask()
        assert mask is not None
        allowed = [token for token in range(256) if mask[token // 8] >> token % 8 & 1]
        if mask[END // 8] >> END % 8 & 1:
            return text.decode()
        closing = [token for token in allowed if token in b'<"]}']
        token = dice.choice(closing if closing and dice.random() < 0.3 else allowed)
        text.append(token)
        verdict = grammar.observe(token)
        if verdict is not None:
            assert verdict.finish == "stop"
            return text.decode()
    return None


@pytest.fixture(scope="module")
def compiler(tiny: Path) -> GrammarCompiler:
    return GrammarCompiler(tiny / "tokenizer.json", SalaConfig.load(tiny).vocab_size, frozenset({END}))


def test_every_forced_call_fits_its_schema(compiler: GrammarCompiler, tiny: Path) -> None:
    assert Tokenizer.load(tiny).encode("az<", bos=False) == [*b"az<"]
    dice, ended, both = random.Random(7), 0, (None, ())
    for number in range(400 if IS_FULL else 200):
        if number % 2 == 0 or not IS_FULL:  # otherwise each in both ways
            schema = make_parameters(dice)
        tool = {"name": "f", "parameters": schema}
        grammar = compiler.compile(Sampling(grammar=call_grammar([tool], True, strict=both[number % 2])))
        text = write(grammar, dice, 300)
        if text is None:
            continue
        ended += 1
        rest, calls = parse_calls(text, [{"type": "function", "function": tool}])
        assert (rest, len(calls)) == ("", 1), text
        Validator(schema, format_checker=CHECKER).validate(calls[0].arguments)
    assert ended > 150


INTEGER = {"type": "integer"}
LOOKING = {"type": "string", "pattern": "^(?!a)b$"}  # what zod makes of an e-mail address looks like this
UNENFORCED = {  # parameters, and arguments that fit what is left of them
    "root not": ({"properties": {"x": INTEGER}, "required": ["x"], "not": {"required": ["y"]}}, {"x": 1}),
    "root if": ({"properties": {"x": INTEGER}, "if": {"required": ["x"]}, "then": {"required": ["y"]}}, {"x": 1}),
    "root oneOf": ({"oneOf": [{"properties": {"x": INTEGER}}, {"properties": {"y": INTEGER}}]}, {"y": 1}),
    "not": ({"properties": {"x": {"type": "string", "not": {"const": "a"}}}}, {"x": "a"}),
    "name": ({"properties": {'"': INTEGER, "x": INTEGER}, "required": ['"', "x"]}, {"x": 1}),
    "look-around": ({"properties": {"x": LOOKING}, "required": ["x"]}, {"x": "any"}),
    "look-around inside": ({"properties": {"x": {"type": "array", "items": LOOKING}}}, {"x": ["any"]}),
    "word": ({"properties": {"x": {"type": "string", "pattern": r"\bfoo\b", "maxLength": 3}}}, {"x": "bar"}),
    "value": ({"properties": {"x": {"enum": ["a]]>b<c"]}}, "required": ["x"]}, {"x": "any"}),
    "number": ({"additionalProperties": INTEGER, "minProperties": 2}, {"x": 1, "y": 2}),
    "names of any": ({"properties": {"xy": INTEGER}, "patternProperties": {"^x": {"minimum": 3}}}, {"xy": 1}),
    "far not": ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"x": INTEGER}, "not": {}}}}, {"x": 1}),
    "unique": ({"properties": {"x": {"type": "array", "items": INTEGER, "uniqueItems": True}}}, {"x": [1, 1]}),
    "names": ({"properties": {"x": {"type": "object", "propertyNames": {"pattern": "a"}}}}, {"x": {"b": 1}}),
    "oneOf": ({"properties": {"x": {"oneOf": [INTEGER, {"type": "number"}]}}}, {"x": 1}),
    "limit": ({"properties": {"x": {**INTEGER, "minimum": -(1 << 63), "maximum": (1 << 63) - 1}}}, {"x": -5}),
    "document": ({"properties": {"x": {"type": "object", "$ref": "https://example.org/x"}}}, {"x": {}}),
    "many": ({"allOf": [{"anyOf": [{"properties": {f"x{n}": {}}} for n in range(5)]}] * 2}, {"x4": "any"}),
}


@pytest.mark.parametrize("name", UNENFORCED)
def test_what_no_grammar_can_enforce(compiler: GrammarCompiler, name: str) -> None:
    """It is an error in a strict tool, and left out of any other, whose remaining constraints hold."""
    parameters, arguments = UNENFORCED[name]
    tool = {"name": "f", "parameters": parameters}
    with pytest.raises(InputError, match=r"enforced|is not understood"):
        compiler.compile(Sampling(grammar=call_grammar([tool], True)))
    grammar = compiler.compile(Sampling(grammar=call_grammar([tool], True, strict=())))
    given = {
        key: value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        for key, value in arguments.items()
    }
    written = {key: f"<![CDATA[{text}]]>" if text[0] in "[{" else text for key, text in given.items()}
    params = "".join(f'<param name="{key}">{text}</param>' for key, text in written.items())
    text = f'<function name="f">{params}</function>'
    feed(grammar, text)
    assert parse_calls(text, [tool])[1][0].arguments == arguments


def test_what_permits_everything_is_passed_over(compiler: GrammarCompiler) -> None:
    """Formats that are not known, names of any text (both as zod writes them), and options of the compiler."""
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"format": "cuid"}}
    parameters = {"properties": {"x": record, "no": False}, "required": ["x"], "x-guidance": {"lenient": "yes"}}
    grammar = compiler.compile(Sampling(grammar=call_grammar([{"name": "f", "parameters": parameters}], True)))
    feed(grammar, '<function name="f"><param name="x"><![CDATA[{"a":"b"}]]></param></function>')


@pytest.mark.parametrize("strict", [None, ()])
def test_parameters_with_any_names(compiler: GrammarCompiler, strict: Any) -> None:
    """Where a schema says what they look like, they may be written, and must be if it demands some."""
    call = '<function name="f">{}</function>'
    texts = {
        "": call.format(""),
        "b": call.format('<param name="b">2</param>'),
        "x-1": call.format('<param name="x-1">-3</param><param name="x-2">4</param>'),
        "word": call.format('<param name="x-1">word</param>'),
    }
    expected: dict[str, tuple[dict[str, Any], set[str]]] = {
        "integers": ({"additionalProperties": INTEGER}, {"", "b", "x-1"}),
        "some": ({"additionalProperties": INTEGER, "minProperties": 1}, {"b", "x-1"}),
        "text": ({"additionalProperties": True}, {"", "b", "x-1", "word"}),
        "names": ({"patternProperties": {"^x-": INTEGER}, "minProperties": 1}, {"x-1"}),
        "one": ({"propertyNames": {"maxLength": 1}, "additionalProperties": INTEGER, "minProperties": 1}, {"b"}),
        "listed": ({"properties": {"a": {}, "b": {}}, "minProperties": 1}, {"b"}),
        "none": ({"properties": {}, "additionalProperties": False}, {""}),
    }
    for parameters, fitting in expected.values():
        tool = {"name": "f", "parameters": {"type": "object", **parameters}}
        grammar_text, found = call_grammar([tool], True, strict=strict), set()
        for name, text in texts.items():
            with contextlib.suppress(AssertionError):
                feed(compiler.compile(Sampling(grammar=grammar_text)), text)
                found.add(name)
        assert found == fitting, parameters
    tool = {"name": "f", "parameters": {"additionalProperties": INTEGER}}
    assert parse_calls(texts["x-1"], [tool])[1][0].arguments == {"x-1": -3, "x-2": 4}


def test_strict_calls_fit_their_schema(compiler: GrammarCompiler) -> None:
    """Text is free up to the opening tag of a strict tool, and after the call; other tools are free."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tools = [{"name": name, "parameters": schema} for name in ("f", "g-2")]
    grammar_text, dice = strict_grammar(tools), random.Random(11)
    call = '<function name="f"><param name="n">{}</param></function>'
    free = ["", "Hello, <b>you</b> <function", '<function name="other"><param name="n">x</param></function>']
    for before, opening in itertools.product(free, ['<function name="f">', '\n<function  name="g-2"\n>']):
        grammar = compiler.compile(Sampling(grammar=grammar_text))
        feed(grammar, f"{before}{call.format(-3)} and {opening}")
        rest = write(grammar, dice, 300)
        assert rest is not None
        _, calls = parse_calls(opening + rest)
        assert set(calls[0].arguments) == {"n"}
        assert re.fullmatch("-?[0-9]+", str(calls[0].arguments["n"]))
    for text in free:
        grammar = compiler.compile(Sampling(grammar=grammar_text))
        feed(grammar, text)
        mask = grammar.mask()
        assert mask is not None
        assert mask[END // 8] >> END % 8 & 1, "the answer may end here"
    refused = [
        call.format("x"),
        '<function name="f"></function>',
        '<function name="f"><param name="x">1</param></function>',
    ]
    for text in refused:
        with pytest.raises(AssertionError, match="not allowed"):
            feed(compiler.compile(Sampling(grammar=grammar_text)), text)


def feed(grammar: Grammar, text: str) -> None:
    """Let a grammar read a text; each of its bytes must be allowed."""
    for token in text.encode():
        mask = grammar.mask()
        assert mask is not None
        assert mask[token // 8] >> token % 8 & 1, f"{chr(token)} is not allowed"
        grammar.observe(token)


@pytest.mark.parametrize("name", CHECKED)
def test_formats(compiler: GrammarCompiler, name: str) -> None:
    dice, tool = (
        random.Random(3),
        {"name": "f", "parameters": {"properties": {"x": {"type": "string", "format": name}}}},
    )
    tool["parameters"]["required"] = ["x"]
    for _ in range(10):
        text = write(compiler.compile(Sampling(grammar=call_grammar([tool], True))), dice, 500)
        if text is not None:
            jsonschema.validate(parse_calls(text)[1][0].arguments["x"], {"format": name}, format_checker=CHECKER)


@pytest.mark.parametrize("pattern", [*PATTERNS, r"a\$", r"\|a|b", "[|]a", "(a|b)c", r"^\^", "^(a)(b)$", "(^a$)"])
def test_patterns_are_searched_for(pattern: str) -> None:
    whole = re.compile(match_whole(pattern))
    plain = "a b ab ABC xABC 12-a aab bred red za x yy /a/1 $1.00 a$ <a> <a>x ]x axxb |a | |ac bc ^ a1 1a"
    for text in ("", *plain.split(), "qx", "qxa", "zy", "zya", "ac", "c", "abc", "ababc", "ab1", "b1", "ba"):
        assert bool(whole.fullmatch(text)) == bool(re.search(pattern, text)), text


@pytest.mark.parametrize("pattern", [one for one in ECMASCRIPT if r"\p" not in one])
def test_patterns_are_read_as_ecmascript(pattern: str) -> None:
    whole, meant = re.compile(match_whole(pattern)), re.compile(ECMASCRIPT[pattern])
    texts = [
        "2026",
        "٢٠٢٦",
        "a\nb",
        "a",
        "[&&b]",
        "a&&b]",
        "b",
        "\x01/-!",
        "\x01/é!",
        "é",
        "é😀",
        "{ā}",
        "{é}",
        "x\ry",
        "xzy",
    ]
    assert [bool(whole.fullmatch(text)) for text in texts] == [bool(meant.search(text)) for text in texts]
    assert any(meant.search(text) for text in texts)


@pytest.mark.parametrize(
    "pattern", ["[", "(a", "a)", "*", "a**", "[b-a]", "a{2,1}", "\\", r"\u{110000}", "(" * 99 + ")" * 99]
)
def test_invalid_patterns(pattern: str) -> None:
    tool = {"name": "f", "parameters": {"properties": {"x": {"type": "string", "pattern": pattern}}}}
    inside = {"name": "f", "parameters": {"properties": {"x": {"type": "array", "items": {"pattern": pattern}}}}}
    for one, strict in itertools.product((tool, inside), (None, ())):
        with pytest.raises(InputError, match=r"function 'f' has the pattern .* not a valid regular expression"):
            call_grammar([one], True, strict=strict)


def test_text_in_cdata(compiler: GrammarCompiler) -> None:
    tool = {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}, "required": ["x"]}}
    for value in ("a < b", "a]", "]]", "a]b]]c", "]>"):
        grammar = compiler.compile(Sampling(grammar=call_grammar([tool], True)))
        text = f'<function name="f"><param name="x"><![CDATA[{value}]]></param></function>'
        verdicts = [grammar.observe(token) for token in text.encode()]
        assert verdicts[-1] is not None, value
        assert parse_calls(text)[1][0].arguments == {"x": value}


def test_white_space_is_what_people_write(compiler: GrammarCompiler) -> None:
    spaces = {
        "": True,
        " ": True,
        "\n        ": True,
        "\n\t": True,
        "\n\t\t": False,
        "  ": False,
        "\n" + " " * 9: False,
    }
    for space, is_allowed in spaces.items():
        grammar = compiler.compile(
            Sampling(json_schema='{"properties": {"a": {"type": "boolean"}}, "required": ["a"]}')
        )
        text = f'{{"a":{space}true'.encode()
        assert (grammar._matcher.validate_tokens([*text]) == len(text)) == is_allowed, space


def test_types_behind_references_are_converted() -> None:
    schema = {
        "properties": {
            "a": {"$ref": "#/$defs/n"},
            "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "c": {"const": 5},
        },
        "$defs": {"n": {"allOf": [{"type": "number"}, {"minimum": 0}]}},
    }
    text = (
        '<function name="f"><param name="a">1.5</param><param name="b">None</param><param name="c">5</param></function>'
    )
    assert parse_calls(text, [{"name": "f", "parameters": schema}])[1][0].arguments == {"a": 1.5, "b": None, "c": 5}


def test_hostile_schemas_are_read_in_few_steps(compiler: GrammarCompiler) -> None:
    deep = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 50} for at in range(50)}
    values = {"a": {"$ref": "#/$defs/d0"}, "b": {"$ref": "#/$defs/self"}, "c": {"type": [["string"], {}, "hiccup"]}}
    schema = {"properties": values, "$defs": {**deep, "self": {"$ref": "#/$defs/self"}}}
    tool = {"name": "f", "parameters": schema}
    compiler.compile(Sampling(grammar=call_grammar([tool], True)))
    text = '<function name="f"><param name="a">1</param><param name="b">2</param><param name="c">3</param></function>'
    assert parse_calls(text, [tool])[1][0].arguments == {"a": "1", "b": "2", "c": "3"}

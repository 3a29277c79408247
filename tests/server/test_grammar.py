"""Grammars that enforce tool calls: they compile, and what they let through can be read back."""

import json
from pathlib import Path
from typing import Any

import pytest

from sala.errors import InputError
from sala.llm import LLM
from sala.server.api.conversation import call_grammar
from tests.splitting import parse_calls


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny, device="cpu", ctx=2048)


def function(**properties: Any) -> dict[str, Any]:
    return {"name": "f", "parameters": {"type": "object", "properties": properties, "required": list(properties)}}


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 5}, int),
        ({"type": "boolean"}, bool),
        ({"type": ["boolean", "null"]}, (bool, type(None))),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}, list),
        ({"type": "object", "properties": {"a": {"enum": ["<", "]"]}}, "additionalProperties": False}, dict),
        ({"enum": ["a<b", 'say "hi"']}, str),
        ({"$ref": "#/$defs/flag", "type": "object"}, dict),
    ],
)  # fmt: skip
def test_values(llm: LLM, schema: dict[str, Any], kind: Any) -> None:
    tool = function(x=schema)
    flag = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    tool["parameters"]["$defs"] = {"flag": flag}
    for seed in range(3):
        answer = llm.generate("hello", grammar=call_grammar([tool], True), seed=seed, max_tokens=200, temperature=1.0)
        text, calls = parse_calls(answer.text, [{"type": "function", "function": tool}])
        assert (text, len(calls)) == ("", 1), answer.text
        assert isinstance(calls[0].arguments["x"], kind)


def test_no_parameters_and_many_functions(llm: LLM) -> None:
    functions: list[dict[str, Any]] = [{"name": name} for name in ("a", "b-c", "d_e")]
    names = set()
    for seed in range(12):
        answer = llm.generate("hello", grammar=call_grammar(functions, True), seed=seed, max_tokens=80, temperature=3.0)
        names |= {call.name for call in parse_calls(answer.text)[1]}
    assert len(names) > 1


def test_calls_or_an_answer(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    grammar = call_grammar([{"name": "f"}], False, schema)
    for seed in range(6):
        text = llm.generate("hello", grammar=grammar, seed=seed, max_tokens=120, temperature=2.0).text
        assert parse_calls(text)[1] or "a" in json.loads(text)


def test_names_that_cannot_be_written_are_left_out() -> None:
    tool = function(**{'evil"<': {"type": "string"}})
    assert "evil" not in call_grammar([tool], True, strict=())
    with pytest.raises(InputError, match="cannot be enforced"):
        call_grammar([tool], True, strict=("f",))

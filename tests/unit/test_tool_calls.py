"""Tool calls in a stream of text: read the same however it is cut, and given out as JSON while they arrive."""

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sala.text.answer import ChatSplitter
from sala.text.tools import CallPiece, Part, ToolCall, ToolSplitter
from tests.golden import DATA
from tests.splitting import parse_calls

PROPERTIES = {
    "n": {"type": "integer"},
    "on": {"type": "boolean"},
    "o": {"type": "object"},
    "s": {"type": "string"},
    "t": {"type": "string"},
}
COUNT = {"properties": {"kind": {"const": "count"}, "x": {"type": "integer"}}, "required": ["kind", "x"]}
NAMED = {"properties": {"kind": {"const": "name"}, "x": {"type": "string"}}, "required": ["kind", "x"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "either", "parameters": {"anyOf": [COUNT, NAMED]}}},
]
CALLS = {
    '<function name="f"><param name="n">3</param></function>': ("", [("f", {"n": 3})]),
    'ok\n<function name="f"><param name="s">3</param><param name="on">True</param></function>': ("ok", [("f", {"s": "3", "on": True})]),  # noqa: E501
    '<function name="f"><param name="s"><![CDATA[a<b&</function>\nc]]></param></function>!': ("!", [("f", {"s": "a<b&</function>\nc"})]),  # noqa: E501
    '<function name="f"><param name="o">{"a": [1]}</param></function>\n<function name="g"></function>': ("", [("f", {"o": {"a": [1]}}), ("g", {})]),  # noqa: E501
    '<function name="f"><param name="n">many</param></function>': ("", [("f", {"n": "many"})]),
    '<function name="f"><param name="s">a < b</param></function>': ("", [("f", {"s": "a < b"})]),
    '<function name="f"><param name="s"><![CDATA[a]]>b]]></param></function>': ("", [("f", {"s": "a]]>b"})]),
    '<function name="f"><param name="s">a</function>': ("", [("f", {"s": "a"})]),
    '<function name="f"><param name="s"><![CDATA[a]]>\n</function>': ("", [("f", {"s": "a"})]),
    '<function name="f"><param name="s">a</param>': ("", [("f", {"s": "a"})]),
    '<function name="f"><param name="s">a</param> So': ("So", [("f", {"s": "a"})]),
    '<function name="f"><param name="s">a</param><function name="g"></function>': ("", [("f", {"s": "a"}), ("g", {})]),
    '<function name="f"><param name="s">1</param><param name="s">2</param></function>': ("", [("f", {"s": "1"})]),
    '<function name="either"><param name="x">3</param><param name="kind">count</param></function>': ("", [("either", {"x": 3, "kind": "count"})]),  # noqa: E501
    '<function name="either"><param name="x">3</param><param name="kind">name</param></function>': ("", [("either", {"x": "3", "kind": "name"})]),  # noqa: E501
    '<function name="f"><param name="n">3': ("", [("f", '{"n": 3')]),
    '<function name="f"><param name="s">a</par': ("", [("f", '{"s": "a')]),
    '<function name="f"><par': ('<function name="f"><par', []),
    "<function>x</function>": ("<function>x</function>", []),
    '<function name="f">junk</function>': ('<function name="f">junk</function>', []),
    "a <functional> style": ("a <functional> style", []),
    "a < b": ("a < b", []),
}  # fmt: skip
MARKUP = [
    '<function name="f">', '<function name="either">', '<function name="new">', "</function>", '<param name="s">',
    '<param name="t">', '<param name="n">', '<param name="kind">', '<param name="x">', '<param  name=" "\n>',
    "</param>", "<![CDATA[", "]]>", "]", "<", " ", "\n", " " * 300, "3", "count", "a", '"', "\\", "ä🙂", "<fun",
    "</par", "x" * 600,
]  # fmt: skip


def cut(text: str, data: st.DataObject) -> list[str]:
    """Split a text at random places."""
    places = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=12))})
    return [text[start:end] for start, end in pairwise(places)]


def read(pieces: Iterable[str], is_cut: bool = False) -> list[Part]:
    splitter = ToolSplitter(TOOLS)
    parts = [part for piece in pieces for part in splitter.push(piece)]
    return [*parts, *(splitter.cut() if is_cut else splitter.flush())]


def summarize(parts: list[Part]) -> tuple[list[Any], str]:
    """Return text and calls in order, adjacent text joined; check that the pieces of each call make up its JSON."""
    out: list[Any] = []
    shown = first = ""
    for part in parts:
        if isinstance(part, CallPiece):
            assert part.is_opening == (shown == "")
            assert part.json
            shown, first = shown + part.json, first + part.first
        elif isinstance(part, ToolCall):
            assert part.json == shown
            if part.cut_json is None:
                assert json.loads(shown) == part.arguments
            given = next(iter(part.arguments.values()), "")
            assert first in ("", given) or (part.cut_json or "").endswith(json.dumps(first, ensure_ascii=False)[1:-1])
            out.append((part.name, part.arguments, part.cut_json))
            shown = first = ""
        else:
            assert shown == "", "text in the middle of a call"
            out[-1:] = [out[-1] + part] if out and isinstance(out[-1], str) else [*out[-1:], part]
    return out, shown


@pytest.mark.parametrize("text", CALLS)
def test_tool_calls_however_they_are_cut(text: str) -> None:
    wanted, calls = CALLS[text]
    content, found = parse_calls(text, TOOLS)
    assert content.strip() == wanted
    assert [(one.name, one.arguments if one.cut_json is None else one.cut_json) for one in found] == calls
    assert len({call.id for call in found}) == len(found)
    for size in (1, 3, 7):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert summarize(read(pieces)) == summarize(read([text]))


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(MARKUP), max_size=14).map("".join), st.booleans(), st.data())
def test_any_text_is_read_the_same_in_any_pieces(text: str, is_cut: bool, data: st.DataObject) -> None:
    whole, rest = summarize(read([text], is_cut))
    assert rest == "", "pieces of a call that never came"
    assert summarize(read(cut(text, data), is_cut)) == (whole, "")


def write(name: str, arguments: dict[str, Any]) -> str:
    """Return a call as models write it."""
    out = f'<function name="{name}">'
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        out += f'<param name="{key}">{f"<![CDATA[{text}]]>" if "<" in text else text}</param>'
    return out + "</function>"


TEXTS = st.text('ab<>&"\\\n\t]é🙂/', max_size=20).filter(lambda text: "]]>" not in text and text == text.strip())
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(), "on": st.booleans(), "o": st.dictionaries(TEXTS, st.integers()), "s": TEXTS, "t": TEXTS,
}  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries({}, optional=VALUES), st.permutations(list(VALUES)), st.data())
def test_a_call_in_which_the_answer_is_cut_is_the_beginning_of_the_whole(
    values: dict[str, Any], order: list[str], data: st.DataObject
) -> None:
    arguments = {key: values[key] for key in order if key in values}
    text = f"Look:\n{write('f', arguments)}"
    whole, _ = summarize(read(cut(text, data)))
    assert whole == ["Look:\n", ("f", arguments, None)]
    begun = text[: data.draw(st.integers(0, len(text) - 1))]
    found, _ = summarize(read(cut(begun, data), is_cut=True))
    assert "Look:\n".startswith(found[0] if found else "")
    if '<function name="f">' in begun:
        ((name, _, partial),) = found[1:]
        assert name == "f"
        assert json.dumps(arguments, ensure_ascii=False).startswith(partial)


def test_text_is_given_out_at_once() -> None:
    splitter = ToolSplitter(TOOLS)
    list(splitter.push('<function name="f"><param name="n">1</param><param name="s">'))
    for char in "Once \n upon":
        (piece,) = splitter.push(char)
        assert piece.json == json.dumps(char)[1:-1]
    assert [part.json for part in splitter.push("]</param>")] == ["]", '"']
    assert [part.json for part in splitter.push('<param name="t"><![CDATA[<a>]')] == [', "t": "', "<a>"]
    assert [part.json for part in splitter.push("b")] == ["]b"]


def test_a_call_longer_than_anything_that_is_held_back() -> None:
    """Nothing of a value waits for its end, so a length cannot turn it into text."""
    lines = ["a line of a file, a < b\n"] * 100_000
    splitter, shown = ToolSplitter(TOOLS), 0
    list(splitter.push('<function name="f"><param name="s"><![CDATA['))
    for line in lines:
        shown += sum(len(piece.first) for piece in splitter.push(line))
        assert shown % len(line) == 0
    *_, call = splitter.push("]]></param></function>")
    assert call.arguments == {"s": "".join(lines)}
    assert len(call.arguments["s"]) == shown


def show(*calls: str) -> tuple[list[str], list[str], bool]:
    """Return the JSON that the pieces of an answer make up, that of its calls, and whether it ended by a repetition."""
    form = ChatSplitter(TOOLS, ends_on_repeat=True)
    deltas = [delta for char in "\n".join(calls) for delta in form.push(char)] + list(form.flush(is_cut=True))
    pieces: dict[str, str] = {}
    for delta in deltas:
        if delta.call_piece is not None:
            pieces[delta.call_piece.id] = pieces.get(delta.call_piece.id, "") + delta.call_piece.json
    found = [delta.tool_call or delta.cut_call for delta in deltas]
    return list(pieces.values()), [call.json for call in found if call is not None], form.is_repeating


def test_nothing_of_a_repetition_is_shown() -> None:
    rome, romania, oslo = (write("f", {"s": city, "n": 1}) for city in ("Rome", "Romania", "Oslo"))
    other = rome.replace('"f"', '"g"').replace("1", "x")
    told = ['{"s": "Rome", "n": 1}', '{"s": "Romania", "n": 1}', '{"s": "Oslo", "n": 1}', '{"s": "Rome", "n": "x"}']
    assert show(rome, romania, oslo, other) == (told, told, False)
    assert show(rome, rome, oslo) == (told[:1], told[:1], True)
    assert show(rome, romania, rome) == (told[:2], told[:2], True)
    begun = [told[0], '{"s": "Ro']
    assert show(rome, rome[: rome.index("me<")]) == (begun, begun, False)


def test_the_templates_own_calls_are_read_back() -> None:
    case = json.loads((DATA / "chat_template_cases.json").read_text())["tool_call_with_text"]
    call = case["messages"][1]["tool_calls"][0]["function"]
    _, calls = parse_calls(case["rendered"].split("assistant\n")[1].split("<|im_end|>")[0], case["tools"])
    assert [(c.name, c.arguments) for c in calls] == [(call["name"], call["arguments"])]

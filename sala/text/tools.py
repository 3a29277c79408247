"""Tool calls in the format of the released model: `<function name="f"><param name="p">v</param></function>`, or CDATA.

A call begins with its first parameter, or with a closing tag at once; anything else stays text. From then on its
arguments are given out as JSON while they arrive, so nothing of it can become text again. It ends at its closing tag,
or after a parameter that something else follows.
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sala.text.parameters import as_typed, convert, find_kinds, find_settled

OPEN, CLOSE = "<function", "</function>"
_PARAM, _END_PARAM = "<param", "</param>"
_CDATA, _END_CDATA = "<![CDATA[", "]]>"
_SPACE = r"\s{0,256}"  # with bounds, no text waits without end for what may follow it
_HEAD = re.compile(rf'<function\s{{1,256}}name="(?P<name>[^"<>]{{1,512}})"{_SPACE}>')
_NEXT = re.compile(rf'{_SPACE}(?:</function>|<param\s{{1,256}}name="(?P<param>[^"<>]{{0,512}})"{_SPACE}>)')
_MAX_TAG = 1536  # characters that a tag and the space before it have at most
_BEGIN_DATA = re.compile(_SPACE + re.escape(_CDATA))
_AFTER_PLAIN = re.compile(r"</(?P<tag>param|function)>")
_AFTER_DATA = re.compile(rf"\]\]>{_SPACE}</(?P<tag>param|function)>")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call. If the answer was cut in it, `cut_json` is the beginning of its arguments as JSON."""

    id: str
    name: str
    arguments: dict[str, Any]
    cut_json: str | None = None

    @property
    def json(self) -> str:
        return _dump(self.arguments) if self.cut_json is None else self.cut_json


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call on its way: the next characters of its arguments as JSON. Together they are `ToolCall.json`.

    `first` is what it adds to the first argument, where that is text.
    """

    id: str
    name: str
    json: str
    first: str = ""
    is_opening: bool = False  # the first of the call


class _CallReader:
    """Turns the parameters of one call, as they arrive, into pieces of JSON.

    Text is given out character by character, any other value when it is complete, and one whose type depends on what
    else there is (and all that follow it) at the end of the call. If a parameter occurs twice, the first value counts.
    """

    def __init__(self, name: str, parameters: Any) -> None:
        self._id = f"call_{secrets.token_hex(12)}"
        self._name = name
        self._schema = parameters
        self._raw: dict[str, str] = {}  # complete values, as they are written
        self._param: str | None = None  # the parameter that is being read
        self._value: list[str] = []
        self._is_text = False
        self._is_settled = True  # the types of all parameters so far are known
        self._num_shown = 0

    def begin(self) -> CallPiece:
        return self._piece("{")

    def open(self, param: str) -> Iterator[CallPiece]:
        kinds = find_settled(param, self._schema)
        self._param, self._value = param, []
        self._is_settled = self._is_settled and kinds is not None
        self._is_text = self._is_settled and kinds is not None and "string" in kinds
        if self._is_text and param not in self._raw:
            yield self._piece(f'{self._key(param)}"')

    def grow(self, text: str) -> Iterator[CallPiece]:
        self._value.append(text)
        if text and self._is_text and self._param not in self._raw:
            yield self._piece(_dump(text)[1:-1], "" if self._raw else text)

    def close(self) -> Iterator[CallPiece]:
        """End the parameter that is being read."""
        param, value = self._param or "", "".join(self._value)
        if self._is_settled and param not in self._raw:
            typed = as_typed(value, find_kinds(param, self._schema))
            yield self._piece('"' if self._is_text else self._key(param) + _dump(typed))
        self._raw.setdefault(param, value)
        self._param = None

    def end(self) -> Iterator[CallPiece | ToolCall]:
        call = ToolCall(self._id, self._name, convert(self._raw, self._schema))
        yield self._piece(call.json[self._num_shown :])
        yield call

    def cut(self) -> Iterator[CallPiece | ToolCall]:
        """End the call where the answer was cut: a string is not closed."""
        arguments = convert(self._raw, self._schema)
        text = _dump(arguments)[:-1]
        if self._param is not None and self._param not in self._raw:
            value = "".join(self._value)
            is_text = "string" in find_kinds(self._param, self._schema)
            text += self._key(self._param) + (_dump(value)[:-1] if is_text else value)
        if text[self._num_shown :]:
            yield self._piece(text[self._num_shown :])
        yield ToolCall(self._id, self._name, arguments, text)

    def _key(self, param: str) -> str:
        return f"{', ' if self._raw else ''}{_dump(param)}: "

    def _piece(self, text: str, first: str = "") -> CallPiece:
        is_opening, self._num_shown = not self._num_shown, self._num_shown + len(text)
        return CallPiece(self._id, self._name, text, first, is_opening)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _find_parameters(name: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    """Return the schema of the parameters of a tool; None if there is no such tool."""
    functions = (tool.get("function", tool) for tool in tools)
    found = (one.get("parameters") for one in functions if isinstance(one, Mapping) and one.get("name") == name)
    return next(found, None)


Part = str | CallPiece | ToolCall


class ToolSplitter:
    """Splits a stream of text into text and calls, in order. The pieces of a call precede the call itself."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._tools = tools
        self._held = ""
        self._waits = False  # for more text
        self._call: _CallReader | None = None
        self._is_value = False  # a value is being read, not what stands between parameters
        self._after: re.Pattern[str] | None = None  # what ends the value, once it is known how it is written

    @property
    def is_holding(self) -> bool:
        """Whether text is held back, since it may begin a call or belongs to one."""
        return bool(self._held) or self._call is not None

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        self._waits = False
        while self._held and not self._waits:
            if self._call is None:
                yield from self._read_text()
            elif self._is_value:
                yield from self._read_value(self._call)
            else:
                yield from self._read_tag(self._call)

    def flush(self) -> Iterator[Part]:
        """End the text. A call that lacks its closing tag only is complete, one that breaks off in a value is cut."""
        if self._call is not None and self._is_value:
            yield from self.cut()
        elif self._call is not None:
            yield from self._end(self._call)
        yield from self._text(len(self._held))

    def cut(self) -> Iterator[CallPiece | ToolCall]:
        """Drop what was held back because it may begin a call, and yield that call if its name is complete."""
        head = _HEAD.match(self._held)
        call, self._call = self._call, None
        if call is None and head is not None:
            call = self._new_call(head["name"])
            yield call.begin()
        self._held = ""
        if call is not None:
            yield from call.cut()

    def _read_text(self) -> Iterator[Part]:
        at = self._held.find(OPEN)
        if at < 0:
            self._waits = True
            yield from self._text(len(self._held) - longest_overlap(self._held, OPEN))
            return
        yield from self._text(at)
        head = _HEAD.match(self._held)
        found = head and _NEXT.match(self._held, head.end())
        if head is not None and found is not None:
            self._call = self._new_call(head["name"])
            yield self._call.begin()
            yield from self._enter(self._call, found)
        elif _may_go_on(self._held, (OPEN,)) if head is None else _may_go_on(self._held[head.end() :]):
            self._waits = True
        else:
            yield from self._text(len(OPEN))

    def _read_tag(self, call: _CallReader) -> Iterator[Part]:
        """Read what follows a parameter."""
        found = _NEXT.match(self._held)
        if found is not None:
            yield from self._enter(call, found)
        elif _may_go_on(self._held):
            self._waits = True
        else:
            yield from self._end(call)

    def _read_value(self, call: _CallReader) -> Iterator[Part]:
        if self._after is None:
            self._read_form()
            return
        found = self._after.search(self._held)
        at = found.start() if found is not None else self._find_doubt()
        yield from call.grow(self._held[:at])
        self._held = self._held[at:] if found is None else self._held[found.end() :]
        self._waits = found is None
        if found is not None:
            self._is_value = False
            yield from call.close()
            if found["tag"] == "function":
                yield from self._end(call)

    def _read_form(self) -> None:
        """Find out whether a value is CDATA."""
        data, body = _BEGIN_DATA.match(self._held), self._held.lstrip()
        if data is not None:
            self._after = _AFTER_DATA
            self._held = self._held[data.end() :]
        elif _CDATA.startswith(body) and len(self._held) < _MAX_TAG:
            self._waits = True
        else:
            self._after = _AFTER_PLAIN

    def _find_doubt(self) -> int:
        """Return where what ends the value may begin, at the end of the text."""
        text = self._held
        if self._after is _AFTER_PLAIN:
            return len(text) - max(longest_overlap(text, end) for end in (_END_PARAM, CLOSE))
        at = text.rfind(_END_CDATA)
        if at >= 0 and _may_go_on(text[at + len(_END_CDATA) :], (_END_PARAM, CLOSE)):
            return at
        return len(text) - longest_overlap(text, _END_CDATA)

    def _new_call(self, name: str) -> _CallReader:
        return _CallReader(name, _find_parameters(name, self._tools))

    def _enter(self, call: _CallReader, found: re.Match[str]) -> Iterator[Part]:
        """Go on after a tag: into a parameter, or out of the call."""
        self._held = self._held[found.end() :]
        if found["param"] is None:
            yield from self._end(call)
            return
        self._is_value, self._after = True, None
        yield from call.open(found["param"])

    def _end(self, call: _CallReader) -> Iterator[Part]:
        self._call, self._is_value = None, False
        yield from call.end()

    def _text(self, count: int) -> Iterator[str]:
        out, self._held = self._held[:count], self._held[count:]
        if out:
            yield out


def _may_go_on(text: str, tags: Sequence[str] = (_PARAM, CLOSE)) -> bool:
    """Return whether more text may make one of these tags of this, after white space."""
    body = text.lstrip()
    is_tag = any(tag.startswith(body) or (body.startswith(tag) and ">" not in body) for tag in tags)
    return is_tag and len(text) < _MAX_TAG


def longest_overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0

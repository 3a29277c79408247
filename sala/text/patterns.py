"""Regular expressions of JSON schemas: what they demand of a whole text, and which of them a grammar can enforce.

They are read as ECMAScript, the dialect of JSON schemas, and written without anchors, names of groups and lazy
repetition, in what llguidance, Lark and Python understand alike.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby

ANY = "(?s:.*)"
MAX_LENGTH = 1 << 14  # characters of a pattern
MAX_WRITTEN = 1 << 18  # and of what is made of it: anchors in groups may multiply alternatives
MAX_DEPTH = 64  # of groups
MAX_EXPANDED = 16  # repetitions of what holds anchors
META = frozenset(r"\.^$|?*+()[]{}/&~#-")
CLASSES = {  # as members of others
    "d": "0-9", "D": r"\x00-\/:-\U0010ffff",
    "w": "0-9A-Z_a-z", "W": r"\x00-\/:-@\[-\^`\{-\U0010ffff",
    "s": r"\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff",
    "S": r"\x00-\x08\x0e-\x1f!-\x9f\xa1-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e\u2030-\u205e\u2060-\u2fff"
    r"\u3001-\ufefe\uff00-\U0010ffff",
}  # fmt: skip
CONTROLS = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r"}
DOT, EVERY, NOTHING = r"[^\n\r\u2028\u2029]", r"[\x00-\U0010ffff]", r"[^\x00-\U0010ffff]"
_REPEAT = re.compile(r"[*+?]|\{(?P<least>\d+)(?P<range>,(?P<most>\d*))?\}|\{,(?P<up_to>\d+)\}")
_OPENING = re.compile(r"\((?!\?)|\(\?P?<[^\W\d][\w$]*>|\(\?(?P<on>[a-z]*)(?:-(?P<off>[a-z]+))?(?P<end>[:)])")
_CODE = re.compile(
    r"\\(?:u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?:u\{(?P<braced>[0-9a-fA-F]{1,8})\}|u(?P<four>[0-9a-fA-F]{4})|U(?P<eight>[0-9a-fA-F]{8})|x(?P<two>[0-9a-fA-F]{2}))"
    r"|c(?P<control>[A-Za-z])|(?P<zero>0)(?![0-9]))"
)
_PROPERTY = re.compile(r"\\[pP]\{[A-Za-z0-9_]+(=[A-Za-z0-9_]+)?\}")
_NEXT_BRACKET = re.compile(r"(?:[^\\\[\]]|\\.)*([\[\]])", re.DOTALL)
ANYWHERE: frozenset[str] = frozenset()


class PatternError(ValueError):
    """A pattern is not a valid regular expression."""

    def __init__(self, pattern: str, reason: str) -> None:
        super().__init__(f"the pattern {pattern[:60]!r}, which is not a valid regular expression: {reason}")


class NotRegular(ValueError):
    """A pattern holds what no grammar can search for, such as look-around."""


def match_whole(pattern: str) -> str:
    """Return a regular expression that matches a whole text where the pattern is found in it, without its anchors.

    Raises PatternError and NotRegular.
    """
    if len(pattern) > MAX_LENGTH:
        raise PatternError(pattern, f"it has more than {MAX_LENGTH:,} characters")
    try:
        found = _PatternReader(pattern).read()
    except NotRegular:
        raise NotRegular(f"the pattern {pattern[:60]!r}") from None
    if any(len(ends) < 2 for ends in found.empties):  # every text has a beginning, and an end
        return ANY
    branches = [
        f"{'' if at_start else ANY}{text}{'' if at_end else ANY}" for (at_start, at_end), text in found.texts.items()
    ]
    return "|".join(branches + [""] * len(found.empties)) if branches or found.empties else NOTHING


def is_regular(pattern: str) -> bool:
    """Return whether a grammar can search for a pattern. An invalid one counts as such: it is an error elsewhere."""
    try:
        match_whole(pattern)
    except NotRegular:
        return False
    except PatternError:
        return True
    return True


@dataclass(frozen=True)
class _Part:
    """What a part of a pattern matches.

    - texts: regular expressions that can stand in a row, by whether what they match must begin where the text begins,
      and must end where it ends. They match whatever the part does, unless that is empty
    - empties: the ends of the text ("^", "$", both, neither) at which the part may be empty. Where that may be
      anywhere, the expression that demands no end matches it, too
    """

    texts: Mapping[tuple[bool, bool], str]
    empties: frozenset[frozenset[str]] = frozenset()

    @property
    def has_anchors(self) -> bool:
        return self.texts.keys() != {(False, False)} or not self.empties <= {ANYWHERE}


def _plain(text: str, is_nullable: bool = False) -> _Part:
    return _Part({(False, False): text}, frozenset({ANYWHERE} if is_nullable else ()))


def _collect(texts: Iterable[tuple[tuple[bool, bool], str]], empties: Iterable[frozenset[str]]) -> _Part:
    found: dict[tuple[bool, bool], dict[str, None]] = {}
    for ends, text in texts:
        found.setdefault(ends, {})[text] = None
    joined = {ends: "|".join(some) for ends, some in found.items()}
    if sum(map(len, joined.values())) > MAX_WRITTEN:
        raise NotRegular
    return _Part(
        {ends: f"(?:{text})" if len(found[ends]) > 1 else text for ends, text in joined.items()}, frozenset(empties)
    )


def _either(parts: Sequence[_Part]) -> _Part:
    return _collect((one for part in parts for one in part.texts.items()), (e for part in parts for e in part.empties))


def _pair(first: _Part, second: _Part) -> _Part:
    """Return two parts in a row: nothing but what is empty stands before the text begins, or after it ends."""
    texts = []
    for (at_start, is_last), before in first.texts.items():
        texts += [
            ((at_start, at_end), before + after)
            for (is_first, at_end), after in second.texts.items()
            if not is_last and not is_first
        ]
        texts += [
            ((at_start, is_last or "$" in ends), before)
            for ends in second.empties
            if "^" not in ends and (is_last or ends)
        ]
    for (is_first, at_end), after in second.texts.items():
        texts += [
            ((is_first or "^" in ends, at_end), after)
            for ends in first.empties
            if "$" not in ends and (is_first or ends)
        ]
    return _collect(texts, (one | other for one in first.empties for other in second.empties))


def _row(parts: Sequence[_Part]) -> _Part:
    """Return parts in a row; those without anchors are joined first."""
    merged: list[_Part] = []
    for has_anchors, group in groupby(parts, lambda part: part.has_anchors):
        some = [*group]
        text = "".join(part.texts.get((False, False), "") for part in some)
        merged += some if has_anchors else [_plain(text, all(part.empties for part in some))]
    return reduce(_pair, merged) if merged else _plain("", True)


def _repeat(part: _Part, least: int, most: int | None) -> _Part:
    if not part.has_anchors:
        short = {(0, None): "*", (1, None): "+", (0, 1): "?", (least, least): f"{{{least}}}"}
        count = short.get((least, most), f"{{{least},{'' if most is None else most}}}")
        return _plain(part.texts[False, False] + count, least == 0 or bool(part.empties))
    if max(least, most or 0) > MAX_EXPANDED:
        raise NotRegular
    more = [_any_number(part)] if most is None else [_either([_plain("", True), part])] * (most - least)
    return _row([part] * least + more)


def _any_number(part: _Part) -> _Part:
    """Return a part with anchors, any number of times."""
    middle = f"(?:{part.texts[False, False]})*" if (False, False) in part.texts else ""
    texts = [((False, False), middle)]
    for (at_start, at_end), text in part.texts.items():
        if at_start != at_end:
            texts.append(((at_start, at_end), text + middle if at_start else middle + text))
        elif at_start:
            texts.append(((True, True), text))
    if (True, False) in part.texts and (False, True) in part.texts:
        texts.append(((True, True), part.texts[True, False] + middle + part.texts[False, True]))
    return _collect(texts, [ANYWHERE])


class _PatternReader:
    """Reads a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0
        self._dot = DOT

    def read(self) -> _Part:
        found = self._alternatives()
        if self._next():
            raise self._error("it closes a group that it does not open")
        return found

    def _next(self, ahead: int = 0) -> str:
        return self._pattern[self._at + ahead : self._at + ahead + 1]

    def _error(self, reason: str) -> PatternError:
        return PatternError(self._pattern, reason)

    def _alternatives(self) -> _Part:
        """Read up to the end of a group."""
        branches = [self._sequence()]
        while self._next() == "|":
            self._at += 1
            branches.append(self._sequence())
        return _either(branches)

    def _sequence(self) -> _Part:
        parts = []
        while self._next() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom()))
        return _row(parts)

    def _atom(self) -> _Part:
        char = self._next()
        if char == "(":
            return self._group()
        if char in "^$":
            self._at += 1
            return _Part({}, frozenset({frozenset({char})}))
        if _REPEAT.match(self._pattern, self._at):
            raise self._error("there is nothing to repeat")
        if char == ".":
            self._at += 1
            return _plain(self._dot)
        if char == "[":
            return _plain(self._class())
        members = self._set()
        return _plain(f"[{members}]" if members else _write(self._literal()))

    def _group(self) -> _Part:
        opening = _OPENING.match(self._pattern, self._at)
        on, off = ("", "") if opening is None else (opening["on"] or "", opening["off"] or "")
        is_rest = opening is not None and opening["end"] == ")"  # flags that hold from here on
        if opening is None or not {*on, *off} <= {"i", "s", "u"} or (is_rest and (self._at or not on)):
            raise NotRegular
        if self._depth == MAX_DEPTH:
            raise self._error("it is nested too deeply")
        dot, self._at, self._depth = self._dot, opening.end(), self._depth + 1
        self._dot = EVERY if "s" in on else DOT if "s" in off else dot
        found = self._alternatives()
        self._dot, self._depth = dot, self._depth - 1
        if not is_rest and self._next() != ")":
            raise self._error("a group is not closed")
        self._at += not is_rest
        flag = "i" if "i" in on else "-i" if "i" in off else ""
        if flag or _REPEAT.match(self._pattern, self._at):
            return _Part({ends: f"(?{flag}:{text})" for ends, text in found.texts.items()}, found.empties)
        return found

    def _repeated(self, part: _Part) -> _Part:
        found = _REPEAT.match(self._pattern, self._at)
        if found is None:
            return part
        self._at = found.end()
        if self._next() == "+":
            raise NotRegular  # takes back nothing, in other dialects
        self._at += self._next() == "?"
        if _REPEAT.match(self._pattern, self._at):
            raise self._error("there is nothing to repeat")
        if len(found[0]) > 20:
            raise self._error("it repeats something too often")
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(found[0], (0, None))
        if found["up_to"] is not None:
            most = int(found["up_to"])
        elif found["least"] is not None:
            least = int(found["least"])
            most = least if found["range"] is None else int(found["most"]) if found["most"] else None
        if most is not None and least > most:
            raise self._error("the bounds of a repetition are in the wrong order")
        return _repeat(part, least, most)

    def _class(self) -> str:
        self._at += 1
        is_negated = self._next() == "^"
        self._at += is_negated
        if self._next() == "]":
            bracket = _NEXT_BRACKET.match(self._pattern, self._at + 1)
            if bracket is None or bracket[1] == "[":  # otherwise nothing would open the class that it closes
                self._at += 1
                return EVERY if is_negated else NOTHING
        members, is_first = [], True
        while is_first or self._next() != "]":
            if not self._next():
                raise self._error("a class is not closed")
            members.append(self._range())
            is_first = False
        self._at += 1
        return f"[{'^' if is_negated else ''}{''.join(members)}]"

    def _range(self) -> str:
        """Read members of a class up to a `-` and what follows it, if one does."""
        begin, first = self._at, self._set()
        low = "" if first else self._literal(in_class=True)
        if self._next() != "-" or self._next(1) in ("]", ""):
            return first or _write(low)
        self._at += 1
        second = self._set()
        high = "" if second else self._literal(in_class=True)
        if first or second:  # an ordinary `-`
            return rf"{first or _write(low)}\-{second or _write(high)}"
        if low > high:
            raise self._error(f"{self._pattern[begin : self._at]!r} goes backwards")
        return f"{_write(low)}-{_write(high)}"

    def _set(self) -> str:
        """Read an escape that means many characters, and return it as members of a class; empty if there is none."""
        if self._next() != "\\":
            return ""
        known, named = CLASSES.get(self._next(1), ""), _PROPERTY.match(self._pattern, self._at)
        self._at += 2 if known else 0 if named is None else len(named[0])
        return known or ("" if named is None else named[0])

    def _literal(self, in_class: bool = False) -> str:
        """Read an ordinary character, or an escape that means one."""
        char, name, code = self._next(), self._next(1), _CODE.match(self._pattern, self._at)
        self._at += 1 if char != "\\" else 2 if code is None else len(code[0])
        if code is not None:
            char = self._decode(code)
        elif char == "\\":
            if not name:
                raise self._error("it ends with a backslash")
            if name.isascii() and name.isalnum() and name not in CONTROLS and not (in_class and name == "b"):
                raise NotRegular
            char = "\b" if in_class and name == "b" else CONTROLS.get(name, name)
        if "\ud800" <= char <= "\udfff":
            raise NotRegular  # half of a character
        return char

    def _decode(self, code: re.Match[str]) -> str:
        if code["high"]:
            return chr(0x10000 + ((int(code["high"], 16) - 0xD800) << 10) + int(code["low"], 16) - 0xDC00)
        if code["control"]:
            return chr(ord(code["control"]) % 32)
        number = int(code["braced"] or code["four"] or code["eight"] or code["two"] or "0", 16)
        if number > sys.maxunicode:
            raise self._error(f"there is no character {code[0]}")
        return chr(number)


def _write(char: str) -> str:
    if char in META:
        return f"\\{char}"
    if char.isprintable():
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _ipv6() -> str:
    """Eight groups of digits, or fewer with `::` in one place."""
    group = "[0-9A-Fa-f]{1,4}"
    shortened = []
    for left in range(8):
        before = f"{group}(:{group}){{{left - 1}}}" if left else ""
        after = f"({group}(:{group}){{0,{6 - left}}})?" if left < 7 else ""
        shortened.append(f"{before}::{after}")
    return "|".join([f"({group}:){{7}}{group}", *shortened])


_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP}-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATOM = "[A-Za-z0-9_%+-]+"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_PATH = "([A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})"
_DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_HOURS = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_DAYS}({_HOURS})?|{_HOURS}|[0-9]+W)",
    "email": rf"{_ATOM}(\.{_ATOM})*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"({_OCTET}\.){{3}}{_OCTET}",
    "ipv6": _ipv6(),
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(//({_PATH})*|[A-Za-z0-9]{_PATH}*)(\?({_PATH}|\?)*)?(#({_PATH}|\?)*)?",
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
}

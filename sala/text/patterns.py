"""Regular expressions of JSON schemas: what they demand of a whole text, and which of them a grammar can enforce."""

import re

ANY = "(?s:.*)"
MAX_DEPTH = 16  # of groups around anchors
SPELLINGS = {  # Lark's, and classes as JSON schemas define them
    "/": r"\/", "\n": r"\n", "\r": r"\r",
    r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]",
}  # fmt: skip
CONTEXT = re.compile(r"\\[bBAZzGk1-9]")  # escapes that depend on the text around them
LOOKS = re.compile(r"\(\?(?:[=!>(#]|<[=!]|P=)")


def match_whole(pattern: str, depth: int = 0) -> str:
    """Return a regular expression that matches a whole text where the pattern is found in it, without its anchors."""
    return "|".join(_match_branch(branch, depth) for branch in _split(pattern))


def _match_branch(branch: str, depth: int) -> str:
    if branch.startswith("(") and depth < MAX_DEPTH and _group_end(branch) == len(branch):
        inner = branch.removeprefix("(").removeprefix("?:")[:-1]
        if not inner.startswith("?"):
            return f"({match_whole(inner, depth + 1)})"
    body = branch.removeprefix("^")
    before = ANY if body == branch else ""
    is_end = body.endswith("$") and (len(body) - len(body[:-1].rstrip("\\"))) % 2 == 1
    return f"{before}({body[:-1] if is_end else body}){'' if is_end else ANY}"


def _split(pattern: str) -> list[str]:
    """Return the alternatives of a regular expression."""
    branches, depth = [""], 0
    for piece in pieces(pattern):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0:
            branches.append("")
        else:
            branches[-1] += piece
    return branches


def _group_end(pattern: str) -> int:
    """Return where the group at the beginning of a regular expression ends."""
    depth = at = 0
    for piece in pieces(pattern):
        depth += (piece == "(") - (piece == ")")
        at += len(piece)
        if depth == 0:
            break
    return at


def pieces(pattern: str) -> list[str]:
    """Return the characters of a regular expression; an escape and a class are one piece each."""
    pieces, at = [], 0
    while at < len(pattern):
        end = at + (2 if pattern[at] == "\\" else 1)
        if pattern[at] == "[":
            end += pattern[end : end + 1] == "^"
            end += pattern[end : end + 1] == "]"  # the first one is an ordinary character
            while end < len(pattern) and pattern[end] != "]":
                end += 2 if pattern[end] == "\\" else 1
            end += 1
        pieces.append(pattern[at:end])
        at = end
    return pieces


def is_regular(pattern: str) -> bool:
    """Return whether a grammar can search for a pattern: it has no look-around, and no references to groups."""
    parts = pieces(pattern)
    plain = "".join(part if len(part) == 1 else "." for part in parts)
    return not LOOKS.search(plain) and not any(CONTEXT.fullmatch(part) for part in parts)


def is_anchored_inside(pattern: str) -> bool:
    """Return whether what `match_whole` returns still holds an anchor, in a place that it cannot resolve."""
    return not {"^", "$"}.isdisjoint(pieces(pattern))


def spell(pattern: str) -> str:
    """Return a regular expression as it is written in Lark."""
    return re.sub(r"(?s:\\.)|[/\n\r]", lambda found: SPELLINGS.get(found[0], found[0]), pattern)


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

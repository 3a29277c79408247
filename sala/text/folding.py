"""Text in the form in which quotes are compared, and where its characters come from.

Printed text and an answer spell the same words differently: other spaces, quotation marks and dashes, ligatures,
accents as characters of their own, marks of Markdown, words that are divided at the end of a line.
"""

import re
import unicodedata
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

WIDE = r"\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"  # without spaces between words
_UNSPACED = r"\u3001-\u30ff\u3400-\u9fff\uf900-\ufaff\uff01-\uff65"  # where the end of a line is no space
_ACCENTS = r"\u0300-\u036f\u0653-\u0655\u093c\u1161-\u1175\u11a8-\u11c2\u1dc0-\u1dff\u20d0-\u20ff\u3099\u309a"
_LIGATURES = dict(zip("ﬀﬁﬂﬃﬄﬅﬆ", ("ff", "fi", "fl", "ffi", "ffl", "st", "st"), strict=True))
_SPELLING = re.compile(
    r"(?P<line_end>\u00ad+(?=[^\S\n]*\n))|(?P<unseen>[\u00ad\u200b-\u200d\u2060\ufeff]+)|(?P<emphasis>[*_]+)"
    rf"|(?P<ligature>[\ufb00-\ufb06])|(?P<accented>[^{_ACCENTS}][{_ACCENTS}]{{1,30}})"
)
_LAYOUT = re.compile(rf"(?P<hyphen>-(?: *\n[ \n]*)?)|[ \n]{{2,}}|\n| (?=[{_UNSPACED}])")
_IS_UNSPACED = re.compile(f"[{_UNSPACED}]")
_ALIKE = {
    '"': "“”„‟«»「」『』″",
    "'": "‘’‚‛‹›`´′",
    "-": "‐‑‒–—−",
    " ": "\t\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000",
    "\n": "\r\v\f\x1c\x1d\x1e\x1f\x85\u2028\u2029",
}
_LONGEST_EMPHASIS = 6  # longer runs of * or _ are lines and blanks
_WORD = re.compile(rf"[^\W_{WIDE}]{{2}}")
_NUMBER = re.compile(r"\d[.,:/⁄'’\u00a0\u2009\u202f]?\d")


@dataclass(frozen=True, slots=True)
class _Changed:
    """A text in which pieces are replaced: the pieces `starts[i]:ends[i]` were `were_from[i]:were_to[i]` before."""

    text: str
    starts: "array[int]" = field(default_factory=lambda: array("q"))
    ends: "array[int]" = field(default_factory=lambda: array("q"))
    were_from: "array[int]" = field(default_factory=lambda: array("q"))
    were_to: "array[int]" = field(default_factory=lambda: array("q"))

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Return where the characters `start` to `end`, at least one, stood before."""
        first = bisect_right(self.starts, start) - 1
        last = bisect_right(self.starts, end - 1) - 1
        was_start = self.were_from[first] if first >= 0 and start < self.ends[first] else self._moved(first, start)
        was_end = self.were_to[last] if last >= 0 and end <= self.ends[last] else self._moved(last, end)
        return was_start, was_end

    def _moved(self, piece: int, at: int) -> int:
        return self.were_to[piece] + at - self.ends[piece] if piece >= 0 else at


def _replace(text: str, pattern: re.Pattern[str], spell: Callable[[re.Match[str]], str]) -> _Changed:
    pieces: list[str] = []
    changed = _Changed("")
    done = length = 0
    for found in pattern.finditer(text):
        old, new = found[0], spell(found)
        if old == new:
            continue
        start, end = found.span()
        pieces += text[done:start], new
        length += start - done
        changed.starts.append(length)
        length += len(new)
        changed.ends.append(length)
        changed.were_from.append(start)
        changed.were_to.append(end)
        done = end
    return _Changed("".join([*pieces, text[done:]]), changed.starts, changed.ends, changed.were_from, changed.were_to)


class FoldedText:
    """A text in one spelling. It takes time in proportion to the length of the text.

    A hyphen between letters is left out, since the end of a line may have put it there: compare `hyphens` as well.
    """

    def __init__(self, text: str) -> None:
        self._spelled = _replace(text, _SPELLING, _spell)
        plain = self._spelled.text
        for sign, others in _ALIKE.items():
            for other in others:
                plain = plain.replace(other, sign)
        self._plain = plain
        self._laid_out = _replace(plain, _LAYOUT, _lay_out)
        self.text = self._laid_out.text

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Return where the characters `start` to `end`, at least one, stand in the text as it was given."""
        return self._spelled.span(*self._laid_out.span(start, end))

    def cuts(self, start: int, end: int) -> tuple[str, str]:
        """Return what the borders of a piece cut: "word", "number" or nothing, each."""
        first, last = self._laid_out.span(start, end)
        return self._cut(first), self._cut(last)

    def _cut(self, at: int) -> str:
        text = self._spelled.text
        if at in (0, len(text)):
            return ""
        if any(_NUMBER.fullmatch(text[max(0, at - before) : at + after]) for before, after in ((1, 1), (2, 1), (1, 2))):
            return "number"
        return "word" if _WORD.fullmatch(text[at - 1 : at + 1]) else ""

    def num_changes(self, start: int, end: int) -> int:
        """Return how many hyphens and ends of lines are at most between the characters `start` to `end`."""
        return len(self._changes(start, end))

    def _changes(self, start: int, end: int) -> range:
        return range(bisect_right(self._laid_out.starts, start), bisect_left(self._laid_out.starts, end))

    def hyphens(self, start: int, end: int) -> tuple[set[int], set[int]]:
        """Return the hyphens left out between the characters `start` to `end`: in lines, and at the ends of lines."""
        laid_out, inside, at_ends = self._laid_out, set[int](), set[int]()
        for piece in self._changes(start, end):
            at, was = laid_out.starts[piece], laid_out.were_from[piece]
            if at == laid_out.ends[piece] and self._plain[was] == "-":
                (inside if laid_out.were_to[piece] == was + 1 else at_ends).add(at - start)
        return inside, at_ends


def _spell(found: re.Match[str]) -> str:
    """Return characters as they are compared."""
    old = found[0]
    match found.lastgroup:
        case "line_end":
            return "-"
        case "ligature":
            return _LIGATURES[old]
        case "accented":
            return unicodedata.normalize("NFC", old)
        case "emphasis":
            before, after = _around(found)
            is_name = bool(_WORD.fullmatch(before + after))  # as in snake_case, 2**3
            is_loose = not before.strip() and not after.strip()
            return old if is_name or is_loose or len(old) > _LONGEST_EMPHASIS else ""
    return ""


def _lay_out(found: re.Match[str]) -> str:
    """Return spaces, ends of lines and hyphens as they are compared."""
    old = found[0]
    before, after = _around(found)
    if not found["hyphen"]:
        return "" if _IS_UNSPACED.match(before) and _IS_UNSPACED.match(after) else " "
    if before.isalpha() and after.isalpha():
        return ""
    if len(old) == 1 or (before.isalnum() and after.isalnum()):
        return "-"
    return "- "


def _around(found: re.Match[str]) -> tuple[str, str]:
    """Return the characters before and after a match, each empty at the end of the text."""
    start, end = found.span()
    return found.string[max(0, start - 1) : start], found.string[end : end + 1]

"""Quotations in an answer: text in quotation marks of several languages, and block quotes of Markdown.

Texts may have any length and come from any client, so looking quotes up takes time proportional to that length.
"""

import re
import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from sala.text.folding import WIDE, FoldedText

_PAIRS = (
    ("“„‟", "“”"),
    ('"', '"'),
    ("«", "»"),
    ("»", "«"),
    ("「", "」"),
    ("『", "』"),
    ("‹", "›"),
    ("‘‚", "’‘"),
)
_NARROW = rf"[^\W_{WIDE}]"  # a letter of a script with spaces between words
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
_BLOCK = re.compile(r"(?:^[ ]{0,3}>[^\n]*(?:\n|\Z))+", re.MULTILINE)
_MARKED = re.compile(
    "|".join(
        rf"(?<!{_NARROW})[{opening}](?P<q{index}>(?:(?!\n\s*\n)[^{opening}{closing}]){{1,2000}})[{closing}](?!{_NARROW})"
        for index, (opening, closing) in enumerate(_PAIRS)
    )
)
_OPENING = " \"'"  # what a quote may begin and end with that need not be in the text
_CLOSING = " \"'.,;:!?。，；：！？"
_GAP = re.compile(r" ?(?:[\[(] ?)?(?:…|\.(?: ?\.){2,})+(?: ?[\])])?")
MAX_GAP = 1000  # characters that an ellipsis may stand for
MAX_PIECES = 32  # between the ellipses of a quote
MAX_QUOTES = 256  # per answer
LEAST_WIDE = 4  # characters of a quote in such a script
NOWHERE = sys.maxsize
Found = tuple[str, int, int]  # a quote, and its place in the answer without the marks


class TooMuchWorkError(Exception):
    """The quotes of an answer take too long to look up."""


@dataclass(slots=True)
class SearchBudget:
    """What looking up the quotes of one answer may still cost, in characters that are searched."""

    left: int
    TEXT = 2_000  # what costs as much: to begin with a piece in a text,
    PLACE = 4_000  # a place that is compared,
    HYPHEN = 100  # a hyphen or an end of a line in it

    @classmethod
    def for_text(cls, length: int) -> "SearchBudget":
        return cls(2**26 + 128 * length)

    def spend(self, amount: int) -> None:
        """Raise TooMuchWorkError if no more is left."""
        self.left -= amount
        if self.left < 0:
            raise TooMuchWorkError


def find_quotes(answer: str) -> Iterator[Found]:
    """Yield the quotations of an answer, in order; code and single words without a digit are none.

    There are at most MAX_QUOTES, each of at most MAX_PIECES pieces.
    """
    code = [found.span() for found in _CODE.finditer(answer)]
    blocks = [found for found in _BLOCK.finditer(answer) if not _is_inside(found.start(), code)]
    quoted = [found.span() for found in blocks]
    found = [(_unmarked(block[0]), block.start(), block.end()) for block in blocks]
    for match in _MARKED.finditer(answer):
        if not _is_inside(match.start(), code) and not _is_inside(match.start(), quoted):
            name = str(match.lastgroup)
            found.append((match[name].strip(), match.start(name), match.end(name)))
    in_order = sorted(found, key=lambda one: one[1])
    yield from islice((one for one in in_order if _is_worth_it(one[0])), MAX_QUOTES)


def _is_inside(at: int, spans: list[tuple[int, int]]) -> bool:
    before = bisect_right(spans, at, key=lambda span: span[0]) - 1
    return before >= 0 and at < spans[before][1]


def _unmarked(block: str) -> str:
    """Return the text of a block quote."""
    text = "\n".join(re.sub(r"^[ ]{0,3}(?:>[ ]?)+", "", line) for line in block.splitlines())
    return re.sub(r"\*\*|__", "", text).strip()


def _is_worth_it(text: str) -> bool:
    """Return whether a quotation can be looked up and is long enough: two words, a number, some wide characters."""
    num_wide = len(re.findall(f"[{WIDE}]", text))
    words = re.findall(r"\w+", text)
    is_long = num_wide >= LEAST_WIDE or (not num_wide and (len(words) > 1 or any(map(str.isdigit, text))))
    return is_long and bool(split_quote(text))


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a quote without an ellipsis; `may_cut` says whether it may begin and end inside a word."""

    text: str
    hyphens: tuple[set[int], set[int]]
    may_cut: tuple[bool, bool]

    def __len__(self) -> int:
        return len(self.text)

    @property
    def variants(self) -> set[str]:
        """Its texts with a capital and a small first letter: an answer fits them to its own sentence."""
        first, rest = self.text[0], self.text[1:]
        return {self.text, *(other + rest for other in (first.upper(), first.lower()) if len(other) == 1)}

    def fits(self, text: FoldedText, start: int, work: SearchBudget) -> bool:
        """Return whether the piece is what stands at a place where its letters are: whole words, the same hyphens."""
        work.spend(SearchBudget.PLACE)
        end = start + len(self)
        for cut, may_cut in zip(text.cuts(start, end), self.may_cut, strict=True):
            if cut == "number" or (cut and not may_cut):
                return False
        work.spend(SearchBudget.HYPHEN * text.num_changes(start, end))
        inside, at_ends = text.hyphens(start, end)
        own, own_at_ends = self.hyphens
        return inside <= own | own_at_ends and own <= inside | at_ends


def split_quote(quote: str) -> list[Piece]:
    """Return what of a quote is to be found in a text, piece after piece; nothing if it cannot be looked up.

    An ellipsis stands for some text, and marks of punctuation that end the quote may be the answer's own.
    """
    folded = FoldedText(quote)
    gaps = [(0, 0, False), *((*gap.span(), True) for gap in _GAP.finditer(folded.text))]
    spans = []
    for (_, start, is_gap), (end, _, is_next_gap) in zip(gaps, [*gaps[1:], (len(folded.text), 0, False)], strict=True):
        text = folded.text[start:end]
        if re.search(r"\w", text):
            may_cut = is_gap and not text[0].isspace(), is_next_gap and folded.text[end] != " "
            spans.append((start + len(text) - len(text.lstrip(_OPENING)), start + len(text.rstrip()), may_cut))
    if not spans or len(spans) > MAX_PIECES:
        return []
    start, end, may_cut = spans[-1]
    spans[-1] = start, start + len(folded.text[start:end].rstrip(_CLOSING)), may_cut
    return [Piece(folded.text[start:end], folded.hyphens(start, end), may_cut) for start, end, may_cut in spans]


class _PieceSearch:
    """The places of a piece of a quote in a text that follow a place of the pieces before it.

    Everything moves from left to right only, so that the text is read once for each piece.
    """

    def __init__(self, text: FoldedText, piece: Piece, before: "_PieceSearch | None", work: SearchBudget) -> None:
        work.spend(SearchBudget.TEXT)
        self.piece = piece
        self.start = -1
        self._text, self._before, self._work = text, before, work
        self._next = dict.fromkeys(piece.variants, -1)

    def move(self, at: int) -> int:
        """Go to the first such place from `at` on, which never decreases, and return it; NOWHERE if there is none."""
        if at <= self.start:
            return self.start
        self.start = self._find(at)
        while self._before is not None and self.start != NOWHERE:
            length = len(self._before.piece)
            before = self._before.move(max(0, self.start - MAX_GAP - length))
            if before == NOWHERE:
                self.start = NOWHERE
            elif before + length <= self.start:
                break
            else:
                self.start = self._find(before + length)
        return self.start

    def _find(self, at: int) -> int:
        """Return the first place of the piece alone."""
        while (start := min(self._find_variant(variant, at) for variant in self._next)) != NOWHERE:
            if self.piece.fits(self._text, start, self._work):
                break
            at = start + 1
        return start

    def _find_variant(self, variant: str, at: int) -> int:
        if self._next[variant] < at:
            found = self._text.text.find(variant, at)
            self._next[variant] = NOWHERE if found < 0 else found
            self._work.spend(min(self._next[variant], len(self._text.text)) - min(at, len(self._text.text)))
        return self._next[variant]


def look_up(pieces: list[Piece], text: FoldedText, work: SearchBudget) -> tuple[int, int] | None:
    """Return where a quote stands in a text as it was given, or None. Raises TooMuchWorkError."""
    searches: list[_PieceSearch] = []
    for piece in pieces:
        searches.append(_PieceSearch(text, piece, searches[-1] if searches else None, work))
    if not searches or searches[-1].move(0) == NOWHERE:
        return None
    return text.span(searches[0].start, searches[-1].start + len(pieces[-1]))

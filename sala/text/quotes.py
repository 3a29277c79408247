"""Quotations in an answer: text in quotation marks of several languages, and block quotes of Markdown."""

import re
from collections.abc import Iterator

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
_WIDE = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"  # written without spaces between words
_NARROW = rf"[^\W{_WIDE}]"  # a letter of the others
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
_BLOCK = re.compile(r"(?:^[ ]{0,3}>[^\n]*(?:\n|\Z))+", re.MULTILINE)
_MARKED = re.compile(
    "|".join(
        rf"(?<!{_NARROW})[{opening}](?P<q{index}>(?:(?!\n\s*\n)[^{opening}{closing}]){{1,2000}})[{closing}](?!{_NARROW})"
        for index, (opening, closing) in enumerate(_PAIRS)
    )
)
_SIGNS = {
    **dict.fromkeys("\"“”„‟«»「」『』″", '["“”„‟«»「」『』″]'),
    **dict.fromkeys("'‘’‚‛‹›`´′", "['‘’‚‛‹›`´′]"),
    **dict.fromkeys("-‐‑‒–—−", "[-‐‑‒–—−]"),
}  # fmt: skip
_GAP = re.compile(r"\s*(?:\[\s*(?:…|\.\.\.)\s*\]|…|\.\.\.)\s*")
MAX_GAP = 1000  # characters that an ellipsis may stand for
LEAST_WIDE = 4  # characters of a quote in such a script
Found = tuple[str, int, int]  # a quote, and its place in the answer without the marks


def find_quotes(answer: str) -> Iterator[Found]:
    """Yield the quotations of an answer, in order; code and single words without a digit are none."""
    hidden = [found.span() for found in _CODE.finditer(answer)]
    blocks = [found for found in _BLOCK.finditer(answer) if not _is_inside(found.start(), hidden)]
    hidden += [found.span() for found in blocks]
    found = [(_unmarked(block[0]), block.start(), block.end()) for block in blocks]
    for match in _MARKED.finditer(answer):
        if not _is_inside(match.start(), hidden):
            name = str(match.lastgroup)
            found.append((match[name].strip(), match.start(name), match.end(name)))
    yield from (one for one in sorted(found, key=lambda one: one[1]) if _is_worth_it(one[0]))


def _is_inside(at: int, spans: list[tuple[int, int]]) -> bool:
    return any(start <= at < end for start, end in spans)


def _unmarked(block: str) -> str:
    """Return the text of a block quote."""
    text = "\n".join(re.sub(r"^[ ]{0,3}(?:>[ ]?)+", "", line) for line in block.splitlines())
    return re.sub(r"\*\*|__", "", text).strip()


def _is_worth_it(text: str) -> bool:
    """Return whether a quotation is long enough to be looked up: two words, a number, some signs of a wide script."""
    num_wide = len(re.findall(f"[{_WIDE}]", text))
    words = re.findall(r"\w+", text)
    return num_wide >= LEAST_WIDE or (not num_wide and (len(words) > 1 or any(map(str.isdigit, text))))


def pattern_of(quote: str) -> "re.Pattern[str] | None":
    """Return what finds a quote in a text; None if nothing of it can be searched for.

    White space may differ, quotation marks and dashes may be others, an ellipsis stands for some text, and marks of
    punctuation that end the quote may be the answer's own.
    """
    bare = quote.strip().strip('"“”„‟«»「」『』‹›').rstrip(".,;:!?。，；：！？ ")
    pieces = [piece for piece in _GAP.split(bare) if re.search(r"\w", piece)]
    if not pieces:
        return None
    gap = rf"[\s\S]{{0,{MAX_GAP}}}?"
    return re.compile(gap.join(_spelled(piece) for piece in pieces))


def _spelled(piece: str) -> str:
    words = piece.split()
    return r"\s+".join("".join(_SIGNS.get(char, re.escape(char)) for char in word) for word in words)

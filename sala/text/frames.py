"""The frames of documents in a prompt: how they are written, and how they are found again in a text.

A document begins with a line that names it, then come its sections, each after a line with its label; a line closes it.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape, unescape

CLOSING = "</document>\n\n"
_EDGE = re.compile(r'^(?:<document name="([^"\n]*)">|</document>)$', re.MULTILINE)
_MARK = re.compile(r"^\[((?:(page|slide|message)|(chapter)) (\d{1,9})(?(3)\b.*)|sheet .*)\]\n", re.MULTILINE)


def opening(name: str) -> str:
    """Return the line that a document begins with."""
    return f'<document name="{escape(name)}">\n'


def mark(label: str) -> str:
    """Return the line that a section begins with; empty for a document of one section without a label."""
    return f"[{label}]\n" if label else ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece of a document comes from. The number of a line is None where it is not known, or in the frame."""

    name: str
    label: str
    unit: str
    number: int | None

    def __str__(self) -> str:
        line = "" if self.number is None else f"{self.unit} {self.number}"
        return ", ".join(part for part in (self.name, self.label, line) if part)


@dataclass(frozen=True, slots=True)
class FramedSection:
    """The characters `start` to `end` of a text: a section of a document, without the line of its label."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class FramedDocument:
    """The characters `start` to `end` of a text: a document with its frame."""

    name: str
    start: int
    end: int
    sections: tuple[FramedSection, ...]

    def section_at(self, char: int) -> FramedSection | None:
        """Return the section that a character of the text belongs to; None for the frame."""
        at = bisect_right(self.sections, char, key=lambda section: section.start) - 1
        return self.sections[at] if at >= 0 and char < self.sections[at].end else None

    def place(self, text: str, char: int) -> Place | None:
        """Return the place of a character; None for the frame. The rows of a sheet are counted in the file alone."""
        section = self.section_at(char)
        if section is None:
            return None
        if section.label.startswith("sheet "):
            return Place(self.name, section.label, "row", None)
        return Place(self.name, section.label, "line", text.count("\n", section.start, char) + 1)


def find_documents(text: str) -> list[FramedDocument]:
    """Return the documents in a text, in order.

    A document ends at the last closing line before the next document, so its own text may contain such lines. What it
    contains is not trusted: where it imitates a closing line and the opening of another document, that one is found.
    """
    found: list[FramedDocument] = []
    name, start, body, last = "", -1, 0, -1
    for edge in _EDGE.finditer(text) if "</document>" in text else ():
        if edge[1] is None:
            last = edge.start()
        elif start < 0 or last >= body:
            if start >= 0:
                found.append(_document(text, name, start, body, last))
            name, start, body = unescape(edge[1]), edge.start(), edge.end() + 1
    if start >= 0 and last >= body:
        found.append(_document(text, name, start, body, last))
    return found


def _document(text: str, name: str, start: int, body: int, last: int) -> FramedDocument:
    """Return the document whose sections stand between `body` and the closing line at `last`."""
    marks = list(_marks(text, body, last))
    labels, begins, ends = [""], [body], [last]
    if marks:
        labels = [found[1] for found in marks]
        begins = [found.end() for found in marks]
        ends = [*(found.start() for found in marks[1:]), last]
    end = last + len(CLOSING if text.startswith(CLOSING, last) else CLOSING.rstrip())
    return FramedDocument(name, start, end, tuple(map(FramedSection, labels, begins, ends)))


def _marks(text: str, start: int, end: int) -> Iterator["re.Match[str]"]:
    """Yield the lines with labels. The first stands first; the others are of its kind, with numbers that grow."""
    first = _MARK.match(text, start, end)
    if first is None:
        return
    yield first
    kind, number = first[2] or first[3], int(first[4] or 0)
    for found in _MARK.finditer(text, first.end(), end):
        if (found[2] or found[3]) == kind and (kind is None or int(found[4]) > number):
            number = int(found[4] or 0)
            yield found

"""A document as one text, the way the model reads it: its name, marks of its sections, their lines."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from sala.documents.model import Document
from sala.text.frames import CLOSING, mark, opening

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class LineRange:
    """The characters `start` to `end` of a text: the lines of a section. `numbers` are those of its lines."""

    label: str
    unit: str
    start: int
    end: int
    numbers: Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Layout:
    """A document as text, and where its sections are in it."""

    name: str
    text: str
    stretches: list[LineRange]
    notes: list[str]

    def count_tokens(self, ends: Sequence[int]) -> list[int]:
        """Return how many tokens each section has; `ends` are the characters at which the tokens of `text` end."""
        return [bisect_right(ends, one.end) - bisect_right(ends, one.start) for one in self.stretches]


def lay_out(document: Document) -> Layout:
    """Return a document as the text whose tokens `packing` puts in line."""
    pieces = [_SURROGATE.sub("\ufffd", opening(document.name))]
    at, label = len(pieces[0]), ""
    stretches: list[LineRange] = []
    for section in document.sections:
        if section.label != label or not stretches:
            label = section.label
            pieces.append(_SURROGATE.sub("\ufffd", mark(label)))
            at += len(pieces[-1])
        text = section.text if section.text.endswith("\n") else f"{section.text}\n"
        pieces.append(_SURROGATE.sub("\ufffd", text))
        stretches.append(LineRange(label, section.unit, at, at + len(text), section.numbers))
        at += len(text)
    return Layout(document.name, "".join([*pieces, CLOSING]), stretches, document.notes)

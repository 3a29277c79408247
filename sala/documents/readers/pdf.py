"""PDF: one section per page."""

import io
from functools import cache
from importlib import import_module
from typing import Any

from sala.documents.model import Section, Unreadable

SPACE = 200  # thousandths of the font size
NO_TEXT = "it holds no text, probably scanned pages; run OCR over it first"


def read_pdf(data: bytes, max_chars: int) -> tuple[list[Section], list[str]]:
    """Return the pages with text, and notes on those without."""
    from pypdf import PdfReader

    _see_gaps()
    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted:
        _unlock(reader)
    sections, empty, broken, num_chars = [], [], [], 0
    for number, page in enumerate(reader.pages, 1):
        try:
            text = page.extract_text().strip()
        except (MemoryError, RecursionError):
            raise
        except Exception:  # whatever is wrong with a page, others may be intact
            broken.append(number)
            continue
        num_chars += len(text)
        if num_chars > max_chars:
            raise Unreadable(f"it holds more than {max_chars:,} characters; split it")
        if text:
            sections.append(Section(f"page {number}", text))
        else:
            empty.append(number)
    if not sections:
        raise Unreadable("it is damaged" if broken or not empty else NO_TEXT)
    notes = [f"{_pages(empty)} without text"] if empty else []
    return sections, notes + ([f"{_pages(broken)} cannot be read"] if broken else [])


@cache
def _see_gaps() -> None:
    """Let pypdf see the gaps between words in fonts without a space, such as those of XeTeX.

    It takes another glyph for the space, which is often too wide, and runs the words together. This process reads
    documents and does nothing else, so that a change to the library is felt nowhere else.
    """
    try:
        font_class: Any = import_module("pypdf._page").Font
        make = font_class.from_font_resource
    except (ImportError, AttributeError):  # another version
        return

    def from_font_resource(*args: Any) -> Any:
        font = make(*args)
        if " " not in font.character_map.values():
            font.space_width = min(font.space_width, SPACE)
        return font

    font_class.from_font_resource = staticmethod(from_font_resource)


def _unlock(reader: Any) -> None:
    """Open a PDF that needs no password to be read. Raises Unreadable for others."""
    from pypdf.errors import DependencyError

    try:
        is_open = bool(reader.decrypt(""))
    except (DependencyError, NotImplementedError):
        is_open = False
    if not is_open:
        raise Unreadable("it is encrypted; save it without a password first")


def _pages(numbers: list[int]) -> str:
    """Return page numbers as "page 3" or "pages 1-4, 7", the first few of them."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    shown = ", ".join("-".join(map(str, run)) for run in runs[:8]) + (", …" if len(runs) > 8 else "")
    return f"page {shown}" if len(numbers) == 1 else f"pages {shown}"

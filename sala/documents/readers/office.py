"""Office files: DOCX as running text, PPTX by slide, XLSX by sheet."""

import csv
import io
from collections.abc import Iterator
from datetime import datetime, time
from typing import Any

from sala.documents.model import Section, Unreadable

WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
NOT_SHOWN = {f"{WORD}del", f"{WORD}moveFrom", "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"}
MAX_EMPTY_ROWS = 100_000  # one after another: a sheet may claim a million of them


def read_docx(data: bytes) -> list[Section]:
    """Return the text of the body, with tables, text boxes, accepted insertions and footnotes."""
    from docx import Document

    document = Document(io.BytesIO(data))
    lines = list(_blocks(document.element.body))
    for kind in ("footnotes", "endnotes", "comments"):
        notes = [line for root in _notes(document, kind) for line in _blocks(root) if line.strip()]
        lines += ["", f"{kind.capitalize()}:", *notes] if notes else []
    return [Section("", "\n".join(lines).strip())]


def _notes(document: Any, kind: str) -> Iterator[Any]:
    from docx.opc.oxml import parse_xml

    for relation in document.part.rels.values():
        if not relation.is_external and relation.reltype.endswith(f"/{kind}"):
            yield parse_xml(relation.target_part.blob)


def _blocks(parent: Any) -> Iterator[str]:
    """Yield paragraphs and rows of tables, in order."""
    for element in parent:
        if element.tag == f"{WORD}p":
            yield _heading(element) + _text(element)
        elif element.tag == f"{WORD}tbl":
            for row in element.iter(f"{WORD}tr"):
                cells = row.iterchildren(f"{WORD}tc")
                yield " | ".join(" ".join("\n".join(_blocks(cell)).split()) for cell in cells)
        elif isinstance(element.tag, str) and element.tag not in NOT_SHOWN:
            yield from _blocks(element)  # content controls, footnotes


def _heading(paragraph: Any) -> str:
    style = paragraph.find(f"{WORD}pPr/{WORD}pStyle")
    name = "" if style is None else style.get(f"{WORD}val", "").lower()
    if name == "title":
        return "# "
    level = name.removeprefix("heading")
    return "#" * min(6, int(level)) + " " if name != level and level.isdigit() else ""


def _text(element: Any) -> str:
    """Return the text below an element without what was deleted, so that changes count as accepted."""
    pieces: list[str] = []
    for child in element:
        if child.tag == f"{WORD}t":
            pieces.append(child.text or "")
        elif child.tag in (f"{WORD}tab", f"{WORD}ptab"):
            pieces.append("\t")
        elif child.tag in (f"{WORD}br", f"{WORD}cr"):
            pieces.append("\n")
        elif child.tag == f"{WORD}noBreakHyphen":
            pieces.append("-")
        elif child.tag not in NOT_SHOWN and child.tag != f"{WORD}pPr":
            pieces.append(_text(child))
    return "".join(pieces)


def read_pptx(data: bytes) -> list[Section]:
    from pptx import Presentation

    sections = []
    for number, slide in enumerate(Presentation(io.BytesIO(data)).slides, 1):
        lines = list(_shapes(slide.shapes))
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            notes = slide.notes_slide.notes_text_frame.text.strip()
            lines += [f"Notes: {notes}"] if notes else []
        if text := "\n".join(line for line in lines if line.strip()):
            sections.append(Section(f"slide {number}", text.replace("\v", "\n")))
    return sections


def _shapes(shapes: Any) -> Iterator[str]:
    for shape in shapes:
        if hasattr(shape, "shapes"):
            yield from _shapes(shape.shapes)
        elif getattr(shape, "has_table", False):
            for row in shape.table.rows:
                yield " | ".join(" ".join(cell.text.split()) for cell in row.cells)
        elif shape.has_text_frame:
            yield shape.text_frame.text


def read_xlsx(data: bytes, max_chars: int) -> tuple[list[Section], list[str]]:
    """Return the sheets as CSV without empty rows, and notes on rows that were not read.

    Formulas give the values that were saved with them.
    """
    from openpyxl import load_workbook

    workbook = load_workbook(io.BytesIO(data), read_only=True, data_only=True)
    sections, notes, num_chars = [], [], 0
    for sheet in workbook.worksheets:
        sheet.reset_dimensions()  # what the file says of its size need not be true
        text, numbers = io.StringIO(), []
        writer = csv.writer(text, lineterminator="\n")
        empty = 0
        for number, row in enumerate(sheet.iter_rows(values_only=True), 1):
            cells = [_cell(value) for value in row]
            while cells and not cells[-1]:
                cells.pop()
            empty = 0 if cells else empty + 1
            if empty > MAX_EMPTY_ROWS:
                notes.append(f"sheet {sheet.title} from row {number + 1:,} on, after {empty:,} empty rows, is not read")
                break
            if cells:
                writer.writerow(cells)
                numbers.append(number)
                if num_chars + text.tell() > max_chars:
                    raise Unreadable(f"it holds more than {max_chars:,} characters; split it")
        num_chars += text.tell()
        if numbers:
            sections.append(Section(f"sheet {sheet.title}", text.getvalue(), "row", numbers))
    return sections, notes


def _cell(value: Any) -> str:
    """Return a cell on one line, so that lines are rows."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, datetime) and value.time() == time():
        return value.date().isoformat()
    return " ".join(str(value).split())

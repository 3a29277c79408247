"""HTML and EPUB as plain text: headings, lists, tables and preformatted text keep their form."""

import io
import posixpath
import re
import zipfile
from collections.abc import Set
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote

from sala.documents.model import Section, Unreadable
from sala.documents.readers.formulas import Formula
from sala.documents.readers.plain import decode

HIDDEN = {
    "script", "style", "template", "noscript", "svg", "head", "iframe", "object", "select", "annotation",
    "annotation-xml",
}  # fmt: skip
IN_HEAD = {"title", "meta", "link", "base", "basefont", "script", "style", "noscript", "template"}
BLOCKS = {
    "p", "div", "section", "article", "header", "footer", "main", "aside", "nav", "ul", "ol", "dl", "dt", "dd",
    "table", "blockquote", "figure", "figcaption", "form", "fieldset", "address", "hr", "details", "summary", "body",
}  # fmt: skip
HEADINGS = {f"h{level}": level for level in range(1, 7)}
NOT_IN_FORMULAS = {*BLOCKS, *HEADINGS, "li", "tr", "td", "th", "pre", "br", "img"}
CONTAINER = "META-INF/container.xml"
CHARSET = re.compile(rb"""<(?:meta[^>]{0,200}?charset|\?xml[^>]{0,200}?encoding)\s*=\s*["']?([\w-]{2,40})""", re.I)
DOCTYPE = re.compile(  # at the beginning, with declarations of XML, such as those of entities
    r"""(\s*(?:<\?xml[^>]*>\s*)?<!DOCTYPE[^\[>]*)\[(?:[^\]"']|"[^"]*"|'[^']*')*+\]""", re.I
)


class TextParser(HTMLParser):
    """Collects what a reader of the page sees. `title` is its title, `heading` its first heading.

    Elements in `shown` are treated as if they had no meaning: those that are nowhere closed.
    """

    def __init__(self, shown: Set[str] = frozenset()) -> None:
        super().__init__(convert_charrefs=True)
        self.title = self.heading = ""
        self._shown = shown
        self._pieces: list[str] = []
        self._hidden: list[str] = []  # open elements whose text is not shown
        self._num_pre = 0
        self._in_title = False
        self._open_heading: int | None = None  # where its text begins
        self._is_first_cell = True
        self._formula: Formula | None = None
        self._formula_text = ""  # of the last formula, where the page has it in one piece

    @property
    def unclosed(self) -> set[str]:
        """The open elements because of which text is not shown."""
        return {*self._hidden, *(["title"] if self._in_title else [])}

    def set_cdata_mode(self, elem: str, **options: Any) -> None:
        if elem not in self._shown:
            super().set_cdata_mode(elem, **options)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag in self._shown:
            return
        if tag == "body" or (self._hidden == ["head"] and tag not in IN_HEAD):
            self._hidden = []  # the end of the head may be missing
        if tag == "title" and self._hidden in ([], ["head"]):
            self._in_title = True
        if tag in HIDDEN:
            self._hidden.append(tag)
        if self._hidden:
            return
        if tag in NOT_IN_FORMULAS:
            self._formula = None  # its end may be missing
        if self._formula is not None:
            self._pieces.append(self._formula.start(tag))
        elif tag == "math":
            self._begin_formula(dict(attrs))
        else:
            self._begin(tag, attrs)

    def _begin_formula(self, attributes: dict[str, str | None]) -> None:
        self._formula_text = attributes.get("alttext") or ""
        if self._formula_text:
            self._pieces.append(self._formula_text)
            self._hidden.append("math")
        else:
            self._formula = Formula()

    def _begin(self, tag: str, attrs: Any) -> None:
        if tag in HEADINGS:
            self._break(2)
            self._pieces.append("#" * HEADINGS[tag] + " ")
            self._open_heading = len(self._pieces)
        elif tag == "br":
            self._pieces.append("\n")
        elif tag == "li":
            self._break(1)
            self._pieces.append("- ")
        elif tag == "tr":
            self._break(1)
            self._is_first_cell = True
        elif tag in ("td", "th"):
            self._pieces.append("" if self._is_first_cell else " | ")
            self._is_first_cell = False
        elif tag == "img":
            text = dict(attrs).get("alt") or ""
            self._pieces.append(f" {text} " if text and text != self._formula_text else "")
        elif tag == "pre":
            self._break(2)
            self._num_pre += 1
        elif tag in BLOCKS:
            self._break(1 if tag in ("dt", "dd") else 2)

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
        if tag in self._hidden:
            while self._hidden.pop() != tag:
                pass
            return
        if self._hidden or tag in HIDDEN:
            return
        if tag == "math" or tag in NOT_IN_FORMULAS:
            self._formula = None
        if self._formula is not None:
            self._pieces.append(self._formula.end(tag))
        elif tag in HEADINGS and self._open_heading is not None:
            self.heading = self.heading or " ".join("".join(self._pieces[self._open_heading :]).split())
            self._open_heading = None
            self._break(2)
        elif tag == "pre":
            self._num_pre = max(0, self._num_pre - 1)
            self._break(2)
        elif tag in BLOCKS:
            self._break(2)

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title = " ".join(f"{self.title} {data}".split())[:300]
            return
        if self._hidden == ["head"] and data.strip():
            self._hidden = []
        if self._formula is not None and not self._hidden:
            self._pieces.append(data.strip(" \t\n"))
        elif not self._hidden:
            begins = not self._pieces or self._pieces[-1].endswith(("\n", "- ", "# "))
            text = data if self._num_pre else re.sub(r"\s+", " ", data)
            self._pieces.append(text.lstrip() if begins and not self._num_pre else text)

    def _break(self, lines: int) -> None:
        """End the line; two lines leave an empty one."""
        if not self._num_pre:
            self._pieces.append("\n" * lines)

    @property
    def text(self) -> str:
        lines = [line.rstrip() for line in "".join(self._pieces).split("\n")]
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def read_html(data: bytes) -> list[Section]:
    parser = parse_html(decode_markup(data))
    is_named = parser.title and parser.title not in parser.text[:1000]
    return [Section("", f"{parser.title}\n\n{parser.text}" if is_named else parser.text)]


def parse_html(text: str) -> TextParser:
    """Parse a page. An element that hides its text and is not closed does not hide what follows, nor does a comment."""
    found = DOCTYPE.match(text)  # the entities that it declares are not expanded
    text = text if found is None else found[1] + text[found.end() :]
    end = max(text.rfind("-->"), text.rfind("--!>"), 0)  # comments that begin after it are not closed
    text = text[:end] + text[end:].replace("<!--", "")
    shown: frozenset[str] = frozenset()
    while True:
        parser = TextParser(shown)
        parser.feed(text)
        parser.close()
        if not parser.unclosed - shown:
            return parser
        shown |= parser.unclosed


def decode_markup(data: bytes) -> str:
    """Decode HTML or XML, by the encoding that it declares where that fits."""
    declared = CHARSET.search(data[:2048])
    return decode(data, declared[1].decode("ascii") if declared else None)


def read_epub(data: bytes) -> tuple[list[Section], list[str]]:
    """Return the chapters in reading order. An encrypted book (DRM) raises Unreadable."""
    from defusedxml.ElementTree import fromstring

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = set(archive.namelist())
        if CONTAINER not in names:
            raise Unreadable("it is damaged: it does not say where its contents are")
        root = fromstring(archive.read(CONTAINER))
        package = next((one.get("full-path") for one in root.iter() if _tag(one) == "rootfile"), None)
        if package not in names:
            raise Unreadable("it is damaged: its list of contents is missing")
        book = fromstring(archive.read(package))
        files = {one.get("id"): unquote(one.get("href", "")) for one in book.iter() if _tag(one) == "item"}
        order = [files.get(one.get("idref")) for one in book.iter() if _tag(one) == "itemref"]
        folder = posixpath.dirname(package)
        paths = [posixpath.normpath(posixpath.join(folder, name)) for name in order if name]
        if _encrypted(archive, names) & set(paths):
            raise Unreadable("it is encrypted (DRM)")
        found: list[Section] = []
        missing = 0
        for path in paths:
            if path not in names:
                missing += 1
                continue
            parser = parse_html(decode_markup(archive.read(path)))
            if parser.text:
                heading = f": {parser.heading}" if parser.heading else ""
                found.append(Section(f"chapter {len(found) + 1}{heading[:100]}", parser.text))
    return found, [f"{missing} chapters are missing"] if missing else []


def _encrypted(archive: zipfile.ZipFile, names: set[str]) -> set[str]:
    """Return the encrypted files of a book; often those are only its fonts."""
    from defusedxml.ElementTree import fromstring

    name = "META-INF/encryption.xml"
    if name not in names:
        return set()
    return {
        unquote(one.get("URI", "")) for one in fromstring(archive.read(name)).iter() if _tag(one).endswith("Reference")
    }


def _tag(element: Any) -> str:
    return str(element.tag).rpartition("}")[2]

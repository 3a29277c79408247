"""HTML and EPUB as plain text: headings, lists, tables and preformatted text keep their form."""

import io
import posixpath
import re
import zipfile
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote

from sala.documents.model import Section, Unreadable
from sala.documents.readers.plain import decode

HIDDEN = {"script", "style", "template", "noscript", "svg", "math", "head", "iframe", "object", "select"}
BLOCKS = {
    "p", "div", "section", "article", "header", "footer", "main", "aside", "nav", "ul", "ol", "dl", "dt", "dd",
    "table", "blockquote", "figure", "figcaption", "form", "fieldset", "address", "hr", "details", "summary", "body",
}  # fmt: skip
HEADINGS = {f"h{level}": level for level in range(1, 7)}
CONTAINER = "META-INF/container.xml"
CHARSET = re.compile(rb"""<(?:meta[^>]{0,200}?charset|\?xml[^>]{0,200}?encoding)\s*=\s*["']?([\w-]{2,40})""", re.I)
DOCTYPE = re.compile(  # at the beginning, with declarations of XML, such as those of entities
    r"""(\s*(?:<\?xml[^>]*>\s*)?<!DOCTYPE[^\[>]*)\[(?:[^\]"']|"[^"]*"|'[^']*')*+\]""", re.I
)


class TextParser(HTMLParser):
    """Collects what a reader of the page sees. `title` is its title, `heading` its first heading."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title = self.heading = ""
        self._pieces: list[str] = []
        self._hidden: list[str] = []  # open elements whose text is not shown
        self._num_pre = 0
        self._in_title = False
        self._open_heading: int | None = None  # where its text begins
        self._is_first_cell = True

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "title" and self._hidden in ([], ["head"]):
            self._in_title = True
        if tag == "body":
            self._hidden = []  # the end of the head may be missing
        if tag in HIDDEN:
            self._hidden.append(tag)
        if self._hidden:
            return
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
            self._pieces.append(next((f" {value} " for name, value in attrs if name == "alt" and value), ""))
        elif tag == "pre":
            self._break(2)
            self._num_pre += 1
        elif tag in BLOCKS:
            self._break(1 if tag in ("dt", "dd") else 2)

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
        if tag in HIDDEN:
            if tag in self._hidden:
                while self._hidden.pop() != tag:
                    pass
            return
        if self._hidden:
            return
        if tag in HEADINGS and self._open_heading is not None:
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
    parser = TextParser()
    found = DOCTYPE.match(text)  # the entities that it declares are not expanded
    parser.feed(text if found is None else found[1] + text[found.end() :])
    parser.close()
    return parser


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

"""From a file to its documents: tell the format, by content before name; open archives; call the reader."""

import io
import zipfile
from collections.abc import Callable
from posixpath import splitext

from sala.documents.model import Document, LeftOut, Limits, Section, Unreadable, clean_name
from sala.documents.readers.mail import read_mail, read_mbox
from sala.documents.readers.markup import read_epub, read_html
from sala.documents.readers.office import read_docx, read_pptx, read_xlsx
from sala.documents.readers.pdf import read_pdf
from sala.documents.readers.plain import read_plain
from sala.errors import MissingExtra

LIBRARIES = {"pypdf": "pypdf", "docx": "python-docx", "pptx": "python-pptx", "openpyxl": "openpyxl"}
LIBRARIES |= {"defusedxml": "defusedxml", "charset_normalizer": "charset-normalizer", "pathspec": "pathspec"}
SIGNATURES = (  # beginnings of files that cannot be read, and what to say of them
    (
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
        "it is in an old Office format or encrypted; save it as DOCX, PPTX, XLSX or PDF",
    ),
    (b"{\\rtf", "it is RTF; save it as DOCX or PDF"),
    (b"%!PS", "it is PostScript; convert it to PDF"),
    (b"\x1f\x8b", "it is compressed (gzip); unpack it first"),
    (b"BZh", "it is compressed (bzip2); unpack it first"),
    (b"\xfd7zXZ\0", "it is compressed (xz); unpack it first"),
    (b"(\xb5/\xfd", "it is compressed (zstd); unpack it first"),
    (b"7z\xbc\xaf'\x1c", "it is a 7z archive; unpack it first"),
    (b"Rar!\x1a\x07", "it is a RAR archive; unpack it first"),
    (b"\x89PNG\r\n", "it is an image"),
    (b"\xff\xd8\xff", "it is an image"),
    (b"GIF8", "it is an image"),
    (b"SQLite format 3\0", "it is a database"),
    (b"\x7fELF", "it is a program"),
)
PACKAGES = (  # a member that tells what a ZIP file is
    ("word/document.xml", "docx"),
    ("ppt/presentation.xml", "pptx"),
    ("xl/workbook.xml", "xlsx"),
    ("META-INF/container.xml", "epub"),
)
SUFFIXES = {".html": "html", ".htm": "html", ".xhtml": "html", ".eml": "mail", ".mbox": "mbox"}
MAX_LISTED = 3  # members of an archive without any text
Read = tuple[list[Section], list[str], list[tuple[str, bytes]]]  # sections, notes, and files inside the file


class Reading:
    """The reading of one file and all that is inside it, within common limits."""

    def __init__(self, limits: Limits) -> None:
        self.documents: list[Document] = []
        self.left_out: list[LeftOut] = []
        self._limits = limits
        self._num_members = self._num_bytes = self._num_chars = 0

    def read(self, name: str, data: bytes, depth: int = 0) -> None:
        """Read a file. What cannot be read is left out, with the reason."""
        try:
            if not data.strip():
                raise Unreadable("it is empty")
            kind = find_kind(name, data)
            if kind == "zip":
                self._unpack(name, data, depth)
                return
            sections, notes, inner = self._parse(kind, data)
            sections = [section for section in sections if section.text.strip()]
            if not sections and not inner:
                raise Unreadable("it holds no text")
            self._num_chars += sum(len(section.text) for section in sections)
            if self._num_chars > self._limits.text_chars:
                raise Unreadable(f"it holds more than {self._limits.text_chars:,} characters; split it")
            if sections:
                self.documents.append(Document(name, sections, notes))
        except Unreadable as error:
            self.left_out.append(LeftOut(name, str(error)))
            return
        except ModuleNotFoundError as error:
            library = LIBRARIES.get((error.name or "").partition(".")[0], error.name or "a library")
            self.left_out.append(LeftOut(name, str(MissingExtra(library, "documents"))))
            return
        except MemoryError:
            raise
        except RecursionError:
            self.left_out.append(LeftOut(name, "it is nested too deeply"))
            return
        except Exception as error:  # libraries raise anything for a broken file
            self.left_out.append(LeftOut(name, f"it is damaged ({type(error).__name__})"))
            return
        for inside, content in inner:
            self._enter(f"{name}/{clean_name(inside)}", content, depth + 1)

    def _parse(self, kind: str, data: bytes) -> Read:
        limit = self._limits.text_chars
        if kind in ("docx", "pptx", "xlsx", "epub"):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                self._check(archive)
        if kind == "pdf":
            return *read_pdf(data, limit), []
        if kind == "epub":
            return *read_epub(data), []
        if kind == "xlsx":
            return *read_xlsx(data, limit), []
        if kind in ("mail", "mbox"):
            sections, inner = (read_mail if kind == "mail" else read_mbox)(data)
            return sections, [], inner
        readers: dict[str, Callable[[bytes], list[Section]]] = {"html": read_html, "docx": read_docx, "pptx": read_pptx}
        return readers.get(kind, read_plain)(data), [], []

    def _unpack(self, name: str, data: bytes, depth: int) -> None:
        """Read the members of an archive in the order of their names; one without any text is left out in one line."""
        num_documents, num_left_out = len(self.documents), len(self.left_out)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            self._check(archive)
            members = sorted((one for one in archive.infolist() if not one.is_dir()), key=lambda one: one.filename)
            for member in members:
                inside = f"{name}/{clean_name(member.filename.lstrip('/'))}"
                if member.flag_bits & 1:
                    self.left_out.append(LeftOut(inside, "it is encrypted; unpack it first"))
                    continue
                try:
                    content = archive.read(member)
                except MemoryError:
                    raise
                except Exception as error:  # of zipfile, zlib and lzma
                    self.left_out.append(LeftOut(inside, f"it is damaged ({type(error).__name__})"))
                    continue
                self._enter(inside, content, depth + 1)
        lost = self.left_out[num_left_out:]
        if len(self.documents) == num_documents and len(lost) > MAX_LISTED:
            self.left_out[num_left_out:] = [
                LeftOut(name, f"none of its {len(lost):,} files can be read ({lost[0].why})")
            ]

    def _enter(self, name: str, data: bytes, depth: int) -> None:
        self._num_members += 1
        if depth > self._limits.depth:
            self.left_out.append(LeftOut(name, f"archives are nested more than {self._limits.depth} deep"))
        elif self._num_members > self._limits.members:
            raise Unreadable(f"it holds more than {self._limits.members:,} files")
        else:
            self.read(name, data, depth)

    def _check(self, archive: zipfile.ZipFile) -> None:
        """Raise Unreadable for an archive that unpacks to too much. It never unpacks to more than it declares."""
        infos = archive.infolist()
        size, packed = sum(one.file_size for one in infos), sum(one.compress_size for one in infos)
        if len(infos) > self._limits.members:
            raise Unreadable(f"it holds more than {self._limits.members:,} files")
        if size > 1 << 20 and size > self._limits.ratio * max(1, packed):
            raise Unreadable(f"it is probably a zip bomb: it unpacks to {size // max(1, packed):,} times its size")
        self._num_bytes += size
        if self._num_bytes > self._limits.file_bytes:
            raise Unreadable(f"it unpacks to more than {self._limits.file_bytes >> 20} MiB")


def find_kind(name: str, data: bytes) -> str:
    """Return the format of a file. Raises Unreadable for one that is known and cannot be read."""
    head = data[:1024]
    suffix = splitext(name.lower())[1]
    if head.lstrip().startswith(b"%PDF-") or (suffix == ".pdf" and b"%PDF-" in head):
        return "pdf"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _package(data)
    for beginning, why in SIGNATURES:
        if head.startswith(beginning):
            raise Unreadable(why)
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    start = head.lstrip().lower()
    return "html" if start.startswith((b"<!doctype html", b"<html")) else "plain"


def _package(data: bytes) -> str:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = set(archive.namelist())
            if "mimetype" in names and archive.getinfo("mimetype").file_size < 200:
                kind = archive.read("mimetype").decode("ascii", "replace")
                if kind.startswith("application/vnd.oasis"):
                    raise Unreadable("it is in an OpenDocument format; save it as DOCX, PPTX, XLSX or PDF")
    except zipfile.BadZipFile:
        raise Unreadable("it is damaged (a ZIP file without its end)") from None
    return next((kind for member, kind in PACKAGES if member in names), "zip")

"""Documents of all formats, made by the libraries or by hand, intact and hostile."""

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from email.message import EmailMessage

CONTAINER = '<container><rootfiles><rootfile full-path="OPS/book.opf"/></rootfiles></container>'


HELVETICA = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
SPACELESS = b"""<< /Type /Font /Subtype /Type0 /BaseFont /A /Encoding /Identity-H /ToUnicode 4 0 R
    /DescendantFonts [<< /Type /Font /Subtype /CIDFontType2 /BaseFont /A /CIDSystemInfo << /Registry (Adobe)
    /Ordering (Identity) /Supplement 0 >> /W [32 [700] 97 [500 500 500]] /DW 500 >>] >>"""
CMAP = b"""/CIDInit /ProcSet findresource begin begincmap 1 begincodespacerange <0000> <FFFF> endcodespacerange
    2 beginbfchar <0020> <003D> <0061> <0061> endbfchar 1 beginbfrange <0062> <007A> <0062> endbfrange endcmap end"""


def spaceless_pdf() -> bytes:
    """Return a PDF as XeTeX writes them: gaps between words are moves, and glyph 32 is not a space."""
    content = b"BT /F1 12 Tf 72 720 Td [<00740077006f>-250<0077006f007200640073>] TJ ET"
    stream = b"<< /Length %d >>\nstream\n%s\nendstream" % (len(CMAP), CMAP)
    return pdf([""], {0: zlib.compress(content)}, SPACELESS, stream)


def pdf(
    pages: Sequence[str], streams: Mapping[int, bytes] | None = None, font: bytes = HELVETICA, *more: bytes
) -> bytes:
    """Return a PDF with the given lines per page; `streams` are packed contents that replace those of pages."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", font, *more]
    kids = []
    for number, text in enumerate(pages):
        lines = "".join(f"({line}) Tj T*\n" for line in text.split("\n") if line)
        packed = (streams or {}).get(number) or zlib.compress(
            f"BT /F1 12 Tf 14 TL 72 720 Td\n{lines}ET".encode("latin-1")
        )
        header = b"<< /Length %d /Filter /FlateDecode >>\nstream\n" % len(packed)
        objects.append(header + packed + b"\nendstream")
        kids.append(len(objects) + 1)
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R"
            b" /Resources << /Font << /F1 3 0 R >> >> >>" % len(objects)
        )
    objects[1] = b"<< /Type /Pages /Count %d /Kids [%s] >>" % (len(kids), b" ".join(b"%d 0 R" % kid for kid in kids))
    out, places = b"%PDF-1.4\n", []
    pieces = [out]
    size = len(out)
    for number, content in enumerate(objects, 1):
        places.append(size)
        pieces.append(b"%d 0 obj\n%s\nendobj\n" % (number, content))
        size += len(pieces[-1])
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n"
    return b"".join(pieces) + end % (len(objects) + 1, table, len(objects) + 1, size)


def encrypted_pdf(password: str) -> bytes:
    from pypdf import PdfReader, PdfWriter

    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf(["kept secret"]))))
    writer.encrypt(user_password=password, owner_password="owner", algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def docx() -> bytes:
    from docx import Document

    document = Document()
    document.add_heading("Lease", 1)
    paragraph = document.add_paragraph("The rent is 900 euros")
    paragraph._p.append(_word('<w:ins w:id="1" w:author="A"><w:r><w:t> a month</w:t></w:r></w:ins>'))
    paragraph._p.append(_word('<w:del w:id="2" w:author="A"><w:r><w:delText> a year</w:delText></w:r></w:del>'))
    table = document.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "Deposit", "1800"
    document.add_paragraph("Signed in Bonn.")
    return _saved(document)


def _word(xml: str):  # type: ignore[no-untyped-def]
    from docx.oxml import parse_xml
    from docx.oxml.ns import nsdecls

    return parse_xml(xml.replace(" ", f" {nsdecls('w')} ", 1))


def pptx() -> bytes:
    from pptx import Presentation
    from pptx.util import Inches

    deck = Presentation()
    for title, body in (("Plan", "Launch in May"), ("Risks", "Rain")):
        slide = deck.slides.add_slide(deck.slide_layouts[1])
        slide.shapes.title.text, slide.placeholders[1].text = title, body
    table = slide.shapes.add_table(1, 2, Inches(1), Inches(4), Inches(4), Inches(1)).table
    table.cell(0, 0).text, table.cell(0, 1).text = "Cost", "12 million"
    slide.notes_slide.notes_text_frame.text = "Smile here"
    return _saved(deck)


def xlsx() -> bytes:
    from openpyxl import Workbook

    book = Workbook()
    book.active.title = "Sales"
    book.active.append(["Region", "Units"])
    book.active.append(["North", 41.0])
    book.active["A90"], book.active["B90"] = "South\nEast", 7
    book.create_sheet("Empty")
    return _saved(book)


def far_xlsx() -> bytes:
    """Return a sheet with one cell at each end, and another one after it."""
    from openpyxl import Workbook

    book = Workbook()
    book.active.title = "Far"
    book.active["A1"], book.active["A1048576"] = "near", "far away"
    book.create_sheet("Next")["A1"] = "the next sheet"
    return _saved(book)


def _saved(document) -> bytes:  # type: ignore[no-untyped-def]
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


def epub(encrypted: str = "") -> bytes:
    book = """<package xmlns="http://www.idpf.org/2007/opf"><manifest><item id="b" href="two.xhtml"/>
    <item id="a" href="one.xhtml"/></manifest><spine><itemref idref="a"/><itemref idref="b"/></spine></package>"""
    files = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": CONTAINER,
        "OPS/book.opf": book,
        "OPS/two.xhtml": "<html><body><h1>The Storm</h1><p>It rained.</p></body></html>",
        "OPS/one.xhtml": "<html><head><title>x</title></head><body><h1>The Calm</h1><p>Ana slept.</p></body></html>",
    }
    if encrypted:
        files["META-INF/encryption.xml"] = f'<encryption><CipherReference URI="{encrypted}"/></encryption>'
    return archive(files)


def mail(attachment: bytes) -> bytes:
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = "ana@example.org", "ben@example.org", "Grüße, the invoice"
    message.set_content("Please pay 77 euros.\n")
    message.add_alternative("<p>not this part</p>", subtype="html")
    message.add_attachment(attachment, maintype="application", subtype="pdf", filename="invoice.pdf")
    return message.as_bytes()


def archive(files: Mapping[str, str | bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as target:
        for name, content in files.items():
            target.writestr(name, content)
    return out.getvalue()


def with_password(data: bytes) -> bytes:
    """Mark all members of an archive as encrypted."""
    data = bytearray(data)
    for signature, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = data.find(signature)
        while place >= 0:
            data[place + at] |= 1
            place = data.find(signature, place + 4)
    return bytes(data)


def nested(depth: int) -> bytes:
    content = archive({"deep.txt": "the innermost text"})
    for level in range(depth):
        content = archive({f"level{level}.zip": content})
    return content


def laughs() -> str:
    """Return the beginning of an XML file whose entity `&j;` is a billion laughs."""
    entities = "".join(
        f'<!ENTITY {name} "{f"&{inner};" * 10}">' for inner, name in zip("abcdefghi", "bcdefghij", strict=True)
    )
    return f'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "ha">{entities}]>'


def laughing_docx() -> bytes:
    found: dict[str, str | bytes] = {}
    with zipfile.ZipFile(io.BytesIO(docx())) as source:
        for name in source.namelist():
            found[name] = source.read(name)
    body = '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body><w:p><w:r><w:t>'
    found["word/document.xml"] = f"{laughs()}{body}&j;</w:t></w:r></w:p></w:body></w:document>"
    return archive(found)

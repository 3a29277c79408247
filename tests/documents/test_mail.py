"""Mail of all forms: what is neither the body nor another form of it is an attachment, and nothing is lost silently."""

import base64
from pathlib import Path

import pytest

from sala.documents.reader import read_documents
from sala.documents.readers.mail import read_mail, read_mbox
from tests.documents import files

PDF = base64.b64encode(files.pdf(["pay by June"])).decode()


def multipart(kind: str, *parts: str) -> str:
    boundary = f"={kind}="
    inner = "".join(f"--{boundary}\n{part}\n" for part in parts)
    return f'Content-Type: multipart/{kind}; boundary="{boundary}"\n\n{inner}--{boundary}--\n'


def part(kind: str, content: str, more: str = "") -> str:
    return f"Content-Type: {kind}\n{more}\n{content}"


PLAIN, HTML = part("text/plain", "body"), part("text/html", "<p>body</p>")
FILE = part("application/pdf; name=a.pdf", "%PDF")
MAILS = {  # body, and names and contents of attachments
    "a file": (part("application/pdf", "%PDF"), "", {"attachment 1": "%PDF"}),
    "a named text": (
        part("text/plain", "x", "Content-Disposition: attachment; filename=x.txt\n"), "", {"x.txt": "x"}
    ),
    "a message": (part("message/rfc822", "Subject: y\n\nz"), "", {"attachment 1.eml": "Subject: y\n\nz"}),
    "without its boundary": ("Content-Type: multipart/mixed\n\ntext\n", "", {"attachment 1": "text\n"}),
    "two forms": (multipart("alternative", PLAIN, HTML), "body", {}),
    "a file in one form": (multipart("alternative", PLAIN, multipart("mixed", HTML, FILE)), "body", {"a.pdf": "%PDF"}),
    "signed": (
        multipart("signed", multipart("mixed", PLAIN, FILE), part("application/pgp-signature", "sig")),
        "body",
        {"a.pdf": "%PDF", "attachment 2": "sig"},
    ),
    "one name twice": (multipart("mixed", PLAIN, FILE, FILE), "body", {"a.pdf": "%PDF", "2/a.pdf": "%PDF"}),
    "more texts": (
        multipart("mixed", PLAIN, multipart("alternative", part("text/plain", "second"), HTML), HTML),
        "body",
        {"attachment 1": "second", "attachment 2.html": "<p>body</p>"},
    ),
    "a report": (
        multipart("report", PLAIN, part("message/delivery-status", "Action: failed\n"), part("message/rfc822", "A: b")),
        "body",
        {"attachment 1": "Action: failed\n\n", "attachment 2.eml": "A: b\n\n"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", MAILS)
def test_all_parts_of_a_mail_are_read(form: str) -> None:
    content, body, attachments = MAILS[form]
    ((section,), found) = read_mail(f"From: ana@example.org\n{content}".encode())
    assert section.text == f"From: ana@example.org\n\n{body}"
    assert {name: data.decode() for name, data in found} == attachments


def test_a_mail_that_is_a_pdf(tmp_path: Path) -> None:
    header = "From: ana@example.org\nContent-Type: application/pdf\nContent-Transfer-Encoding: base64\n\n"
    (tmp_path / "scan.eml").write_text(header + PDF)
    found = {one.name: one.sections[0].text for one in read_documents([tmp_path / "scan.eml"]).documents}
    assert found == {"scan.eml": "From: ana@example.org\n\n", "scan.eml/attachment 1": "pay by June"}


def test_lines_that_begin_like_a_message_are_unquoted_in_files_of_many() -> None:
    data = (
        b"From a@b Mon\nSubject: one\n\n>From Bonn\n>>From him\n> From me\n>Fromage\n\nFrom c Tue\nSubject: two\n\nx\n"
    )
    sections, _ = read_mbox(data)
    assert sections[0].text == "Subject: one\n\nFrom Bonn\n>From him\n> From me\n>Fromage"
    assert sections[1].text == "Subject: two\n\nx"
    assert read_mail(b"Subject: one\n\n>From Bonn")[0][0].text == "Subject: one\n\n>From Bonn"

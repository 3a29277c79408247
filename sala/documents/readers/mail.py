"""Mail: a message with its headers, body and attachments; and files of many messages (mbox)."""

import email
import email.policy
import re
from collections.abc import Iterator
from email.message import EmailMessage
from typing import cast

from sala.documents.model import Section
from sala.documents.readers.markup import parse_html
from sala.documents.readers.plain import decode

HEADERS = ("From", "To", "Cc", "Date", "Subject")
_BEGIN = re.compile(rb"^From [^\n]*\n(?=[A-Za-z-]+:)", re.MULTILINE)


def read_mail(data: bytes) -> tuple[list[Section], list[tuple[str, bytes]]]:
    """Return the message and its attachments."""
    text, attachments = _message(data)
    return [Section("", text)], attachments


def read_mbox(data: bytes) -> tuple[list[Section], list[tuple[str, bytes]]]:
    """Return one section per message, and the attachments of all."""
    sections, attachments = [], []
    for number, part in enumerate(_split(data), 1):
        text, more = _message(part)
        sections.append(Section(f"message {number}", text))
        attachments += [(f"message {number}/{name}", content) for name, content in more]
    return sections, attachments


def _split(data: bytes) -> Iterator[bytes]:
    starts = [match.start() for match in _BEGIN.finditer(data)]
    for start, end in zip(starts, [*starts[1:], len(data)], strict=True):
        yield data[data.find(b"\n", start) + 1 : end]


def _message(data: bytes) -> tuple[str, list[tuple[str, bytes]]]:
    message = email.message_from_bytes(data, policy=email.policy.default)
    lines = [f"{name}: {' '.join(str(value).split())}" for name in HEADERS for value in message.get_all(name, [])]
    body = message.get_body(("plain", "html"))
    text = "" if body is None else _body(cast(EmailMessage, body))
    attachments = []
    for number, part in enumerate(message.iter_attachments() if message.is_multipart() else (), 1):
        if part.get_content_maintype() == "message":
            attachments.append((f"attachment {number}.eml", part.get_content().as_bytes()))
            continue
        content = part.get_payload(decode=True)
        if isinstance(content, bytes) and content:
            attachments.append((part.get_filename() or f"attachment {number}", content))
    return "\n".join([*lines, "", text.strip()]), attachments


def _body(part: EmailMessage) -> str:
    data = part.get_payload(decode=True)
    text = decode(data, part.get_content_charset()) if isinstance(data, bytes) and data else ""
    return parse_html(text).text if part.get_content_subtype() == "html" else text

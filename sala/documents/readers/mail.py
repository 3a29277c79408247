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
TEXTS = ("plain", "html")  # the forms of a body, the better one first
BEGIN = re.compile(rb"^From [^\n]*\n(?=[A-Za-z-]+:)", re.MULTILINE)
QUOTED_FROM = re.compile(rb"^>(>*From )", re.MULTILINE)  # a line of a message that would look like the next message


def read_mail(data: bytes) -> tuple[list[Section], list[tuple[str, bytes]]]:
    """Return the message and its attachments."""
    text, attachments = _message(data)
    return [Section("", text)], attachments


def read_mbox(data: bytes) -> tuple[list[Section], list[tuple[str, bytes]]]:
    """Return one section per message, and the attachments of all."""
    sections, attachments = [], []
    for number, part in enumerate(_split(data), 1):
        text, more = _message(QUOTED_FROM.sub(rb"\1", part))
        sections.append(Section(f"message {number}", text))
        attachments += [(f"message {number}/{name}", content) for name, content in more]
    return sections, attachments


def _split(data: bytes) -> Iterator[bytes]:
    starts = [match.start() for match in BEGIN.finditer(data)]
    for start, end in zip(starts, [*starts[1:], len(data)], strict=True):
        yield data[data.find(b"\n", start) + 1 : end]


def _message(data: bytes) -> tuple[str, list[tuple[str, bytes]]]:
    """Return headers and body, and all other parts: a mail may be a single file without any text."""
    message = email.message_from_bytes(data, policy=email.policy.default)
    lines = [f"{name}: {' '.join(str(value).split())}" for name in HEADERS for value in message.get_all(name, [])]
    body = message.get_body(TEXTS)
    text = "" if body is None else _body(cast(EmailMessage, body))
    attachments: dict[str, bytes] = {}
    for number, part in enumerate(_others(message, cast(EmailMessage | None, body)), 1):
        name, content = _content(part, f"attachment {number}")
        if content:
            attachments[name if name not in attachments else f"{number}/{name}"] = content
    return "\n".join([*lines, "", text.strip()]), [*attachments.items()]


def _others(part: EmailMessage, body: EmailMessage | None) -> Iterator[EmailMessage]:
    """Yield the parts that are not the body, nor another form of a text that is read."""
    if part.get_content_maintype() != "multipart" or not part.is_multipart():
        if part is not body:
            yield part
        return
    is_alternative = part.get_content_subtype() == "alternative"
    chosen = part.get_body(TEXTS) if is_alternative else None
    for inner in part.iter_parts():
        for other in _others(cast(EmailMessage, inner), body):
            is_text = other.get_content_maintype() == "text" and not other.is_attachment()
            if not (is_alternative and is_text) or other is chosen or chosen is None:
                yield other


def _content(part: EmailMessage, default: str) -> tuple[str, bytes]:
    """Return the name and the bytes of an attachment."""
    if part.get_content_maintype() == "message" and part.is_multipart():
        is_mail = part.get_content_subtype() in ("rfc822", "global")
        inner = cast(list[EmailMessage], part.get_payload())
        return default + (".eml" if is_mail else ""), b"\n".join(one.as_bytes() for one in inner)
    content = part.get_payload(decode=True)
    name = part.get_filename() or default + (".html" if part.get_content_type() == "text/html" else "")
    return name, content if isinstance(content, bytes) else b""


def _body(part: EmailMessage) -> str:
    data = part.get_payload(decode=True)
    text = decode(data, part.get_content_charset()) if isinstance(data, bytes) and data else ""
    return parse_html(text).text if part.get_content_subtype() == "html" else text

"""Plain text of any common encoding."""

import codecs

from sala.documents.model import Section, Unreadable
from sala.errors import MissingExtra

HEAD = 1 << 16  # bytes that decide whether a file is text
SAMPLE = 1 << 18  # bytes from which an encoding is guessed
MAX_CONTROLS = 0.02  # share of control characters in text
FEW_BAD = 0.02  # damaged characters by intact ones in what is still UTF-8
MARKS = (  # the longer ones first: the mark of UTF-32 begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
COMMON = [  # encodings that are guessed: with all that exist, short texts are often taken for a rare one
    "cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "koi8_r", "iso8859_2", "iso8859_15",
    "cp437", "cp850", "cp866", "mac_roman", "shift_jis", "cp932", "euc_jp", "gb18030", "big5", "euc_kr", "tis_620",
]  # fmt: skip
_TEXT = bytes({7, 8, 9, 10, 12, 13, 27, *range(0x20, 0x100)} - {0x7F})


def read_plain(data: bytes) -> list[Section]:
    return [Section("", decode(data))]


def decode(data: bytes, declared: str | None = None) -> str:
    """Return bytes as text with plain line ends. Raises Unreadable for what is not text."""
    text = _decode(data, declared).replace("\r\n", "\n").replace("\r", "\n")
    return text.replace("\0", "").removeprefix("\ufeff")


def _decode(data: bytes, declared: str | None) -> str:
    for mark, encoding in MARKS:
        if data.startswith(mark):
            return data.decode(encoding, "replace")
    head = data[:HEAD]
    if b"\0" in head:
        return _decode_wide(data, head)
    if len(head.translate(None, _TEXT)) > MAX_CONTROLS * len(head):
        raise Unreadable("it is not text")
    if declared is not None:
        try:
            return data.decode(declared)
        except (LookupError, ValueError):
            pass
    if b"\x1b$" in head or b"\x1b(" in head:
        try:
            return data.decode("iso2022_jp")
        except ValueError:
            pass
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return _damaged_utf8(data) or data.decode(_guess(data), "replace")


def _decode_wide(data: bytes, head: bytes) -> str:
    """Decode UTF-16 without a mark: in most scripts every other byte of spaces and line ends is zero."""
    low, high = head[0::2].count(0), head[1::2].count(0)
    if min(low, high) * 20 > max(low, high) or max(low, high) * 20 < len(head):
        raise Unreadable("it is not text")
    try:
        return data.decode("utf-16-le" if high > low else "utf-16-be")
    except UnicodeDecodeError:
        raise Unreadable("it is not text") from None


def _damaged_utf8(data: bytes) -> str | None:
    """Return UTF-8 with a few bad bytes as text; None if it is more likely another encoding."""
    text = data.decode("utf-8", "replace")
    bad = text.count("\ufffd")
    intact = sum(1 for char in text[: 1 << 20] if char > "\x7f" and char != "\ufffd")
    return text if intact and bad <= max(1, FEW_BAD * intact) else None


def _guess(data: bytes) -> str:
    try:
        from charset_normalizer import from_bytes
    except ImportError:
        raise Unreadable(f"it is not UTF-8, and {MissingExtra('charset-normalizer', 'documents')}") from None
    begin = next((at for at, byte in enumerate(data) if byte > 0x7F), 0)
    begin = data.rfind(b"\n", 0, begin) + 1  # the first bytes may be plain ASCII for megabytes
    best = from_bytes(data[begin : begin + SAMPLE], cp_isolation=COMMON, enable_fallback=False).best()
    if best is None:
        raise Unreadable("it is not text in a known encoding")
    return best.encoding

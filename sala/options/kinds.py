"""The kinds of values that options have: how each is checked, how it is read from text, and how its rule is worded.

A kind is a type annotated for pydantic. Flags and variables are text; `Kind.parse` turns text into what the type takes,
and leaves alone what it cannot turn, so that the same check words the same complaint for every source.
"""

import ipaddress
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

UNITS = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3}
SWITCH_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """What a type is called in help texts, its rule in words, and how it is read from text."""

    metavar: str
    rule: str = ""  # empty: worded from the bounds of the option
    parse: Callable[[str], Any] = str
    is_secret: bool = False


def read_count(text: str | int) -> int:
    """Read a whole number with an optional unit: 128k = 128,000, 128K = 131,072, 1m, 1M. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", str(text).strip(), re.ASCII)
    if found is None or len(found[1]) > 18:
        raise ValueError(f"{str(text)[:40]!r} is not a valid count; use a number such as 4096 or 128K")
    return int(float(found[1]) * UNITS[found[2]])


def show_count(number: int) -> str:
    """Spell a count with the largest unit that divides it."""
    unit = next((unit for unit in ("G", "M", "K") if number and number % UNITS[unit] == 0), "")
    return f"{number // UNITS[unit]}{unit}"


def parse_whole(text: str) -> int | str:
    return int(text) if re.fullmatch(r"\s*[+-]?\d{1,30}\s*", text, re.ASCII) else text


def parse_number(text: str) -> float | str:
    try:
        whole = parse_whole(text)
        return float(text) if isinstance(whole, str) else whole
    except ValueError:
        return text


def parse_count(text: str) -> int | str:
    try:
        return read_count(text)
    except ValueError:
        return text


def parse_switch(text: str) -> bool | str:
    return SWITCH_WORDS.get(text.strip().lower(), text)


def parse_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


WHOLE = Kind("N", parse=parse_whole)
NUMBER = Kind("X", parse=parse_number)
SWITCH = Kind("", "use true or false", parse=parse_switch)
CHOICE = Kind("NAME")


def _read_count(value: Any) -> Any:
    return parse_count(value) if isinstance(value, str) else value


def _read_text(value: Any) -> str:
    text = os.fspath(value) if isinstance(value, Path) else value
    if not isinstance(text, str) or not text.strip() or not text.isprintable():
        raise ValueError
    return text.strip()


def read_secret(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[\x21-\x7e]+", value.strip()):
        raise ValueError
    return value.strip()


def _read_path(value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
        raise ValueError
    try:
        return Path(value).expanduser()
    except RuntimeError:  # the home directory of an unknown user
        raise ValueError from None


def _read_address(value: Any) -> str:
    text = value.strip().lower() if isinstance(value, str) else ""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not is_ip(bare) and not re.fullmatch(r"[a-z0-9_]([a-z0-9_.-]{0,252}[a-z0-9_])?\.?", bare):
        raise ValueError
    return bare


def _read_endpoint(value: Any) -> str:
    host, _, port = value.strip().rpartition(":") if isinstance(value, str) else ("", "", "")
    if not port.isascii() or not port.isdecimal() or not 0 < int(port[:6]) < 1 << 16:
        raise ValueError
    name = _read_address(host)
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def _read_origin(value: Any) -> str:
    text = value.strip().lower() if isinstance(value, str) else ""
    if not re.fullmatch(r"https?://[a-z0-9_.\-\[\]:]+", text) or not _has_host(text):
        raise ValueError
    return text


def _read_url(value: Any) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if not re.fullmatch(r"https?://[^\s@\\?#]+", text) or not _has_host(text):
        raise ValueError
    return text.rstrip("/")


def _read_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _read_loop_guard(value: int) -> int:
    if value and not 32 <= value <= 1 << 20:
        raise ValueError
    return value


def is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _has_host(url: str) -> bool:
    """Return whether the URL has a host and, if it names a port, a valid one."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def spelling(**aliases: str) -> BeforeValidator:
    """Ignore case and surrounding space, and accept other spellings of a choice (`_0` for 0 and false)."""
    known = {name.lstrip("_"): value for name, value in aliases.items()}

    def read(value: Any) -> Any:
        text = str(int(value)) if isinstance(value, bool) else value
        if not isinstance(text, str):
            return value
        text = text.strip().lower()
        return known.get(text, text)

    return BeforeValidator(read)


Count = Annotated[int, BeforeValidator(_read_count), Kind("COUNT", parse=parse_count)]
LoopGuard = Annotated[
    int,
    BeforeValidator(_read_count),
    AfterValidator(_read_loop_guard),
    Kind("COUNT", "it must be 0, or from 32 to 1M", parse_count),
]
Text = Annotated[str, BeforeValidator(_read_text), Kind("TEXT", "give printable text")]
Plain = Annotated[str, Kind("TEXT", "give it as text")]
Secret = Annotated[
    str, BeforeValidator(read_secret), Kind("KEY", "use letters, digits and signs of ASCII, no spaces", is_secret=True)
]
PATH = Kind("PATH", "give a path")
File = Annotated[Path, BeforeValidator(_read_path), PATH]
Address = Annotated[
    str, BeforeValidator(_read_address), Kind("HOST", "give an address or a name such as 127.0.0.1, without port")
]
Endpoint = Annotated[
    str, BeforeValidator(_read_endpoint), Kind("HOST:PORT", "write it as HOST:PORT, such as 10.0.0.1:29500")
]
Url = Annotated[str, BeforeValidator(_read_url), Kind("URL", "write it as https://example.org")]
Stops = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(_read_list),
    Kind("TEXT", "give one or more strings that are not empty", parse_list),
]
Origins = Annotated[
    tuple[Annotated[str, BeforeValidator(_read_origin)], ...],
    BeforeValidator(_read_list),
    Kind("URL", "give a list such as https://example.org, http://localhost:3000", parse_list),
]
Hosts = Annotated[
    tuple[Annotated[str, BeforeValidator(_read_address)], ...],
    BeforeValidator(_read_list),
    Kind("HOST", "give a list of names such as example.org, without port", parse_list),
]

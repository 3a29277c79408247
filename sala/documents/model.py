"""What readers make of files: documents in sections, and what was left out and why."""

from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What a file may cost. Files are hostile: each limit holds for every file, whatever it claims to be.

    - file_bytes: size of a file, or of all that an archive unpacks to
    - text_chars: characters of text that one file may become
    - ratio: unpacked to packed size of an archive of more than a MiB
    - members, depth: of archives, with those inside them
    """

    file_bytes: int = 512 * MIB
    text_chars: int = 64 * MIB
    ratio: int = 300
    members: int = 20_000
    depth: int = 3


@dataclass(slots=True)
class Section:
    """A part of a document with a place of its own, for example a page.

    - label: the place, such as "page 3"; empty if the document is one text
    - unit: what its lines are: "line" or "row"
    - numbers: the numbers of its lines, where these do not simply count from 1
    """

    label: str
    text: str
    unit: str = "line"
    numbers: list[int] | None = None


@dataclass(slots=True)
class Document:
    """The text of one file, or of one member of an archive. `notes` tell what of it is missing."""

    name: str
    sections: list[Section]
    notes: list[str] = field(default_factory=list)

    @property
    def num_chars(self) -> int:
        return sum(len(section.text) for section in self.sections)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file that is not read, and why."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: left out: {self.why}"


class Unreadable(Exception):
    """A file gives no text; the message says why, and what to do if something can be done."""


def clean_name(name: str) -> str:
    """Return the name of a file as one line that shows what it is."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in name)[:500]

"""What `--sources` prints under an answer: the passages that it comes from, and quotes that are not in the text."""

import shutil
import textwrap
from typing import TYPE_CHECKING

from sala.cli import flags as s

if TYPE_CHECKING:
    from sala.text.sources import Passage, Quote, Sources

WIDTH = 10  # of a bar
LINE = 100  # characters of a line
LINES = 6  # lines of a passage
INDENT = " " * 7
EIGHTHS = " ▏▎▍▌▋▊▉"
MISSING = "[not in the text that was given]"


def show_sources(sources: "Sources | None") -> None:
    """Write sources as notes; nothing if none were asked for."""
    if sources is None:
        return
    lines = ["sources:"] if sources.passages else ["sources: none: the prompt is too short, or no passage stands out"]
    for passage in sources.passages:
        lines += [f"{passage.weight:4.0%} {_bar(passage.weight)} {_place(passage)}", _block(passage.text)]
    if sources.quotes:
        lines += ["quotes:", *(f"  {_line(quote.text)}  {_quoted(quote)}" for quote in sources.quotes)]
    s.note("\n".join(lines))


def _bar(share: float) -> str:
    eighths = round(share * WIDTH * 8)
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()).ljust(WIDTH)


def _place(passage: "Passage | Quote") -> str:
    if passage.file is not None:
        return f"{passage.file}: {passage.place}" if passage.place else passage.file
    if passage.message is None:
        return f"tokens {passage.tokens[0]:,}-{passage.tokens[1]:,}" if hasattr(passage, "tokens") else "the prompt"
    return f"message {passage.message + 1}, characters {passage.start:,}-{passage.end:,}"


def _quoted(quote: "Quote") -> str:
    return _place(quote) if quote.found else MISSING


def _block(text: str) -> str:
    """Return a passage in lines that fit the terminal; its evidence may stand anywhere in it."""
    width = min(shutil.get_terminal_size().columns, LINE + len(INDENT))
    wrapped = textwrap.wrap(" ".join(text.split()), width, initial_indent=INDENT, subsequent_indent=INDENT)
    return "\n".join(wrapped if len(wrapped) <= LINES else [*wrapped[: LINES - 1], wrapped[LINES - 1] + " …"])


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LINE else line[: LINE - 1] + "…"

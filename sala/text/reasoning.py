"""Splits `<think>` reasoning from the answer, in a stream whose pieces may end anywhere."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sala.text.stops import longest_overlap

OPEN, CLOSE = "<think>", "</think>"
Kind = Literal["reasoning", "content"]


@dataclass(frozen=True, slots=True)
class Piece:
    kind: Kind
    text: str


class ReasoningSplitter:
    """Feed text, get pieces. `is_open`: the prompt itself ended with the opening tag.

    Reasoning is opened only at the beginning of the answer and closed by the first closing tag. Every other tag is
    text like any other: what a stream has shown as text cannot become reasoning later.
    """

    def __init__(self, is_open: bool = False) -> None:
        self._kind: Kind | None = "reasoning" if is_open else None  # None: nothing but white space so far
        self._held = ""
        self._trims = is_open  # white space around the tags belongs to neither side

    def push(self, text: str) -> Iterator[Piece]:
        self._held += text
        while (piece := self._next()) is not None:
            if piece.text:
                yield piece

    def flush(self) -> Iterator[Piece]:
        """What was held back, as it is; unclosed reasoning stays reasoning."""
        held, self._held = self._held, ""
        if self._trims:
            held = held.lstrip()
        if held:
            yield Piece(self._kind or "content", held)

    def _next(self) -> Piece | None:
        if self._trims:
            self._held = self._held.lstrip()
            self._trims = not self._held
        if not self._held:
            return None
        if self._kind is None:
            return self._begin()
        return self._take(len(self._held)) if self._kind == "content" else self._until_close()

    def _begin(self) -> Piece | None:
        body = self._held.lstrip()
        if body.startswith(OPEN):
            self._kind, self._held, self._trims = "reasoning", body[len(OPEN) :], True
            return Piece("reasoning", "")
        if OPEN.startswith(body):  # also when there is only white space
            return None
        self._kind = "content"
        return Piece("content", "")

    def _until_close(self) -> Piece | None:
        at = self._held.find(CLOSE)
        if at < 0:
            keep = longest_overlap(self._held, CLOSE)
            body = self._held[: len(self._held) - keep].rstrip()  # white space before the tag is no part of the thought
            return self._take(len(body)) if body else None
        before, self._held = self._held[:at], self._held[at + len(CLOSE) :]
        self._kind, self._trims = "content", True
        return Piece("reasoning", before.rstrip())

    def _take(self, count: int) -> Piece:
        out, self._held = self._held[:count], self._held[count:]
        return Piece(self._kind or "content", out)


def split_reasoning(text: str, is_open: bool = False) -> tuple[str, str]:
    """A whole answer → (reasoning, content)."""
    parts: dict[Kind, str] = {"reasoning": "", "content": ""}
    splitter = ReasoningSplitter(is_open)
    for pieces in (splitter.push(text), splitter.flush()):
        for piece in pieces:
            parts[piece.kind] += piece.text
    return parts["reasoning"], parts["content"]


class ThinkFilter:
    """Removes reasoning from a stream of text: `next(piece)` is what to show. With `no_think=False` all passes.

    Call `finish()` at the end for the characters that were held back because a tag might have begun.
    """

    def __init__(self, no_think: bool = True) -> None:
        self._splitter = ReasoningSplitter() if no_think else None

    def next(self, text: str) -> str:
        if self._splitter is None:
            return text
        return "".join(piece.text for piece in self._splitter.push(text) if piece.kind == "content")

    def finish(self) -> str:
        if self._splitter is None:
            return ""
        return "".join(piece.text for piece in self._splitter.flush() if piece.kind == "content")

"""Sampled tokens to what a reader sees: characters, then stop strings, then reasoning and tool calls.

The stages, each fed with what the stage before it lets through: `Detokenizer`, `StopFinder`, `ReasoningSplitter` and
`tools.ToolSplitter`; `Answer` chains them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from sala.text.tools import ToolCall, ToolSplitter, longest_overlap

REPLACEMENT = "�"
CONTEXT = 6  # earlier tokens that decide about a leading space
WINDOW = 16  # earlier tokens that are decoded again at most, until a position between two characters is found
MAX_HELD = 8  # no character takes more tokens: bytes held back longer are not valid text
TAIL = 4  # of those, the tokens that may still begin a character


class Decoder(Protocol):
    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...


class Detokenizer:
    """`push` returns the text that a token completes, `flush` what is left; together they are the whole text.

    New tokens are decoded together with a few earlier ones, since spaces and byte runs depend on what precedes them.
    The window of earlier tokens starts only at positions between two characters.
    """

    def __init__(self, decoder: Decoder, prompt: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._ids = list(prompt[-CONTEXT:])
        self._start = next((n for n in range(len(self._ids)) if self._is_whole(n, len(self._ids))), len(self._ids))
        self._shown = len(self._ids)  # tokens whose text is out; those from _start on serve as context

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._pending(len(self._ids))
        if not text.endswith(REPLACEMENT):
            return self._show(text, len(self._ids))
        if len(self._ids) - self._shown > MAX_HELD:
            upto = len(self._ids) - TAIL
            return self._show(self._pending(upto), upto)
        return ""

    def flush(self) -> str:
        return self._show(self._pending(len(self._ids)), len(self._ids))

    def _pending(self, upto: int) -> str:
        """Return the text of the tokens not yet shown, decoded together with a few earlier ones."""
        before = self._decoder.decode(self._ids[self._start : self._shown])
        text = self._decoder.decode(self._ids[self._start : upto])
        return text[len(before) :]

    def _show(self, text: str, upto: int) -> str:
        if not text:
            return ""
        self._shown = upto
        if upto - self._start > CONTEXT:
            latest = upto - WINDOW
            starts = range(upto - CONTEXT, max(self._start, latest), -1)
            self._start = next((n for n in starts if self._is_whole(n, upto)), max(self._start, latest))
        return text

    def _is_whole(self, start: int, end: int) -> bool:
        """Return whether decoding may begin at this token: it gives text, and no half character."""
        text = self._decoder.decode(self._ids[start:end])
        return bool(text) and REPLACEMENT not in text


class StopFinder:
    """`push` returns the text that cannot be part of a stop string; once `is_found`, nothing follows."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    @property
    def is_found(self) -> bool:
        return self.found is not None

    def push(self, text: str) -> str:
        if self.is_found or not self._stops:
            return "" if self.is_found else text
        self._held += text
        hits = [(self._held.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in self._held]
        if hits:  # the one that is complete first, reading character by character
            end, size, self.found = min(hits)
            at = end + size
            out, self._held = self._held[:at], ""
            return out
        keep = max(longest_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def flush(self) -> str:
        out, self._held = self._held, ""
        return out


OPEN, CLOSE = "<think>", "</think>"
Kind = Literal["reasoning", "content"]


@dataclass(frozen=True, slots=True)
class Piece:
    kind: Kind
    text: str


class ReasoningSplitter:
    """Splits a stream of text into pieces. `is_open`: the prompt itself ended with the opening tag.

    Reasoning is opened only at the beginning of the answer and closed by the first closing tag. Every other tag is
    text like any other: what a stream has shown as text cannot become reasoning later.
    """

    def __init__(self, is_open: bool = False) -> None:
        self._kind: Kind | None = "reasoning" if is_open else None  # None: only white space so far
        self._held = ""
        self._trims = is_open  # white space around the tags belongs to neither side

    def push(self, text: str) -> Iterator[Piece]:
        self._held += text
        while (piece := self._next()) is not None:
            if piece.text:
                yield piece

    def flush(self) -> Iterator[Piece]:
        """Return what was held back; unclosed reasoning stays reasoning."""
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
            body = self._held[
                : len(self._held) - keep
            ].rstrip()  # white space before the tag is not part of the reasoning
            return self._take(len(body)) if body else None
        before, self._held = self._held[:at], self._held[at + len(CLOSE) :]
        self._kind, self._trims = "content", True
        return Piece("reasoning", before.rstrip())

    def _take(self, count: int) -> Piece:
        out, self._held = self._held[:count], self._held[count:]
        return Piece(self._kind or "content", out)


class ThinkFilter:
    """Removes reasoning from a stream of text: `next(piece)` returns what to show. With `no_think=False` all passes.

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


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the answer."""

    text: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None


class Plain:
    """Passes text through unchanged: for prompts that are not conversations."""

    def push(self, text: str) -> Iterator[Delta]:
        if text:
            yield Delta(text=text)

    def flush(self) -> Iterator[Delta]:
        return iter(())


class Structured:
    """Takes reasoning, and with `tools` their calls, out of the text: for conversations.

    Without tools nothing is parsed as a tool call: what looks like one stays text.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None, is_open: bool = False) -> None:
        self._reasoning = ReasoningSplitter(is_open)
        self._tools = ToolSplitter(tools) if tools else None

    def push(self, text: str) -> Iterator[Delta]:
        yield from self._deltas(self._reasoning.push(text))

    def flush(self) -> Iterator[Delta]:
        yield from self._deltas(self._reasoning.flush())
        for text in self._tools.flush() if self._tools is not None else ():
            yield Delta(text=text)

    def _deltas(self, pieces: Iterable[Piece]) -> Iterator[Delta]:
        for piece in pieces:
            if piece.kind == "reasoning":
                yield Delta(reasoning=piece.text)
                continue
            for part in (piece.text,) if self._tools is None else self._tools.push(piece.text):
                yield Delta(tool_call=part) if isinstance(part, ToolCall) else Delta(text=part)


class Answer:
    """Feeds tokens through the detokenizer and the stop strings into `form`.

    With `stops_when_shown` stop strings are looked for in the text that is shown, not in reasoning and tool calls.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        form: Plain | Structured,
        stops_when_shown: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._raw_stops = StopFinder(() if stops_when_shown else stops)
        self._shown_stops = StopFinder(stops) if stops_when_shown else None
        self._form = form

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has been found: no later token counts."""
        return self._raw_stops.is_found or (self._shown_stops is not None and self._shown_stops.is_found)

    def push(self, token: int) -> list[Delta]:
        deltas = list(self._form.push(self._raw_stops.push(self._detokenizer.push(token))))
        return deltas if self._shown_stops is None else list(self._cut(deltas, self._shown_stops))

    def finish(self) -> list[Delta]:
        rest = self._raw_stops.push(self._detokenizer.flush()) + self._raw_stops.flush()
        deltas = [*self._form.push(rest), *self._form.flush()]
        if self._shown_stops is None:
            return deltas
        return [*self._cut(deltas, self._shown_stops), Delta(text=self._shown_stops.flush())]

    def _cut(self, deltas: Iterable[Delta], stops: StopFinder) -> Iterator[Delta]:
        """Leave out what follows a stop string in the shown text."""
        for delta in deltas:
            if stops.is_found:
                return
            if not delta.text:
                yield delta
            elif text := stops.push(delta.text):
                yield Delta(text=text)

"""From sampled tokens to what a reader sees: characters, stops, reasoning, tool calls, in that order."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sala.text.detokenize import Detokenizer
from sala.text.reasoning import Piece, ReasoningSplitter
from sala.text.stops import StopFinder
from sala.text.tools import ToolCall, ToolSplitter


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the answer."""

    text: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None


class Plain:
    """Text as it comes: for raw prompts."""

    def push(self, text: str) -> Iterator[Delta]:
        if text:
            yield Delta(text=text)

    def flush(self) -> Iterator[Delta]:
        return iter(())


class Structured:
    """Reasoning and tool calls taken out: for chats."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = (), is_open: bool = False) -> None:
        self._reasoning = ReasoningSplitter(is_open)
        self._tools = ToolSplitter(tools)

    def push(self, text: str) -> Iterator[Delta]:
        yield from self._deltas(self._reasoning.push(text))

    def flush(self) -> Iterator[Delta]:
        yield from self._deltas(self._reasoning.flush())
        for text in self._tools.flush():
            yield Delta(text=text)

    def _deltas(self, pieces: Iterable[Piece]) -> Iterator[Delta]:
        for piece in pieces:
            if piece.kind == "reasoning":
                yield Delta(reasoning=piece.text)
                continue
            for part in self._tools.push(piece.text):
                yield Delta(tool_call=part) if isinstance(part, ToolCall) else Delta(text=part)


class Untooled(Structured):
    """Reasoning taken out; what looks like a tool call stays text, since nobody offered a tool."""

    def _deltas(self, pieces: Iterable[Piece]) -> Iterator[Delta]:
        for piece in pieces:
            yield Delta(reasoning=piece.text) if piece.kind == "reasoning" else Delta(text=piece.text)


class Answer:
    """Feeds tokens through the detokenizer and the stop strings into `form`."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], form: Plain | Structured) -> None:
        self._detokenizer = detokenizer
        self._stops = StopFinder(stops)
        self._form = form

    @property
    def is_stopped(self) -> bool:
        """A stop string has been found: no token after this one counts."""
        return self._stops.is_found

    def push(self, token: int) -> list[Delta]:
        return list(self._form.push(self._stops.push(self._detokenizer.push(token))))

    def finish(self) -> list[Delta]:
        rest = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        return [*self._form.push(rest), *self._form.flush()]

"""Sampled tokens to what a reader sees: characters, then stop strings, then reasoning and tool calls."""

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

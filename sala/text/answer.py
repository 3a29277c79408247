"""Turn sampled tokens into what a reader sees: characters, stop strings, then reasoning and tool calls.

The stages, each of which takes the output of the one before: `Detokenizer`, `StopFinder`, `ReasoningSplitter` and
`tools.ToolSplitter`; `Answer` chains them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sala.text.tools import CallPiece, Part, ToolCall, ToolSplitter, longest_overlap

REPLACEMENT = "�"
CONTEXT = 6  # earlier tokens that decide about a leading space
WINDOW = 16  # earlier tokens that are decoded again at most, until a position between two characters is found
MAX_HELD = 8  # no character takes more tokens: bytes held back longer are not valid text
TAIL = 4  # of those, the tokens that may still begin a character


class TokenDecoder(Protocol):
    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...


class Detokenizer:
    """`push` returns the text that a token completes, `flush` what is left; together they are the whole text.

    New tokens are decoded together with a few earlier ones, since spaces and byte runs depend on what precedes them.
    The window of earlier tokens starts only at positions between two characters.
    """

    def __init__(self, decoder: TokenDecoder, prompt: Sequence[int] = ()) -> None:
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


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the answer: text, reasoning, or one of a call, and after the last of those the whole call.

    `cut_call` is a call in which the answer was cut: it must not be run.
    """

    text: str = ""
    reasoning: str = ""
    call_piece: CallPiece | None = None
    tool_call: ToolCall | None = None
    cut_call: ToolCall | None = None


class ReasoningSplitter:
    """Splits a stream of text into reasoning and text.

    `is_open`: the prompt itself ended with the opening tag. `has_begun`: it ended inside an answer, in reasoning if
    `is_open`, otherwise in text.

    Reasoning is opened only at the beginning of the answer and closed by the first closing tag. Every other tag is
    text like any other: what a stream has shown as text cannot become reasoning later.
    """

    def __init__(self, is_open: bool = False, has_begun: bool = False) -> None:
        self._is_reasoning = True if is_open else False if has_begun else None  # None: only white space so far
        self._held = ""
        self._trims = is_open and not has_begun  # white space around the tags belongs to neither side

    @property
    def has_text(self) -> bool:
        """Whether the text of the answer has begun: reasoning is over, or there was none."""
        return self._is_reasoning is False and not self._trims

    def push(self, text: str) -> Iterator[Delta]:
        self._held += text
        while (delta := self._next()) is not None:
            if delta.text or delta.reasoning:
                yield delta

    def flush(self) -> Iterator[Delta]:
        """Return what was held back; unclosed reasoning stays reasoning."""
        if self._trims:
            self._held = self._held.lstrip()
        if self._held:
            yield self._take(len(self._held))

    def _next(self) -> Delta | None:
        if self._trims:
            self._held = self._held.lstrip()
            self._trims = not self._held
        if not self._held:
            return None
        if self._is_reasoning is None:
            return self._begin()
        return self._until_close() if self._is_reasoning else self._take(len(self._held))

    def _begin(self) -> Delta | None:
        body = self._held.lstrip()
        if body.startswith(OPEN):
            self._is_reasoning, self._held, self._trims = True, body[len(OPEN) :], True
            return Delta()
        if OPEN.startswith(body):  # also when there is only white space
            return None
        self._is_reasoning = False
        return Delta()

    def _until_close(self) -> Delta | None:
        at = self._held.find(CLOSE)
        if at < 0:
            keep = longest_overlap(self._held, CLOSE)
            # White space before the tag is not part of the reasoning.
            body = self._held[: len(self._held) - keep].rstrip()
            return self._take(len(body)) if body else None
        before, self._held = self._held[:at], self._held[at + len(CLOSE) :]
        self._is_reasoning, self._trims = False, True
        return Delta(reasoning=before.rstrip())

    def _take(self, count: int) -> Delta:
        out, self._held = self._held[:count], self._held[count:]
        return Delta(reasoning=out) if self._is_reasoning else Delta(text=out)


class ThinkFilter:
    """Removes reasoning from a stream of text: `next(piece)` returns what to show. With `no_think=False` all passes.

    Call `finish()` at the end for the characters that were held back because a tag might have begun.
    """

    def __init__(self, no_think: bool = True) -> None:
        self._splitter = ReasoningSplitter() if no_think else None

    def next(self, text: str) -> str:
        if self._splitter is None:
            return text
        return "".join(delta.text for delta in self._splitter.push(text))

    def finish(self) -> str:
        if self._splitter is None:
            return ""
        return "".join(delta.text for delta in self._splitter.flush())


class RepeatFinder:
    """Looks for a call that repeats an earlier one; its pieces are held back for as long as it may."""

    def __init__(self) -> None:
        self.is_found = False
        self._calls: list[ToolCall] = []
        self._held: list[CallPiece] = []
        self._id = ""  # of the call under way
        self._num_read = 0
        self._rivals: list[ToolCall] = []  # the earlier calls that it may repeat

    def pass_on(self, part: Part) -> list[Part]:
        """Return what can be shown now."""
        if isinstance(part, str):
            return [part]
        if isinstance(part, ToolCall):
            self.is_found = part.cut_json is None and any(one.json == part.json for one in self._rivals)
            if self.is_found:
                return []
            self._calls.append(part)
            return [*self._let_go(), part]
        if part.id != self._id:
            self._id, self._num_read = part.id, 0
            self._rivals = [one for one in self._calls if one.name == part.name]
        self._held.append(part)
        self._rivals = [one for one in self._rivals if one.json.startswith(part.json, self._num_read)]
        self._num_read += len(part.json)
        return [] if self._rivals else self._let_go()

    def _let_go(self) -> list[Part]:
        held, self._held = self._held, []
        return list(held)


class ChatSplitter:
    """Takes reasoning, and with `tools` their calls, out of the text: for conversations.

    Without tools nothing is parsed as a tool call: what looks like one stays text. With `ends_on_repeat` the answer
    ends where a call is repeated; the repetition is left out.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]] | None = None,
        is_open: bool = False,
        has_begun: bool = False,
        ends_on_repeat: bool = False,
    ) -> None:
        self._reasoning = ReasoningSplitter(is_open, has_begun)
        self._tools = ToolSplitter(tools) if tools else None
        self._repeats = RepeatFinder() if ends_on_repeat else None
        self.is_repeating = False
        self.has_dropped = False  # left out text that was the beginning of a call

    def push(self, text: str) -> Iterator[Delta]:
        yield from self._find_calls(self._reasoning.push(text))

    def flush(self, is_cut: bool = False) -> Iterator[Delta]:
        """Return what was held back. In an answer that was cut, the beginning of a call is not text."""
        yield from self._find_calls(self._reasoning.flush())
        if self._tools is None or self.is_repeating:
            return
        self.has_dropped = is_cut and self._tools.is_holding
        yield from self._show(self._tools.cut() if is_cut else self._tools.flush())

    def _find_calls(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        for delta in deltas:
            if self.is_repeating:
                return
            if self._tools is None or delta.reasoning:
                yield delta
                continue
            yield from self._show(self._tools.push(delta.text))

    def _show(self, parts: Iterable[Part]) -> Iterator[Delta]:
        for part in parts:
            for one in [part] if self._repeats is None else self._repeats.pass_on(part):
                yield _as_delta(one)
            self.is_repeating = self._repeats is not None and self._repeats.is_found
            if self.is_repeating:
                return


def _as_delta(part: Part) -> Delta:
    if isinstance(part, str):
        return Delta(text=part)
    if isinstance(part, CallPiece):
        return Delta(call_piece=part)
    return Delta(tool_call=part) if part.cut_json is None else Delta(cut_call=part)


class Answer:
    """Feeds tokens through the detokenizer and the stop strings into `form`; None for prompts without conversation.

    With `stops_when_shown` stop strings are looked for in the text that is shown, not in reasoning and tool calls.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], form: ChatSplitter | None, stops_when_shown: bool = False
    ) -> None:
        self._detokenizer = detokenizer
        self._raw_stops = StopFinder(() if stops_when_shown else stops)
        self._shown_stops = StopFinder(stops if stops_when_shown else ())
        self._form = form

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string or a repeated call has been found: no later token counts."""
        is_repeating = self._form is not None and self._form.is_repeating
        return is_repeating or self._raw_stops.is_found or self._shown_stops.is_found

    @property
    def has_dropped(self) -> bool:
        """Whether text was left out because it was the beginning of a call in which the answer was cut."""
        return self._form is not None and self._form.has_dropped

    def push(self, token: int) -> list[Delta]:
        return list(self._cut(self._shape(self._raw_stops.push(self._detokenizer.push(token)))))

    def finish(self, is_cut: bool = False) -> list[Delta]:
        """Return what was held back; `is_cut` says that the model has not ended the answer itself."""
        rest = self._raw_stops.push(self._detokenizer.flush()) + self._raw_stops.flush()
        deltas = [*self._shape(rest), *(self._form.flush(is_cut) if self._form is not None else ())]
        held = [*self._cut(deltas), Delta(text=self._shown_stops.flush())]
        return held if held[-1].text else held[:-1]

    def _shape(self, text: str) -> list[Delta]:
        if self._form is not None:
            return list(self._form.push(text))
        return [Delta(text=text)] if text else []

    def _cut(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """Leave out what follows a stop string in the shown text."""
        for delta in deltas:
            if self._shown_stops.is_found:
                return
            if not delta.text:
                yield delta
            elif text := self._shown_stops.push(delta.text):
                yield Delta(text=text)

"""Answers as a row of blocks, reasoning, text and calls: the form in which other interfaces than chats give them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from sala.engine.requests import Submission
from sala.engine.service import Stream
from sala.engine.stream import Completion, Event, StreamItem
from sala.llm import LLM
from sala.server.api.chat import Choice, Plan
from sala.server.api.chat_schema import ChatRequest
from sala.server.http.errors import ApiError, from_validation
from sala.server.http.sse import encode
from sala.text.tools import ToolCall

Kind = Literal["reasoning", "text", "call"]


def build_chat(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """The request as a chat. `names` are the client's words for fields that chats call otherwise."""
    try:
        return ChatRequest(**{name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        first: dict[str, Any] = {**error.errors(include_url=False)[0]}
        path = [*first["loc"], *([first["ctx"]["field"]] if "field" in first.get("ctx", {}) else [])]
        raise from_validation([{**first, "ctx": {}, "loc": [names.get(path[0], path[0]), *path[1:]]}]) from None


class Prepared:
    """A plan that remembers how long its prompt is."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.num_tokens = 0

    def prepare(self, llm: LLM) -> Submission:
        submission = self._plan.prepare(llm)
        self.num_tokens = len(submission.groups[0][0].request.prompt)
        return submission


@dataclass
class Block:
    kind: Kind
    index: int
    text: str = ""  # of a call its arguments, as JSON
    call: ToolCall | None = None


@dataclass(frozen=True)
class Step:
    """A block begins, grows by `text`, or ends."""

    what: Literal["begin", "grow", "end"]
    block: Block
    text: str = ""


class Blocks:
    """Cuts one answer into blocks while it grows."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._choice = Choice()
        self._open: Block | None = None
        self._held = ""  # line ends that are left out if a call follows
        self._num_calls = 0
        self.all: list[Block] = []

    async def collect(self, stream: Stream) -> None:
        while (item := await stream.aread()) is not None:
            for _ in self.take(item):
                continue

    def take(self, item: StreamItem) -> Iterator[Step]:
        if not isinstance(item, Event):
            return
        self._choice.take(item)
        self._choice.sampled.clear()
        delta = item.delta
        if delta.reasoning and self._plan.shows_reasoning:
            yield from self._grow("reasoning", delta.reasoning)
        if delta.tool_call is not None and self._may_call:
            yield from self._add_call(delta.tool_call)
        yield from self._add_text(delta.text)
        if self._choice.completion is not None:
            yield from self._end()

    @property
    def completion(self) -> Completion:
        if self._choice.completion is None:
            raise ApiError(500, "the answer is not complete", code="server_error")
        return self._choice.completion

    @property
    def is_cut(self) -> bool:
        """Whether the answer was ended before its own end."""
        return self._choice.completion is not None and self.completion.finish_reason in ("length", "repetition")

    @property
    def num_reasoning(self) -> int:
        return self._choice.num_reasoning

    @property
    def _may_call(self) -> bool:
        return not self._num_calls or self._plan.body.parallel_tool_calls is not False

    def _add_call(self, call: ToolCall) -> Iterator[Step]:
        self._num_calls += 1
        self._held = ""
        yield from self._begin(Block("call", len(self.all), call=call))
        yield from self._grow("call", json.dumps(call.arguments, ensure_ascii=False))
        yield from self._end()

    def _add_text(self, text: str) -> Iterator[Step]:
        text = self._held + text
        is_last = self._choice.completion is not None and not self._num_calls
        shown = text.rstrip("\n") if self._plan.tools and not is_last else text
        self._held = text[len(shown) :]
        if self._num_calls and self._open is None:
            shown = shown.lstrip()
        if shown:
            yield from self._grow("text", shown)

    def _grow(self, kind: Kind, text: str) -> Iterator[Step]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(Block(kind, len(self.all)))
        block = self.all[-1]
        block.text += text
        yield Step("grow", block, text)

    def _begin(self, block: Block) -> Iterator[Step]:
        yield from self._end()
        self._open = block
        self.all.append(block)
        yield Step("begin", block)

    def _end(self) -> Iterator[Step]:
        if self._open is not None:
            block, self._open = self._open, None
            yield Step("end", block)


def encode_named(event: Mapping[str, Any]) -> bytes:
    """An event whose name is its type."""
    return f"event: {event['type']}\n".encode() + encode(event)

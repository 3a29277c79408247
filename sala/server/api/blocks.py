"""Answers as a sequence of blocks (reasoning, text, tool calls), the form of the Responses and Messages APIs."""

import json
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sala.engine.requests import InputProcessor, Submission
from sala.engine.stream import Completion, Event, StreamItem
from sala.server.api.answers import AnswerProgress, B, Reply
from sala.server.api.chat import ChatInput
from sala.server.http.sse import encode_named
from sala.text.tools import ToolCall

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    kind: Kind
    index: int
    text: str = ""  # for a call its arguments, as JSON
    call: ToolCall | None = None


@dataclass(frozen=True)
class BlockChange:
    """A block begins, grows by `text`, or ends."""

    what: Literal["begin", "grow", "end"]
    block: Block
    text: str = ""


class Blocks:
    """Splits one answer into blocks while it grows."""

    def __init__(self, conversation: ChatInput, shows_reasoning: bool) -> None:
        self._has_tools = conversation.offered_tools is not None
        self._is_single = conversation.is_single
        self._shows_reasoning = shows_reasoning
        self._answer = AnswerProgress()
        self._open: Block | None = None
        self.all: list[Block] = []

    def take(self, event: Event) -> Iterator[BlockChange]:
        self._answer.take(event)
        delta = event.delta
        if delta.reasoning and self._shows_reasoning:
            yield from self._grow("reasoning", delta.reasoning)
        if delta.tool_call is not None and not (self._is_single and self._answer.num_calls):
            yield from self._add_call(delta.tool_call)
        yield from self._add_text(delta.text)
        if self._answer.completion is not None:
            yield from self._end()

    @property
    def completion(self) -> Completion:
        return self._answer.result

    @property
    def is_cut(self) -> bool:
        """Return whether the answer was cut before the model ended it."""
        return self._answer.completion is not None and self.completion.finish_reason in ("length", "repetition")

    @property
    def num_reasoning(self) -> int:
        return self._answer.num_reasoning

    def _add_call(self, call: ToolCall) -> Iterator[BlockChange]:
        self._answer.num_calls += 1
        self._answer.held = ""
        yield from self._begin(Block("call", len(self.all), call=call))
        yield from self._grow("call", json.dumps(call.arguments, ensure_ascii=False))
        yield from self._end()

    def _add_text(self, text: str) -> Iterator[BlockChange]:
        text = self._answer.held + text
        is_last = self._answer.completion is not None and not self._answer.num_calls
        shown = text.rstrip("\n") if self._has_tools and not is_last else text
        self._answer.held = text[len(shown) :]
        if self._answer.num_calls and self._open is None:
            shown = shown.lstrip()
        if shown:
            yield from self._grow("text", shown)

    def _grow(self, kind: Kind, text: str) -> Iterator[BlockChange]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(Block(kind, len(self.all)))
        block = self.all[-1]
        block.text += text
        yield BlockChange("grow", block, text)

    def _begin(self, block: Block) -> Iterator[BlockChange]:
        yield from self._end()
        self._open = block
        self.all.append(block)
        yield BlockChange("begin", block)

    def _end(self) -> Iterator[BlockChange]:
        if self._open is not None:
            block, self._open = self._open, None
            yield BlockChange("end", block)


class BlockReply(Reply[B]):
    """A reply that consists of blocks. Its events are named, and the last of them says that the answer is complete."""

    done = b""

    @abstractmethod
    def conversation(self) -> ChatInput:
        """Translate the body."""

    @property
    def shows_reasoning(self) -> bool:
        return not self.settings.no_think

    def prepare(self, inputs: InputProcessor) -> Submission:
        conversation = self.conversation()
        self.blocks = Blocks(conversation, self.shows_reasoning)
        self.changes: list[BlockChange] = []  # what the last item changed
        call = conversation.as_call(self.settings)
        self.sampling = call.sampling
        submission = inputs.submit(call)
        self.prompt_len = len(submission.groups[0][0].request.prompt)
        return submission

    def take(self, item: StreamItem) -> None:
        self.changes = list(self.blocks.take(item)) if isinstance(item, Event) else []

    def encode(self, chunk: Any) -> bytes:
        return encode_named(chunk)

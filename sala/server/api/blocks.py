"""Answers as a sequence of blocks (reasoning, text, tool calls), the form of the Responses and Messages APIs."""

import json
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sala.engine.requests import InputProcessor, Submission
from sala.engine.stream import Event, StreamItem
from sala.server.api.answers import AnswerProgress, B, Chunk, Reply
from sala.server.api.chat import ChatInput
from sala.text.tools import ToolCall

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    kind: Kind
    index: int
    text: str = ""  # for a call its arguments, as JSON
    call: ToolCall | None = None

    def emptied(self) -> "Block":
        """Return the block as it is when it begins."""
        return Block(self.kind, self.index, call=self.call)


class BlockChange(NamedTuple):
    """A block begins, grows by `text`, or ends."""

    what: Literal["begin", "grow", "end"]
    block: Block
    text: str = ""


class BlockReply(Reply[B]):
    """A reply that consists of blocks. Its events are named, and the last of them says that the answer is complete."""

    done = b""

    @abstractmethod
    def conversation(self) -> ChatInput:
        """Translate the body."""

    @abstractmethod
    def events(self, change: BlockChange) -> Iterator[Chunk]:
        """Return what is sent for a change."""

    @property
    def shows_reasoning(self) -> bool:
        return not self.settings.no_think

    def prepare(self, inputs: InputProcessor) -> Submission:
        conversation = self.conversation()
        has_tools = conversation.offered_tools is not None
        self.progress = AnswerProgress(has_tools, conversation.is_single, self.shows_reasoning)
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._changes: list[BlockChange] = []  # by the last item
        call = conversation.as_call(self.settings)
        self.sampling = call.sampling
        submission = inputs.submit(call)
        self.prompt_len = len(submission.groups[0][0].request.prompt)
        return submission

    def take(self, item: StreamItem) -> None:
        self._changes = list(self._split(item)) if isinstance(item, Event) else []

    def chunks(self, item: StreamItem) -> Iterator[Chunk]:
        for change in self._changes:
            yield from self.events(change)

    def encode(self, chunk: Chunk) -> bytes:
        return f"event: {chunk['type']}\n".encode() + super().encode(chunk)

    @property
    def is_cut(self) -> bool:
        """Return whether the answer was cut before the model ended it."""
        completion = self.progress.completion
        return completion is not None and completion.finish_reason in ("length", "repetition")

    def _split(self, event: Event) -> Iterator[BlockChange]:
        self.progress.take(event)
        delta = self.progress.show(event)
        if delta.reasoning:
            yield from self._grow("reasoning", delta.reasoning)
        if delta.tool_call is not None:
            yield from self._begin(Block("call", len(self.blocks), call=delta.tool_call))
            yield from self._grow("call", json.dumps(delta.tool_call.arguments, ensure_ascii=False))
            yield from self._end()
        text = delta.text.lstrip() if self.progress.num_calls and self._open is None else delta.text
        if text:
            yield from self._grow("text", text)
        if self.progress.completion is not None:
            yield from self._end()

    def _grow(self, kind: Kind, text: str) -> Iterator[BlockChange]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(Block(kind, len(self.blocks)))
        block = self.blocks[-1]
        block.text += text
        yield BlockChange("grow", block, text)

    def _begin(self, block: Block) -> Iterator[BlockChange]:
        yield from self._end()
        self._open = block
        self.blocks.append(block)
        yield BlockChange("begin", block)

    def _end(self) -> Iterator[BlockChange]:
        if self._open is not None:
            block, self._open = self._open, None
            yield BlockChange("end", block)

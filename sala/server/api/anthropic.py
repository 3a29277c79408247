"""Anthropic's Messages API: what it sends and gets, strictly validated. Cache and billing fields are not used.

For the form of its errors see `http.errors`.
"""

import secrets
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from annotated_types import MaxLen, MinLen
from pydantic import Field, Tag, model_validator

from sala.server.api import answers, conversation
from sala.server.api.answers import MAX_STOPS, AnswerRequest, Count, StopText, TopK
from sala.server.api.conversation import (
    AnswerBlock,
    BlockReply,
    CalledName,
    ChatInput,
    Description,
    Parameters,
    ToolName,
    Tools,
    WithTools,
)
from sala.server.http.body import FIRST_ONLY, History, Strict, TextOr, discriminate, join, problem, union
from sala.server.http.errors import ApiError, anthropic_envelope
from sala.text.answer import StopFinder

THINKING = ("thinking", "redacted_thinking")
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "repetition": "max_tokens", "tool_calls": "tool_use"}
BILLING = "x-anthropic-billing-header:"  # a line that some clients send; it varies, so the prefix would never be cached
DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class TextBlock(History, remedy="this model reads text only; leave blocks of other types out"):
    type: Literal["text"]
    text: str


class ToolUse(History):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: CalledName
    input: Any = Field(None, description="An object. Anything else is read like the `arguments` of chats.")


TextOrBlocks = Annotated[TextOr[TextBlock], union("a string or a list of text blocks")]


class ToolResultBlock(History):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOrBlocks = ""
    is_error: bool | None = Field(None, description="Accepted and not used: the content must say so.")


class ThinkingBlock(History):
    """The reasoning of an earlier answer. Redacted reasoning is not used."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


def _block_kind(value: Any) -> str | None:
    """Return the tag of a block; an unknown type is validated, and refused, as text."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind in THINKING:
        return "~thought"
    return f"~{kind}" if kind in ("tool_use", "tool_result") else "~text"


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("~text")]
    | Annotated[ToolUse, Tag("~tool_use")]
    | Annotated[ToolResultBlock, Tag("~tool_result")]
    | Annotated[ThinkingBlock, Tag("~thought")],
    discriminate(_block_kind, "a block"),
]
AnthropicContent = Annotated[TextOr[ContentBlock], union("a string or a list of blocks")]
OTHERS: dict[str, tuple[type[Strict], ...]] = {
    "user": (ToolUse, ThinkingBlock),
    "assistant": (ToolResultBlock,),
    "system": (ToolUse, ToolResultBlock, ThinkingBlock),
}


class AnthropicMessage(History):
    role: Literal["user", "assistant", "system"]
    content: AnthropicContent

    @property
    def blocks(self) -> Sequence[ContentBlock]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    @model_validator(mode="after")
    def _check_blocks(self) -> "AnthropicMessage":
        if any(isinstance(block, OTHERS[self.role]) for block in self.blocks):
            raise problem("holds blocks that this role cannot have", "content")
        return self


class AnthropicTool(
    Strict,
    ignored=("eager_input_streaming", "defer_loading", "input_examples", "allowed_callers", "cache_control"),
    remedy="only custom tools can be offered; leave the others out",
):
    type: Literal["custom", None] = None
    name: ToolName
    description: Description | None = None
    input_schema: Parameters
    strict: bool | None = Field(None, description=conversation.STRICT)


class AnthropicToolChoice(Strict, needs={"tool": ("name", "is required with type tool")}):
    """`any` and `tool` are enforced: the answer consists of calls only."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = Field(None, description="If true, only the first call is returned.")


class Thinking(Strict, needs={"enabled": ("budget_tokens", "is required with type enabled")}):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = Field(None, description="Maximum tokens of reasoning.")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="`omitted` leaves the reasoning out; otherwise it is returned in full."
    )


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="A budget for the reasoning, as in chats, unless `thinking` sets one."
    )
    format: OutputFormat | None = Field(None, description="Enforced while sampling.")


class CountRequest(WithTools, ignored={"cache_control", "context_management", "diagnostics", "speed", "thread"}):
    """The parts of a prompt. `cache_control` is accepted everywhere and not used: prefixes are cached automatically."""

    model: str | None = Field(
        None, max_length=answers.MAX_MODEL_NAME, description="The model to use; by default the server's default model."
    )
    messages: Annotated[list[AnthropicMessage], MinLen(1), FIRST_ONLY] = Field(
        json_schema_extra={"example": [{"role": "user", "content": "Hello"}]}
    )
    system: TextOrBlocks | None = None
    tools: Tools[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = Field(None, description="By default, the server's setting.")
    output_config: OutputConfig | None = None
    mcp_servers: Annotated[list[Any], MaxLen(0)] | None = Field(
        None, description="Must be empty: they are not supported."
    )

    @model_validator(mode="before")
    @classmethod
    def _check_thread(cls, data: Any) -> Any:
        """Refuse to continue a thread, in the form that tells clients to send the whole conversation again."""
        thread = data.get("thread") if isinstance(data, dict) else None
        if isinstance(thread, dict) and thread.get("type") == "continue":
            message = "this server keeps no threads: send the whole conversation"
            details = {"details": {"error_code": "thread_not_found"}}
            raise ApiError(404, message, param="thread", code="thread_not_found", extra=details)
        return data

    @model_validator(mode="after")
    def _check(self) -> "CountRequest":
        last = self.messages[-1]
        if last.role == "assistant" and any(isinstance(block, ToolUse) for block in last.blocks):
            raise problem("must not end with a tool call; send its result too", "messages")
        if last.role == "assistant" and self.thinking is not None and self.thinking.type == "enabled":
            raise problem("cannot be enabled where the answer has been begun", "thinking")
        return self

    @property
    def choice(self) -> tuple[str, str | None]:
        if self.tool_choice is None:
            return "auto", None
        word = {"any": "required", "tool": "required"}.get(self.tool_choice.type, self.tool_choice.type)
        return word, self.tool_choice.name if self.tool_choice.type == "tool" else None


class MessagesRequest(CountRequest, AnswerRequest, ignored={"inference_geo"}):
    """A conversation to answer.

    `metadata`, `service_tier`, `inference_geo`, `thread` and the other fields that only steer caches, storage or
    moderation are accepted and not used.
    """

    max_tokens: Count = Field(description="Maximum length of the answer, reasoning included.")
    stop_sequences: Annotated[list[StopText], MaxLen(MAX_STOPS), FIRST_ONLY] | None = None
    top_k: TopK | None = Field(None, description="0 or -1: no limit.")


def read_conversation(body: CountRequest) -> ChatInput:
    choice, thinking, output = body.tool_choice, body.thinking, body.output_config
    sampling: dict[str, Any] = {}
    if isinstance(body, MessagesRequest):
        sampling = {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        sampling["stop"] = tuple(body.stop_sequences) if body.stop_sequences else None
    is_disabled = thinking is not None and thinking.type == "disabled"
    messages = list(as_messages(body))
    form = output.format if output is not None else None
    return ChatInput(
        messages=messages,
        attention=answers.read_attention(body) if isinstance(body, MessagesRequest) else None,
        sampling=sampling,
        tools=[conversation.as_tool(tool.name, tool.description, tool.input_schema) for tool in body.tools or ()],
        choice=body.choice,
        strict={tool.name for tool in body.tools or () if tool.strict},
        is_single=choice is not None and bool(choice.disable_parallel_tool_use),
        schema=conversation.answer_schema(form.type, form.schema_, is_strict=True) if form is not None else None,
        effort="none" if is_disabled else output.effort if output is not None else None,
        think_budget=thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None,
        continue_final=conversation.can_continue(messages),
    )


def as_messages(body: CountRequest) -> Iterator[dict[str, Any]]:
    system = join(body.system or "")
    if system.startswith(BILLING):
        system = system.partition("\n")[2]
    if system:
        yield {"role": "system", "content": system}
    for message in body.messages:
        if message.role == "assistant":
            yield _as_turn(message.blocks)
        else:
            yield from _as_inputs(message.role, message.blocks)


def _as_turn(blocks: Sequence[ContentBlock]) -> dict[str, Any]:
    """Return reasoning, text and calls of the assistant as one message."""
    text = "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
    thinking = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [_as_call(block) for block in blocks if isinstance(block, ToolUse)]
    more = {"reasoning_content": thinking, "tool_calls": calls}
    return {"role": "assistant", "content": text, **{name: value for name, value in more.items() if value}}


def _as_call(block: ToolUse) -> dict[str, Any]:
    return conversation.as_call(block.id, block.name, conversation.read_arguments(block.input))


def _as_inputs(role: str, blocks: Sequence[ContentBlock]) -> Iterator[dict[str, Any]]:
    """Yield tool results as messages of their own, and adjacent texts as one message."""
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": role, "content": "\n".join(texts)}
                texts = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": join(block.content)}
    if texts or not blocks:
        yield {"role": role, "content": "\n".join(texts)}


class MessageReply(BlockReply[MessagesRequest]):
    """The answer to one request, as a message of blocks."""

    fields = {  # noqa: RUF012
        "prompt": "messages", "stop": "stop_sequences", "json_schema": "output_config.format",
        "response_format": "output_config.format", "grammar": "tools", "think_budget": "thinking.budget_tokens",
    }  # fmt: skip
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def read(self) -> ChatInput:
        return read_conversation(self.body)

    @property
    def shows_reasoning(self) -> bool:
        is_omitted = self.body.thinking is not None and self.body.thinking.display == "omitted"
        return super().shows_reasoning and not is_omitted

    def whole(self) -> dict[str, Any]:
        content = [_show(block) for block in self.blocks]
        return {**self._head(), "content": content, **self._ending(), "usage": self._usage()}

    def opening(self) -> Iterator[dict[str, Any]]:
        """Begin the message. How much of the prompt was cached is known at the end only."""
        usage = _usage(self.prompt_len, 0, 0)
        start = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield {"type": "message_start", "message": start}
        yield {"type": "ping"}

    def events(self, change: conversation.Change, block: AnswerBlock, text: str) -> Iterator[dict[str, Any]]:
        if change == "begin":
            start = _show(block.emptied())
            if block.kind == "call":
                start["input"] = {}
            yield {"type": "content_block_start", "index": block.index, "content_block": start}
        elif change == "end":
            yield {"type": "content_block_stop", "index": block.index}
        else:
            kind, name = DELTAS[block.kind]
            yield {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}

    def closing(self) -> Iterator[dict[str, Any]]:
        yield {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> dict[str, Any]:
        return anthropic_envelope(error)

    def _head(self) -> dict[str, Any]:
        number = f"msg_{secrets.token_hex(12)}"
        return {"id": number, "type": "message", "role": "assistant", "model": self.model_id}

    def _usage(self) -> dict[str, Any]:
        usage = self.progress.result.usage
        return _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)

    def _ending(self) -> dict[str, Any]:
        stop = self._find_stop()
        reason = STOP_REASONS.get(self.progress.result.finish_reason, "end_turn")
        return {"stop_reason": "stop_sequence" if stop is not None else reason, "stop_sequence": stop}

    def _find_stop(self) -> str | None:
        """Return the stop string that ended the answer, if one did."""
        completion = self.progress.result
        has_ended_itself = completion.stop_token is not None or completion.finish_reason not in ("stop", "tool_calls")
        if not self.body.stop_sequences or has_ended_itself:
            return None
        finder = StopFinder(self.body.stop_sequences)
        finder.push(self.llm.tokenizer.decode(completion.token_ids))
        return finder.found


def _usage(prompt: int, cached: int, sampled: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sampled,
    }


def _show(block: AnswerBlock) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.call is None:
        return {"type": "text", "text": block.text, "citations": None}
    return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": block.call.arguments}

"""What Anthropic's Messages API sends and gets, strictly validated. Cache and billing fields are not used."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import BaseModel, Field, Tag, model_validator

from sala.server.api.chat_schema import MAX_INT, MAX_TOOLS, Count, Parameters, StopText, ToolName, check_tools
from sala.server.http.body import FIRST_ONLY, Strict, discriminate, problem, union

CACHED = frozenset({"cache_control"})
THINKING = ("thinking", "redacted_thinking")


class TextBlock(Strict):
    ignored = CACHED | {"citations"}
    types = ("text",)
    remedy = "this model reads text only; leave blocks of other types out"

    type: Literal["text"]
    text: str


class ToolUse(Strict):
    """A tool call of an earlier answer."""

    ignored = CACHED | {"caller", "toolset_name"}

    type: Literal["tool_use"]
    id: str
    name: ToolName
    input: dict[str, Any]


TextOrBlocks = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[TextBlock], FIRST_ONLY, Tag("~list")],
    union({str: "~text", list: "~list"}, "a string or a list of text blocks"),
]


def join(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class ToolResult(Strict):
    """The result of a tool call."""

    ignored = CACHED | {"toolset_name"}

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOrBlocks = ""
    is_error: bool | None = Field(None, description="Accepted and not used: the content must say so.")


class ThinkingBlock(Strict):
    """The reasoning of an earlier answer. Redacted reasoning is not used."""

    ignored = CACHED | {"signature", "data"}

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
    | Annotated[ToolResult, Tag("~tool_result")]
    | Annotated[ThinkingBlock, Tag("~thought")],
    discriminate(_block_kind, "a block"),
]
AnthropicContent = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[ContentBlock], FIRST_ONLY, Tag("~list")],
    union({str: "~text", list: "~list"}, "a string or a list of blocks"),
]
OTHERS: dict[str, tuple[type[Strict], ...]] = {
    "user": (ToolUse, ThinkingBlock),
    "assistant": (ToolResult,),
    "system": (ToolUse, ToolResult, ThinkingBlock),
}


class AnthropicMessage(Strict):
    role: Literal["user", "assistant", "system"]
    content: AnthropicContent

    @model_validator(mode="after")
    def _check_blocks(self) -> "AnthropicMessage":
        if any(isinstance(block, OTHERS[self.role]) for block in self.content):
            raise problem("holds blocks that this role cannot have", "content")
        return self


class CustomTool(Strict):
    ignored = CACHED | {"strict", "eager_input_streaming", "defer_loading", "input_examples", "allowed_callers"}
    types = ("custom",)
    remedy = "only custom tools can be offered; leave the others out"

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: Parameters


class AnthropicToolChoice(Strict):
    """`any` and `tool` are enforced: the answer consists of calls only."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = Field(None, description="If true, only the first call is returned.")

    @model_validator(mode="after")
    def _check_name(self) -> "AnthropicToolChoice":
        if self.type == "tool" and self.name is None:
            raise problem("is required with type tool", "name", "missing")
        return self


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Ge(1), Le(MAX_INT)] | None = Field(None, description="Maximum tokens of reasoning.")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="`omitted` leaves the reasoning out; otherwise it is returned in full."
    )

    @model_validator(mode="after")
    def _check_budget(self) -> "Thinking":
        if self.type == "enabled" and self.budget_tokens is None:
            raise problem("is required with type enabled", "budget_tokens", "missing")
        return self


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="A budget for the reasoning, as in chats, unless `thinking` sets one."
    )
    format: OutputFormat | None = Field(None, description="Enforced while sampling.")


class CountRequest(Strict):
    """The parts of a prompt. `cache_control` is accepted everywhere and not used: prefixes are cached automatically."""

    ignored = CACHED | {"context_management", "diagnostics", "speed"}

    model: str | None = Field(None, description="The model to use; by default the server's default model.")
    messages: Annotated[list[AnthropicMessage], MinLen(1), FIRST_ONLY] = Field(
        json_schema_extra={"example": [{"role": "user", "content": "Hello"}]}
    )
    system: TextOrBlocks | None = None
    tools: Annotated[list[CustomTool], MaxLen(MAX_TOOLS), FIRST_ONLY] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = Field(None, description="By default, the server's setting.")
    output_config: OutputConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> "CountRequest":
        check_tools([tool.name for tool in self.tools or ()], *self.choice)
        if self.messages[-1].role == "assistant":
            raise problem(
                "must not end with a message of the assistant: a partial answer cannot be continued", "messages"
            )
        return self

    @property
    def choice(self) -> tuple[str, str | None]:
        if self.tool_choice is None:
            return "auto", None
        word = {"any": "required", "tool": "required"}.get(self.tool_choice.type, self.tool_choice.type)
        return word, self.tool_choice.name if self.tool_choice.type == "tool" else None


class MessagesRequest(CountRequest):
    """A conversation to answer.

    `metadata`, `service_tier`, `inference_geo` and the fields that /messages/count_tokens ignores are accepted and not
    used.
    """

    ignored = CountRequest.ignored | {"metadata", "service_tier", "inference_geo"}

    max_tokens: Count = Field(description="Maximum length of the answer, reasoning included.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it is generated.")
    stop_sequences: Annotated[list[StopText], MaxLen(4), FIRST_ONLY] | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_INT, description="0: no limit.")


class MessageUsage(BaseModel):
    input_tokens: int = Field(description="Prompt tokens that were not cached.")
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageObject(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]] = Field(description="Blocks of type thinking, text and tool_use.")
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    input_tokens: int


class ErrorDetail(BaseModel):
    type: str
    message: str


class MessagesError(BaseModel):
    """The body of every error of these routes."""

    type: Literal["error"]
    error: ErrorDetail

"""The shapes of Anthropic's Messages interface, strictly read. What only steers a cache or a bill is not used."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import BaseModel, Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from sala.server.api.chat_schema import FIRST_ONLY, MAX_INT, MAX_TOOLS, TOOL_NAME, Count, StopText, Strict, check_schema

CACHED = frozenset({"cache_control"})
THOUGHTS = ("thinking", "redacted_thinking")


class TextBlock(Strict):
    ignored = CACHED | {"citations"}

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("type"), str) and data["type"] != "text":
            raise PydanticCustomError(
                "text_only", "this model reads text only; leave blocks of other types out", {"field": "type"}
            )
        return data


class ToolUse(Strict):
    """A call that an earlier answer made."""

    ignored = CACHED | {"caller", "toolset_name"}

    type: Literal["tool_use"]
    id: str
    name: str = Field(pattern=TOOL_NAME)
    input: dict[str, Any]


def _text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return "~text"
    return "~list" if isinstance(value, list) else None


Text = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[TextBlock], FIRST_ONLY, Tag("~list")],
    Discriminator(_text_or_list, "value", "must be a string or a list of text blocks"),
]


def join(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class ToolResult(Strict):
    """What came of a call."""

    ignored = CACHED | {"toolset_name"}

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text = ""
    is_error: bool | None = Field(None, description="Accepted and not used: the text must say it.")


class Thought(Strict):
    """The reasoning of an earlier answer; redacted it is of no use."""

    ignored = CACHED | {"signature", "data"}

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


def _block_kind(value: Any) -> str | None:
    """Whatever else it is, it is refused as what the model cannot read."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind in THOUGHTS:
        return "~thought"
    return f"~{kind}" if kind in ("tool_use", "tool_result") else "~text"


Block = Annotated[
    Annotated[TextBlock, Tag("~text")]
    | Annotated[ToolUse, Tag("~tool_use")]
    | Annotated[ToolResult, Tag("~tool_result")]
    | Annotated[Thought, Tag("~thought")],
    Discriminator(_block_kind, "value", "must be a block"),
]
Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[Block], FIRST_ONLY, Tag("~list")],
    Discriminator(_text_or_list, "value", "must be a string or a list of blocks"),
]
OTHERS: dict[str, tuple[type[Strict], ...]] = {
    "user": (ToolUse, Thought),
    "assistant": (ToolResult,),
    "system": (ToolUse, ToolResult, Thought),
}


class InputMessage(Strict):
    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def _check_blocks(self) -> "InputMessage":
        if any(isinstance(block, OTHERS[self.role]) for block in self.content):
            raise PydanticCustomError("value", "holds blocks that are not for this role", {"field": "content"})
        return self


class CustomTool(Strict):
    ignored = CACHED | {"strict", "eager_input_streaming", "defer_loading", "input_examples", "allowed_callers"}

    type: Literal["custom"] | None = None
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="A JSON schema of type object.")

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("type"), str) and data["type"] != "custom":
            raise PydanticCustomError(
                "value", "only tools of your own can be offered; leave the others out", {"field": "type"}
            )
        return data

    @field_validator("input_schema")
    @classmethod
    def _check_parameters(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_schema(value)
        return value


class ToolChoice(Strict):
    """`any` and `tool` are enforced: the answer can be nothing but calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = Field(None, description="If true, only the first call is given back.")

    @model_validator(mode="after")
    def _check_name(self) -> "ToolChoice":
        if self.type == "tool" and self.name is None:
            raise PydanticCustomError("missing", "says which tool", {"field": "name"})
        return self


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Ge(1), Le(MAX_INT)] | None = Field(None, description="Tokens of reasoning at most.")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="`omitted` leaves the reasoning out; else it is given as it is."
    )

    @model_validator(mode="after")
    def _check_budget(self) -> "Thinking":
        if self.type == "enabled" and self.budget_tokens is None:
            raise PydanticCustomError("missing", "says how much", {"field": "budget_tokens"})
        return self


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="A budget for the reasoning, as in chats, unless `thinking` sets one."
    )
    format: OutputFormat | None = Field(None, description="Enforced while the answer is sampled.")


class CountRequest(Strict):
    """What a prompt is made of. `cache_control` is accepted everywhere and not used: whatever can be reused is."""

    ignored = CACHED | {"context_management", "diagnostics", "speed"}

    model: str | None = Field(None, description="Which model answers; by default the one that was loaded first.")
    messages: Annotated[list[InputMessage], MinLen(1), FIRST_ONLY] = Field(
        json_schema_extra={"example": [{"role": "user", "content": "Hello"}]}
    )
    system: Text | None = None
    tools: Annotated[list[CustomTool], MaxLen(MAX_TOOLS), FIRST_ONLY] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = Field(None, description="Without it the model thinks as the server lets it.")
    output_config: OutputConfig | None = None

    @model_validator(mode="after")
    def _check_end(self) -> "CountRequest":
        if self.messages[-1].role == "assistant":
            raise PydanticCustomError(
                "value", "must not end with the assistant's: an answer that is begun cannot be continued",
                {"field": "messages"},
            )  # fmt: skip
        return self


class MessagesRequest(CountRequest):
    """A conversation to be answered.

    `metadata`, `service_tier`, `inference_geo` and what /messages/count_tokens ignores are accepted and not used.
    """

    ignored = CountRequest.ignored | {"metadata", "service_tier", "inference_geo"}

    max_tokens: Count = Field(description="Length of the answer at most, reasoning included.")
    stream: bool | None = Field(None, description="Send the answer piece by piece, as server-sent events.")
    stop_sequences: Annotated[list[StopText], MaxLen(4), FIRST_ONLY] | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_INT, description="0: no limit.")


class MessageUsage(BaseModel):
    input_tokens: int = Field(description="Of the prompt, without those that were read before.")
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
    """Every answer of these routes that is not a success."""

    type: Literal["error"]
    error: ErrorDetail

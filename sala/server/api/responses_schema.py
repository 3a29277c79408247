"""What OpenAI's Responses API sends and gets, strictly validated."""

import json
from typing import Annotated, Any, Literal

from annotated_types import MaxLen, MinLen
from pydantic import BaseModel, Field, Tag, field_validator, model_validator

from sala.server.api.chat_schema import MAX_TOOLS, TEXT_ONLY, Count, Parameters, ToolName, check_tools
from sala.server.http.body import FIRST_ONLY, Strict, discriminate, problem, union

NOT_STORED = "this server stores nothing; send the whole conversation as input"
MARKS = frozenset({"id", "status", "phase"})  # fields of answered items that are not used when they are sent back


class ContentPart(Strict):
    ignored = frozenset({"annotations", "logprobs"})
    types = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
    remedy = TEXT_ONLY

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _read_refusal(cls, data: Any) -> Any:
        is_refusal = isinstance(data, dict) and data.get("type") == "refusal"
        return {"type": "refusal", "text": data.get("refusal")} if is_refusal else data


TextOrParts = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[ContentPart], FIRST_ONLY, Tag("~list")],
    union({str: "~text", list: "~list"}, "a string or a list of text parts"),
]


def join(content: str | list[ContentPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class MessageItem(Strict):
    ignored = MARKS

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts


class CallItem(Strict):
    """A tool call of an earlier answer."""

    ignored = MARKS

    type: Literal["function_call"]
    call_id: str
    name: ToolName
    arguments: str = Field(description="A JSON object, as a string.")

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, value: str) -> str:
        try:
            is_object = isinstance(json.loads(value or "{}"), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise problem("must be a JSON object, as a string")
        return value


class CallOutput(Strict):
    """The result of a tool call."""

    ignored = MARKS

    type: Literal["function_call_output"]
    call_id: str
    output: TextOrParts


class ReasoningItem(Strict):
    """The reasoning of an earlier answer."""

    ignored = MARKS | {"encrypted_content", "summary"}

    type: Literal["reasoning"]
    content: list[ContentPart] | None = None


class ItemReference(Strict):
    """A reference to a stored item: refused, since the server stores nothing."""

    type: Literal["item_reference"]

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        raise problem(NOT_STORED)


def _item_kind(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else None
    known = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
    return f"~{kind}" if kind in known else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("~message")]
    | Annotated[CallItem, Tag("~function_call")]
    | Annotated[CallOutput, Tag("~function_call_output")]
    | Annotated[ReasoningItem, Tag("~reasoning")]
    | Annotated[ItemReference, Tag("~item_reference")],
    discriminate(_item_kind, "a message, function_call, function_call_output or reasoning"),
]
Input = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[InputItem], MinLen(1), FIRST_ONLY, Tag("~list")],
    union({str: "~text", list: "~list"}, "a string or a list of items"),
]


class FunctionTool(Strict):
    types = ("function",)
    remedy = "only tools of type function can be offered; leave the others out"

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = Field(None, description="Accepted and not used: enforced calls are always strict.")


class FunctionChoice(Strict):
    type: Literal["function"]
    name: str


AnyChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~word")] | Annotated[FunctionChoice, Tag("~function")],
    union({str: "~word", dict: "~function"}, "none, auto, required or a function"),
]


class TextFormat(Strict):
    ignored = frozenset({"description", "strict"})

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(None, max_length=64)
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="The JSON schema that the answer must follow."
    )

    @model_validator(mode="after")
    def _check_schema(self) -> "TextFormat":
        if self.type == "json_schema" and self.schema_ is None:
            raise problem("json_schema needs a schema", "schema", "missing")
        return self


class TextOptions(Strict):
    ignored = frozenset({"verbosity"})

    format: TextFormat | None = Field(None, description="Enforced while sampling.")


class Reasoning(Strict):
    ignored = frozenset({"context"})

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="A budget for the reasoning, as in chats."
    )
    summary: Literal["auto"] | None = Field(None, description="Not summarised: the reasoning itself is returned.")
    generate_summary: None = Field(None, description="Not supported.")


class ResponseRequest(Strict):
    """A conversation to answer, as a list of items.

    Nothing is stored, even if `store` is true. `user`, `service_tier`, `safety_identifier`, `prompt_cache_key`,
    `prompt_cache_retention`, `max_tool_calls`, `stream_options` and `text.verbosity` are accepted and not used.
    """

    ignored = frozenset(
        {
            "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
            "max_tool_calls", "stream_options", "client_metadata",
        }
    )  # fmt: skip

    model: str | None = Field(None, description="The model to use; by default the server's default model.")
    input: Input = Field(json_schema_extra={"example": "Hello"})
    instructions: str | None = Field(None, description="A system message that precedes the input.")
    max_output_tokens: Count | None = Field(None, description="Maximum length of the answer, reasoning included.")
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    tools: Annotated[list[FunctionTool], MaxLen(MAX_TOOLS), FIRST_ONLY] | None = None
    tool_choice: AnyChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="If false, only the first call is returned.")
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it is generated.")
    metadata: dict[Annotated[str, MaxLen(64)], Annotated[str, MaxLen(512)]] | None = Field(
        None, max_length=16, description="Returned unchanged."
    )
    include: list[str] | None = Field(None, max_length=16, description="Accepted and not used.")
    truncation: Literal["disabled"] | None = Field(None, description="A prompt that is too long is always an error.")
    background: bool | None = Field(None, description="Not supported: only false.")
    top_logprobs: int | None = Field(None, ge=0, le=0, description="Not supported here; use /chat/completions.")
    previous_response_id: None = None
    conversation: None = None
    prompt: None = Field(None, description="Not supported.")

    @model_validator(mode="before")
    @classmethod
    def _check_memory(cls, data: Any) -> Any:
        for name in ("previous_response_id", "conversation"):
            if isinstance(data, dict) and data.get(name) is not None:
                raise problem(NOT_STORED, name)
        if isinstance(data, dict) and data.get("background") is True:
            raise problem("background requests are not supported; leave it out, or use stream", "background")
        return data

    @field_validator("include")
    @classmethod
    def _check_include(cls, value: list[str] | None) -> list[str] | None:
        if "message.output_text.logprobs" in (value or ()):
            raise problem("asks for logprobs, which only /chat/completions returns")
        return value

    @model_validator(mode="after")
    def _check_tools(self) -> "ResponseRequest":
        check_tools([tool.name for tool in self.tools or ()], *self.choice)
        return self

    @property
    def choice(self) -> tuple[str, str | None]:
        if isinstance(self.tool_choice, FunctionChoice):
            return "required", self.tool_choice.name
        return self.tool_choice or "auto", None


class ResponseUsage(BaseModel):
    class InputDetails(BaseModel):
        cached_tokens: int
        cache_write_tokens: int

    class OutputDetails(BaseModel):
        reasoning_tokens: int

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]] = Field(description="Items of type reasoning, message and function_call.")
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None = Field(None, description="Present when the answer is complete.")

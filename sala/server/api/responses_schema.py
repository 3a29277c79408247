"""The shapes of OpenAI's Responses interface, strictly read."""

import json
from typing import Annotated, Any, Literal

from annotated_types import MaxLen, MinLen
from pydantic import BaseModel, Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from sala.server.api.chat_schema import FIRST_ONLY, MAX_TOOLS, TOOL_NAME, Count, Strict, check_schema

NOT_STORED = "this server stores nothing; send the whole conversation as input"
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
MARKS = frozenset({"id", "status", "phase"})  # what items of an answer carry, and is of no use to the next one


class Part(Strict):
    ignored = frozenset({"annotations", "logprobs"})

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("type"), str):
            return data
        if data["type"] == "refusal":
            return {"type": "refusal", "text": data.get("refusal")}
        if data["type"] not in TEXTS:
            raise PydanticCustomError(
                "text_only", "this model reads text only; leave parts of other types out", {"field": "type"}
            )
        return data


def _text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return "~text"
    return "~list" if isinstance(value, list) else None


Text = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[Part], FIRST_ONLY, Tag("~list")],
    Discriminator(_text_or_list, "value", "must be a string or a list of text parts"),
]


def join(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class InputMessage(Strict):
    ignored = MARKS

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text


class CallItem(Strict):
    """A call that an earlier answer made."""

    ignored = MARKS

    type: Literal["function_call"]
    call_id: str
    name: str = Field(pattern=TOOL_NAME)
    arguments: str = Field(description="A JSON object, as text.")

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, value: str) -> str:
        try:
            is_object = isinstance(json.loads(value or "{}"), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise PydanticCustomError("value", "must be a JSON object, as text")
        return value


class CallOutput(Strict):
    """What came of a call."""

    ignored = MARKS

    type: Literal["function_call_output"]
    call_id: str
    output: Text


class ReasoningItem(Strict):
    """The reasoning of an earlier answer."""

    ignored = MARKS | {"encrypted_content", "summary"}

    type: Literal["reasoning"]
    content: list[Part] | None = None


class ItemReference(Strict):
    """Leads nowhere."""

    type: Literal["item_reference"]

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        raise PydanticCustomError("value", NOT_STORED)


def _item_kind(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else None
    known = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
    return f"~{kind}" if kind in known else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("~message")]
    | Annotated[CallItem, Tag("~function_call")]
    | Annotated[CallOutput, Tag("~function_call_output")]
    | Annotated[ReasoningItem, Tag("~reasoning")]
    | Annotated[ItemReference, Tag("~item_reference")],
    Discriminator(_item_kind, "value", "must be a message, function_call, function_call_output or reasoning"),
]
Input = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[InputItem], MinLen(1), FIRST_ONLY, Tag("~list")],
    Discriminator(_text_or_list, "value", "must be a string or a list of items"),
]


class FunctionTool(Strict):
    type: Literal["function"]
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of type object.")
    strict: bool | None = Field(None, description="Accepted and not used: calls that are enforced are always strict.")

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("type"), str) and data["type"] != "function":
            raise PydanticCustomError(
                "value", "only tools of type function can be offered; leave the others out", {"field": "type"}
            )
        return data

    @field_validator("parameters")
    @classmethod
    def _check_parameters(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        check_schema(value)
        return value


class FunctionChoice(Strict):
    type: Literal["function"]
    name: str


def _choice_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "~word"
    return "~function" if isinstance(value, dict) else None


AnyChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~word")] | Annotated[FunctionChoice, Tag("~function")],
    Discriminator(_choice_kind, "value", "must be none, auto, required or a function"),
]


class TextFormat(Strict):
    ignored = frozenset({"description", "strict"})

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(None, max_length=64)
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="The JSON schema that the answer follows.")

    @model_validator(mode="after")
    def _check_schema(self) -> "TextFormat":
        if self.type == "json_schema" and self.schema_ is None:
            raise PydanticCustomError("missing", "json_schema needs a schema", {"field": "schema"})
        return self


class TextOptions(Strict):
    ignored = frozenset({"verbosity"})

    format: TextFormat | None = Field(None, description="Enforced while the answer is sampled.")


class Reasoning(Strict):
    ignored = frozenset({"context"})

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="A budget for the reasoning, as in chats."
    )
    summary: Literal["auto"] | None = Field(None, description="Nothing is summed up: the reasoning itself is given.")
    generate_summary: None = Field(None, description="Not supported.")


class ResponseRequest(Strict):
    """A conversation to be answered, as items.

    Nothing is stored, whatever `store` says. `user`, `service_tier`, `safety_identifier`, `prompt_cache_key`,
    `prompt_cache_retention`, `max_tool_calls`, `stream_options` and `text.verbosity` are accepted and not used.
    """

    ignored = frozenset(
        {
            "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
            "max_tool_calls", "stream_options", "client_metadata",
        }
    )  # fmt: skip

    model: str | None = Field(None, description="Which model answers; by default the one that was loaded first.")
    input: Input = Field(json_schema_extra={"example": "Hello"})
    instructions: str | None = Field(None, description="A system message that stands before the input.")
    max_output_tokens: Count | None = Field(None, description="Length of the answer at most, reasoning included.")
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    tools: Annotated[list[FunctionTool], MaxLen(MAX_TOOLS), FIRST_ONLY] | None = None
    tool_choice: AnyChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="If false, only the first call is given back.")
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = Field(None, description="Send the answer piece by piece, as server-sent events.")
    metadata: dict[Annotated[str, MaxLen(64)], Annotated[str, MaxLen(512)]] | None = Field(
        None, max_length=16, description="Given back as it is."
    )
    include: list[str] | None = Field(None, max_length=16, description="Nothing of it is there to be included.")
    truncation: Literal["disabled"] | None = Field(None, description="A prompt that is too long is an error.")
    background: bool | None = Field(None, description="Not supported: only false.")
    top_logprobs: int | None = Field(None, ge=0, le=0, description="Not supported here; chats have them.")
    previous_response_id: None = None
    conversation: None = None
    prompt: None = Field(None, description="Not supported.")

    @model_validator(mode="before")
    @classmethod
    def _check_memory(cls, data: Any) -> Any:
        for name in ("previous_response_id", "conversation"):
            if isinstance(data, dict) and data.get(name) is not None:
                raise PydanticCustomError("value", NOT_STORED, {"field": name})
        if isinstance(data, dict) and data.get("background") is True:
            raise PydanticCustomError(
                "value", "nothing runs in the background; leave it out, or stream", {"field": "background"}
            )
        return data

    @field_validator("include")
    @classmethod
    def _check_include(cls, value: list[str] | None) -> list[str] | None:
        if "message.output_text.logprobs" in (value or ()):
            raise PydanticCustomError("value", "holds logprobs, which only chats have here")
        return value


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
    usage: ResponseUsage | None = Field(None, description="Not before the answer is complete.")

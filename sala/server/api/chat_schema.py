"""What chats send and get: OpenAI's request and response, strictly validated. An unknown field is an error."""

import re
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import AfterValidator, Field, Tag, field_validator, model_validator

from sala.server.http.body import FIRST_ONLY, Strict, TextOr, problem, text_or, union

MAX_ANSWERS = 8
MAX_TOOLS = 128
MAX_BIASES = 1024
MAX_INT = (1 << 31) - 1
MIN_SEED, MAX_SEED = -(1 << 63), (1 << 63) - 1
TEXT_ONLY = "this model reads text only; leave parts of other types out"


def check_schema(schema: Any) -> Any:
    """Return a JSON schema unchanged; raise if it holds an invalid regular expression."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        if not isinstance(one, dict):
            continue
        waiting += one.values()
        pattern = one.get("pattern")
        if isinstance(pattern, str):
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError):
                raise problem("holds a pattern that is not a valid regular expression") from None
    return schema


StopText = Annotated[str, MinLen(1), MaxLen(256)]
Stop = Annotated[
    Annotated[StopText, Tag("~text")] | Annotated[list[StopText], MaxLen(4), FIRST_ONLY, Tag("~list")],
    union({str: "~text", list: "~list"}, "a string or a list of strings"),
]
Count = Annotated[int, Ge(1), Le(MAX_INT)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Parameters = Annotated[dict[str, Any], AfterValidator(check_schema), Field(description="A JSON schema of type object.")]


class TextPart(Strict, remedy=TEXT_ONLY):
    type: Literal["text"]
    text: str


Content = Annotated[TextOr[TextPart], text_or("a list of text parts")]


class FunctionCall(Strict):
    name: ToolName
    arguments: str = Field(description="A JSON object, as a string.")


class ToolCallInput(Strict, ignored={"index"}):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict, ignored={"annotations", "refusal"}):
    """One message of a conversation. `developer` means `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = Field(None, description="Accepted and not used.")
    reasoning_content: str | None = Field(None, description="The reasoning of an earlier answer.")
    tool_calls: list[ToolCallInput] | None = Field(None, max_length=MAX_TOOLS)
    tool_call_id: str | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _check_role(self) -> "Message":
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.reasoning_content)):
            raise problem("a message needs content", "content", "missing")
        if self.tool_calls and self.role != "assistant":
            raise problem("only messages of the assistant may call tools", "tool_calls")
        return self


class Function(Strict, ignored={"strict"}):
    name: ToolName
    description: str | None = None
    parameters: Parameters | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class ChosenFunction(Strict):
    name: str


class ToolChoice(Strict):
    type: Literal["function"]
    function: ChosenFunction


AnyToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~word")] | Annotated[ToolChoice, Tag("~function")],
    union({str: "~word", dict: "~function"}, "none, auto, required or a function"),
]


class NamedSchema(Strict, ignored={"description", "strict"}):
    name: str = Field("schema", min_length=1, max_length=64)
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON schema that the answer must follow.")


class ResponseFormat(Strict, needs={"json_schema": ("json_schema", "json_schema needs a schema")}):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StreamOptions(Strict, ignored={"include_obfuscation"}):
    include_usage: bool = False


class TemplateOptions(Strict):
    """Variables of the chat template."""

    enable_thinking: bool | None = None


class AnswerRequest(Strict):
    """The fields that all requests to generate an answer share."""

    model: str | None = Field(None, description="The model to use; by default the server's default model.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it is generated.")


class GenerationRequest(
    AnswerRequest, ignored={"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
):
    """The fields that chats and plain completions share."""

    sampling_fields: ClassVar[tuple[str, ...]] = (
        "temperature", "top_p", "top_k", "min_p", "min_tokens", "seed", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "ignore_eos",
    )  # fmt: skip

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS, description="Number of answers; the prompt is processed once.")
    stop: Stop | None = Field(None, description="End the answer before any of these strings.")
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED, description="The same seed samples the same tokens.")
    temperature: float | None = Field(None, ge=0, le=100, description="0 selects the most probable token.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_INT, description="0: no limit.")
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_BIASES, description="Token ids, as strings, and what to add to their logits."
    )
    ignore_eos: bool | None = Field(None, description="Continue after the end token.")
    return_progress: bool | None = Field(
        None, description="In a stream, report prefill progress in chunks with `prompt_progress`."
    )

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or ():
            if not re.fullmatch(r"[0-9]{1,10}", key):
                raise problem("holds a key that is not a token id")
        return value

    @model_validator(mode="after")
    def _check_stream(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise problem("needs stream to be true", "stream_options")
        if self.return_progress and not self.stream:
            raise problem("needs stream to be true", "return_progress")
        return self


class ChatRequest(GenerationRequest, ignored={"verbosity"}):
    """A conversation to answer.

    `user`, `store`, `metadata`, `service_tier`, `safety_identifier`, `prompt_cache_key` and `verbosity` are accepted
    and not used. If a key occurs twice, the last value counts. Any other field is an error.
    """

    messages: Annotated[list[Message], MinLen(1), FIRST_ONLY] = Field(
        json_schema_extra={"example": [{"role": "user", "content": "Hello"}]}
    )
    max_tokens: Count | None = Field(None, description="Maximum length of the answer, reasoning included.")
    max_completion_tokens: Count | None = Field(None, description="The newer name of `max_tokens`.")
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: AnyToolChoice | None = Field(
        None, description="`required` and a named function are enforced: the answer consists of calls only."
    )
    parallel_tool_calls: bool | None = Field(None, description="If false, only the first call is returned.")
    response_format: ResponseFormat | None = Field(None, description="Enforced while sampling.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None,
        description="A budget for the reasoning: none and minimal 0 tokens, low 1,024, medium 4,096, otherwise "
        "unlimited. `thinking_budget` sets it exactly.",
    )
    thinking_budget: int | None = Field(
        None, ge=-1, le=MAX_INT, description="Maximum tokens of reasoning; -1: no limit."
    )
    chat_template_kwargs: TemplateOptions | None = None
    modalities: list[Literal["text"]] | None = Field(None, min_length=1, max_length=1)
    audio: None = Field(None, description="Not supported.")
    functions: None = Field(None, description="Not supported; use tools.")
    function_call: None = Field(None, description="Not supported; use tool_choice.")
    prediction: None = Field(None, description="Not supported.")
    web_search_options: None = Field(None, description="Not supported.")

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise problem("needs logprobs to be true", "top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise problem("differs from max_tokens", "max_completion_tokens")
        check_tools([tool.function.name for tool in self.tools or ()], *self.choice)
        return self

    @property
    def choice(self) -> tuple[str, str | None]:
        """The tool choice: auto, none or required, and the function if one is named."""
        if isinstance(self.tool_choice, ToolChoice):
            return "required", self.tool_choice.function.name
        return self.tool_choice or "auto", None


def check_tools(names: list[str], choice: str, function: str | None) -> None:
    """Raise if a tool is offered twice, or if a call is demanded that is not possible."""
    if len(set(names)) < len(names):
        raise problem("names a function twice", "tools")
    if choice == "required" and not names:
        raise problem("needs tools", "tool_choice")
    if function is not None and function not in names:
        raise problem("names a function that is not in tools", "tool_choice")

"""What clients send and get: OpenAI's shapes, strictly read. A field that nobody knows is an error, not a surprise."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, ClassVar, Literal, cast

import pydantic_core
from annotated_types import Ge, Le, MaxLen, MinLen
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from sala.server.http.errors import ApiError, from_validation
from sala.server.http.limits import find_excess
from sala.server.http.security import need_key

LARGE = 1 << 16  # bytes of a body that are too many to be read while others wait
MAX_ANSWERS = 8
MAX_PROMPTS = 128
MAX_TOOLS = 128
MAX_BIASES = 1024
MAX_INT = (1 << 31) - 1
MIN_SEED, MAX_SEED = -(1 << 63), (1 << 63) - 1
TOOL_NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class StrictRoute(APIRoute):
    """Reads JSON bodies by the letter: declared as JSON, in UTF-8, without NaN, within bounds. The key comes first."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            if self.body_field is not None:
                await need_key(request)  # before the body: who has no key is not listened to
                check_content_type(request)
                request = _StrictRequest(request, cast(type[BaseModel], self.body_field.field_info.annotation))
            return await handle(request)

        return strictly


def check_content_type(request: Request) -> None:
    """Only JSON by name: a web page elsewhere can send anything else without asking."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the content type must be application/json", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "compressed bodies are not read", code="unsupported_media_type")


class _StrictRequest(Request):
    """Reads its body where it holds up nobody: a large one is parsed and checked in a thread."""

    def __init__(self, request: Request, kind: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._kind = kind

    async def json(self) -> Any:
        body = await self.body()
        return read_json(body) if len(body) < LARGE else await asyncio.to_thread(self._read, body)

    def _read(self, body: bytes) -> Any:
        """What is checked here is not checked again."""
        data = read_json(body)
        try:
            return self._kind.model_validate(data)
        except ValidationError as error:
            raise from_validation(error.errors(include_url=False, include_input=False)) from None


def read_json(body: bytes) -> Any:
    """JSON by the letter; of a key that stands twice the last one counts."""
    excess = find_excess(body)
    if excess is not None:
        raise ApiError(400, f"the body holds {excess}; send less at a time", code="invalid_json")
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False, cache_strings="keys")
    except (ValueError, RecursionError) as error:
        problem = str(error).partition("\n")[0][:200]
        raise ApiError(400, f"the body is no JSON that can be read: {problem}", code="invalid_json") from None


class Strict(BaseModel):
    """No coercion, no NaN, no unknown field; a null where a default exists is the default."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in data:
            if name not in known and name not in cls.ignored:
                raise PydanticCustomError("unknown_field", "this field is not supported; leave it out", {"field": name})
        return {name: value for name, value in data.items() if name in known}


def _union(kinds: dict[type, str], words: str) -> Discriminator:
    """Tells the members of a union by their type; their tags begin with ~ and stay out of error paths."""
    return Discriminator(
        lambda value: next((tag for kind, tag in kinds.items() if isinstance(value, kind)), None),
        custom_error_type="value",
        custom_error_message=f"must be {words}",
    )


class _FirstOnly(FailFast):
    """One bad item of a long list is enough to know."""

    __hash__ = object.__hash__


FIRST_ONLY = _FirstOnly()
StopText = Annotated[str, MinLen(1), MaxLen(256)]
Stop = Annotated[
    Annotated[StopText, Tag("~text")] | Annotated[list[StopText], MaxLen(4), FIRST_ONLY, Tag("~list")],
    _union({str: "~text", list: "~list"}, "a string or a list of strings"),
]
Count = Annotated[int, Ge(1), Le(MAX_INT)]


class TextPart(Strict):
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("type"), str) and data["type"] != "text":
            raise PydanticCustomError(
                "text_only", "this model reads text only; leave parts of other types out", {"field": "type"}
            )
        return data


Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[TextPart], FIRST_ONLY, Tag("~parts")],
    _union({str: "~text", list: "~parts"}, "a string or a list of text parts"),
]


class FunctionCall(Strict):
    name: str = Field(pattern=TOOL_NAME)
    arguments: str = Field(description="A JSON object, as text.")


class ToolCallInput(Strict):
    ignored = frozenset({"index"})

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    """One message of a conversation. `developer` is `system` by another name."""

    ignored = frozenset({"annotations", "refusal"})

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
            raise PydanticCustomError("missing", "a message needs content", {"field": "content"})
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("value", "only an assistant calls tools", {"field": "tool_calls"})
        return self


class Function(Strict):
    ignored = frozenset({"strict"})

    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of type object.")

    @field_validator("parameters")
    @classmethod
    def _check_parameters(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        check_schema(value)
        return value


def check_schema(schema: Any) -> None:
    """What of a JSON schema would make no sense to anybody."""
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
                raise PydanticCustomError("value", "holds a pattern that is no regular expression") from None


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
    _union({str: "~word", dict: "~function"}, "none, auto, required or a function"),
]


class NamedSchema(Strict):
    ignored = frozenset({"description", "strict"})

    name: str = Field("schema", min_length=1, max_length=64)
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON schema that the answer follows.")


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("missing", "json_schema needs a schema", {"field": "json_schema"})
        return self


class StreamOptions(Strict):
    ignored = frozenset({"include_obfuscation"})

    include_usage: bool = False


class TemplateOptions(Strict):
    """What a chat template may be told."""

    enable_thinking: bool | None = None


class Common(Strict):
    """What chats and plain completions have in common."""

    ignored = frozenset({"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"})

    model: str | None = Field(None, description="Which model answers; by default the one that was loaded first.")
    stream: bool | None = Field(None, description="Send the answer piece by piece, as server-sent events.")
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS, description="So many answers; they share one reading.")
    stop: Stop | None = Field(None, description="End the answer before one of these texts.")
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED, description="The same seed draws the same tokens.")
    temperature: float | None = Field(None, ge=0, le=100, description="0 takes the most probable token.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_INT, description="0: no limit.")
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_BIASES, description="Token ids, as text, and what is added to their scores."
    )
    ignore_eos: bool | None = Field(None, description="Go on after the end token.")
    return_progress: bool | None = Field(
        None, description="In a stream, tell how much of the prompt is read: chunks with `prompt_progress`."
    )

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or ():
            if not re.fullmatch(r"[0-9]{1,10}", key):
                raise PydanticCustomError("value", "holds a key that is no token id")
        return value

    @model_validator(mode="after")
    def _check_stream(self) -> "Common":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("value", "is for streams only", {"field": "stream_options"})
        if self.return_progress and not self.stream:
            raise PydanticCustomError("value", "is for streams only", {"field": "return_progress"})
        return self


class ChatRequest(Common):
    """A conversation to be answered.

    `user`, `store`, `metadata`, `service_tier`, `safety_identifier`, `prompt_cache_key` and `verbosity` are accepted
    and not used. Of a key that stands twice the last one counts. Any other field is an error.
    """

    ignored = Common.ignored | {"verbosity"}

    messages: Annotated[list[Message], MinLen(1), FIRST_ONLY] = Field(
        json_schema_extra={"example": [{"role": "user", "content": "Hello"}]}
    )
    max_tokens: Count | None = Field(None, description="Length of the answer at most, reasoning included.")
    max_completion_tokens: Count | None = Field(None, description="The newer name of max_tokens.")
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: AnyToolChoice | None = Field(
        None, description="`required` and a named function are enforced: the answer can be nothing but calls."
    )
    parallel_tool_calls: bool | None = Field(None, description="If false, only the first call is given back.")
    response_format: ResponseFormat | None = Field(None, description="Enforced while the answer is sampled.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None,
        description="A budget for the reasoning: none and minimal 0 tokens, low 1,024, medium 4,096, else unlimited. "
        "`thinking_budget` says it to the token.",
    )
    thinking_budget: int | None = Field(None, ge=-1, le=MAX_INT, description="Tokens of reasoning; -1: no limit.")
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
            raise PydanticCustomError("value", "needs logprobs to be true", {"field": "top_logprobs"})
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise PydanticCustomError("value", "differs from max_tokens", {"field": "max_completion_tokens"})
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise PydanticCustomError("value", "names a function twice", {"field": "tools"})
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return
        if not names:
            raise PydanticCustomError("value", "needs tools", {"field": "tool_choice"})
        if isinstance(choice, ToolChoice) and choice.function.name not in names:
            raise PydanticCustomError("value", "names a function that is not among the tools", {"field": "tool_choice"})


TokenId = Annotated[int, Ge(0), Le(MAX_INT)]
TokenIds = Annotated[list[TokenId], MinLen(1), FIRST_ONLY]


def _prompt_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "~text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    return {str: "~texts", int: "~tokens", list: "~lists"}.get(type(first))


Prompt = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[str], MinLen(1), MaxLen(MAX_PROMPTS), FIRST_ONLY, Tag("~texts")]
    | Annotated[TokenIds, Tag("~tokens")]
    | Annotated[list[TokenIds], MinLen(1), MaxLen(MAX_PROMPTS), FIRST_ONLY, Tag("~lists")],
    Discriminator(
        _prompt_kind,
        custom_error_type="value",
        custom_error_message="must be a string, a list of token ids, or a list of either",
    ),
]


class CompletionRequest(Common):
    """A text to be continued, or several. Ignored and refused fields are those of chats."""

    prompt: Prompt = Field(description="Text, token ids, or a list of either.", json_schema_extra={"example": "Hello"})
    max_tokens: int | None = Field(None, ge=0, le=MAX_INT, description="0 is for scoring, with echo.")
    echo: bool | None = Field(None, description="Give the prompt back too, with its log-probabilities if asked for.")
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: int | None = Field(None, ge=1, le=MAX_ANSWERS, description="Only as many as n.")
    suffix: None = Field(None, description="Not supported.")

    @model_validator(mode="after")
    def _check_completion(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise PydanticCustomError("value", "must be equal to n", {"field": "best_of"})
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("value", "may be 0 only with echo", {"field": "max_tokens"})
        if self.max_tokens == 0 and (self.n or 1) > 1:
            raise PydanticCustomError("value", "must be 1 where nothing is sampled", {"field": "n"})
        return self


class Usage(BaseModel):
    class PromptDetails(BaseModel):
        cached_tokens: int

    class CompletionDetails(BaseModel):
        reasoning_tokens: int

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TimingsObject(BaseModel):
    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class TokenLogprob(BaseModel):
    class Rival(BaseModel):
        token: str
        logprob: float
        bytes: list[int] | None

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[Rival]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob] | None
    refusal: None


class AnsweredCall(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | None = Field(None, description="`repetition`: the answer was cut since it only repeated itself.")


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: TimingsObject


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | None = None


class TextCompletion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    timings: TimingsObject | None = None

"""What plain completions send and get: OpenAI's request and response, strictly validated."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import BaseModel, Field, Tag, model_validator

from sala.server.api.chat_schema import MAX_ANSWERS, MAX_INT, GenerationRequest, TimingsObject, UsageObject
from sala.server.http.body import FIRST_ONLY, discriminate, problem

MAX_PROMPTS = 128
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
    discriminate(_prompt_kind, "a string, a list of token ids, or a list of either"),
]


class CompletionRequest(GenerationRequest):
    """One or several texts to continue. The ignored and unsupported fields are those of chats."""

    prompt: Prompt = Field(description="Text, token ids, or a list of either.", json_schema_extra={"example": "Hello"})
    max_tokens: int | None = Field(None, ge=0, le=MAX_INT, description="0 is for scoring a text, with `echo`.")
    echo: bool | None = Field(None, description="Return the prompt too, with its log-probabilities if requested.")
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: int | None = Field(None, ge=1, le=MAX_ANSWERS, description="Must be equal to `n`.")
    suffix: None = Field(None, description="Not supported.")

    @model_validator(mode="after")
    def _check_completion(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise problem("must be equal to n", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise problem("can be 0 only with echo", "max_tokens")
        if self.max_tokens == 0 and (self.n or 1) > 1:
            raise problem("must be 1 if max_tokens is 0", "n")
        return self


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
    usage: UsageObject
    timings: TimingsObject | None = None

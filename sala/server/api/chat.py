"""Chats: a conversation in, the next message out, as a whole or as a stream. An unknown field is an error."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from annotated_types import MaxLen, MinLen
from pydantic import Field, Tag, model_validator

from sala.engine.requests import InputProcessor, Submission
from sala.engine.stream import Event, PromptProgress, StreamItem
from sala.server.api import answers, conversation
from sala.server.api.answers import MAX_INT, AnswerProgress, ChoicesReply, Count, GenerationRequest, TokenSpeller
from sala.server.api.conversation import (
    MAX_NAME,
    Allowed,
    CalledName,
    ChatInput,
    ChosenOr,
    Continuing,
    Description,
    Parameters,
    ToolName,
    Tools,
    WithTools,
    WordOr,
    read_arguments,
    read_reasoning,
    read_refusal,
)
from sala.server.http.body import FIRST_ONLY, History, Strict, TextOr, discriminate, join, problem, union, unless
from sala.text.tools import CallPiece, ToolCall


class TextPart(History, remedy=conversation.TEXT_ONLY):
    type: Literal["text", "refusal"]
    text: str
    cache_control: Any = Field(
        None,
        description="In the last message: what ends here begins further prompts too, such as documents before a "
        "question. It is kept in the cache as it is, also on disk, and so are the ends of documents in it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_refusal(cls, data: Any) -> Any:
        return read_refusal(data)


class ThoughtPart(History):
    """The reasoning of an earlier answer. Redacted reasoning is not used."""

    type: Literal["thinking", "redacted_thinking", "reasoning"]
    text: str | None = None
    thinking: str | list[Any] | None = None


def _part_kind(value: Any) -> str:
    """Return the tag of a part; an unknown type is validated, and refused, as text."""
    kind = value.get("type") if isinstance(value, dict) else None
    return "~thought" if kind in ("thinking", "redacted_thinking", "reasoning") else "~text"


Part = Annotated[
    Annotated[TextPart, Tag("~text")] | Annotated[ThoughtPart, Tag("~thought")], discriminate(_part_kind, "a part")
]
Content = Annotated[TextOr[Part], union("a string or a list of text parts")]
Reasoning = Annotated[TextOr[Any], union("a string or a list of parts")]


class FunctionCall(History):
    name: CalledName
    arguments: Any = Field(
        None,
        description="A JSON object, as a string or as it is. A string may break off where an answer was cut; anything "
        "else becomes an argument of its own.",
    )


class ToolCallInput(History):
    id: str | None = None
    type: Literal["function", None] = None
    function: FunctionCall


ASSISTANT = {"role": {"const": "assistant"}}
BY_ROLE = (
    unless(ASSISTANT, {"content": {"not": {"type": "null"}}}),
    unless({"tool_calls": {"maxItems": 0}, "function_call": {"type": "null"}}, ASSISTANT),
)


class Message(History, rules=BY_ROLE):
    """One message of a conversation. `developer` means `system`, and `function` means `tool`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = Field(None, max_length=MAX_NAME, description="Accepted and not used.")
    refusal: str | None = Field(None, description="Of an earlier answer that has no content.")
    reasoning_content: Reasoning | None = Field(None, description="The reasoning of an earlier answer.")
    reasoning: Reasoning | None = Field(None, description="Another name of `reasoning_content`.")
    tool_calls: list[ToolCallInput] | None = Field(None, max_length=conversation.MAX_TOOLS)
    tool_call_id: str | None = Field(None, max_length=MAX_NAME)
    audio: Any = Field(None, description="Of an earlier answer. Accepted and not used.")
    function_call: FunctionCall | None = Field(None, description="The only call, in OpenAI's older form.")

    @property
    def parts(self) -> list[TextPart]:
        """The parts of the content, without reasoning."""
        parts = self.content if isinstance(self.content, list) else []
        return [part for part in parts if isinstance(part, TextPart)]

    @property
    def text(self) -> str:
        if isinstance(self.content, list) and self.content:
            return join(self.parts)
        return str(self.content or self.refusal or "")

    @property
    def thoughts(self) -> str:
        parts = self.content if isinstance(self.content, list) else []
        inside = [part.thinking or part.text for part in parts if isinstance(part, ThoughtPart)]
        return read_reasoning(self.reasoning_content or self.reasoning or inside)

    @property
    def calls(self) -> list[ToolCallInput]:
        older = [ToolCallInput(function=self.function_call)] if self.function_call is not None else []
        return [*(self.tool_calls or ()), *older]

    @model_validator(mode="after")
    def _check_role(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise problem("a message needs content", "content", "missing")
        if self.calls and self.role != "assistant":
            field = "tool_calls" if self.tool_calls else "function_call"
            raise problem("only messages of the assistant may call tools", field)
        return self


class Function(Strict, ignored={"cache_control"}):
    name: ToolName
    description: Description | None = None
    parameters: Parameters | None = None
    strict: bool | None = Field(None, exclude=True, description=conversation.STRICT)


class ChatTool(Strict, ignored={"cache_control"}):
    type: Literal["function"]
    function: Function

    @property
    def name(self) -> str:
        return self.function.name


class ChosenFunction(Strict):
    name: str


class ToolChoice(Strict):
    type: Literal["function"]
    function: ChosenFunction

    @property
    def name(self) -> str:
        return self.function.name


class AllowedSet(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], MinLen(1), MaxLen(conversation.MAX_TOOLS), FIRST_ONLY]


class AllowedTools(Allowed):
    allowed_tools: AllowedSet

    @property
    def word(self) -> str:
        return self.allowed_tools.mode

    @property
    def names(self) -> list[str]:
        return [tool.name for tool in self.allowed_tools.tools]


class NamedSchema(Strict, ignored={"description"}):
    name: str = Field("schema", min_length=1, max_length=64)
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="The JSON schema that the answer must follow; without one, any object."
    )
    strict: bool | None = Field(None, description=conversation.STRICT_FORMAT)


class ResponseFormat(Strict, needs={"json_schema": ("json_schema", "json_schema needs a schema")}):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class ChatRequest(
    GenerationRequest, WithTools, Continuing, ignored={"verbosity"}, switches={"top_logprobs": "logprobs"}
):
    """A conversation to answer.

    Fields that only steer caches, storage, moderation or billing (`user`, `store`, `metadata`, `service_tier`,
    `safety_identifier`, `moderation`, `prompt_cache_key`, `prompt_cache_retention`, `prompt_cache_options`,
    `cache_control`) and `verbosity` are accepted and not used; so are unknown fields inside messages, and unknown
    fields that are null. If a key occurs twice, the last value counts. Any other field is an error.
    """

    messages: Annotated[list[Message], MinLen(1), FIRST_ONLY] = Field(
        json_schema_extra={"example": [{"role": "user", "content": "Hello"}]}
    )
    max_tokens: Count | None = Field(None, description="Maximum length of the answer, reasoning included.")
    max_completion_tokens: Count | None = Field(None, description="The newer name of `max_tokens`.")
    tools: Tools[ChatTool] | None = None
    tool_choice: WordOr[ChosenOr[ToolChoice, AllowedTools]] | None = Field(
        None,
        description="`required` and a named function are enforced: the answer consists of calls only, and ends where a "
        "call is repeated. With `allowed_tools` only those are offered.",
    )
    parallel_tool_calls: bool | None = Field(None, description="If false, only the first call is returned.")
    response_format: ResponseFormat | None = Field(None, description="Enforced while sampling.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None,
        description="A budget for the reasoning: none and minimal 0 tokens, low 1,024, medium 4,096, otherwise "
        "unlimited. `thinking_budget` sets it exactly.",
    )
    thinking_budget: int | None = Field(
        None, ge=-1, le=MAX_INT, description="Maximum tokens of reasoning; -1: no limit."
    )
    chat_template_kwargs: conversation.TemplateOptions | None = None
    return_sources: bool | None = Field(
        None,
        description="Tell where the answer comes from: each choice gets `sources`, the passages of the prompt that the "
        "model attended to, heaviest first, with file and place in documents from `/v1/documents`, and the quotes of "
        "the answer with their places; in a stream, in the last chunk of the choice.",
    )
    modalities: list[Literal["text"]] | None = Field(None, min_length=1, max_length=1)
    audio: None = Field(None, description="Not supported.")
    functions: None = Field(None, description="Not supported; use tools.")
    function_call: None = Field(None, description="Not supported; use tool_choice.")
    prediction: None = Field(None, description="Not supported.")
    web_search_options: None = Field(None, description="Not supported.")

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatRequest":
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise problem("differs from max_tokens", "max_completion_tokens")
        return self


def read_chat(body: ChatRequest) -> ChatInput:
    messages = as_messages(body.messages)
    return ChatInput(
        messages=messages,
        attention=answers.read_attention(body),
        sampling={
            **answers.read_sampling(body),
            "max_tokens": body.max_completion_tokens or body.max_tokens,
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
            "return_sources": body.return_sources,
        },
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        choice=body.choice,
        allowed=body.allowed,
        strict={tool.name for tool in body.tools or () if tool.function.strict},
        is_single=body.parallel_tool_calls is False,
        schema=_read_format(body.response_format),
        effort=body.reasoning_effort,
        think_budget=body.thinking_budget,
        variables=conversation.read_variables(body.chat_template_kwargs),
        n=body.n or 1,
        continue_final=body.continues(messages),
        question=_question(body.messages[-1]),
    )


def _question(message: Message) -> str:
    """Return the text of a message after its last part with `cache_control`; empty if there is none."""
    parts = message.parts
    marked = max((at for at, part in enumerate(parts) if part.cache_control is not None), default=len(parts))
    return join(parts[marked + 1 :])


def _read_format(form: ResponseFormat | None) -> Mapping[str, Any] | None:
    """Return the schema that the answer must follow, if any."""
    if form is None:
        return None
    named = form.json_schema
    if named is None:
        return conversation.answer_schema(form.type, None, is_strict=False)
    return conversation.answer_schema(form.type, named.schema_, bool(named.strict))


def as_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Return a conversation as templates expect it: text, arguments as objects, no older names of roles."""
    out = []
    for message in messages:
        role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
        calls = [
            conversation.as_call(call.id or "", call.function.name, read_arguments(call.function.arguments))
            for call in message.calls
        ]
        thoughts = message.thoughts or None
        more = {"reasoning_content": thoughts, "tool_calls": calls or None, "tool_call_id": message.tool_call_id}
        given = {name: value for name, value in more.items() if value is not None}
        out.append({"role": role, "content": message.text, **given})
    return out


class ChatReply(ChoicesReply[ChatRequest]):
    """The answers to a chat, in OpenAI's form."""

    kind, prefix = "chat.completion", "chatcmpl"
    fields = {  # noqa: RUF012
        "prompt": "messages", "json_schema": "response_format", "grammar": "tools", "think_budget": "thinking_budget",
        "logprobs": "top_logprobs", "logit_bias token": "logit_bias",
    }  # fmt: skip

    def prepare(self, inputs: InputProcessor) -> Submission:
        chat = read_chat(self.body)
        has_tools, shows_reasoning = chat.offered_tools is not None, not self.settings.no_think
        self.answers = [AnswerProgress(has_tools, chat.is_single, shows_reasoning) for _ in range(chat.n)]
        self._speller = TokenSpeller(self.llm) if self.body.logprobs else None
        return inputs.submit(
            chat.as_call(self.llm.default_sampling, self.settings), wants_progress=bool(self.body.return_progress)
        )

    def take(self, item: StreamItem) -> None:
        if isinstance(item, Event):
            self.answers[item.index].take(item)

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(index, one) for index, one in enumerate(self.answers)]
        return {**self.head, "choices": choices, **self.summary()}

    def opening(self) -> Iterator[dict[str, Any]]:
        self.head["object"] = "chat.completion.chunk"
        for index in range(len(self.answers)):
            yield self.chunk({"index": index, "delta": {"role": "assistant", "content": ""}})

    def chunks(self, item: StreamItem) -> Iterator[dict[str, Any]]:
        if isinstance(item, PromptProgress):
            yield self.chunk({"index": 0, "delta": {}}, prompt_progress=answers.prompt_progress(item))
        if not isinstance(item, Event):
            return
        one = self.answers[item.index]
        delta = one.show(item)
        if delta.reasoning:
            yield self._chunk(item.index, {"reasoning_content": delta.reasoning})
        if delta.call_piece is not None:
            for call in _dump_piece(delta.call_piece):
                yield self._chunk(item.index, {"tool_calls": [{"index": one.num_calls - 1, **call}]})
        if delta.text:
            yield self._chunk(item.index, {"content": delta.text})
        if one.completion is not None:
            is_last = all(each.completion is not None for each in self.answers)
            more = {"timings": answers.timings(self.completions)} if is_last else {}
            ending = answers.finish(one.completion) | answers.sources(one.completion)
            yield self._chunk(item.index, {}, ending, **more)

    def _chunk(self, index: int, delta: Any, ending: Any = None, **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(self.answers[index])}
        return self.chunk({**choice, **(ending or {})}, **more)

    def _choice(self, index: int, one: AnswerProgress) -> dict[str, Any]:
        completion, calls = one.result, one.calls
        message: dict[str, Any] = {
            "role": "assistant",
            "content": completion.text if completion.text or not calls else None,
            "refusal": None,
        }
        if completion.reasoning and one.shows_reasoning:
            message["reasoning_content"] = completion.reasoning
        if calls:
            message["tool_calls"] = [_dump_call(call) for call in calls]
        ending = answers.finish(completion) | answers.sources(completion)
        return {"index": index, "message": message, "logprobs": self._logprobs(one), **ending}

    def _logprobs(self, one: AnswerProgress) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens since the last call; None unless they were requested."""
        if self._speller is None:
            return None
        sampled = one.sampled[one.num_told :]
        one.num_told = len(one.sampled)
        return {"content": self._speller.spell(sampled), "refusal": None}

    def usage(self) -> dict[str, Any]:
        first = self.completions[0].usage
        sampled = sum(one.usage.completion_tokens for one in self.completions)
        reasoning = sum(one.num_reasoning for one in self.answers)
        return answers.usage(first.prompt_tokens, first.cached_tokens, sampled, reasoning)


def _dump_piece(piece: CallPiece) -> Iterator[dict[str, Any]]:
    """Yield the opening of a call, then what its arguments grow by."""
    if piece.is_opening:
        yield conversation.as_call(piece.id, piece.name, "")
    yield {"function": {"arguments": piece.json}}


def _dump_call(call: ToolCall) -> dict[str, Any]:
    return conversation.as_call(call.id, call.name, call.json)

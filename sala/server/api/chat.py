"""Chats: a conversation in, the next message out, as a whole or as a stream. An unknown field is an error."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import MinLen
from pydantic import Field, model_validator

from sala.config import parse_object
from sala.engine.requests import InputProcessor, Submission
from sala.engine.stream import Event, PromptProgress, StreamItem
from sala.errors import InputError
from sala.server.api import answers, conversation
from sala.server.api.answers import MAX_INT, AnswerProgress, ChoicesReply, Count, GenerationRequest, TokenSpeller
from sala.server.api.conversation import ChatInput, Parameters, ToolName, Tools, WithTools, WordOr
from sala.server.http.body import FIRST_ONLY, Strict, TextOr, join, problem, union
from sala.text.tools import ToolCall


class TextPart(Strict, remedy=conversation.TEXT_ONLY):
    type: Literal["text"]
    text: str


Content = Annotated[TextOr[TextPart], union("a string or a list of text parts")]


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
    tool_calls: list[ToolCallInput] | None = Field(None, max_length=conversation.MAX_TOOLS)
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


class NamedSchema(Strict, ignored={"description", "strict"}):
    name: str = Field("schema", min_length=1, max_length=64)
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON schema that the answer must follow.")


class ResponseFormat(Strict, needs={"json_schema": ("json_schema", "json_schema needs a schema")}):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class TemplateOptions(Strict):
    """Variables of the chat template."""

    enable_thinking: bool | None = None


class ChatRequest(GenerationRequest, WithTools, ignored={"verbosity"}):
    """A conversation to answer.

    `user`, `store`, `metadata`, `service_tier`, `safety_identifier`, `prompt_cache_key` and `verbosity` are accepted
    and not used. If a key occurs twice, the last value counts. Any other field is an error.
    """

    messages: Annotated[list[Message], MinLen(1), FIRST_ONLY] = Field(
        json_schema_extra={"example": [{"role": "user", "content": "Hello"}]}
    )
    max_tokens: Count | None = Field(None, description="Maximum length of the answer, reasoning included.")
    max_completion_tokens: Count | None = Field(None, description="The newer name of `max_tokens`.")
    tools: Tools[Tool] | None = None
    tool_choice: WordOr[ToolChoice] | None = Field(
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
        return self


def read_chat(body: ChatRequest) -> ChatInput:
    kwargs, form = body.chat_template_kwargs, body.response_format
    named = form.json_schema if form else None
    thinking = None if kwargs is None else kwargs.enable_thinking
    return ChatInput(
        messages=as_messages(body.messages),
        sampling={
            **answers.read_sampling(body),
            "max_tokens": body.max_completion_tokens or body.max_tokens,
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        },
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        choice=body.choice,
        is_single=body.parallel_tool_calls is False,
        schema=conversation.answer_schema(form.type, named.schema_ if named else None) if form else None,
        effort=body.reasoning_effort,
        think_budget=body.thinking_budget,
        variables={} if thinking is None else {"enable_thinking": thinking},
        n=body.n or 1,
    )


def as_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Return a conversation as templates expect it: text, arguments as objects, `system` for `developer`."""
    out = []
    for index, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        calls = [
            conversation.as_call(call.id, call.function.name, _arguments(call.function.arguments, index, number))
            for number, call in enumerate(message.tool_calls or ())
        ]
        more = {"reasoning_content": message.reasoning_content or None, "tool_calls": calls or None}
        more["tool_call_id"] = message.tool_call_id
        given = {name: value for name, value in more.items() if value is not None}
        out.append({"role": role, "content": join(message.content or ""), **given})
    return out


def _arguments(text: str, index: int, number: int) -> dict[str, Any]:
    arguments = parse_object(text or "{}")
    if arguments is None:
        field = f"messages[{index}].tool_calls[{number}].function.arguments"
        raise InputError(field, "is not a JSON object", "send one, as a string")
    return arguments


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
        return inputs.submit(chat.as_call(self.settings), wants_progress=bool(self.body.return_progress))

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
        if delta.tool_call is not None:
            call = {"index": one.num_calls - 1, **_dump_call(delta.tool_call)}
            yield self._chunk(item.index, {"tool_calls": [call]})
        if delta.text:
            yield self._chunk(item.index, {"content": delta.text})
        if one.completion is not None:
            is_last = all(each.completion is not None for each in self.answers)
            more = {"timings": answers.timings(self.completions)} if is_last else {}
            yield self._chunk(item.index, {}, answers.finish(one.completion), **more)

    def _chunk(self, index: int, delta: Any, ending: Any = None, **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(self.answers[index])}
        return self.chunk({**choice, **(ending or {})}, **more)

    def _choice(self, index: int, one: AnswerProgress) -> dict[str, Any]:
        completion = one.result
        calls = completion.tool_calls[:1] if one.is_single else completion.tool_calls
        message: dict[str, Any] = {
            "role": "assistant",
            "content": completion.text if completion.text or not calls else None,
            "refusal": None,
        }
        if completion.reasoning and one.shows_reasoning:
            message["reasoning_content"] = completion.reasoning
        if calls:
            message["tool_calls"] = [_dump_call(call) for call in calls]
        return {"index": index, "message": message, "logprobs": self._logprobs(one), **answers.finish(completion)}

    def _logprobs(self, one: AnswerProgress) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens since the last call; None unless they were requested."""
        if self._speller is None:
            return None
        sampled = one.sampled[one.num_told :]
        one.num_told = len(one.sampled)
        return {"content": [self._speller.sampled(each) for each in sampled], "refusal": None}

    def usage(self) -> dict[str, Any]:
        first = self.completions[0].usage
        sampled = sum(one.usage.completion_tokens for one in self.completions)
        reasoning = sum(one.num_reasoning for one in self.answers)
        return answers.usage(first.prompt_tokens, first.cached_tokens, sampled, reasoning)


def _dump_call(call: ToolCall) -> dict[str, Any]:
    return conversation.as_call(call.id, call.name, json.dumps(call.arguments, ensure_ascii=False))

"""Chats: a conversation in, the next message out, as a whole or as a stream."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sala.config import parse_object
from sala.engine.requests import Call, InputProcessor, Submission
from sala.engine.stream import Event, PromptProgress, StreamItem
from sala.errors import InputError
from sala.server.api import answers
from sala.server.api.answers import AnswerProgress, ChoicesReply, TokenSpeller
from sala.server.api.chat_schema import ChatRequest, Message
from sala.server.api.grammar import call_grammar
from sala.server.http.body import join
from sala.server.settings import Settings
from sala.text.tools import ToolCall

EFFORTS = {"none": 0, "minimal": 0, "low": 1024, "medium": 4096, "high": None, "xhigh": None, "max": None}


@dataclass(frozen=True)
class ChatInput:
    """A conversation to answer, whichever API it came through: messages and tools as chat templates expect them.

    - choice: auto, none or required, and with the last the only function that may be called, if one is named
    - is_single: return at most one call
    - schema: the JSON schema that the answer must follow
    """

    messages: list[dict[str, Any]]
    sampling: Mapping[str, Any]
    tools: list[dict[str, Any]] | None = None
    choice: tuple[str, str | None] = ("auto", None)
    is_single: bool = False
    schema: Mapping[str, Any] | None = None
    effort: str | None = None
    think_budget: int | None = None  # -1: no limit
    variables: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        return self.tools if self.tools and self.choice[0] != "none" else None

    def as_call(self, settings: Settings) -> Call:
        """Return the request to the engine. Raises InputError for a schema that cannot be enforced."""
        values = {"think_budget": self._budget(settings), **self._constraint(), **self.sampling}
        sampling, tools = answers.build_sampling(settings, values), self.offered_tools
        return Call(None, sampling, messages=self.messages, tools=tools, n=self.n, variables=self._variables())

    def encode(self, inputs: InputProcessor) -> list[int]:
        return inputs.encode_chat(self.messages, tools=self.offered_tools, **self._variables())

    def _variables(self) -> dict[str, Any]:
        """Return the variables of the template. Effort `none` turns the reasoning off, unless the client set it."""
        default = {"enable_thinking": False} if self.effort == "none" else {}
        return {**default, **self.variables}

    def _budget(self, settings: Settings) -> int | None:
        if self.think_budget is not None:
            return None if self.think_budget < 0 else self.think_budget
        return settings.think_budget if self.effort is None else EFFORTS[self.effort]

    def _constraint(self) -> dict[str, Any]:
        """Return the grammar that the answer must follow, if any, as a sampling parameter."""
        word, function = self.choice
        answer = self.schema if word == "auto" else None
        try:
            if self.offered_tools is None or (word == "auto" and answer is None):
                return {} if self.schema is None else {"json_schema": json.dumps(self.schema, allow_nan=False)}
            functions = [tool["function"] for tool in self.offered_tools]
            wanted = [one for one in functions if function in (None, one["name"])]
            return {"grammar": call_grammar(wanted, self.is_single or function is not None, answer)}
        except ValueError:
            field, verb = ("response_format", "holds") if self.offered_tools is None else ("tools", "hold")
            raise InputError(field, f"{verb} a number that is not finite") from None


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
        schema=answer_schema(form.type, named.schema_ if named else None) if form else None,
        effort=body.reasoning_effort,
        think_budget=body.thinking_budget,
        variables={} if thinking is None else {"enable_thinking": thinking},
        n=body.n or 1,
    )


def answer_schema(kind: str, schema: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the schema that an answer in this format must follow, if any."""
    if kind == "text":
        return None
    return {"type": "object"} if kind == "json_object" or schema is None else schema


def as_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Return a conversation as templates expect it: text, arguments as objects, `system` for `developer`."""
    out = []
    for index, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        calls = [
            as_call(call.id, call.function.name, _arguments(call.function.arguments, index, number))
            for number, call in enumerate(message.tool_calls or ())
        ]
        more = {"reasoning_content": message.reasoning_content or None, "tool_calls": calls or None}
        more["tool_call_id"] = message.tool_call_id
        given = {name: value for name, value in more.items() if value is not None}
        out.append({"role": role, "content": join(message.content or ""), **given})
    return out


def as_tool(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """Return a function as templates expect it."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def as_call(number: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


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
    return as_call(call.id, call.name, json.dumps(call.arguments, ensure_ascii=False))

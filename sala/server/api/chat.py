"""POST /chat/completions: a conversation in, the next message out, as a whole or as a stream."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from sala.engine.requests import Call, InputProcessor, Submission
from sala.engine.stream import Completion, Event, PromptProgress, StreamItem
from sala.errors import InputError
from sala.server.api import answers
from sala.server.api.answers import AnswerProgress, Reply
from sala.server.api.chat_schema import ChatCompletion, ChatRequest, GenerationRequest, Message, ToolChoice
from sala.server.api.grammar import call_grammar
from sala.server.http.body import StrictRoute
from sala.server.http.errors import ALWAYS
from sala.server.http.sse import until_gone
from sala.server.runtime import LoadedModel
from sala.server.settings import Settings
from sala.text.tools import ToolCall

router = APIRouter(tags=["chat"], route_class=StrictRoute)
EFFORTS = {"none": 0, "minimal": 0, "low": 1024, "medium": 4096, "high": None, "xhigh": None, "max": None}
FIELDS = {
    "prompt": "messages", "json_schema": "response_format", "grammar": "tools", "think_budget": "thinking_budget",
    "logprobs": "top_logprobs", "logit_bias token": "logit_bias",
}  # fmt: skip
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "min_tokens", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "ignore_eos",
)  # fmt: skip
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream`, server-sent events of chunks that end with `[DONE]`.",
        "content": {"text/event-stream": {}},
    }
}


@router.post(
    "/chat/completions",
    response_model=ChatCompletion,
    responses={**ALWAYS, **STREAMED},
    summary="Answer a conversation",
)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    return await answers.answer(request, body, ChatReply)


@router.post(
    "/chat/completions/input_tokens",
    responses={**ALWAYS, 200: {"content": {"application/json": {"example": {"input_tokens": 12}}}}},
    summary="Count the tokens of a conversation",
)
async def count_input_tokens(body: ChatRequest, request: Request) -> dict[str, int]:
    """Takes what /chat/completions takes, and returns the length of the prompt."""
    return {"input_tokens": await count_tokens(request, body.model, lambda: read_chat(body), FIELDS)}


@dataclass(frozen=True)
class ChatInput:
    """A conversation to answer, whichever API it came through: messages and tools as chat templates expect them.

    - tool_choice: auto, none, required, or a function: the only one that may be called, and must be
    - is_single: return at most one call
    - schema: the JSON schema that the answer must follow
    """

    messages: list[dict[str, Any]]
    sampling: Mapping[str, Any]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | ToolChoice = "auto"
    is_single: bool = False
    schema: Mapping[str, Any] | None = None
    effort: str | None = None
    think_budget: int | None = None  # -1: no limit
    variables: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        return self.tools if self.tools and self.tool_choice != "none" else None

    def as_call(self, settings: Settings) -> Call:
        """Return the request to the engine. Raises InputError for a schema that cannot be enforced."""
        sampling = answers.build_sampling(
            settings, **self.sampling, think_budget=self._budget(settings), **self._constraint()
        )
        return Call(
            None, sampling, messages=self.messages, tools=self.offered_tools, n=self.n, variables=self._variables()
        )

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
        is_free = self.tool_choice == "auto"
        if self.offered_tools is None or (is_free and self.schema is None):
            return {} if self.schema is None else {"json_schema": _dump(self.schema)}
        functions = [tool["function"] for tool in self.offered_tools]
        is_named = isinstance(self.tool_choice, ToolChoice)
        if isinstance(self.tool_choice, ToolChoice):
            name = self.tool_choice.function.name
            functions = [function for function in functions if function["name"] == name]
        try:
            return {"grammar": call_grammar(functions, self.is_single or is_named, self.schema if is_free else None)}
        except ValueError:
            raise InputError("tools", "hold a number that is not finite") from None


async def count_tokens(
    request: Request, model_id: str | None, read: Callable[[], ChatInput], fields: Mapping[str, str]
) -> int:
    """Return the length of the prompt of the conversation that `read` returns; it may be longer than the context."""
    model: LoadedModel = await until_gone(request, request.app.state.runtime.get(model_id))
    with answers.naming(fields):
        return len(await until_gone(request, model.service.call(lambda: read().encode(model.llm.inputs))))


def read_chat(body: ChatRequest) -> ChatInput:
    kwargs = body.chat_template_kwargs
    thinking = None if kwargs is None else kwargs.enable_thinking
    return ChatInput(
        messages=as_messages(body.messages),
        sampling={
            **read_sampling(body),
            "max_tokens": body.max_completion_tokens or body.max_tokens,
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        },
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        tool_choice=body.tool_choice or "auto",
        is_single=body.parallel_tool_calls is False,
        schema=_answer_schema(body),
        effort=body.reasoning_effort,
        think_budget=body.thinking_budget,
        variables={} if thinking is None else {"enable_thinking": thinking},
        n=body.n or 1,
    )


def read_sampling(body: GenerationRequest) -> dict[str, Any]:
    """Return the sampling parameters that a body sets."""
    values: dict[str, Any] = {name: getattr(body, name) for name in SAMPLING}
    if body.stop is not None:
        values["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.logit_bias:
        values["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    return values


def _answer_schema(body: ChatRequest) -> Mapping[str, Any] | None:
    form = body.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object" or form.json_schema is None:
        return {"type": "object"}
    return form.json_schema.schema_


def _dump(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except ValueError:
        raise InputError("response_format", "holds a number that is not finite") from None


def as_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Return a conversation as templates expect it: text, arguments as objects, `system` for `developer`."""
    out = []
    for index, message in enumerate(messages):
        content = message.content or ""
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        role = "system" if message.role == "developer" else message.role
        one: dict[str, Any] = {"role": role, "content": content}
        if message.reasoning_content:
            one["reasoning_content"] = message.reasoning_content
        if message.tool_call_id is not None:
            one["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            one["tool_calls"] = [
                as_call(call.id, call.function.name, _arguments(call.function.arguments, index, number))
                for number, call in enumerate(message.tool_calls)
            ]
        out.append(one)
    return out


def as_call(number: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(text: str, index: int, number: int) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InputError(
            f"messages[{index}].tool_calls[{number}].function.arguments",
            "is not a JSON object",
            "send one, as a string",
        )
    return arguments


class ChatReply(Reply[ChatRequest]):
    """The answers to a chat, in OpenAI's form."""

    fields = FIELDS

    def prepare(self, inputs: InputProcessor) -> Submission:
        conversation = read_chat(self.body)
        self._has_tools = conversation.offered_tools is not None
        self._answers = [AnswerProgress() for _ in range(conversation.n)]
        self._speller = answers.TokenSpeller(self.model.llm) if self.body.logprobs else None
        return inputs.submit(conversation.as_call(self.settings), wants_progress=bool(self.body.return_progress))

    def take(self, item: StreamItem) -> None:
        if isinstance(item, Event):
            self._answers[item.index].take(item)

    def whole(self) -> dict[str, Any]:
        return {
            **answers.head("chat.completion", "chatcmpl", self.model.id),
            "choices": [self._choice(index, one) for index, one in enumerate(self._answers)],
            "usage": self._usage(),
            "timings": answers.timings(self._completions()),
        }

    def opening(self) -> Iterator[dict[str, Any]]:
        self._head = answers.head("chat.completion.chunk", "chatcmpl", self.model.id)
        for index in range(len(self._answers)):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def chunks(self, item: StreamItem) -> Iterator[dict[str, Any]]:
        if isinstance(item, PromptProgress):
            yield {**self._chunk(0, {}), "prompt_progress": answers.prompt_progress(item)}
        if not isinstance(item, Event):
            return
        one = self._answers[item.index]
        for delta in self._deltas(one, item):
            yield self._chunk(item.index, delta, self._logprobs(one))
        if one.completion is not None:
            last = self._chunk(item.index, {}, self._logprobs(one))
            last["choices"][0] |= answers.finish(one.completion)
            if all(each.completion is not None for each in self._answers):
                last["timings"] = answers.timings(self._completions())
            yield last

    def closing(self) -> Iterator[dict[str, Any]]:
        if self._wants_usage:
            timings = answers.timings(self._completions())
            yield {**self._head, "choices": [], "usage": self._usage(), "timings": timings}

    @property
    def _wants_usage(self) -> bool:
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    def _choice(self, index: int, one: AnswerProgress) -> dict[str, Any]:
        completion = one.result
        calls = completion.tool_calls[:1] if self.body.parallel_tool_calls is False else completion.tool_calls
        message: dict[str, Any] = {
            "role": "assistant",
            "content": completion.text if completion.text or not calls else None,
            "refusal": None,
        }
        if completion.reasoning and not self.settings.no_think:
            message["reasoning_content"] = completion.reasoning
        if calls:
            message["tool_calls"] = [_dump_call(call) for call in calls]
        return {"index": index, "message": message, "logprobs": self._logprobs(one), **answers.finish(completion)}

    def _deltas(self, one: AnswerProgress, event: Event) -> Iterator[dict[str, Any]]:
        delta = event.delta
        if delta.reasoning and not self.settings.no_think:
            yield {"reasoning_content": delta.reasoning}
        if delta.tool_call is not None and (self.body.parallel_tool_calls is not False or not one.num_calls):
            yield {"tool_calls": [{"index": one.num_calls, **_dump_call(delta.tool_call)}]}
            one.num_calls += 1
        text = one.held + delta.text
        shown = text.rstrip("\n") if self._has_tools else text
        if one.completion is not None and not one.num_calls:
            shown = text
        one.held = text[len(shown) :]
        if shown:
            yield {"content": shown}

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        chunk = {**self._head, "choices": [choice]}
        return {**chunk, "usage": None} if self._wants_usage else chunk

    def _logprobs(self, one: AnswerProgress) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens since the last call; None unless they were requested."""
        if self._speller is None:
            return None
        sampled = one.sampled[one.num_told :]
        one.num_told = len(one.sampled)
        return {"content": [self._speller.sampled(each) for each in sampled], "refusal": None}

    def _completions(self) -> list[Completion]:
        return [one.completion for one in self._answers if one.completion is not None]

    def _usage(self) -> dict[str, Any]:
        completions = self._completions()
        return answers.usage(
            completions[0].usage.prompt_tokens,
            completions[0].usage.cached_tokens,
            sum(one.usage.completion_tokens for one in completions),
            sum(one.num_reasoning for one in self._answers),
        )


def _dump_call(call: ToolCall) -> dict[str, Any]:
    return as_call(call.id, call.name, json.dumps(call.arguments, ensure_ascii=False))

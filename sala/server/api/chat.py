"""POST /chat/completions: a conversation in, the next message out, whole or piece by piece."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from sala.engine.requests import Call, Submission
from sala.engine.service import Stream
from sala.engine.stream import Completion, Event, PromptProgress, StreamItem
from sala.errors import InputError
from sala.llm import LLM
from sala.protocol import SampledToken, Sampling
from sala.server.api import answers
from sala.server.api.chat_schema import ChatCompletion, ChatRequest, Message, StrictRoute, ToolChoice
from sala.server.api.grammar import call_grammar
from sala.server.http.errors import ALWAYS, ApiError, dump
from sala.server.http.sse import EventStream, until_gone
from sala.server.runtime import LoadedModel, Runtime
from sala.server.settings import Settings
from sala.text.tools import ToolCall

router = APIRouter(tags=["chat"], route_class=StrictRoute)
EFFORTS = {"none": 0, "minimal": 0, "low": 1024, "medium": 4096, "high": None, "xhigh": None}
FIELDS = {
    "prompt": "messages", "json_schema": "response_format", "grammar": "tools", "think_budget": "thinking_budget",
    "logprobs": "top_logprobs", "logit_bias token": "logit_bias",
}  # fmt: skip
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream` as server-sent events of chunks, ended by `[DONE]`.",
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
    runtime: Runtime = request.app.state.runtime
    settings: Settings = request.app.state.settings
    model = await until_gone(request, runtime.get(body.model))
    with answers.naming(FIELDS):
        plan = Plan.build(body, settings)
        stream = await until_gone(request, model.worker.open(plan.prepare), model.worker.cancel)
    chat = Chat(model, plan, stream)
    if body.stream:
        events = chat.events(settings.ping_s)
        return EventStream(events, stream.overflowed, lambda: model.worker.cancel(stream))
    try:
        whole = await until_gone(request, chat.collect())
    finally:
        model.worker.cancel(stream)
    return Response(dump(whole), media_type="application/json")


@router.post(
    "/chat/completions/input_tokens",
    responses={**ALWAYS, 200: {"content": {"application/json": {"example": {"input_tokens": 12}}}}},
    summary="Count the tokens of a conversation",
)
async def count_input_tokens(body: ChatRequest, request: Request) -> dict[str, int]:
    """Takes what /chat/completions takes, and answers nothing but the length of the prompt."""
    model = await request.app.state.runtime.get(body.model)
    plan = Plan.build(body, request.app.state.settings)
    with answers.naming(FIELDS):
        ids = await until_gone(request, model.worker.call(plan.encode))
    return {"input_tokens": len(ids)}


@dataclass(frozen=True)
class Plan:
    """What a request comes down to."""

    body: ChatRequest
    sampling: Sampling
    tools: list[dict[str, Any]] | None  # as the template and the reader of the answer see them
    variables: dict[str, Any]
    shows_reasoning: bool

    @classmethod
    def build(cls, body: ChatRequest, settings: Settings) -> "Plan":
        tools = None
        if body.tools and body.tool_choice != "none":
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
        variables: dict[str, Any] = {}
        if body.chat_template_kwargs is not None and body.chat_template_kwargs.enable_thinking is not None:
            variables["enable_thinking"] = body.chat_template_kwargs.enable_thinking
        elif body.reasoning_effort == "none":
            variables["enable_thinking"] = False
        sampling = answers.build_sampling(
            body,
            settings,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            think_budget=_budget(body, settings),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            **_constraint(body, tools),
        )
        return cls(body, sampling, tools, variables, not settings.no_think)

    def prepare(self, llm: LLM) -> Submission:
        """Render and encode the conversation; runs in the thread pool."""
        call = Call(
            None,
            self.sampling,
            messages=as_messages(self.body.messages),
            tools=self.tools,
            n=self.body.n or 1,
            variables=self.variables,
        )
        return llm.inputs.submit(call, wants_progress=bool(self.body.return_progress))

    def encode(self, llm: LLM) -> list[int]:
        return llm.encode_chat(as_messages(self.body.messages), tools=self.tools, **self.variables)


def _budget(body: ChatRequest, settings: Settings) -> int | None:
    if body.thinking_budget is not None:
        return None if body.thinking_budget < 0 else body.thinking_budget
    if body.reasoning_effort is not None:
        return EFFORTS[body.reasoning_effort]
    return settings.think_budget


def _constraint(body: ChatRequest, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    """The grammar of the answer, if it has to follow one."""
    schema = _answer_schema(body)
    choice = body.tool_choice
    if tools is None or (choice in (None, "auto") and schema is None):
        return {} if schema is None else {"json_schema": _dump(schema)}
    functions = [tool["function"] for tool in tools]
    if isinstance(choice, ToolChoice):
        functions = [function for function in functions if function["name"] == choice.function.name]
    is_single = body.parallel_tool_calls is False or isinstance(choice, ToolChoice)
    is_free = choice in (None, "auto")
    try:
        return {"grammar": call_grammar(functions, is_single, schema if is_free else None)}
    except ValueError:
        raise InputError("tools", "hold a number that is not finite") from None


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
    """The conversation as templates know it: text, arguments as objects, `system` for `developer`."""
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
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(call.function.arguments, index, number),
                    },
                }
                for number, call in enumerate(message.tool_calls)
            ]
        out.append(one)
    return out


def _arguments(text: str, index: int, number: int) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InputError(
            f"messages[{index}].tool_calls[{number}].function.arguments", "is no JSON object", "give one, as text"
        )
    return arguments


@dataclass
class Choice:
    """One answer while it grows."""

    num_seen: int = 0
    num_reasoning: int = 0
    num_calls: int = 0
    held: str = ""  # line ends that are left out if a call follows
    sampled: list[SampledToken] = field(default_factory=list)  # not yet told
    all_sampled: list[SampledToken] = field(default_factory=list)
    completion: Completion | None = None

    def take(self, piece: Event) -> None:
        self.num_seen += len(piece.sampled)
        self.sampled += piece.sampled
        if piece.delta.reasoning:
            self.num_reasoning = self.num_seen
        if piece.completion is not None:
            self.completion = piece.completion
            if self.completion.stop_token is not None and self.sampled:
                self.sampled.pop()  # the end token is no part of the answer


class Chat:
    """The answers to one request."""

    def __init__(self, model: LoadedModel, plan: Plan, stream: Stream) -> None:
        self._model = model
        self._plan = plan
        self._stream = stream
        self._body = plan.body
        self._choices = [Choice() for _ in range(plan.body.n or 1)]
        self._speller = answers.Speller(model.llm) if plan.body.logprobs else None

    async def collect(self) -> dict[str, Any]:
        """The whole answer."""
        while (item := await self._stream.aread()) is not None:
            if isinstance(item, Event):
                self._choices[item.index].take(item)
        return {
            **answers.head("chat.completion", "chatcmpl", self._model.id),
            "choices": [self._whole(index, choice) for index, choice in enumerate(self._choices)],
            "usage": self._usage(),
            "timings": answers.timings(self._completions()),
        }

    def events(self, ping_s: float) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        self._head = answers.head("chat.completion.chunk", "chatcmpl", self._model.id)
        roles = [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(len(self._choices))]
        return answers.send_events(self._stream, ping_s, roles, self._chunks, self._closing)

    def _closing(self) -> Iterator[dict[str, Any]]:
        if self._wants_usage:
            timings = answers.timings(self._completions())
            yield {**self._head, "choices": [], "usage": self._usage(), "timings": timings}

    @property
    def _wants_usage(self) -> bool:
        return self._body.stream_options is not None and self._body.stream_options.include_usage

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        completion = choice.completion
        if completion is None:
            raise ApiError(500, "the answer is not complete", code="server_error")
        calls = self._allowed(completion.tool_calls)
        has_text = completion.text or not calls
        message: dict[str, Any] = {
            "role": "assistant",
            "content": completion.text if has_text else None,
            "refusal": None,
        }
        if completion.reasoning and self._plan.shows_reasoning:
            message["reasoning_content"] = completion.reasoning
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        logprobs = self._logprobs(choice)
        return {"index": index, "message": message, "logprobs": logprobs, **answers.finish(completion)}

    def _chunks(self, item: StreamItem) -> Iterator[dict[str, Any]]:
        if isinstance(item, PromptProgress):
            yield {**self._chunk(0, {}), "prompt_progress": answers.progress(item)}
        if not isinstance(item, Event):
            return
        choice = self._choices[item.index]
        choice.take(item)
        for delta in self._deltas(choice, item):
            yield self._chunk(item.index, delta, self._logprobs(choice))
        if choice.completion is not None:
            last = self._chunk(item.index, {}, self._logprobs(choice))
            last["choices"][0] |= answers.finish(choice.completion)
            if all(one.completion is not None for one in self._choices):
                last["timings"] = answers.timings(self._completions())
            yield last

    def _deltas(self, choice: Choice, piece: Event) -> Iterator[dict[str, Any]]:
        delta = piece.delta
        if delta.reasoning and self._plan.shows_reasoning:
            yield {"reasoning_content": delta.reasoning}
        if delta.tool_call is not None and self._allowed([None] * (choice.num_calls + 1))[choice.num_calls :]:
            yield {"tool_calls": [{"index": choice.num_calls, **_call(delta.tool_call)}]}
            choice.num_calls += 1
        text = choice.held + delta.text
        body = text.rstrip("\n") if self._plan.tools else text
        if choice.completion is not None and not choice.num_calls:
            body = text
        choice.held = text[len(body) :]
        if body:
            yield {"content": body}

    def _allowed(self, calls: list[Any]) -> list[Any]:
        return calls[:1] if self._body.parallel_tool_calls is False else calls

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        chunk = {**self._head, "choices": [choice]}
        return {**chunk, "usage": None} if self._wants_usage else chunk

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Of the tokens since the last time; null if nobody asked."""
        if self._speller is None:
            return None
        sampled, choice.sampled = choice.sampled, []
        return {"content": [self._speller.sampled(one) for one in sampled], "refusal": None}

    def _completions(self) -> list[Completion]:
        return [choice.completion for choice in self._choices if choice.completion is not None]

    def _usage(self) -> dict[str, Any]:
        completions = self._completions()
        return answers.usage(
            completions[0].usage.prompt_tokens,
            completions[0].usage.cached_tokens,
            sum(one.usage.completion_tokens for one in completions),
            sum(choice.num_reasoning for choice in self._choices),
        )


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}

"""OpenAI's Responses API: items in, items out, strictly validated.

For tools and their calls see `response_tools`, for items `items`, and for what is stored `stored`.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import MaxLen, MinLen
from pydantic import Field, model_validator

from sala.engine.stream import StreamItem
from sala.errors import InputError
from sala.llm import LLM
from sala.options import MAX_LOGPROBS
from sala.protocol import SampledToken
from sala.server.api import answers, conversation, items
from sala.server.api.answers import MAX_INT, Count, SamplingRequest, TokenSpeller
from sala.server.api.conversation import (
    Allowed,
    AnswerBlock,
    BlockReply,
    ChatInput,
    ChosenOr,
    Continuing,
    Tools,
    WithTools,
    WordOr,
)
from sala.server.api.items import Input, MessageItem
from sala.server.api.response_tools import MAX_ID, CallItem, Offer, ResponseTool, ShortText, dump_tool, offers
from sala.server.api.truncation import truncate
from sala.server.http.body import FIRST_ONLY, PIECE, LazyList, Strict, problem
from sala.server.http.errors import ApiError
from sala.server.settings import Settings
from sala.text.tools import ToolCall

NO_CONVERSATIONS = "conversations are not stored; use previous_response_id, or send the whole conversation as input"
PREFIXES = {"reasoning": "rs", "text": "msg"}
DELTAS = {"reasoning": "reasoning_text", "text": "output_text"}
LOGPROBS = "message.output_text.logprobs"  # in `include`


class FunctionChoice(Strict):
    type: Literal["function", "custom"]
    name: str


class AllowedTools(Allowed):
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], MinLen(1), MaxLen(conversation.MAX_TOOLS), FIRST_ONLY]

    @property
    def word(self) -> str:
        return self.mode

    @property
    def names(self) -> list[str]:
        return [tool.name for tool in self.tools]


class TextFormat(Strict, ignored={"description"}, needs={"json_schema": ("schema", "json_schema needs a schema")}):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(None, max_length=64)
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="The JSON schema that the answer must follow."
    )
    strict: bool | None = Field(None, description=conversation.STRICT_FORMAT)


class TextOptions(Strict, ignored={"verbosity"}):
    format: TextFormat | None = Field(None, description="Enforced while sampling.")


class Reasoning(Strict, ignored={"context"}):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="A budget for the reasoning, as in chats."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Not summarised: the reasoning itself is returned."
    )
    generate_summary: None = Field(None, description="Not supported.")


class ResponseRequest(
    SamplingRequest,
    WithTools,
    Continuing,
    ignored={"max_tool_calls", "stream_options", "client_metadata", "context_management"},
):
    """A conversation to answer, as a list of items.

    `user`, `service_tier`, `safety_identifier`, `prompt_cache_key`, `prompt_cache_retention`, `max_tool_calls`,
    `stream_options`, `context_management` and `text.verbosity` are accepted and not used.
    """

    input: Input = Field(json_schema_extra={"example": "Hello"})
    instructions: str | None = Field(None, description="A system message that precedes the input.")
    previous_response_id: str | None = Field(
        None, max_length=MAX_ID, description="A stored response that the input follows, with all that preceded it."
    )
    store: bool | None = Field(None, description="If false, the response is not stored.")
    background: bool | None = Field(
        None,
        description="Answer at once, with status `queued`; GET /responses/{id} returns the response. "
        "With `stream`, its events can be followed there.",
    )
    max_output_tokens: Count | None = Field(None, description="Maximum length of the answer, reasoning included.")
    tools: Tools[ResponseTool] | None = None
    tool_choice: WordOr[ChosenOr[FunctionChoice, AllowedTools]] | None = None
    parallel_tool_calls: bool | None = Field(None, description="If false, only the first call is returned.")
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    thinking_budget: int | None = Field(
        None, ge=-1, le=MAX_INT, description="Maximum tokens of reasoning; -1: no limit."
    )
    chat_template_kwargs: conversation.TemplateOptions | None = None
    metadata: dict[Annotated[str, MaxLen(64)], Annotated[str, MaxLen(512)]] | None = Field(
        None, max_length=16, description="Returned unchanged."
    )
    include: list[ShortText] | None = Field(
        None, max_length=16, description=f"`{LOGPROBS}` returns log-probabilities; other values are not used."
    )
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Alternatives for every token.")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: leave out the oldest turns of a conversation that is too long."
    )
    conversation: None = None
    prompt: None = Field(None, description="Not supported.")

    @model_validator(mode="before")
    @classmethod
    def _check_memory(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("conversation") is not None:
            raise problem(NO_CONVERSATIONS, "conversation")
        return data

    @model_validator(mode="after")
    def _check_background(self) -> Self:
        if self.background and self.store is False:
            raise problem("needs the response to be stored; leave out store", "background")
        return self

    @property
    def offers(self) -> list[Offer]:
        return offers(self.tools or ())

    @property
    def tool_names(self) -> list[str]:
        return [offer.name for offer in self.offers]

    @property
    def items(self) -> list[Any]:
        """The input as items."""
        return [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def logprobs(self) -> int | None:
        is_wanted = self.top_logprobs is not None or LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if is_wanted else None


def as_messages(body: ResponseRequest, history: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Return the messages of a request that follows the items of `history`."""
    return items.as_messages([*history, *body.items], body.instructions)


def read_response(body: ResponseRequest, history: Sequence[Any], llm: LLM, settings: Settings) -> ChatInput:
    """Translate a request; truncation leaves room for the answer, or for an eighth of the context if it is long."""
    form = body.text.format if body.text else None
    messages = as_messages(body, history)
    sampling = {**answers.read_sampling(body), "max_tokens": body.max_output_tokens, "logprobs": body.logprobs}
    chat = ChatInput(
        messages=messages,
        attention=answers.read_attention(body),
        sampling=sampling,
        tools=[offer.as_function() for offer in body.offers],
        choice=body.choice,
        allowed=body.allowed,
        strict={offer.name for offer in body.offers if offer.is_strict},
        is_single=body.parallel_tool_calls is False,
        schema=conversation.answer_schema(form.type, form.schema_, bool(form.strict)) if form else None,
        effort=body.reasoning.effort if body.reasoning else None,
        think_budget=body.thinking_budget,
        variables=conversation.read_variables(body.chat_template_kwargs),
        continue_final=body.continues(messages, by_default=items.ends_open(body.items)),
    )
    if body.truncation != "auto":
        return chat
    room = min(body.max_output_tokens or settings.max_tokens, llm.ctx // 8)
    return truncate(chat, llm.inputs, llm.ctx - room)


def check_self_contained(body: ResponseRequest) -> None:
    """Raise InputError for a request that needs what is stored: in a batch file nothing is."""
    remedy = "send the whole conversation as input"
    if body.previous_response_id is not None:
        raise InputError("previous_response_id", "is not possible in a batch", remedy)
    if body.background:
        raise InputError("background", "is not possible in a batch", "leave it out")
    for at, item in enumerate(body.items):
        if isinstance(item, items.ItemReference):
            raise InputError(f"input[{at}]", "refers to an item, and a batch stores none", remedy)


@dataclass(eq=False)
class ResponseReply(BlockReply[ResponseRequest]):
    """The answer to one request, as items."""

    fields: ClassVar[Mapping[str, str]] = {
        "messages": "input", "prompt": "input", "json_schema": "text.format", "response_format": "text.format",
        "grammar": "tools", "max_tokens": "max_output_tokens", "think_budget": "reasoning.effort",
        "logprobs": "top_logprobs", "logit_bias token": "logit_bias",
    }  # fmt: skip

    history: Sequence[Any] | None = None  # items that precede the input; None where nothing is stored
    keep: Callable[[dict[str, Any]], bool] | None = None  # stores a response; returns whether it did

    def read(self) -> ChatInput:
        self.id = f"resp_{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._num_events = 0
        self._is_queued = bool(self.body.background)
        self._offers = {offer.name: offer for offer in self.body.offers}
        self._speller = None if self.body.logprobs is None else TokenSpeller(self.llm)
        if self.history is None:
            check_self_contained(self.body)
        return read_response(self.body, self.history or (), self.llm, self.settings)

    def forget_input(self) -> None:
        """Free what is not needed once the request has been prepared."""
        self.history, self.body.input = (), ""

    def whole(self) -> dict[str, Any]:
        usage = self.progress.result.usage
        response = self.snapshot("incomplete" if self.is_cut else "completed")
        response["completed_at"] = None if self.is_cut else int(time.time())
        response["incomplete_details"] = {"reason": "max_output_tokens"} if self.is_cut else None
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.progress.num_reasoning},
            "total_tokens": usage.total_tokens,
        }
        response["store"] = self.keep is not None and self.keep(response)
        return response

    def opening(self) -> Iterator[dict[str, Any]]:
        start = self.snapshot("queued" if self._is_queued else "in_progress")
        yield self._event("created", response=start)
        yield self._event(start["status"], response=start)

    def chunks(self, item: StreamItem) -> Iterator[answers.Chunk]:
        if self._is_queued:
            self._is_queued = False
            yield self._event("in_progress", response={**self.snapshot("in_progress"), "output": []})
        yield from super().chunks(item)

    def closing(self) -> Iterator[dict[str, Any]]:
        response = self.whole()
        yield self._event(response["status"], response=response)

    def failed(self, error: ApiError) -> dict[str, Any]:
        return self._event("failed", response=self.failure(error))

    def failure(self, error: ApiError) -> dict[str, Any]:
        return {**self.snapshot("failed"), "error": {"code": "server_error", "message": error.message}}

    def events(self, change: conversation.Change, block: AnswerBlock, text: str) -> Iterator[dict[str, Any]]:
        if change == "begin":
            item = self._item(block.emptied(), "in_progress")
            if block.call is None:
                item["content"] = []
            yield self._event("output_item.added", output_index=block.index, item=item)
        if block.call is not None:
            for name, fields in self._call_item(block, block.call).events(change, block.index, text, block.new_first):
                yield self._event(name, **fields)
        else:
            yield from self._text_events(change, block, text)
        if change == "end":
            item = self._item(block, self._status(block))
            yield self._event("output_item.done", output_index=block.index, item=item)

    def _text_events(self, change: conversation.Change, block: AnswerBlock, text: str) -> Iterator[dict[str, Any]]:
        place: dict[str, Any] = {"item_id": _item_id(block), "output_index": block.index, "content_index": 0}
        sampled = block.sampled[len(block.sampled) - block.num_new :] if change == "grow" else block.sampled
        logprobs = {"logprobs": self._spell(sampled, _bare)} if block.kind == "text" else {}
        if change == "begin":
            yield self._event("content_part.added", **place, part=self._part(block.emptied()))
        elif change == "grow":
            yield self._event(f"{DELTAS[block.kind]}.delta", **place, delta=text, **logprobs)
        else:
            yield self._event(f"{DELTAS[block.kind]}.done", **place, text=block.text, **logprobs)
            yield self._event("content_part.done", **place, part=self._part(block))

    def _call_item(self, block: AnswerBlock, call: ToolCall) -> CallItem:
        return CallItem(call, block.number, block.text, block.first, self._offers.get(call.name))

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": f"response.{kind}", "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    def _status(self, block: AnswerBlock, of_response: str = "completed") -> str:
        """Return "incomplete" for the last item of a cut answer, unless it is a whole call."""
        if block is self.growing:
            return "in_progress" if of_response == "in_progress" else "incomplete"
        is_last = block.index == len(self.blocks) - 1
        is_cut = self.is_cut and is_last if block.call is None else block.call.cut_json is not None
        return "incomplete" if is_cut else "completed"

    def _item(self, block: AnswerBlock, status: str) -> dict[str, Any]:
        if block.call is not None:
            return self._call_item(block, block.call).dump(status)
        item = {"id": _item_id(block), "status": status, "content": [self._part(block)]}
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "encrypted_content": None}
        return {**item, "type": "message", "role": "assistant"}

    def snapshot(self, status: str) -> dict[str, Any]:
        """Return the response as far as it is there."""
        body, sampling = self.body, self.sampling
        choice = body.tool_choice or "auto"
        return {
            **dict.fromkeys(("completed_at", "error", "incomplete_details", "max_tool_calls")),
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": bool(body.background),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model_id,
            "output": [self._item(block, self._status(block, status)) for block in self.blocks],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {name: getattr(body.reasoning, name, None) for name in ("effort", "summary")},
            "service_tier": "default",
            "store": self.keep is not None,
            "temperature": sampling.temperature,
            "text": {"format": self._format()},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": LazyList(dump_tool, body.tools or (), PIECE),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": body.truncation or "disabled",
        }

    def _part(self, block: AnswerBlock) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        return {
            "type": "output_text", "text": block.text, "annotations": [],
            "logprobs": self._spell(block.sampled, _with_bytes),
        }  # fmt: skip

    def _spell(self, sampled: Sequence[SampledToken], form: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
        """Return log-probabilities, with tokens in the form that this API has for them."""
        speller = self._speller
        if speller is None:
            return []

        def spell(one: SampledToken) -> dict[str, Any]:
            spelt = speller.sampled(one)
            return {**form(spelt), "top_logprobs": [*map(form, spelt["top_logprobs"])]}

        return speller.spell([*sampled], spell)

    def _format(self) -> dict[str, Any]:
        form = self.body.text.format if self.body.text else None
        if form is None or form.type != "json_schema":
            return {"type": "text" if form is None else form.type}
        return {"type": form.type, "name": form.name or "schema", "schema": form.schema_, "strict": bool(form.strict)}


def _item_id(block: AnswerBlock) -> str:
    return f"{PREFIXES[block.kind]}_{block.number}"


def _with_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a token as this API has it: bytes may not be null."""
    return {"token": entry["token"], "logprob": entry["logprob"], "bytes": entry["bytes"] or []}


def _bare(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a token as events have it: without bytes."""
    return {"token": entry["token"], "logprob": entry["logprob"]}

"""Conversations, whichever API they come through: tools, what is asked of the engine, and answers as blocks.

Blocks (reasoning, text, tool calls) are the form of the Responses and Messages APIs.
"""

import json
import secrets
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from annotated_types import MaxLen, MinLen
from pydantic import AfterValidator, Field, Tag, model_validator
from pydantic_core import from_json

from sala.engine.requests import Call, InputProcessor, Submission
from sala.engine.stream import Event, StreamItem
from sala.errors import InputError
from sala.options import Attention, Sampling
from sala.protocol import SampledToken
from sala.server.api import answers
from sala.server.api.answers import AnswerProgress, B, Chunk, Reply
from sala.server.http.body import FIRST_ONLY, Strict, discriminate, problem, union
from sala.server.settings import Settings
from sala.text.answer import CLOSE, OPEN
from sala.text.schemas import as_lenient, simplify
from sala.text.tool_grammar import call_grammar, strict_grammar
from sala.text.tools import ToolCall

MAX_TOOLS = 128
MAX_SCHEMA_VALUES = 50_000
MAX_ARGUMENT_VALUES = 1 << 16  # of an earlier call; more are shown to the model as text
MAX_NAME = 4096  # characters of names and ids that only the client knows
STRICT = "If true, calls fit the schema also where the model decides whether to call."
STRICT_FORMAT = "If true, a schema that cannot be enforced as a whole is an error; else what can be enforced is."
TEXT_ONLY = "this model reads text only; leave parts of other types out"
EFFORTS = {"none": 0, "minimal": 0, "low": 1024, "medium": 4096, "high": None, "xhigh": None, "max": None}
Kind = Literal["reasoning", "text", "call"]
Change = Literal["begin", "grow", "end"]


def check_schema(schema: Any) -> Any:
    """Return a JSON schema unchanged; raise if it is too large."""
    waiting, num_values = [schema], 0
    while waiting:
        one = waiting.pop()
        num_values += 1
        if num_values > MAX_SCHEMA_VALUES:
            raise problem(f"holds more than {MAX_SCHEMA_VALUES:,} values")
        waiting += one if isinstance(one, list) else one.values() if isinstance(one, dict) else ()
    return schema


def read_refusal(data: Any) -> Any:
    """Return a refusal among the parts of a message as a part with text; anything else as it is."""
    is_refusal = isinstance(data, dict) and data.get("type") == "refusal" and "refusal" in data
    return {"type": "refusal", "text": data.get("refusal")} if is_refusal else data


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
CalledName = Annotated[str, MinLen(1), Field(description="As the model wrote it, even if no function has that name.")]
Parameters = Annotated[dict[str, Any], AfterValidator(check_schema), Field(description="A JSON schema of type object.")]
Description = Annotated[str, MaxLen(1 << 20)]
T = TypeVar("T")
Tools = Annotated[list[T], MaxLen(MAX_TOOLS), FIRST_ONLY]
U = TypeVar("U")
WordOr = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~str")] | Annotated[T, Tag("~dict")],
    union("none, auto, required or a function"),
]


ChosenOr = Annotated[
    Annotated[T, Tag("~function")] | Annotated[U, Tag("~allowed_tools")],
    discriminate(lambda value: "~allowed_tools" if value.get("type") == "allowed_tools" else "~function", "a function"),
]


class Allowed(Strict):
    """A tool choice that offers some of the tools."""

    type: Literal["allowed_tools"]

    @property
    def word(self) -> str:
        """Auto or required."""
        raise NotImplementedError

    @property
    def names(self) -> list[str]:
        raise NotImplementedError


class WithTools(Strict):
    """A request with tools; these and a chosen one have a `name`."""

    if TYPE_CHECKING:
        tools: Any
        tool_choice: Any

    @property
    def choice(self) -> tuple[str, str | None]:
        """The tool choice: auto, none or required, and the function if one is named."""
        chosen = self.tool_choice or "auto"
        if isinstance(chosen, Allowed):
            return chosen.word, None
        return (chosen, None) if isinstance(chosen, str) else ("required", chosen.name)

    @property
    def allowed(self) -> list[str] | None:
        """The functions that may be called; None: all."""
        return self.tool_choice.names if isinstance(self.tool_choice, Allowed) else None

    @property
    def tool_names(self) -> list[str]:
        """The functions that are offered."""
        return [tool.name for tool in self.tools or ()]

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        """Raise if a tool is offered twice, or if a call is demanded that is not possible."""
        names, (word, function) = self.tool_names, self.choice
        if len(set(names)) < len(names):
            raise problem("names a function twice", "tools")
        if word == "required" and not names:
            raise problem("needs tools", "tool_choice")
        if not {function, *(self.allowed or ())} <= {None, *names}:
            raise problem("names a function that is not in tools", "tool_choice")
        return self


class TemplateOptions(Strict):
    """Variables of the chat template."""

    enable_thinking: bool | None = None


def read_variables(options: TemplateOptions | None) -> dict[str, Any]:
    """Return the variables of the template that a client sets."""
    return {} if options is None else options.model_dump(exclude_none=True)


class Continuing(Strict):
    """A conversation that may end with an answer that has been begun."""

    continue_final_message: bool | None = Field(
        None,
        description="Whether a last message of the assistant is continued; by default it is. If true, there must be "
        "one. The answer holds only what is new.",
    )
    add_generation_prompt: bool | None = Field(
        None, description="True begins a new answer after a last message of the assistant, false continues that one."
    )

    @model_validator(mode="after")
    def _check_continuing(self) -> Self:
        if self.continue_final_message is not None and self.continue_final_message == self.add_generation_prompt:
            raise problem("must differ from add_generation_prompt", "continue_final_message")
        return self

    def continues(self, messages: Sequence[Mapping[str, Any]], by_default: bool = True) -> bool:
        """Return whether the last of the messages is continued. Raises InputError if it should and cannot be."""
        new = self.add_generation_prompt
        wanted = self.continue_final_message if new is None else not new
        if can_continue(messages):
            return by_default if wanted is None else wanted
        if wanted:
            field = "continue_final_message" if new is None else "add_generation_prompt"
            raise InputError(field, "needs a last message of the assistant that calls no tools", "leave it out")
        return False


def can_continue(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a conversation ends with an answer that can be continued: one without calls."""
    last = messages[-1] if messages else {"role": None}
    return last["role"] == "assistant" and not last.get("tool_calls")


@dataclass(frozen=True)
class ChatInput:
    """A conversation to answer, whichever API it came through: messages and tools as chat templates expect them.

    - choice: auto, none or required, and with the last the only function that may be called, if one is named
    - allowed: the functions that are offered; None: all
    - strict: the functions whose calls fit their schemas even where the model decides whether to call
    - is_single: return at most one call
    - schema: the JSON schema that the answer must follow
    - continue_final: the last message is an answer that has been begun
    - question: how the last message ends, if what stands before it is marked as worth keeping
    """

    messages: list[dict[str, Any]]
    sampling: Mapping[str, Any]
    tools: list[dict[str, Any]] | None = None
    choice: tuple[str, str | None] = ("auto", None)
    allowed: Sequence[str] | None = None
    strict: Collection[str] = ()
    is_single: bool = False
    schema: Mapping[str, Any] | None = None
    effort: str | None = None
    think_budget: int | None = None  # -1: no limit
    variables: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    continue_final: bool = False
    question: str = ""
    attention: Attention | None = None

    def __post_init__(self) -> None:
        """Raise InputError for demands on the beginning of an answer that is there already."""
        if not self.continue_final:
            return
        if self.choice[0] == "required":
            raise InputError("tool_choice", "demands a call where the answer has been begun", "use auto")
        if self.variables.get("enable_thinking") and OPEN not in self.messages[-1]["content"]:
            raise InputError("chat_template_kwargs", "demand reasoning where the answer has been begun", "leave it out")

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        if not self.tools or self.choice[0] == "none":
            return None
        return [tool for tool in self.tools if self.allowed is None or tool["function"]["name"] in self.allowed]

    def as_call(self, model: Sampling, settings: Settings) -> Call:
        """Return the request to the engine. Raises InputError for what cannot be enforced, or is not allowed."""
        values = {"think_budget": self._budget(settings), **self._constraint(model), **self.sampling}
        sampling, tools = answers.build_sampling(model, settings, values), self.offered_tools
        more: dict[str, Any] = {"n": self.n, "variables": self._variables()}
        more |= {"continue_final": self.continue_final, "ends_on_repeat": self.choice[0] == "required"}
        more["question"] = self.question
        more["attention"] = answers.allow_attention(self.attention, settings)
        return Call(None, sampling, messages=self.messages, tools=tools, **more)

    def encode(self, inputs: InputProcessor) -> list[int]:
        more: dict[str, Any] = {"continue_final": self.continue_final, **self._variables()}
        return inputs.encode_chat(self.messages, tools=self.offered_tools, **more)

    def _variables(self) -> dict[str, Any]:
        """Return the variables of the template. Effort `none` turns the reasoning off, unless the client set it."""
        default = {"enable_thinking": False} if self.effort == "none" else {}
        return {**default, **self.variables}

    def _budget(self, settings: Settings) -> int | None:
        if self.think_budget is not None:
            return None if self.think_budget < 0 else self.think_budget
        return settings.think_budget if self.effort is None else EFFORTS[self.effort]

    def _constraint(self, model: Sampling) -> dict[str, Any]:
        """Return the grammar that the answer must follow, if any, as sampling parameters.

        Where only calls must follow it, the model's own repetition penalty still counts.
        """
        word, function = self.choice
        answer = self.schema if word == "auto" else None
        functions = [tool["function"] for tool in self.offered_tools or ()]
        try:
            if self.offered_tools is None:
                return {} if self.schema is None else {"json_schema": json.dumps(self.schema, allow_nan=False)}
            if word == "auto" and answer is None:
                strict = [one for one in functions if one["name"] in self.strict]
                own = {"repetition_penalty": model.repetition_penalty}
                return {"grammar": strict_grammar(strict), **own} if strict else {}
            wanted = [one for one in functions if function in (None, one["name"])]
            return {"grammar": call_grammar(wanted, self.is_single or function is not None, answer, self.strict)}
        except InputError:
            raise
        except ValueError:
            field, verb = ("response_format", "holds") if self.offered_tools is None else ("tools", "hold")
            raise InputError(field, f"{verb} a number that is not finite") from None


def read_arguments(given: Any) -> dict[str, Any]:
    """Return the arguments of a call of the past, which are an object, or one as a string.

    An answer may be cut in a call. Of arguments that break off, the part that is there counts; libraries send those
    that they could not read as a JSON string. What is no object becomes an argument of its own.
    """
    if isinstance(given, dict):
        return given
    text = given if isinstance(given, str) else json.dumps(given)
    for _ in range(2):
        if sum(map(text.count, ",[{")) > MAX_ARGUMENT_VALUES:
            break
        try:
            value = from_json(text or "{}", allow_inf_nan=False, allow_partial="trailing-strings")
        except ValueError:
            break
        if isinstance(value, dict) or value is None:
            return value or {}
        if not isinstance(value, str):
            break
        text = value
    return {"arguments": text}


def answer_schema(kind: str, schema: Mapping[str, Any] | None, is_strict: bool) -> Mapping[str, Any] | None:
    """Return the schema that an answer in this format must follow, if any."""
    if kind == "text":
        return None
    if kind == "json_object" or schema is None:
        return {"type": "object"}
    return simplify(schema, True, "json_schema") if is_strict else as_lenient(schema)


def as_tool(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """Return a function as templates expect it."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def as_call(number: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_reasoning(given: Any) -> str:
    """Return the reasoning of an earlier answer, which is a text, a part with one, or a list of such."""
    if isinstance(given, dict):
        return read_reasoning(next((given[key] for key in ("text", "thinking", "content") if given.get(key)), None))
    if isinstance(given, list):
        return "\n".join(filter(None, map(read_reasoning, given)))
    return given if isinstance(given, str) else ""


@dataclass
class AnswerBlock:
    """A part of an answer; `text` with the tokens that it was sampled as, of which the last `num_new` came last."""

    kind: Kind
    index: int
    text: str = ""  # for a call its arguments, as JSON
    call: ToolCall | None = None  # without arguments as long as it grows
    first: str = ""  # the first argument of a call, where that is text
    new_first: str = ""  # what came last of it
    sampled: list[SampledToken] = field(default_factory=list)
    num_new: int = 0
    number: str = field(default_factory=partial(secrets.token_hex, 16))

    def emptied(self) -> "AnswerBlock":
        """Return the block as it is when it begins."""
        return replace(self, text="", first="", sampled=[], num_new=0)


class BlockReply(Reply[B]):
    """A reply that consists of blocks. Its events are named, and the last of them says that the answer is complete."""

    done = b""

    @abstractmethod
    def read(self) -> ChatInput:
        """Translate the body."""

    @abstractmethod
    def events(self, change: Change, block: AnswerBlock, text: str) -> Iterator[Chunk]:
        """Return what is sent when a block begins, grows by `text`, or ends."""

    @property
    def shows_reasoning(self) -> bool:
        return not self.settings.no_think

    def prepare(self, inputs: InputProcessor) -> Submission:
        chat = self.read()
        has_tools = chat.offered_tools is not None
        self.progress = AnswerProgress(has_tools, chat.is_single, self.shows_reasoning)
        self.blocks: list[AnswerBlock] = []
        self.growing: AnswerBlock | None = None
        self._changes: list[tuple[Change, AnswerBlock, str]] = []  # by the last item
        self._unshown: list[SampledToken] = []  # tokens whose text has not been shown yet
        call = chat.as_call(self.llm.default_sampling, self.settings)
        self.sampling = call.sampling
        submission = inputs.submit(call)
        self.prompt_len = len(submission.groups[0][0].request.prompt)
        return submission

    def take(self, item: StreamItem) -> None:
        self._changes = []
        if not isinstance(item, Event):
            return
        self.progress.take(item)
        if self.sampling.logprobs is not None:
            self._unshown += item.sampled
        delta = self.progress.show(item)
        if delta.reasoning:
            self._grow("reasoning", delta.reasoning)
        if delta.call_piece is not None:
            piece = delta.call_piece
            self._grow("call", piece.json, ToolCall(piece.id, piece.name, {}), piece.first)
        if delta.tool_call is not None and self.growing is not None:
            self.growing.call = delta.tool_call
            self._end()
        text = delta.text.lstrip() if self.progress.num_calls and self.growing is None else delta.text
        if text:
            self._grow("text", text)
        if self.progress.completion is not None:
            self._end()

    def _grow(self, kind: Kind, text: str, call: ToolCall | None = None, first: str = "") -> None:
        """Add text to the block that is open, or to a new one."""
        block = self.growing
        if block is None or block.kind != kind:
            self._end()
            block = self.growing = AnswerBlock(kind, len(self.blocks), call=call)
            self.blocks.append(block)
            self._changes.append(("begin", block, ""))
        block.text += text
        block.first, block.new_first = block.first + first, first
        block.num_new = 0
        if kind == "text":
            tokens = self._tokens_of_text(block)
            block.num_new = len(tokens)
            block.sampled += tokens
        self._unshown = []
        self._changes.append(("grow", block, text))

    def _tokens_of_text(self, block: AnswerBlock) -> list[SampledToken]:
        """Return the tokens that text was sampled as: without those of the closing tag, and without an end token."""
        tokens = self._unshown
        if tokens and not any(one.kind == "text" for one in self.blocks[: block.index]) and not block.sampled:
            ids = [one.token for one in tokens]
            text = self.llm.tokenizer.decode
            closed = bisect_left(range(len(ids) + 1), True, key=lambda count: CLOSE in text(ids[:count]))
            tokens = tokens[closed:] if closed <= len(ids) else tokens
        return [one for one in tokens if self.sampling.ignore_eos or one.token not in self.llm.stop_ids]

    def _end(self) -> None:
        if self.growing is not None:
            self._changes.append(("end", self.growing, ""))
            self.growing = None

    def chunks(self, item: StreamItem) -> Iterator[Chunk]:
        for change in self._changes:
            yield from self.events(*change)

    def event_head(self, chunk: Chunk) -> bytes:
        return f"event: {chunk['type']}\n".encode() + super().event_head(chunk)

    @property
    def is_cut(self) -> bool:
        """Return whether the answer was cut before the model ended it."""
        completion = self.progress.completion
        return completion is not None and completion.finish_reason in ("length", "repetition")

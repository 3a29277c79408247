"""Conversations, whichever API they come through: tools, what is asked of the engine, and answers as blocks.

Blocks (reasoning, text, tool calls) are the form of the Responses and Messages APIs. The grammars, in Lark's syntax,
force an answer to call tools in the form that `text.tools` parses.
"""

import json
import re
import secrets
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from annotated_types import MaxLen
from pydantic import AfterValidator, Field, Tag, model_validator

from sala.engine.requests import Call, InputProcessor, Submission
from sala.engine.stream import Event, StreamItem
from sala.errors import InputError
from sala.server.api import answers
from sala.server.api.answers import AnswerProgress, B, Chunk, Reply
from sala.server.http.body import FIRST_ONLY, Strict, problem, union
from sala.server.settings import Settings
from sala.text.tools import ToolCall

MAX_TOOLS = 128
TEXT_ONLY = "this model reads text only; leave parts of other types out"
EFFORTS = {"none": 0, "minimal": 0, "low": 1024, "medium": 4096, "high": None, "xhigh": None, "max": None}
TEXT = r"TEXT: /[^<]*/"
DATA = r"DATA: /([^\]]|\][^\]])*/"
COMPACT = {"x-guidance": {"whitespace_flexible": False}}  # otherwise a weak model may emit spaces without end
SIMPLE = ("integer", "number", "boolean", "null")
Kind = Literal["reasoning", "text", "call"]
Change = Literal["begin", "grow", "end"]


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


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Parameters = Annotated[dict[str, Any], AfterValidator(check_schema), Field(description="A JSON schema of type object.")]
T = TypeVar("T")
Tools = Annotated[list[T], MaxLen(MAX_TOOLS), FIRST_ONLY]
WordOr = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~str")] | Annotated[T, Tag("~dict")],
    union("none, auto, required or a function"),
]


class WithTools(Strict):
    """A request with tools; these and a chosen one have a `name`."""

    if TYPE_CHECKING:
        tools: Any
        tool_choice: Any

    @property
    def choice(self) -> tuple[str, str | None]:
        """The tool choice: auto, none or required, and the function if one is named."""
        chosen = self.tool_choice or "auto"
        return (chosen, None) if isinstance(chosen, str) else ("required", chosen.name)

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        """Raise if a tool is offered twice, or if a call is demanded that is not possible."""
        names, (word, function) = [tool.name for tool in self.tools or ()], self.choice
        if len(set(names)) < len(names):
            raise problem("names a function twice", "tools")
        if word == "required" and not names:
            raise problem("needs tools", "tool_choice")
        if function is not None and function not in names:
            raise problem("names a function that is not in tools", "tool_choice")
        return self


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


def answer_schema(kind: str, schema: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the schema that an answer in this format must follow, if any."""
    if kind == "text":
        return None
    return {"type": "object"} if kind == "json_object" or schema is None else schema


def as_tool(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """Return a function as templates expect it."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def as_call(number: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def call_grammar(
    functions: Sequence[Mapping[str, Any]], is_single: bool, answer: Mapping[str, Any] | None = None
) -> str:
    """Return a grammar of calls of these functions; with `answer`, a JSON schema, also of such an answer instead."""
    names = [f"f{index}" for index in range(len(functions))]
    calls = "call" if is_single else r'call ("\n" call)*'
    rules = [f"start: {calls}" if answer is None else f"start: {calls} | answer"]
    if answer is not None:
        rules.append(f"answer: %json {json.dumps({**COMPACT, **answer}, allow_nan=False)}")
    rules.append(f"call: {' | '.join(names)}")
    for name, function in zip(names, functions, strict=True):
        rules += _function_rules(name, function)
    return "\n".join([*rules, TEXT, DATA]) + "\n"


def _function_rules(name: str, function: Mapping[str, Any]) -> list[str]:
    schema = function.get("parameters") or {}
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts, rules = [_quote(f'<function name="{function["name"]}">')], []
    for index, (key, value) in enumerate(properties.items()):
        if any(char in key for char in '"<>'):  # the call format cannot express such a name
            continue
        rule = f"{name}p{index}"
        parts.append(rule if key in required else f"{rule}?")
        opening = _quote(f'<param name="{key}">')
        rules.append(f'{rule}: {opening} {_value(value, shared)} "</param>"')
    parts.append('"</function>"')
    return [f"{name}: {' '.join(parts)}", *rules]


def _value(schema: Any, shared: Mapping[str, Any]) -> str:
    """Return the rule for the text between the tags. Objects and lists go into CDATA, since they may hold a `<`."""
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(schema.get("enum"), list) and all(isinstance(item, str) for item in schema["enum"]):
        texts = (f"<![CDATA[{item}]]>" if "<" in item else item for item in schema["enum"])
        return f"({' | '.join(map(_quote, texts))})"
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if kinds == [None] and ("$ref" in schema or "anyOf" in schema or "oneOf" in schema or "allOf" in schema):
        kinds = ["object"]
    if not all(kind in (*SIMPLE, "object", "array") for kind in kinds):
        return '(TEXT | "<![CDATA[" DATA "]]>")'
    inner = f"%json {json.dumps({**shared, **schema, **COMPACT}, allow_nan=False)}"
    if all(kind in SIMPLE for kind in kinds):
        return inner
    return f'"<![CDATA[" {inner} "]]>"'


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@dataclass
class Block:
    kind: Kind
    index: int
    text: str = ""  # for a call its arguments, as JSON
    call: ToolCall | None = None
    number: str = field(default_factory=partial(secrets.token_hex, 16))

    def emptied(self) -> "Block":
        """Return the block as it is when it begins."""
        return replace(self, text="")


class BlockReply(Reply[B]):
    """A reply that consists of blocks. Its events are named, and the last of them says that the answer is complete."""

    done = b""

    @abstractmethod
    def read(self) -> ChatInput:
        """Translate the body."""

    @abstractmethod
    def events(self, change: Change, block: Block, text: str) -> Iterator[Chunk]:
        """Return what is sent when a block begins, grows by `text`, or ends."""

    @property
    def shows_reasoning(self) -> bool:
        return not self.settings.no_think

    def prepare(self, inputs: InputProcessor) -> Submission:
        chat = self.read()
        has_tools = chat.offered_tools is not None
        self.progress = AnswerProgress(has_tools, chat.is_single, self.shows_reasoning)
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._changes: list[tuple[Change, Block, str]] = []  # by the last item
        call = chat.as_call(self.settings)
        self.sampling = call.sampling
        submission = inputs.submit(call)
        self.prompt_len = len(submission.groups[0][0].request.prompt)
        return submission

    def take(self, item: StreamItem) -> None:
        self._changes = []
        if not isinstance(item, Event):
            return
        self.progress.take(item)
        delta = self.progress.show(item)
        if delta.reasoning:
            self._grow("reasoning", delta.reasoning)
        if delta.tool_call is not None:
            self._end()
            self._grow("call", json.dumps(delta.tool_call.arguments, ensure_ascii=False), delta.tool_call)
            self._end()
        text = delta.text.lstrip() if self.progress.num_calls and self._open is None else delta.text
        if text:
            self._grow("text", text)
        if self.progress.completion is not None:
            self._end()

    def _grow(self, kind: Kind, text: str, call: ToolCall | None = None) -> None:
        """Add text to the block that is open, or to a new one."""
        block = self._open
        if block is None or block.kind != kind:
            self._end()
            block = self._open = Block(kind, len(self.blocks), call=call)
            self.blocks.append(block)
            self._changes.append(("begin", block, ""))
        block.text += text
        self._changes.append(("grow", block, text))

    def _end(self) -> None:
        if self._open is not None:
            self._changes.append(("end", self._open, ""))
            self._open = None

    def chunks(self, item: StreamItem) -> Iterator[Chunk]:
        for change in self._changes:
            yield from self.events(*change)

    def encode(self, chunk: Chunk) -> bytes:
        return f"event: {chunk['type']}\n".encode() + super().encode(chunk)

    @property
    def is_cut(self) -> bool:
        """Return whether the answer was cut before the model ended it."""
        completion = self.progress.completion
        return completion is not None and completion.finish_reason in ("length", "repetition")

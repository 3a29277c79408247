"""The tools of the Responses API: how each type is offered to the model, and which items its calls are.

Models call functions. A namespace is a group of functions, a custom tool a function of one text, and a local shell a
function of one command. Tools that OpenAI's own servers run are accepted beside these and never called.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import MaxLen
from pydantic import BeforeValidator, Field, Tag

from sala.server.api import conversation
from sala.server.api.conversation import MAX_NAME, MAX_TOOLS, CalledName, Description, Parameters, ToolName
from sala.server.http.body import FIRST_ONLY, History, Strict, discriminate, problem
from sala.text.tools import ToolCall

MAX_ID = 128
SHELL = "local_shell"
HOSTED = ("web_search", "image_generation", "tool_search")  # beginnings: some have versions
NOT_OFFERED = "only tools of type function, custom, namespace and local_shell can be offered; leave the others out"
UNUSED = {"async", "allowed_callers", "defer_loading", "output_schema"}
SHELL_PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
}
PREFIXES = {"function": "fc", "custom": "ctc", SHELL: "lsh"}


class FunctionTool(Strict, ignored=UNUSED, remedy=NOT_OFFERED):
    type: Literal["function"]
    name: ToolName
    description: Description | None = None
    parameters: Parameters | None = None
    strict: bool | None = Field(None, description=conversation.STRICT)


class CustomFormat(Strict):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Description | None = None


class CustomTool(Strict, ignored=UNUSED):
    """A tool whose input is text. Its grammar is shown to the model and not enforced."""

    type: Literal["custom"]
    name: ToolName
    description: Description | None = None
    format: CustomFormat | None = None


class ShellTool(Strict):
    """A shell that the client runs."""

    type: Literal["local_shell"]


def _tool_kind(value: Any) -> str:
    """Return the tag of a tool; an unknown type is validated, and refused, as a function."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind.startswith(HOSTED):
        return "~hosted"
    return f"~{kind}" if kind in ("custom", "namespace", SHELL) else "~function"


NamedTool = Annotated[
    Annotated[FunctionTool, Tag("~function")] | Annotated[CustomTool, Tag("~custom")],
    discriminate(lambda value: "~custom" if _tool_kind(value) == "~custom" else "~function", "a tool"),
]


class NamespaceTool(Strict, ignored={"description"}):
    """A group of tools; the model calls them as NAMESPACE.NAME."""

    type: Literal["namespace"]
    name: ToolName
    tools: Annotated[list[NamedTool], MaxLen(MAX_TOOLS), FIRST_ONLY]


class HostedTool(History):
    """A tool of OpenAI's servers: accepted beside tools that can be called, without its options, and never called."""

    type: str = Field(max_length=64)


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("~function")]
    | Annotated[CustomTool, Tag("~custom")]
    | Annotated[ShellTool, Tag(f"~{SHELL}")]
    | Annotated[NamespaceTool, Tag("~namespace")]
    | Annotated[HostedTool, Tag("~hosted")],
    discriminate(_tool_kind, "a tool"),
]


@dataclass(frozen=True)
class Offer:
    """A tool as the model sees it: a function, whose name includes the namespace."""

    tool: FunctionTool | CustomTool | ShellTool
    namespace: str | None = None

    @property
    def is_strict(self) -> bool:
        return isinstance(self.tool, FunctionTool) and bool(self.tool.strict)

    @property
    def name(self) -> str:
        return full_name(SHELL if isinstance(self.tool, ShellTool) else self.tool.name, self.namespace)

    def as_function(self) -> dict[str, Any]:
        if isinstance(self.tool, ShellTool):
            return conversation.as_tool(SHELL, "Runs a command and returns its output.", SHELL_PARAMETERS)
        if isinstance(self.tool, FunctionTool):
            return conversation.as_tool(self.name, self.tool.description, self.tool.parameters)
        form, words = self.tool.format, "The input, as text."
        if form is not None and form.definition:
            words = f"The input, as text that follows this {form.syntax or ''} grammar:\n{form.definition}"
        text = {"type": "string", "description": words}
        parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        return conversation.as_tool(self.name, self.tool.description, parameters)


def offers(tools: Sequence[Any]) -> list[Offer]:
    """Return the tools that the model can call. Raises if there is none among those that were given."""
    found: list[Offer] = []
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            found += [Offer(one, tool.name) for one in tool.tools]
        elif not isinstance(tool, HostedTool):
            found.append(Offer(tool))
    if tools and not found:
        raise problem(NOT_OFFERED, "tools[0].type")
    if len(found) > MAX_TOOLS:
        raise problem(f"hold more than {MAX_TOOLS} functions", "tools")
    return found


def full_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}.{name}"


def dump_tool(tool: Any) -> dict[str, Any]:
    """Return a tool as the answer repeats it."""
    if isinstance(tool, FunctionTool):
        return {**tool.model_dump(), "strict": bool(tool.strict)}
    return dict(tool.model_dump(exclude_none=True))


# ------------------------------------------------------------------------------------------------- calls that are sent


@dataclass(frozen=True)
class CallItem:
    """A call in an answer, as an item of the type that its tool asks for."""

    call: ToolCall
    number: str
    arguments: str  # as JSON; empty while the call is only announced
    first: str  # the first argument, where that is text
    offer: Offer | None  # None: the model called something that it was not offered

    @property
    def kind(self) -> str:
        return "function" if self.offer is None else self.offer.tool.type

    @property
    def id(self) -> str:
        return f"{PREFIXES[self.kind]}_{self.number}"

    @property
    def text(self) -> str:
        """The arguments, or the input of a custom tool."""
        return self.first if self.kind == "custom" else self.arguments

    @property
    def names(self) -> dict[str, str]:
        if self.offer is None or self.offer.namespace is None:
            return {"name": self.call.name}
        namespace = self.offer.namespace
        return {"name": self.call.name.removeprefix(f"{namespace}."), "namespace": namespace}

    def dump(self, status: str) -> dict[str, Any]:
        item = {"id": self.id, "status": status, "call_id": self.call.id}
        if self.kind == SHELL:
            return {**item, "type": "local_shell_call", "action": self._action()}
        if self.kind == "custom":
            return {**item, "type": "custom_tool_call", **self.names, "input": self.text}
        return {**item, "type": "function_call", **self.names, "arguments": self.text}

    def events(
        self, change: conversation.Change, output_index: int, text: str, first: str
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield names and fields of the events about the arguments, which grow by `text`, the first by `first`.

        A shell's command is in its item only.
        """
        if self.kind == SHELL or change == "begin":
            return
        place = {"item_id": self.id, "output_index": output_index}
        is_custom = self.kind == "custom"
        word = "custom_tool_call_input" if is_custom else "function_call_arguments"
        new = first if is_custom else text
        if change == "grow":
            if new:
                yield f"{word}.delta", {**place, "delta": new}
        elif is_custom:
            yield f"{word}.done", {**place, "input": self.text}
        else:
            yield f"{word}.done", {**place, "name": self.names["name"], "arguments": self.text}

    def _action(self) -> dict[str, Any]:
        given = self.call.arguments if self.arguments else {"command": []}
        command = given.get("command")
        words = command if isinstance(command, list) else ["bash", "-lc", command] if command else []
        more = {name: given.get(name) for name in ("working_directory", "timeout_ms")}
        return {"type": "exec", "command": [str(word) for word in words], "env": {}, "user": None, **more}


# --------------------------------------------------------------------------------------------- calls that are sent back


def _keep_short(value: Any) -> Any:
    return value if isinstance(value, str) and len(value) <= MAX_NAME else None


Mark = Annotated[Any, BeforeValidator(_keep_short)]  # what is used if it is a short text, and dropped otherwise
ShortText = Annotated[str, MaxLen(MAX_NAME)]
ItemName = Annotated[CalledName, MaxLen(MAX_NAME)]


class Item(History):
    """An item, perhaps of an earlier answer: the marks of those are not used when they are sent back."""

    id: Mark = None


class FunctionCallItem(Item):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: ShortText
    name: ItemName
    namespace: ShortText | None = None
    arguments: str = Field(description="A JSON object, as a string. It may break off where an answer was cut.")

    def as_call(self) -> dict[str, Any]:
        arguments = conversation.read_arguments(self.arguments)
        return conversation.as_call(self.call_id, full_name(self.name, self.namespace), arguments)


class CustomCallItem(Item):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: ShortText
    name: ItemName
    namespace: ShortText | None = None
    input: str

    def as_call(self) -> dict[str, Any]:
        return conversation.as_call(self.call_id, full_name(self.name, self.namespace), {"input": self.input})


class ShellAction(History):
    command: list[str]
    working_directory: str | None = None
    timeout_ms: int | None = None


class ShellCallItem(Item):
    """A command of an earlier answer."""

    type: Literal["local_shell_call"]
    call_id: ShortText
    action: ShellAction

    def as_call(self) -> dict[str, Any]:
        return conversation.as_call(self.call_id, SHELL, self.action.model_dump(exclude_none=True))


def _keep_object(value: Any) -> Any:
    return value if isinstance(value, dict) else None


class HostedAction(History):
    """What a search on the web looked for."""

    type: Mark = None
    query: Mark = None
    url: Mark = None
    pattern: Mark = None


class HostedCallItem(Item):
    """A call that OpenAI's servers ran for an earlier answer: not shown to the model, which cannot make such calls.

    Its results may be megabytes. They are dropped, as the model does not see them.
    """

    type: Literal["web_search_call", "image_generation_call", "tool_search_call", "tool_search_output"]
    status: Mark = None
    call_id: Mark = None
    execution: Mark = None
    action: Annotated[HostedAction | None, BeforeValidator(_keep_object)] = None


CallItems = FunctionCallItem | CustomCallItem | ShellCallItem

"""Tools of MCP servers in `sala chat`: a question before each call, its result in one line, Ctrl-C cancels it."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from sala.cli import flags as s

if TYPE_CHECKING:
    from sala.plugins.mcp import McpTools
    from sala.text.tools import ToolCall

MAX_SHOWN = 160  # characters of a result in the terminal
MAX_ASKED = 2000  # characters of the arguments in a question
REFUSED = "The user did not permit this call."
CANCELLED = "The user cancelled this call."
Ask = Callable[[str], str]
Interruption = Callable[[], AbstractContextManager[Event]]


def open_tools(config: Path, seconds: float) -> "McpTools":
    """Start or reach the servers of a configuration; say which of them cannot be used."""
    from sala.plugins.mcp import McpTools, read_config

    tools = McpTools(read_config(config), seconds)
    for problem in tools.problems:
        s.note(problem)
    return tools


class ToolCaller:
    """Runs the calls of an answer. `ask` puts a question to the user; None: the user cannot be asked."""

    def __init__(self, tools: "McpTools", ask: Ask | None, is_free: bool, interruption: Interruption) -> None:
        self.tools = tools
        self._ask = ask
        self._is_free = is_free  # no questions
        self._interruption = interruption
        self._permitted: set[str] = set()

    def run(self, calls: Sequence["ToolCall"]) -> tuple[list[dict[str, Any]], bool]:
        """Return the results as messages, and whether the model may go on: Ctrl-C ends the turn."""
        messages: list[dict[str, Any]] = []
        goes_on = True
        for call in calls:
            text = self._run(call) if goes_on else None
            goes_on = text is not None
            content = CANCELLED if text is None else text
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content})
        return messages, goes_on

    def _run(self, call: "ToolCall") -> str | None:
        """Return the result of a call, as text for the model; None if the user wants to stop."""
        if call.name in self.tools.tools:
            try:
                if not self._is_permitted(call):
                    return REFUSED
            except (KeyboardInterrupt, EOFError):
                return None
        with self._interruption() as interrupt:
            result = self.tools.call(call.name, call.arguments, interrupt.is_set)
        if result is None:
            s.note(f"({call.name}: cancelled)")
            return None
        if result.problem:
            s.note(result.problem)
        s.note(f"({call.name}: {_brief(result.text, MAX_SHOWN)})")
        return result.text

    def _is_permitted(self, call: "ToolCall") -> bool:
        if self._is_free or call.name in self._permitted:
            return True
        if self._ask is None:
            s.note(f"({call.name} was not called: there is no terminal to ask at; --mcp-yes permits all calls)")
            return False
        server = self.tools.tools[call.name].server
        arguments = _brief(json.dumps(call.arguments, ensure_ascii=False), MAX_ASKED)
        s.note(f"Call {call.name} of {server} with {arguments}?")
        while True:
            word = self._ask("[y]es, [n]o, [a]lways for this tool: ").strip().lower()
            if word in ("a", "always"):
                self._permitted.add(call.name)
            if word in ("y", "yes", "a", "always"):
                return True
            if word in ("", "n", "no"):
                return False


def _brief(text: str, limit: int) -> str:
    """Return a text in one line, with its length if it was cut."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}… ({len(text):,} characters)"

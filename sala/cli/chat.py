"""`sala chat`: a conversation in the terminal. The KV cache stays: every turn computes only what is new."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

from sala.cli import flags as s
from sala.cli.ask import Keep, attach, read_entries, show_entries, with_cache
from sala.cli.generate import read_schema, show_answer, statistics, warn_if_untrained
from sala.cli.progress import prefill_bar
from sala.cli.sources import show_sources
from sala.cli.tools import ToolCaller, open_tools
from sala.errors import ContextTooLong, InputError, SalaError
from sala.options import LOOP_GUARD, Sampling
from sala.server.settings import Settings

if TYPE_CHECKING:
    from sala.engine.requests import Attachment
    from sala.engine.stream import Completion
    from sala.llm import LLM

HELP = """\
/help          this text
/clear         forget the conversation (also the word: clear)
/regen         answer the last question again
/read FILE     put a text file before your next message
/set           show the settings; /set NAME VALUE changes one (temperature, top_p, max_tokens, system, …)
/show          show the model and how full the context is
/tools         list the tools of MCP servers
/save FILE     write the conversation to a file; /load FILE reads one
/bye           leave (also: quit, exit, Ctrl-D)
\"\"\"            begins and ends a message of several lines; Ctrl-C stops the answer"""
WORDS = {"clear": "/clear", "quit": "/bye", "exit": "/bye"}
FORMAT = "sala-chat-1"
MAX_ROUNDS = 32  # answers to one question that call tools
QUOTED = "\0"  # marks a message that was written between triple quotes


@s.derived
def chat(
    *,
    place: s.ModelFirst = None,
    system: s.System = None,
    no_think: s.NoThink = False,
    sampling: Annotated[Sampling, s.Use(defaults={"max_tokens": 1024, "loop_guard": LOOP_GUARD})],
    options: s.Loading,
    servers: Annotated[Settings, s.Use(only=("mcp", "mcp_timeout"))],
    mcp_yes: Annotated[bool, s.flag("Call tools of MCP servers without asking.", "--mcp-yes")] = False,
    docs: Annotated[
        list[str] | None, s.flag("File, directory or glob that the conversation is about. Repeatable.", "--docs")
    ] = None,
    no_keep: Keep = False,
    verbose: s.Verbose = False,
) -> None:
    sampling = read_schema(sampling)
    if mcp_yes and servers.mcp is None:
        raise InputError("--mcp-yes", "needs servers", "name their configuration: --mcp FILE")
    with ExitStack() as stack:
        caller = None
        if servers.mcp is not None:
            tools = stack.enter_context(open_tools(servers.mcp, servers.mcp_timeout))
            caller = ToolCaller(tools, _asker(), mcp_yes, interruption)
        entries, left_out = read_entries(docs, options) if docs else ([], [])
        show_entries(entries, left_out, is_whole=verbose)
        llm = s.load(with_cache(options) if docs and not no_keep else options, verbose)
        attachment = attach(llm, entries, left_out) if docs else None
        _greet(llm, caller)
        Conversation(llm, sampling, system, no_think, caller, attachment).run(_reader())


def _greet(llm: "LLM", caller: ToolCaller | None) -> None:
    trained = f" (trained on up to {llm.config.trained_length:,})" if llm.config.trained_length else ""
    s.note(f"{llm.path.name}, context {llm.ctx:,} tokens{trained}. /help shows what you can do, /bye leaves.")
    if caller is not None:
        s.note(f"tools: {', '.join(caller.tools.tools)}")


@contextmanager
def interruption() -> Iterator[Event]:
    """Yield an event that the first Ctrl-C sets, so that a step can be finished; a second one stops at once."""
    event = Event()

    def on_signal(*_: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)


class Conversation:
    """The messages so far, and the commands that change them."""

    def __init__(
        self,
        llm: "LLM",
        sampling: Any,
        system: str | None,
        no_think: bool,
        caller: ToolCaller | None = None,
        attachment: "Attachment | None" = None,
    ) -> None:
        self.llm = llm
        self.caller = caller
        self.attachment = attachment  # documents: they stay when the conversation is forgotten
        self.sampling = sampling
        self.system = system
        self.no_think = no_think
        self.messages: list[dict[str, Any]] = []
        self.attached: list[str] = []
        self.last: Completion | None = None
        self.has_told = False

    def run(self, read: Callable[[], str]) -> None:
        while True:
            try:
                line = read()
            except KeyboardInterrupt:
                s.note("(to leave, type /bye or press Ctrl-D)")
                continue
            except EOFError:
                return
            is_text = line.startswith(QUOTED)  # between triple quotes, nothing is a command
            line = line.removeprefix(QUOTED) if is_text else WORDS.get(line.strip(), line)
            try:
                if line.startswith("/") and not is_text:
                    if not self.command(line.strip()):
                        return
                elif line.strip():
                    self.ask(line)
            except SalaError as error:
                s.note(str(error))
            except (OSError, ValueError, TypeError, RuntimeError, MemoryError) as error:
                s.note(f"that went wrong ({type(error).__name__}: {error}); the conversation is kept")

    def command(self, line: str) -> bool:
        """Run a command; return False to leave."""
        name, _, rest = line.partition(" ")
        if name in ("/bye", "/exit", "/quit"):
            return False
        run = getattr(self, f"do_{name.removeprefix('/')}", None)
        if run is None:
            s.note(f"{name} is not a command; /help lists them")
        elif name in ("/read", "/save", "/load") and not rest.strip():
            raise InputError(name, "needs a file", f"{name} FILE")
        else:
            run(rest.strip())
        return True

    def ask(self, text: str) -> None:
        content = "\n\n".join([*self.attached, text])
        count = len(self.messages)
        self.messages.append({"role": "user", "content": content})
        try:
            self.answer()
        except BaseException as error:
            del self.messages[count:]  # without an answer the question can be asked again
            if isinstance(error, ContextTooLong):
                self.attached = []  # otherwise no question would ever fit again
            raise
        self.attached = []

    def answer(self) -> None:
        """Answer the last message, calling tools as long as the model asks for them."""
        for _ in range(MAX_ROUNDS):
            completion = self._answer_once()
            if completion is None or self.caller is None or not completion.tool_calls:
                return
            results, goes_on = self.caller.run(completion.tool_calls)
            self.messages += results
            if not goes_on:
                s.note("(stopped)")
                return
        s.note(f"(stopped after {MAX_ROUNDS} rounds of tools; ask to go on)")

    def _answer_once(self) -> "Completion | None":
        """Show one answer and keep it; return None if it was stopped."""
        from sala.engine.requests import Call

        began = time.perf_counter()
        opening = [{"role": "system", "content": self.system}] if self.system else []
        with interruption() as interrupt, prefill_bar() as show_progress:

            def on_progress(done: int, total: int) -> None:
                show_progress(done, total)
                if interrupt.is_set() and done < total:
                    raise _Stopped

            tools = None if self.caller is None else self.caller.tools.functions
            messages = [*opening, *self.messages]
            call = Call(None, self.sampling, messages=messages, tools=tools, attachment=self.attachment)
            events = self.llm.stream_answer(call, on_progress)
            shown: list[Any] = []
            try:
                completion = show_answer(_until(events, interrupt, shown), self.no_think)
            except _Stopped:
                raise SalaError("stopped before the answer began", "the cached part of the prompt is kept") from None
        if completion is None:
            print("\n(stopped)")
            self.messages.append(_partial_message(shown))
            return None
        print()
        show_sources(completion.sources)
        s.note(statistics(completion, time.perf_counter() - began))
        warn_if_untrained(self.llm.config, completion.usage.prompt_tokens)
        self.messages.append(completion.as_message())
        self.last = completion
        off_because = self.llm.engine.speculation.off_because
        if off_because and not self.has_told:
            s.note(f"(speculation is switched off: {off_because})")
            self.has_told = True
        return completion

    def do_help(self, _: str) -> None:
        s.note(HELP)

    def do_clear(self, _: str) -> None:
        self.messages, self.attached, self.last = [], [], None
        s.note("(the conversation is forgotten)")

    def do_regen(self, _: str) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise InputError("/regen", "has no answer to replace", "ask something first")
        old = self.messages.pop()
        try:
            self.answer()
        except BaseException:
            self.messages.append(old)
            raise

    def do_read(self, name: str) -> None:
        text = s.read_text(name)
        self.attached.append(text)
        count = len(self.llm.tokenizer.encode(text, bos=False))
        s.note(f"({name}: {count:,} tokens, sent with your next message)")

    def do_set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        settings = {field.name: getattr(self.sampling, field.name) for field in fields(self.sampling)}
        if not name:
            for key, current in {"system": self.system, **settings}.items():
                s.note(f"  {key} = {current!r}")
        elif name == "system":
            self.system = value or None
        elif name in settings and value:
            parsed = _parse_setting(name, value)
            self.sampling = replace(self.sampling, **{name: parsed})
        else:
            raise InputError("/set", f"does not know {name!r}" if value else "needs a value", "/set NAME VALUE")

    def do_show(self, _: str) -> None:
        config = self.llm.config
        s.note(f"  model    {self.llm.path}")
        s.note(f"  layers   {len(config.sparse_layers)} sparse, {len(config.lightning_layers)} lightning")
        used = 0 if self.last is None else self.last.usage.total_tokens
        s.note(f"  drafts   {self.llm.engine.speculation.summary()}")
        if self.attachment is not None:
            s.note(f"  docs     {len(self.attachment.ids):,} tokens")
        s.note(f"  context  {used:,} of {self.llm.ctx:,} tokens, {len(self.messages)} messages")

    def do_tools(self, _: str) -> None:
        if self.caller is None:
            raise InputError("/tools", "has none to list", "start with --mcp FILE, a configuration of MCP servers")
        for tool in self.caller.tools.tools.values():
            s.note(f"  {tool.name} ({tool.server})  {' '.join(tool.description.split())[:100]}")

    def do_save(self, name: str) -> None:
        from sala.checkpoint.writer import write_text

        text = json.dumps(
            {"format": FORMAT, "system": self.system, "messages": self.messages}, ensure_ascii=False, indent=1
        )
        try:
            write_text(Path(name).expanduser(), text + "\n")
        except FileExistsError:
            raise InputError("/save", f"{name} exists already", "choose another name, or remove it yourself") from None
        except OSError as error:
            raise InputError("/save", f"{name} cannot be written: {error.strerror}") from None
        s.note(f"(saved to {name})")

    def do_load(self, name: str) -> None:
        from sala.text.tokenizer import check_messages

        try:
            data = json.loads(s.read_text(name))
            is_ours = isinstance(data, dict) and data.get("format") == FORMAT and isinstance(data["messages"], list)
        except (ValueError, KeyError, RecursionError):
            is_ours = False
        if not is_ours:
            raise InputError("/load", f"{name} is not a saved conversation", "use a file that /save wrote")
        if data["messages"]:
            check_messages(data["messages"])
        if not isinstance(data.get("system"), str | None):
            raise InputError("/load", f"{name} has a system prompt that is not text", "use a file that /save wrote")
        # the token ids of a file may not match its text, so the text is encoded again
        self.messages = [{key: value for key, value in m.items() if key != "token_ids"} for m in data["messages"]]
        self.system, self.last = data.get("system"), None
        s.note(f"({len(self.messages)} messages loaded)")


def _parse_setting(name: str, value: str) -> Any:
    if name in ("json_schema", "regex", "grammar"):
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    if name == "logit_bias" and isinstance(parsed, dict):
        return {int(token): bias for token, bias in parsed.items()}
    return parsed if parsed is not None or name != "stop" else ()


def _partial_message(shown: list[Any]) -> dict[str, Any]:
    """Return what was shown before the answer was stopped, with its tokens if nothing was removed from them."""
    text = reasoning = ""
    for event in shown:
        text, reasoning = text + event.delta.text, reasoning + event.delta.reasoning
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    elif not any(event.delta.call_piece for event in shown):
        message["token_ids"] = [token for event in shown for token in event.token_ids]
    return message


class _Stopped(Exception):
    """Ctrl-C between two chunks of a prefill."""


def _until(events: Any, interrupt: Event, shown: list[Any]) -> Any:
    for event in events:
        shown.append(event)
        yield event
        if interrupt.is_set() and event.completion is None:
            events.close()
            return


def _reader() -> Callable[[], str]:
    """Return a function that reads one message: with history and editing at a terminal, plainly from a pipe."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _multi_line(input)
    if os.environ.get("TERM") == "dumb":
        return _multi_line(lambda: input("> "), lambda: input(". "))
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession()
    return _multi_line(lambda: session.prompt("> "), lambda: session.prompt(". "))


def _asker() -> Callable[[str], str] | None:
    """Return a function that puts a question to the user; None without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    if os.environ.get("TERM") == "dumb":
        return input
    from prompt_toolkit import prompt

    return prompt


def _multi_line(read: Callable[[], str], read_more: Callable[[], str] | None = None) -> Callable[[], str]:
    def message() -> str:
        line = read()
        if not line.lstrip().startswith('"""'):
            return line
        lines = [line.lstrip().removeprefix('"""')]
        while not lines[-1].rstrip().endswith('"""'):
            lines.append((read_more or read)())
        lines[-1] = lines[-1].rstrip().removesuffix('"""')
        return QUOTED + "\n".join(lines).strip("\n")

    return message

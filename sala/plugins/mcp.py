"""Tools of MCP servers: read the usual configuration, start or reach the servers, list and call their tools.

The connections live in an event loop of their own thread, so that blocking and asynchronous callers can use them. What
a server sends is never trusted: it is text for the model, cut to a limit; escape
control characters before it is shown.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import shlex
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

from sala.errors import InputError, MissingExtra, SalaError, describe_error
from sala.options.sources import read_text

CONNECT_S = 30.0
CALL_S = 120.0
CLOSE_S = 10.0  # after it the library has killed what would not end
POLL_S = 0.1
MAX_CONFIG_BYTES = 1 << 20
MAX_RESULT = 1 << 16  # characters of a result that the model is given
READ_S = 300.0  # between two pieces of an answer over HTTP
MAX_TOOLS = 128
MAX_NAME = 64
T = TypeVar("T")
VARIABLE = re.compile(r"\$\{(\w+)\}")
EXAMPLE = '{"mcpServers": {"files": {"command": "npx", "args": ["…"]}, "web": {"url": "https://…"}}}'


@dataclass(frozen=True)
class ServerConfig:
    """How to start a server, or where it is."""

    name: str
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    is_sse: bool = False

    @property
    def place(self) -> str:
        return self.url or shlex.join([self.command or "", *self.args])


@dataclass(frozen=True)
class Tool:
    """A tool; `name` is what the model calls it, `own_name` what its server does."""

    name: str
    server: str
    own_name: str
    description: str
    parameters: dict[str, Any]

    def as_function(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolResult:
    """What a call gave, as text for the model. `problem` is for the user: what is wrong with the server itself."""

    text: str
    is_error: bool = False
    problem: str | None = None


# ------------------------------------------------------------------------------------------------------- configuration


def read_config(file: Path) -> list[ServerConfig]:
    """Read a file with `mcpServers`. Keys that other programs use are ignored, servers that are disabled left out.

    `${NAME}` in a value is an environment variable, so that keys need not stand in the file.
    """
    try:
        servers = json.loads(read_text(file, MAX_CONFIG_BYTES))["mcpServers"]
        if not isinstance(servers, dict) or not servers:
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(str(file), "does not describe MCP servers", f"write {EXAMPLE}") from None
    return [_read_server(file, name, one) for name, one in servers.items() if not _is_disabled(one)]


def _is_disabled(value: Any) -> bool:
    return isinstance(value, dict) and value.get("disabled") is True


def _read_server(file: Path, name: str, value: Any) -> ServerConfig:
    where = f"{file}: {name}"
    value = _expand(where, value) if isinstance(value, dict) else {}
    command, url = value.get("command"), value.get("url")
    if not isinstance(command or url, str) or (command and url):
        raise InputError(where, "needs either a command or a url", f"write it as in {EXAMPLE}")
    lists = {"args": list, "env": dict, "headers": dict}
    for key, kind in lists.items():
        inside = value.get(key) or kind()
        words = inside.values() if isinstance(inside, dict) else inside
        if not isinstance(inside, kind) or not all(isinstance(one, str) for one in words):
            raise InputError(where, f"has {key} that are not {'strings' if kind is list else 'an object of strings'}")
    if not isinstance(value.get("cwd"), str | None):
        raise InputError(where, "has a cwd that is not text", "name a directory")
    if isinstance(url, str) and not re.match(r"https?://", url):
        raise InputError(where, f"has the url {url!r}", "it must begin with http:// or https://")
    return ServerConfig(
        name=name,
        command=command,
        args=tuple(value.get("args") or ()),
        env=value.get("env") or {},
        cwd=value.get("cwd"),
        url=url,
        headers=value.get("headers") or {},
        is_sse=value.get("type") == "sse",
    )


def _expand(where: str, value: Any) -> Any:
    """Replace `${NAME}` in all strings by the environment variable."""
    if isinstance(value, dict):
        return {key: _expand(where, one) for key, one in value.items()}
    if isinstance(value, list):
        return [_expand(where, one) for one in value]
    if not isinstance(value, str):
        return value

    def look_up(found: "re.Match[str]") -> str:
        if found[1] not in os.environ:
            raise InputError(where, f"uses ${{{found[1]}}}, which is not set", f"set the variable {found[1]}")
        return os.environ[found[1]]

    return VARIABLE.sub(look_up, value)


# --------------------------------------------------------------------------------------------------------- connections


class LastWords:
    """The end of what a server writes to stderr. It never reaches the terminal: it may hold control sequences."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=4)
        self._mark, self._is_read = secrets.token_bytes(16).hex().encode(), threading.Event()
        read, write = os.pipe()
        self.file: TextIO = os.fdopen(write, "w")
        self._reader = threading.Thread(target=self._read, args=(read,), daemon=True)
        self._reader.start()

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as pipe:
            while line := pipe.readline(4096):
                if own := line.replace(self._mark, b"").strip():
                    self._lines.append(own)
                if self._mark in line:
                    self._is_read.set()

    def _catch_up(self) -> None:
        """Wait until everything that the server has written so far is read."""
        if self.file.closed:
            self._reader.join(0.5)
            return
        self._is_read.clear()
        with contextlib.suppress(OSError):
            os.write(self.file.fileno(), self._mark + b"\n")
            self._is_read.wait(0.5)

    def __str__(self) -> str:
        self._catch_up()
        text = b" ".join(self._lines).decode("utf-8", "replace")
        return " ".join("".join(char if char.isprintable() else " " for char in text).split())[-300:]


class McpConnection:
    """One server: a task that connects, holds the session open and closes it."""

    def __init__(self, config: ServerConfig) -> None:
        from anyio import CancelScope

        self.config = config
        self._scope = CancelScope()  # unlike Task.cancel it lets the library end what it has started
        self.listed: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self.words = LastWords()
        self._client: Any = None
        self._closing = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            with self._scope:
                await self._hold()
        except Exception as error:
            if not self.listed.done():
                self.listed.set_exception(_first(error))
        finally:
            self._client = None
            self.listed.cancel()
            with suppress(OSError):
                self.words.file.close()

    async def _hold(self) -> None:
        """Connect, list the tools, and keep the session open until it is to be closed."""
        async with AsyncExitStack() as stack:
            self._client = await self._connect(stack)
            self.listed.set_result(await self._list())
            await self._closing.wait()

    async def _connect(self, stack: AsyncExitStack) -> Any:
        from httpx2 import AsyncClient, Timeout
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.sse import sse_client
        from mcp.client.streamable_http import streamable_http_client

        one, transport = self.config, None
        if one.command is not None:
            how = StdioServerParameters(command=one.command, args=list(one.args), env=dict(one.env), cwd=one.cwd)
            transport = stdio_client(how, errlog=self.words.file)
        elif one.is_sse:
            transport = sse_client(one.url or "", headers=dict(one.headers))
        else:
            http = AsyncClient(headers=dict(one.headers), timeout=Timeout(CONNECT_S, read=READ_S))
            transport = streamable_http_client(one.url or "", http_client=await stack.enter_async_context(http))
        return await stack.enter_async_context(Client(transport))

    async def _list(self) -> list[Any]:
        tools: list[Any] = []
        cursor = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor or len(tools) > MAX_TOOLS:
                return tools

    async def tools(self, seconds: float) -> list[Any]:
        """Return the tools, as soon as the server has listed them. Raises SalaError if it does not."""
        remedy = f'try {self.config.place} by hand, or disable it with "disabled": true'
        name = f"MCP server {self.config.name}"
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(self.listed)
        except TimeoutError:
            self._scope.cancel()
            raise SalaError(f"{name} did not list its tools within {seconds:g} s{self._said()}", remedy) from None
        except FileNotFoundError:
            raise SalaError(f"{name} cannot be started: there is no {self.config.command!r}", remedy) from None
        except Exception as error:
            words = f"{describe_error(error)}{self._said()}"
            raise SalaError(f"{name} cannot be used: {words}", remedy) from None

    async def call(self, name: str, arguments: dict[str, Any], seconds: float) -> ToolResult:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        if self._client is None or self.task.done():
            return self._ended("it has ended")
        try:
            async with asyncio.timeout(seconds):
                result = await self._client.call_tool(name, arguments)
        except TimeoutError:
            words = f"did not answer within {seconds:g} s"
            problem = (
                f"the tool {name} of MCP server {self.config.name} {words}; raise --mcp-timeout if it needs longer"
            )
            return ToolResult(f"Error: the tool {words}.", True, problem)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                return self._ended(error.message)
            return ToolResult(f"Error: {error.message}"[:MAX_RESULT], True)
        except Exception as error:
            return self._ended(describe_error(_first(error)))
        return ToolResult(_as_text(result), bool(result.is_error))

    def _ended(self, words: str) -> ToolResult:
        problem = f"MCP server {self.config.name} does not answer any more: {words}{self._said()}; start sala again"
        return ToolResult("Error: the server of this tool does not answer any more.", True, problem)

    def _said(self) -> str:
        words = str(self.words)
        return f" (it wrote: {words})" if words else ""

    async def close(self) -> None:
        self._closing.set()
        if not self.listed.done():  # it is still being started
            self._scope.cancel()
        await self.task


def _first(error: BaseException) -> Exception:
    """Return the first error inside a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else RuntimeError(str(error))


def _as_text(result: Any) -> str:
    """Return a result as text for the model; content other than text is only named."""
    parts = []
    for block in result.content:
        resource = getattr(block, "resource", None)
        text = getattr(block, "text", None) or getattr(resource, "text", None)
        where = getattr(block, "uri", None) or getattr(resource, "uri", None)
        kind = getattr(block, "mime_type", None) or block.type
        parts.append(text if isinstance(text, str) else f"[{kind}{f' at {where}' if where else ''}: not text]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n".join(parts)
    left = len(text) - MAX_RESULT
    return text if left <= 0 else f"{text[:MAX_RESULT]}\n[{left:,} more characters were left out]"


# --------------------------------------------------------------------------------------------------------------- tools


def check_installed() -> None:
    """Raise MissingExtra if the library is not there."""
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise MissingExtra("mcp", "mcp") from None


class McpTools:
    """The tools of several servers. Closing it ends the processes that it has started.

    A server that cannot be used is left out; `problems` says why. Raises SalaError if that leaves none.
    """

    def __init__(self, configs: list[ServerConfig], call_s: float = CALL_S, connect_s: float = CONNECT_S) -> None:
        check_installed()
        for name in ("mcp", "httpx2"):  # they log what servers send, and without a handler that is printed
            logging.getLogger(name).addHandler(logging.NullHandler())
            logging.getLogger(name).propagate = False
        self._call_s = call_s
        self._connections: dict[str, McpConnection] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._thread.start()
        try:
            found, self.problems = self._submit(self._connect(configs, connect_s)).result()
            self.tools = {tool.name: tool for tool in _name(found)}
            if not self.tools:
                raise SalaError("; ".join(self.problems) or "the MCP servers offer no tools")
        except BaseException:
            self.close()
            raise

    @property
    def functions(self) -> list[dict[str, Any]]:
        return [tool.as_function() for tool in self.tools.values()]

    def submit(self, name: str, arguments: dict[str, Any]) -> "Future[ToolResult]":
        """Call a tool. Cancelling the future cancels the call."""
        tool = self.tools.get(name)
        if tool is None:
            known = ", ".join(self.tools)
            done: Future[ToolResult] = Future()
            done.set_result(ToolResult(f"Error: there is no tool {name!r}; there are {known}.", True))
            return done
        return self._submit(self._connections[tool.server].call(tool.own_name, arguments, self._call_s))

    def call(self, name: str, arguments: dict[str, Any], should_stop: Callable[[], bool]) -> ToolResult | None:
        """Call a tool and wait; return None if `should_stop` became true before it answered."""
        future = self.submit(name, arguments)
        while not should_stop():
            with suppress(FutureTimeout):
                return future.result(POLL_S)
        future.cancel()
        return None

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        with suppress(FutureTimeout):
            self._submit(self._close()).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1)

    def __enter__(self) -> "McpTools":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _connect(self, configs: list[ServerConfig], seconds: float) -> tuple[dict[str, list[Any]], list[str]]:
        self._connections = {one.name: McpConnection(one) for one in configs}
        every = self._connections.values()
        lists = await asyncio.gather(*(one.tools(seconds) for one in every), return_exceptions=True)
        found, problems = {}, []
        for name, listed in zip(self._connections, lists, strict=True):
            if isinstance(listed, SalaError):
                problems.append(str(listed))
            elif isinstance(listed, BaseException):
                raise listed
            else:
                found[name] = listed
        return found, problems

    async def _close(self) -> None:
        await asyncio.gather(*(one.close() for one in self._connections.values()))


def _name(found: Mapping[str, list[Any]]) -> Iterator[Tool]:
    """Yield tools with names that a model can call; those that two servers have get the server's name too."""
    counts = Counter(_plain(tool.name) for tools in found.values() for tool in tools)
    for server, tools in found.items():
        for tool in tools[:MAX_TOOLS]:
            name = _plain(tool.name)
            name = name if counts[name] == 1 else _plain(f"{server}__{tool.name}")
            yield Tool(name, server, tool.name, tool.description or "", dict(tool.input_schema))


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:MAX_NAME]

"""Tools of MCP servers for the chat page: the operator configures them, the page asks its user before each call.

A tool runs with the rights of this server. Calling one therefore needs the admin key, as managing models does, and
pages other than the server's own may not call any, whatever `cors_origins` permits.
"""

import asyncio
import contextlib
import logging
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field

from sala.errors import SalaError
from sala.plugins.mcp import McpTools, check_installed, read_config
from sala.server.api.routes import until_gone
from sala.server.http.body import Strict
from sala.server.http.errors import ApiError
from sala.server.http.security import StrictRoute, is_same, need_admin_key
from sala.server.settings import Settings

_log = logging.getLogger("sala.server")


async def need_own_page(request: Request) -> None:
    """Dependency: refuse web pages that this server has not sent."""
    host = request.headers.get("host", "").encode("latin-1")
    if not all(is_same(origin.lower().encode("latin-1"), host) for origin in request.headers.getlist("origin")):
        raise ApiError(403, "tools are for the server's own page", code="foreign_origin")


router = APIRouter(
    prefix="/mcp",
    route_class=StrictRoute,
    dependencies=[Depends(need_admin_key), Depends(need_own_page)],
    include_in_schema=False,
)


class ToolServers:
    """The MCP servers of the settings, if there are any, from the start of the application to its end."""

    def __init__(self, settings: Settings) -> None:
        self._configs = [] if settings.mcp is None else read_config(settings.mcp)
        if self._configs:
            check_installed()
        self._seconds = settings.mcp_timeout
        self._opening: asyncio.Task[McpTools] | None = None
        self.tools: McpTools | None = None

    async def open(self) -> None:
        """Start or reach the servers. Those that cannot be used are logged and left out."""
        if not self._configs:
            return
        self._opening = asyncio.create_task(asyncio.to_thread(McpTools, self._configs, self._seconds))
        try:
            self.tools = await asyncio.shield(self._opening)
        except SalaError as error:
            _log.error("%s", error)
            return
        for problem in self.tools.problems:
            _log.warning("%s", problem)

    async def close(self) -> None:
        """End the processes, also those that are still being started."""
        if self._opening is not None:
            with contextlib.suppress(SalaError):
                await asyncio.to_thread((await self._opening).close)


class CallRequest(Strict):
    name: str = Field(max_length=256)
    arguments: dict[str, Any] = Field(default_factory=dict)


def _servers(request: Request) -> ToolServers:
    servers: ToolServers = request.app.state.tool_servers
    return servers


Servers = Annotated[ToolServers, Depends(_servers)]


@router.get("/tools")
async def list_tools(servers: Servers) -> Any:
    tools = servers.tools.tools.values() if servers.tools is not None else ()
    return {"object": "list", "data": [{**tool.as_function(), "server": tool.server} for tool in tools]}


@router.post("/call")
async def call_tool(request: Request, body: CallRequest, servers: Servers) -> Any:
    """Run a tool; a client that leaves cancels it."""
    if servers.tools is None:
        raise ApiError(404, "this server offers no tools; start it with --mcp FILE", code="no_tools")
    future = servers.tools.submit(body.name, body.arguments)

    async def wait() -> Any:
        return await asyncio.wrap_future(future)

    result = await until_gone(request, wait())
    if result.problem:
        _log.warning("%s", result.problem)
    return {"content": result.text, "is_error": result.is_error}

"""Tools of MCP servers over HTTP, for the chat page: who may list and call them, results, errors, shutdown."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs the extra mcp")

from sala.errors import InputError
from sala.server.app import create_app
from sala.server.settings import Settings
from tests.mcp.test_chat_tools import demo, write_config
from tests.server.conftest import Server, wait_for

Make = Callable[..., Server]


def call(server: Server, name: str, headers: dict[str, str] | None = None, **arguments: Any) -> Any:
    return server.post("/v1/mcp/call", {"name": name, "arguments": arguments}, headers=headers or {})


def test_the_page_lists_and_calls(make_server: Make, tmp_path: Path) -> None:
    config = write_config(tmp_path / "mcp.json", demo=demo(str(tmp_path / "pid")), no={"command": "no-such-program"})
    server = make_server(mcp=config, mcp_timeout=0.3, cors_origins=("http://friend.example",))
    wait_for(lambda: server.app.state.tool_servers.tools, 30)
    with server.client() as client:
        listed = client.get("/v1/mcp/tools").json()["data"]
    assert (listed[0]["function"]["name"], listed[0]["server"]) == ("add", "demo")
    assert call(server, "add", a=2, b=3).json() == {"content": "5", "is_error": False}
    assert call(server, "add", {"origin": server.url}, a=2, b=4).json()["content"] == "6"
    assert call(server, "add", {"origin": "http://friend.example"}, a=2, b=3).status_code == 403
    assert "raise ValueError" not in call(server, "fail", reason="rain").json()["content"]
    assert call(server, "hang").json() == {"content": "Error: the tool did not answer within 0.3 s.", "is_error": True}
    assert "there is no tool 'x'" in call(server, "x").json()["content"]
    assert server.post("/v1/mcp/call", {"name": "add", "arguments": [1]}).status_code == 400
    server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_keys_and_servers_without_tools(make_server: Make, server: Server, tmp_path: Path) -> None:
    assert server.post("/v1/mcp/call", {"name": "add"}).json()["error"]["code"] == "no_tools"
    with server.client() as client:
        assert client.get("/v1/mcp/tools").json() == {"object": "list", "data": []}
    keyed = make_server(api_key="user-key-0123456789", admin_key="admin-key-0123456789")
    for key, status in ((None, 401), ("user-key-0123456789", 403), ("admin-key-0123456789", 404)):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        assert call(keyed, "add", headers).status_code == status
    (tmp_path / "mcp.json").write_text("[]")
    with pytest.raises(InputError, match="mcpServers"):
        create_app(Settings(mcp=tmp_path / "mcp.json"))

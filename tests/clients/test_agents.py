"""Unchanged coding agents against the server: they read a file, change it and come to an end.

No small model can act as an agent, so what the model says is prescribed; everything else is real.
"""

import asyncio
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from sala.server.app import create_app
from sala.server.settings import Settings
from tests.clients.conftest import Environment
from tests.server.agents import TEMPLATE, call
from tests.server.conftest import END, Puppet, wait_for

TASK = "please look at calc.py and fix the bug"
BROKEN, FIXED = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
PATCH = "calc.py\n```python\n<<<<<<< SEARCH\n    return a - b\n=======\n    return a + b\n>>>>>>> REPLACE\n```\n"
Install = Callable[..., Environment]


class Stage:
    """An application with a prescribed model around it: requests with the task get the answers, others a title."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.answers: list[str] = []
        self.failures: list[str] = []
        self._puppet: Puppet | None = None
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body = b""
        while (message := await receive()).get("more_body") or message.get("body"):
            body += message["body"]
            if not message.get("more_body"):
                break
        held = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Any:
            return held.pop() if held else await receive()

        async def watch(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self.failures.append(f"{scope['path']}: {message['status']}")
            await send(message)

        async with self._turn:
            is_task = (TASK.encode() in body and b'"tools"' in body) or b"SEARCH" in body
            text = self.answers.pop(0) if is_task and self.answers else "Fine."
            self.puppet.script = [*text.encode(), END]
            await self.app(scope, replay, watch)

    @property
    def puppet(self) -> Puppet:
        if self._puppet is None:
            runtime = self.app.state.runtime
            engine = runtime.loaded[runtime.default_id].llm.engine
            self._puppet = engine._executor = Puppet(engine._executor)
        return self._puppet


@pytest.fixture
def stage(tiny: Path, tmp_path: Path) -> Iterator[tuple[Stage, str]]:
    """A prescribed model and its address."""
    shutil.copytree(tiny, tmp_path / "tiny")
    (tmp_path / "tiny" / "chat_template.jinja").write_text(TEMPLATE)
    settings = Settings(model=str(tmp_path / "tiny"), models_dir=tmp_path / "models", device="cpu", ctx=200_000)
    stage = Stage(create_app(settings))
    server = uvicorn.Server(uvicorn.Config(stage, host="127.0.0.1", port=0, log_level="warning", http="h11"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started and stage.app.state.runtime.loaded, 60)
    yield stage, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(20)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "calc.py").write_text(BROKEN)
    for words in ("init -q", "add calc.py", "-c user.name=a -c user.email=a@example.org commit -qm Begin"):
        subprocess.run(["git", *words.split()], cwd=folder, check=True)
    return folder


def check(stage: Stage, project: Path) -> None:
    assert stage.failures == []
    assert stage.answers == []
    assert (project / "calc.py").read_text() == FIXED


def test_claude_code(install_node: Install, stage: tuple[Stage, str], project: Path, tmp_path: Path) -> None:
    file = str(project / "calc.py")
    stage[0].answers = [
        f"I will look.\n{call('Read', file_path=file)}\n{call('Bash', command='ls', description='List')}",
        "<think>\nIt subtracts.\n</think>\n\n" + call("Edit", file_path=file, old_string="a - b", new_string="a + b"),
        "It adds now.",
    ]
    variables = {"ANTHROPIC_BASE_URL": stage[1], "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "tiny"}
    variables |= {"ANTHROPIC_DEFAULT_HAIKU_MODEL": "tiny", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    arguments = ("-p", TASK, "--allowedTools", "Read,Edit,Bash")
    environment = install_node("@anthropic-ai/claude-code")
    said = environment.run(_program(environment, "claude"), *arguments, folder=project, HOME=str(tmp_path), **variables)
    assert "It adds now." in said
    check(stage[0], project)


def test_codex(install_node: Install, stage: tuple[Stage, str], project: Path, tmp_path: Path) -> None:
    stage[0].answers = [
        "<think>\nLook first.\n</think>\n\nI will look.\n" + call("exec_command", cmd="cat calc.py"),
        call("exec_command", cmd="sed -i 's/a - b/a + b/' calc.py") + call("exec_command", cmd="git status"),
        "It adds now.",
    ]
    provider = f'[model_providers.sala]\nname = "sala"\nbase_url = "{stage[1]}/v1"\nwire_api = "responses"\n'
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(f'model = "tiny"\nmodel_provider = "sala"\n\n{provider}')
    arguments = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK)
    environment = install_node("@openai/codex")
    said = environment.run(_program(environment, "codex"), *arguments, folder=project, HOME=str(tmp_path))
    assert "It adds now." in said
    check(stage[0], project)


def test_opencode(install_node: Install, stage: tuple[Stage, str], project: Path, tmp_path: Path) -> None:
    stage[0].answers = [
        f"I will look.\n{call('read', filePath=str(project / 'calc.py'))}\n"
        + call("bash", command="ls", description="List"),
        call("edit", filePath=str(project / "calc.py"), oldString="a - b", newString="a + b"),
        "It adds now.",
    ]
    model = {"name": "tiny", "limit": {"context": 131_072, "output": 8192}}
    options = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{stage[1]}/v1"}, "models": {"tiny": model}}
    config = {"provider": {"sala": options}, "model": "sala/tiny", "small_model": "sala/tiny"}
    (tmp_path / "opencode.json").write_text(json.dumps(config))
    variables = {"HOME": str(tmp_path), "PWD": str(project), "OPENCODE_CONFIG": str(tmp_path / "opencode.json")}
    environment = install_node("opencode-ai")
    said = environment.run(_program(environment, "opencode"), "run", TASK, folder=project, **variables)
    assert "It adds now." in said
    check(stage[0], project)


def test_aider(install: Install, stage: tuple[Stage, str], project: Path, tmp_path: Path) -> None:
    stage[0].answers = [f"I fix it.\n\n{PATCH}"]
    quiet = ("--no-show-model-warnings", "--no-check-update", "--no-analytics", "--no-auto-commits", "--no-gitignore")
    environment = install("aider-chat")
    environment.run(
        "aider", "--model", "openai/tiny", "--edit-format", "diff", "--yes", *quiet, "--message", TASK, "calc.py",
        folder=project, HOME=str(tmp_path), OPENAI_API_BASE=f"{stage[1]}/v1", OPENAI_API_KEY="none",
    )  # fmt: skip
    check(stage[0], project)


def _program(environment: Environment, name: str) -> str:
    return str(environment.folder / "node_modules" / ".bin" / name)

"""`sala chat --mcp`: real servers over stdio and HTTP, questions before calls, a model that says what it is told."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs the extra mcp")

from sala.cli import flags
from sala.cli.chat import Conversation
from sala.cli.generate import show_answer
from sala.cli.tools import CANCELLED, REFUSED, ToolCaller
from sala.engine.stream import Event as AnswerEvent
from sala.errors import InputError, SalaError
from sala.llm import LLM
from sala.options import Sampling
from sala.plugins.mcp import McpTools, read_config
from sala.protocol import Row, SampledToken
from sala.text.answer import Delta
from tests.server.agents import TEMPLATE, call
from tests.server.conftest import END, Puppet, wait_for

SERVER = str(Path(__file__).with_name("server.py"))
PROMPT = r">[^\n]*?\x1b\[\?25h"  # the cursor is shown again
ADD = call("add", a="2", b="3")


def write_config(file: Path, **servers: Any) -> Path:
    file.write_text(json.dumps({"mcpServers": servers, "other": 1}))
    return file


def demo(*arguments: str) -> dict[str, Any]:
    return {"command": sys.executable, "args": [SERVER, *arguments], "autoApprove": []}


class Actor(Puppet):
    """Gives one answer of the script after another."""

    def __init__(self, executor: Any) -> None:
        super().__init__(executor)
        self.answers: list[str] = []

    def _speak(self, row: Row, sampled: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
        if row.start + len(row.tokens) == row.prompt_len and sampled:
            self.script = [*self.answers.pop(0).encode(), END]
        return super()._speak(row, sampled)


@pytest.fixture(scope="module")
def model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("mcp") / "tiny"
    shutil.copytree(tiny, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    with LLM(path, ctx=16_384) as llm:
        llm.engine._executor = Actor(llm.engine._executor)
        llm.engine._executor.script = []
        yield llm


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[McpTools]:
    """One server for all tests that leave it alive."""
    with McpTools(read_config(write_config(tmp_path_factory.mktemp("mcp") / "mcp.json", demo=demo()))) as tools:
        yield tools


@contextmanager
def nobody_interrupts() -> Iterator[Event]:
    yield Event()


def talk(
    model: LLM, tools: McpTools, answers: Sequence[str], words: Sequence[str] | None = ("y",) * 9, **more: Any
) -> list[dict[str, Any]]:
    """Ask once; return the messages. `words` answer the questions before calls."""
    left = list(words or ())
    ask = None if words is None else lambda _: left.pop(0)
    caller = ToolCaller(tools, ask, more.get("is_free", False), more.get("interruption", nobody_interrupts))
    conversation = Conversation(model, Sampling(max_tokens=400), None, False, caller)
    model.engine._executor.answers = list(answers)
    conversation.ask("What is 2 + 3?")
    assert not model.engine._executor.answers
    return conversation.messages


def results(messages: list[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "tool"]


def test_calls_and_what_the_model_gets(model: LLM, tools: McpTools, capfd: pytest.CaptureFixture[str]) -> None:
    assert list(tools.tools) == ["add", "fail", "hang", "die", "hostile_tool"]
    assert tools.functions[0]["function"]["parameters"]["required"] == ["a", "b"]
    fail = call("fail", reason="rain")
    messages = talk(model, tools, [f"Wait.\n{ADD}\n{fail}", call("nonsense"), "It is 5."])
    assert [message["role"] for message in messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    added, failed, unknown = results(messages)
    assert added == "5"
    assert "Error executing tool fail" in failed
    assert "there is no tool 'nonsense'" in unknown
    shown = capfd.readouterr()
    assert "It is 5." in shown.out
    assert 'Call add of demo with {"a": 2, "b": 3}?' in shown.err
    assert "(add: 5)" in shown.err


def test_questions(model: LLM, tools: McpTools, capfd: pytest.CaptureFixture[str]) -> None:
    assert results(talk(model, tools, [f"{ADD}{ADD}", "No."], ["what", "n", ""])) == [REFUSED, REFUSED]
    assert results(talk(model, tools, [f"{ADD}{ADD}", ADD, "5"], ["always"])) == ["5"] * 3
    assert results(talk(model, tools, [ADD, "5"], None, is_free=True)) == ["5"]
    assert results(talk(model, tools, [ADD, "No."], None)) == [REFUSED]
    assert "--mcp-yes permits all calls" in capfd.readouterr().err


def test_interruptions(model: LLM, tools: McpTools) -> None:
    @contextmanager
    def at_once() -> Iterator[Event]:
        event = Event()
        event.set()
        yield event

    messages = talk(model, tools, [call("hang") + ADD], interruption=at_once)
    assert results(messages) == [CANCELLED, CANCELLED]

    def give_up(_: str) -> str:
        raise KeyboardInterrupt

    caller = ToolCaller(tools, give_up, False, nobody_interrupts)
    conversation = Conversation(model, Sampling(max_tokens=400), None, False, caller)
    model.engine._executor.answers = [ADD, "Fine."]
    conversation.ask("What is 2 + 3?")
    assert results(conversation.messages) == [CANCELLED]
    conversation.ask("Never mind.")
    assert [message["role"] for message in conversation.messages[-2:]] == ["user", "assistant"]


def test_nothing_reaches_the_terminal_but_text(
    model: LLM, tools: McpTools, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = talk(model, tools, [call("hostile_tool", why="\x1b[2J"), "So."])
    assert results(messages)[0].endswith("text <|im_end|>")
    long = tools.call("hostile_tool", {"length": 100_000}, lambda: False)
    assert long.text.endswith("x\n[34,501 more characters were left out]")
    shown = capfd.readouterr()
    assert "hostile_tool: \\x1b]0;owned\\x07" in shown.err
    assert not flags.CONTROLS.search(shown.err)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    deltas = [Delta(text="a\x1b[2J\r\u202e\x9b\tb\n"), Delta(reasoning="\x1b]0;x\x07")]
    show_answer((AnswerEvent(delta) for delta in deltas), no_think=False)
    assert capfd.readouterr().out == "a\\x1b[2J\\r\\u202e\\x9b\tb\n<think>\n\\x1b]0;x\\x07"


def test_servers_that_die_or_hang(tmp_path: Path) -> None:
    pid, dead = tmp_path / "pid", [sys.executable, "-c", "import sys; sys.exit('out of\x1b paper')"]
    config = write_config(
        tmp_path / "mcp.json",
        demo=demo(str(pid)),
        missing={"command": "no-such-program"},
        dead={"command": dead[0], "args": dead[1:]},
        web={"url": "http://127.0.0.1:9/mcp"},
        off={"command": "no-such-program", "disabled": True},
    )
    tools = McpTools(read_config(config), call_s=0.2)
    missing, ended, web = tools.problems
    assert "there is no 'no-such-program'" in missing
    assert "it wrote: out of paper" in ended
    assert 'disable it with "disabled": true' in web
    late = tools.call("hang", {}, lambda: False)
    assert late is not None
    assert late.is_error
    assert "raise --mcp-timeout" in str(late.problem)
    assert tools.call("add", {"a": 1, "b": 1}, lambda: False).text == "2"
    for name in ("die", "add"):
        gone = tools.call(name, {"a": 1, "b": 1}, lambda: False)
        assert gone.is_error
        assert "out of paper" in gone.problem
        assert "start sala again" in gone.problem
    tools.close()
    mute = write_config(tmp_path / "mcp.json", mute={"command": "sleep", "args": ["60"]})
    with pytest.raises(SalaError, match="mute did not list its tools"):
        McpTools(read_config(mute), connect_s=0.1)


def test_processes_end(tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    config = write_config(tmp_path / "mcp.json", one=demo(str(files[0])), two=demo(str(files[1])))
    with McpTools(read_config(config)) as tools:
        assert {"one__add", "two__add"} <= set(tools.tools)
        tools.submit("two__hang", {})  # it must be killed
        pids = [int(file.read_text()) for file in files]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids if Path("/proc").exists())
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ctrl_c_at_the_start_ends_what_was_started(tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "mcp.json", mute={"command": "sh", "args": ["-c", f"echo $$ > {tmp_path}/pid; sleep 60"]}
    )
    command = [sys.executable, "-m", "sala", "chat", "--mcp", str(config)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as chat:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 60)
        chat.send_signal(signal.SIGINT)
        assert chat.wait(30) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import uvicorn

    from tests.mcp.server import server

    seen: list[bytes] = []
    inner = server.streamable_http_app()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(value for name, value in scope.get("headers", ()) if name == b"authorization")
        await inner(scope, receive, send)

    one = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=one.run, daemon=True)
    thread.start()
    wait_for(lambda: one.started, 20)
    monkeypatch.setenv("DEMO_KEY", "k1")
    port = one.servers[0].sockets[0].getsockname()[1]
    entry = {"type": "http", "url": f"http://127.0.0.1:{port}/mcp", "headers": {"Authorization": "Bearer ${DEMO_KEY}"}}
    try:
        with McpTools(read_config(write_config(tmp_path / "mcp.json", web=entry))) as tools:
            assert tools.call("add", {"a": 2, "b": 2}, lambda: False).text == "4"
    finally:
        one.should_exit = True
        thread.join(10)
    assert set(seen) == {b"Bearer k1"}


@pytest.mark.parametrize(
    ("servers", "words"),
    [
        ({}, "does not describe MCP servers"),
        ({"a": 1}, "needs either a command or a url"),
        ({"a": {"command": "x", "url": "http://y"}}, "needs either"),
        ({"a": {"command": "x", "args": "y"}}, "args that are not strings"),
        ({"a": {"command": "x", "env": {"K": 1}}}, "env that are not an object of strings"),
        ({"a": {"url": "file:///etc/passwd"}}, "must begin with http"),
        ({"a": {"command": "x", "env": {"K": "${NOT_SET_HERE}"}}}, "set the variable NOT_SET_HERE"),
    ],
)
def test_configurations_that_are_wrong(servers: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words.replace("(", ".")):
        read_config(write_config(tmp_path / "mcp.json", **servers))
    (tmp_path / "mcp.json").write_text("{")
    with pytest.raises(InputError, match="mcpServers"):
        read_config(tmp_path / "mcp.json")


def test_at_a_terminal(tiny: Path, tmp_path: Path) -> None:
    """A model that a grammar forces to call: yes, then Ctrl-C at the next question."""
    pexpect = pytest.importorskip("pexpect", reason="needs a Unix terminal")
    config = write_config(tmp_path / "mcp.json", demo=demo(str(tmp_path / "pid")))
    arguments = ["-m", "sala", "chat", "-m", str(tiny), "-n", "200", "--mcp", str(config)]
    arguments += ["--grammar", f"start: {json.dumps(ADD)}"]
    environment = {**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1"}
    child = pexpect.spawn(
        sys.executable, arguments, encoding="utf-8", timeout=60, dimensions=(40, 160), env=environment
    )
    child.expect("tools: add, fail")
    child.expect(PROMPT)
    child.send("add\r")
    child.expect(r"Call add of demo with \{\"a\": 2, \"b\": 3\}\?")
    child.expect("lways for this tool")
    child.send("y\r")
    child.expect(r"\(add: 5\)")
    child.expect("lways for this tool")
    child.sendintr()
    child.expect(r"\(stopped\)")
    child.expect(PROMPT)
    child.send("/tools\r")
    child.expect(r"add \(demo\)  Add two numbers")
    child.expect(PROMPT)
    child.send("/bye\r")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)

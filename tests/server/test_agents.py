"""Whole conversations of coding agents: every turn is answered, and reuses the prompt of the turn before it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.golden import DATA
from tests.server import agent_prompts, agents
from tests.server.agent_prompts import prose
from tests.server.agents import ChatAgent, ClaudeCode, Codex, Turn, call
from tests.server.conftest import Puppet, Server, start

READ, BASH = call("Read", path="calc.py"), call("Bash", command="ls")
EDIT = call("Edit", path="calc.py", old="a - b", new="a + b")
THOUGHT = "<think>\nIt subtracts.\n</think>\n\n"
TEMPLATES = {"of-agents": agents.TEMPLATE, "released": (DATA / "released" / "chat_template.jinja").read_text()}
# What is asked or answered, and what the model says, beside the turn whose whole prompt is reused.
CONVERSATION: tuple[tuple[str | list[str], str, int | None], ...] = (
    ("Fix the bug in calc.py.", f"I will look.\n{READ}\n{BASH}", None),
    (["def add(a, b):\n    return a - b", "calc.py"], THOUGHT + EDIT, 0),
    (["Error: calc.py has changed since it was read."], f"{THOUGHT}Once more.\n{EDIT}", 1),
    (["Done."], "It adds now.", 2),
    # Templates leave the reasoning of turn 1 out after a new question, so this one goes on from the prompt of turn 1.
    ("Is there a test?", READ, 1),
    ([prose(1500, 1)], f"{THOUGHT}{BASH}\n{READ}", 4),
    ([prose(300, 2), prose(1500, 3)], "Another file." + READ, 5),
    ([prose(1500, 4)], BASH, 6),
    (["Error: " + prose(200, 5)], f"{BASH}\n{BASH}", 7),
    (["1 passed", prose(800, 6)], "There is one, and it passes.", 8),
    ("Write down what you did.", call("Edit", path="notes", old="", new=prose(1500, 7)), 5),
    (["Done."], "It is written down.", 10),
)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model knows tools from its template, with the defaults of the cache."""
    yield from serve(tmp_path_factory, "of-agents")


@pytest.fixture(scope="module", params=TEMPLATES)
def any_room(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same with each of the templates."""
    yield from serve(tmp_path_factory, request.param)


def serve(tmp_path_factory: pytest.TempPathFactory, template: str) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("agents")
    agent_prompts.write_model(folder / "tiny", TEMPLATES[template])
    server = start(folder / "tiny", folder / "models", ctx=40_000)
    yield server
    server.stop()


def speaking(room: Server) -> Iterator[Callable[[str], None]]:
    engine = room.llm.engine
    puppet = engine._executor = Puppet(engine._executor)
    (end,) = room.llm.stop_ids

    def script(text: str) -> None:
        puppet.script = [*room.llm.tokenizer.encode(text, bos=False), end]

    yield script
    room.wait_idle(10)
    engine._executor = puppet._executor
    engine.forget()


@pytest.fixture
def speak(room: Server) -> Iterator[Callable[[str], None]]:
    """Makes the model answer with this text."""
    yield from speaking(room)


@pytest.fixture
def speak_anywhere(any_room: Server) -> Iterator[Callable[[str], None]]:
    yield from speaking(any_room)


def converse(agent: Any, between: Callable[[], Any] = lambda: None) -> None:
    """Hold the conversation; check that every turn is answered and reuses an earlier prompt, and nearly all of its own.

    Of a prompt of the real size, only results and answers of the last turn are new; where reasoning is left out of the
    history, those of the turns since.
    """
    turns: list[Turn] = []
    for given, said, earlier in CONVERSATION:
        turns.append(agent.ask(given, said) if isinstance(given, str) else agent.answer_calls(given, said))
        assert len(turns[-1].calls) == said.count("<function")
        assert turns[-1].text.strip() == said.removeprefix(THOUGHT).partition("<function")[0].strip()
        if earlier is not None:
            assert turns[-1].cached >= turns[earlier].prompt - 1
            assert turns[-1].cached / turns[-1].prompt > (0.95 if earlier == len(turns) - 2 else 0.85)
        between()
    assert 0.95 < agent.first_size / agent.prompt.size < 1.15


def test_claude_code(any_room: Server, speak_anywhere: Callable[[str], None]) -> None:
    agent = ClaudeCode(any_room, speak_anywhere, agent_prompts.CLAUDE_CODE)

    def between() -> None:
        agent.title()
        agent.count("Go on.")

    converse(agent, between)
    thoughts = [block for message in agent.history for block in message["content"] if isinstance(block, dict)]
    assert sum(block["type"] == "thinking" for block in thoughts) == 3
    assert agent.history[-1]["role"] == "assistant"
    counted = agent.count("Thanks.")
    assert agent.ask("Thanks.", "Fine.").prompt == counted


def test_codex(any_room: Server, speak_anywhere: Callable[[str], None]) -> None:
    agent = Codex(any_room, speak_anywhere, agent_prompts.CODEX)
    converse(agent)
    patch = "*** Begin Patch\n*** Update File: calc.py\n-a - b\n+a + b\n*** End Patch"
    calls = call("apply_patch", input=patch) + "\n" + call("agents.Read", path="calc.py")
    turns = [agent.ask("Patch it.", f"{calls}\n" + call("local_shell", command='["ls", "-l"]'))]
    custom, function, shell = turns[0].calls.values()
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "apply_patch", patch)
    assert (function["type"], function["namespace"], function["name"]) == ("function_call", "agents", "Read")
    assert (shell["type"], shell["action"]["command"]) == ("local_shell_call", ["ls", "-l"])
    turns.append(agent.answer_calls(["Done.", "def add", '{"output": "calc.py"}'], "Patched."))
    assert turns[1].cached >= turns[0].prompt - 1


def test_chat_agent(any_room: Server, speak_anywhere: Callable[[str], None]) -> None:
    converse(ChatAgent(any_room, speak_anywhere, agent_prompts.OPENCODE))


def test_events_of_custom_tools(room: Server, speak: Callable[[str], None]) -> None:
    agent = Codex(room, speak, history=[{"role": "user", "content": "Patch it."}])
    speak('<function name="apply_patch"><param name="input"><![CDATA[a <b>]]></param></function>')
    events = [event for event in agent.post("/v1/responses", agent._body()) if "response" not in event]
    assert [event["type"].removeprefix("response.") for event in events] == [
        "output_item.added", *["custom_tool_call_input.delta"] * 5, "custom_tool_call_input.done", "output_item.done"
    ]  # fmt: skip
    first, last = events[0]["item"], events[-1]["item"]
    assert first["input"] == ""
    assert "".join(event.get("delta", "") for event in events) == events[-2]["input"] == last["input"] == "a <b>"
    assert {event.get("item_id", first["id"]) for event in events} == {last["id"]}


def test_two_agents_side_by_side(room: Server, speak: Callable[[str], None]) -> None:
    """Turns of two programs alternate; both keep their prefixes."""
    one, other = ClaudeCode(room, speak), ChatAgent(room, speak)
    first = [one.ask("Look.", READ), other.ask("Look.", READ)]
    second = [one.answer_calls(["a - b"], BASH), other.answer_calls(["a - b"], BASH)]
    third = [one.answer_calls(["calc.py"], "Done."), other.answer_calls(["calc.py"], "Done.")]
    for before, after in zip([*first, *second], [*second, *third], strict=True):
        assert after.cached >= before.prompt - 1


@pytest.mark.parametrize("kind", [ClaudeCode, Codex, ChatAgent])
def test_a_call_of_a_tool_that_does_not_exist_can_be_sent_back(
    kind: Callable[..., Any], room: Server, speak: Callable[[str], None]
) -> None:
    agent = kind(room, speak)
    first = agent.ask("Look.", call("Read the File: now", path="calc.py"))
    assert len(first.calls) == 1
    second = agent.answer_calls(["Error: there is no such tool."], "Then not.")
    assert (second.text, second.cached >= first.prompt - 1) == ("Then not.", True)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("null", "{}"),
        ('"{}"', "{}"),
        (r'"{\"city\": \"Par"', '{"city": "Par"}'),
        ('"Paris"', '{"arguments": "Paris"}'),
        ("[1]", '{"arguments": "[1]"}'),
        ("17", '{"arguments": "17"}'),
    ],
)
def test_arguments_that_are_no_object_are_rendered(arguments: str, meant: str, room: Server) -> None:
    def render(text: str) -> Any:
        called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [called]}]
        return room.post("/v1/tokenize", {"messages": messages}).json()["tokens"]

    assert render(arguments) == render(meant) != render('{"other": 1}')


def test_arguments_that_broke_off_can_be_sent_back(room: Server) -> None:
    """The input of an earlier call, as text, is read like the arguments in chats."""

    def count(given: Any) -> int:
        call = {"type": "tool_use", "id": "t", "name": "get_weather", "input": given}
        result = {"type": "tool_result", "tool_use_id": "t", "content": "cut"}
        messages = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        return int(room.post("/v1/messages/count_tokens", {"messages": messages}).json()["input_tokens"])

    assert count('{"city": "Rome') == count({"city": "Rome"}) > count({"city": ""}) > count({})
    assert count("Rome") == count({"arguments": "Rome"})


def test_calls_of_the_past_in_their_older_form(room: Server) -> None:
    def tokens(*messages: Any) -> Any:
        response = room.post("/v1/tokenize", {"messages": [{"role": "user", "content": "hi"}, *messages]})
        assert response.status_code == 200, response.text
        return response.json()["tokens"]

    function = {"name": "get_weather", "arguments": '{"days": 1}'}
    older = {"role": "assistant", "content": None, "function_call": function}
    newer = {"role": "assistant", "tool_calls": [{"id": "", "type": "function", "function": function}]}
    assert tokens(older) == tokens(newer) != tokens({"role": "assistant", "content": ""})
    result = {"role": "function", "name": "get_weather", "content": "warm"}
    assert tokens(older, result) == tokens(newer, {"role": "tool", "content": "warm"})

"""`sala chat` in a real terminal: turns, commands, Ctrl-C."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pexpect = pytest.importorskip("pexpect", reason="needs a Unix terminal")


PROMPT = r">[^\n]*?\x1b\[\?25h"  # the prompt is sampled and the cursor is shown again


class Terminal:
    def __init__(self, tiny: Path, *arguments: str) -> None:
        self.child = pexpect.spawn(
            sys.executable, ["-m", "sala", "chat", "-m", str(tiny), "-t", "0", *arguments],
            encoding="utf-8", timeout=60, dimensions=(40, 160), env={**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1"},
        )  # fmt: skip
        self.child.expect("/bye leaves")
        self.child.expect(PROMPT)

    def send(self, line: str) -> None:
        self.child.send(line + "\r")

    def turn(self, line: str) -> dict[str, int]:
        """Ask, wait for the statistics, return their numbers."""
        self.send(line)
        self.child.expect(r"\[prompt ([\d,]+) tokens(?: \(([\d,]+) cached\))?.*?answer ([\d,]+) tokens.*?\]")
        prompt, cached, answer = (int((group or "0").replace(",", "")) for group in self.child.match.groups())
        self.child.expect(PROMPT)
        return {"prompt": prompt, "cached": cached, "answer": answer}

    def expect(self, pattern: str) -> "re.Match[str]":
        self.child.expect(pattern)
        return self.child.match


@pytest.fixture
def terminal(tiny: Path) -> Iterator[Terminal]:
    terminal = Terminal(tiny, "-n", "8")
    yield terminal
    terminal.child.close(force=True)


def test_three_turns_clear_and_leave(terminal: Terminal) -> None:
    first = terminal.turn("one")
    assert first["cached"] == 0
    second = terminal.turn("two")
    # <|im_end|> \n <|im_start|> user \n two <|im_end|> \n <|im_start|> assistant \n, and the last sampled token
    new = second["prompt"] - second["cached"]
    assert second["cached"] == first["prompt"] + first["answer"] - 1
    assert new == len("\nuser\ntwo\nassistant\n") + 4 + 1
    third = terminal.turn("three")
    assert third["cached"] == second["prompt"] + second["answer"] - 1
    terminal.send("clear")
    terminal.expect("forgotten")
    fourth = terminal.turn("one")
    assert fourth["prompt"] == first["prompt"]
    terminal.send("exit")
    terminal.child.expect(pexpect.EOF)
    terminal.child.wait()
    assert terminal.child.exitstatus == 0


def test_ctrl_c_stops_the_answer_not_the_program(tiny: Path) -> None:
    terminal = Terminal(tiny, "-n", "1000000")
    terminal.send("talk")
    terminal.expect("[a-zA-Z]{20}")
    terminal.child.sendintr()
    terminal.expect(r"\(stopped\)")
    terminal.expect(PROMPT)
    terminal.send("/set max_tokens 5")
    terminal.expect(PROMPT)
    after = terminal.turn("more")
    assert after["answer"] == 5
    assert after["cached"] > 0
    terminal.child.sendintr()
    terminal.expect("/bye or press Ctrl-D")
    terminal.send("/bye")
    terminal.child.expect(pexpect.EOF)
    terminal.child.wait()
    assert terminal.child.exitstatus == 0


def test_commands(terminal: Terminal, tmp_path: Path) -> None:
    terminal.send("/help")
    terminal.expect("/regen")
    terminal.turn("question")
    again = terminal.turn("/regen")
    assert again["cached"] == again["prompt"] - 1
    (tmp_path / "doc.txt").write_text("words " * 50)
    terminal.send(f"/read {tmp_path / 'doc.txt'}")
    terminal.expect("300 tokens")
    assert terminal.turn("about it?")["prompt"] > 300
    terminal.send("/set temperature 9999")
    terminal.expect("temperature is 9999")
    terminal.send("/set")
    terminal.expect("max_tokens = 8")
    terminal.send("/show")
    terminal.expect("2 sparse, 2 lightning")
    terminal.send("/nonsense")
    terminal.expect("not a command")
    saved = tmp_path / "chat.json"
    terminal.send(f"/save {saved}")
    terminal.expect("saved")
    assert [m["role"] for m in json.loads(saved.read_text())["messages"]] == ["user", "assistant"] * 2
    terminal.send(f"/save {saved}")
    terminal.expect("exists already")
    terminal.send("/clear")
    terminal.expect("forgotten")
    terminal.send(f"/load {saved}")
    terminal.expect("4 messages")
    assert terminal.turn("go on")["prompt"] > 300
    terminal.send(f"/load {tmp_path / 'doc.txt'}")
    terminal.expect("not a saved conversation")
    terminal.send('"""two')
    terminal.expect(r"\.[^\n]*?\x1b\[\?25h")
    lines = terminal.turn('lines"""')
    assert lines["answer"] == 8
    terminal.child.sendeof()
    terminal.child.expect(pexpect.EOF)


def test_from_a_pipe(tiny: Path) -> None:
    import subprocess

    out = subprocess.run(
        [sys.executable, "-m", "sala", "chat", "-m", str(tiny), "-n", "5", "-t", "0"],
        input="hello\nand more\nquit\nnever\n", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert out.returncode == 0
    assert out.stderr.count("answer 5 tokens") == 2
    assert "cached" in out.stderr

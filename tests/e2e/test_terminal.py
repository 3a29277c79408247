"""What reaches a terminal: text that it shows and does not obey, on whatever terminal it is, and none after Ctrl-C."""

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sala import cli
from sala.cli.flags import CONTROLS, escape_controls
from sala.cli.outputs import print_facts, print_json, print_table
from sala.cli.progress import ProgressBar

pexpect = pytest.importorskip("pexpect", reason="needs a Unix terminal")

WITH_MODEL = ["--device", "cpu", "-m", "MODEL"]
COMMANDS = {
    "generate": ["generate", "hello", "-n", "6", "-t", "0", *WITH_MODEL],
    "chat": ["chat", "-n", "6", "-t", "0", *WITH_MODEL],
    "session": ["session", "load", "note", "why?", "-n", "6", "-t", "0", "--sessions-dir", "SESSIONS", *WITH_MODEL],
    "ask": ["ask", "NOTE", "why?", "-n", "6", "-t", "0", "--no-keep", *WITH_MODEL],
    "needle": ["needle", "--context-len", "700", *WITH_MODEL],
    "batch_generate": ["batch_generate", "MODEL", "hello", "you", "-n", "6", "-t", "0", "--device", "cpu"],
    "speculative_generate": ["speculative_generate", "-n", "6", "-t", "0", *WITH_MODEL],
    "as JSON": ["generate", "hello", "-n", "6", "-t", "0", "--json", *WITH_MODEL],
}


@pytest.fixture(scope="module")
def babbler(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes nothing but ESC and BEL, whatever it is asked."""
    path = tmp_path_factory.mktemp("models") / "babbler"
    shutil.copytree(tiny, path)
    tensors = load_file(path / "model.safetensors")
    head = np.zeros_like(tensors["lm_head.weight"])
    head[0x1B] = np.random.default_rng(0).standard_normal(head.shape[1], np.float32)
    head[0x07] = -head[0x1B]
    save_file({**tensors, "lm_head.weight": head}, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture
def call(babbler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Run a command on that model."""
    monkeypatch.setenv("NO_COLOR", "1")
    note = tmp_path / "note.txt"
    note.write_text("a text to be kept")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/regen\n"))

    def run(name: str) -> int:
        places = {"MODEL": str(babbler), "SESSIONS": str(tmp_path / "sessions"), "NOTE": str(note)}
        if name == "session":
            save = ["session", "save", "note", "-f", "NOTE", *COMMANDS[name][-6:]]
            assert cli.run([places.get(part, part) for part in save]) == 0
        return cli.run([places.get(part, part) for part in COMMANDS[name]])

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_a_terminal_is_not_controlled_by_a_model(
    name: str, call: Callable[[str], int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert call(name) == 0
    shown = capsys.readouterr()
    assert re.search(r"\\(x1b|x07|u001b|u0007)", shown.out)
    assert not CONTROLS.search(shown.out + shown.err)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_pipe_gets_the_text_as_it_is(
    name: str, call: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(name) == 0
    shown = capsys.readouterr()
    assert re.search("[\x1b\x07]", json.loads(shown.out)["text"] if name == "as JSON" else shown.out)
    assert not CONTROLS.search(shown.err)


def test_names_in_tables_and_json_do_not_control_it_either(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    bad = "a\x1b[2J\x07\x7f\x9b\u202eb"
    print_table(bad, ["name"], [[bad]])
    print_facts(bad, {"of": "it"})
    print_json({"name": bad, "ü": "ü"})
    shown = capsys.readouterr().out
    assert not CONTROLS.search(shown)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with ProgressBar() as bar:
        bar("reading", 1, 2, f"{bad}[bold]\n")
        bar.rename("reading", bad)
        (task,) = bar._progress.tasks
        assert (task.description, task.fields["text"]) == (escape_controls(bad), f"{escape_controls(bad)}[bold] ")
    assert json.loads(shown.splitlines()[-1]) == {"name": bad, "ü": "ü"}
    assert "ü" in shown


def spawn(*arguments: str, width: int = 40, program: str = "", **environment: str) -> Any:
    start = ["-c", f"{program}; from sala.cli import main; main()"] if program else ["-m", "sala"]
    return pexpect.spawn(
        sys.executable, [*start, *arguments], encoding="utf-8", codec_errors="replace", timeout=60,
        dimensions=(24, width), env={**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1", **environment},
    )  # fmt: skip


PLAIN = {"TERM": "dumb", "NO_COLOR": "1", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_a_narrow_terminal_without_colours_and_letters(tiny: Path) -> None:
    """40 columns, TERM=dumb, NO_COLOR and a locale of ASCII alone: nothing fails, and no sequence is written."""
    child = spawn("chat", "-m", str(tiny), "--regex", r"[\xe0-\xf6]{3}!", "--device", "cpu", **PLAIN)
    shown = ""
    for line in ("how are you?", "/show", "/bye"):
        child.expect("> ")
        shown += child.before
        child.send(line + "\r")
    child.expect(pexpect.EOF)
    shown += child.before
    child.close()
    assert child.exitstatus == 0
    assert "???!" in shown
    assert "2 sparse, 2 lightning" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("environment", "is_tty", "has_colours"),
    [({}, True, True), ({}, False, False), ({"NO_COLOR": ""}, True, False), ({"TERM": "dumb"}, True, False)],
)
def test_colours_only_where_they_are_wanted(
    environment: dict[str, str], is_tty: bool, has_colours: bool, tiny: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_tty)
    assert cli.run(["show", str(tiny)]) == 0
    assert ("\x1b[" in capsys.readouterr().out) == has_colours


SLOW = (
    "from sala.cli import progress; progress.PATIENCE = 0.1; import time; "
    "from sala.backends.torch.executor import TorchExecutor as T; run = T.run; "
    "T.run = lambda self, plan: (time.sleep(0.2), run(self, plan))[1]"
)


def test_ctrl_c_while_a_prompt_is_read(tiny: Path, tmp_path: Path) -> None:
    """The bar goes away, the cursor is shown again, and the exit code says what happened."""
    (tmp_path / "long.txt").write_text("word " * 20_000)
    child = spawn("generate", "-f", str(tmp_path / "long.txt"), "-m", str(tiny), width=100, program=SLOW, TERM="xterm")
    child.expect("reading")
    hidden = child.before
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert "Traceback" not in child.before
    assert (hidden + child.before).rfind("\x1b[?25h") > (hidden + child.before).rfind("\x1b[?25l") >= 0

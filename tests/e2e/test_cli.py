"""The command as people use it: answers on stdout, the rest on stderr, exit codes, one-line errors."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

from sala.cli.flags import count
from tests.command import sala

SALA = [sys.executable, "-m", "sala"]


def test_generate(tiny: Path) -> None:
    arguments = ["generate", "hello", "-m", str(tiny), "-n", "20", "-t", "0"]
    out = subprocess.run([*SALA, *arguments], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0
    assert len(out.stdout.strip()) > 5
    assert "prompt 24 tokens" in out.stderr
    assert "answer 20 tokens" in out.stderr
    assert "tok/s" in out.stderr
    assert "total" in out.stderr
    again = sala("generate", "hello", "-n", "20", "-t", "0", env={"SALA_MODEL": str(tiny)})
    assert again.stdout == out.stdout


def test_json(tiny: Path) -> None:
    out = sala("generate", "hello", "-m", str(tiny), "-n", "5", "--json", "--seed", "3")
    data = json.loads(out.stdout)
    assert len(data["token_ids"]) == data["usage"]["completion_tokens"] == 5
    assert data["finish_reason"] == "length"
    assert data["timings"]["predicted_per_second"] > 0


def test_files_stdin_raw_system_stop(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "doc.txt").write_text("a document")
    base = ["-m", str(tiny), "-t", "0", "-n", "12", "--json"]

    def prompt_tokens(*arguments: str, stdin: str = "") -> int:
        return json.loads(sala("generate", *arguments, *base, stdin=stdin).stdout)["usage"]["prompt_tokens"]

    assert prompt_tokens("q", "--raw") == 2  # BOS and one byte
    assert prompt_tokens("--raw", stdin="abc") == 4
    assert prompt_tokens("q", "--raw", "-f", str(tmp_path / "doc.txt")) == len("a document\n\nq") + 1
    assert prompt_tokens("q", "--raw", "-f", "-", stdin="xy") == len("xy\n\nq") + 1
    with_system = prompt_tokens("q", "-s", "be brief") - prompt_tokens("q")
    assert with_system == len("system\nbe brief\n") + 2
    text = json.loads(sala("generate", "q", *base).stdout)["text"]
    stopped = json.loads(sala("generate", "q", *base, "--stop", text[3:6]).stdout)
    assert stopped["text"] == text[: text.find(text[3:6])]
    assert stopped["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["generate", "x", "-m", "/nowhere"], 1, "no model at /nowhere"),
        (["generate", "x", "-m", "TINY/config.json"], 1, "config.json"),
        (["generate", "x", "-m", "TINY", "-t", "-1"], 2, "temperature"),
        (["generate", "x", "-m", "TINY", "--top-p", "2"], 2, "--top-p is 2; it must be"),
        (["generate", "x", "-m", "TINY", "-n", "0"], 2, "--max-tokens is 0; it must be"),
        (["generate", "x", "-m", "TINY", "--device", "tpu"], 2, "device"),
        (["generate", "x", "-m", "TINY", "--ctx", "lots"], 2, "ctx"),
        (["generate", "x", "-m", "TINY", "--ctx", "19"], 1, "raise the context"),
        (["generate", "-m", "TINY", "-f", "/nowhere"], 2, "cannot be read"),
        (["generate", "-m", "TINY", "-f", "/"], 2, "cannot be read"),
        (["generate", "-m", "TINY"], 2, "prompt is empty"),
        (["generate", "--bogus"], 2, "bogus"),
        (["frobnicate"], 2, "frobnicate"),
        (["show", "/nowhere"], 1, "no model"),
        (["init", "TINY"], 1, "exists already"),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, list) else str(item),
)
def test_errors(tiny: Path, arguments: list[str], code: int, words: str) -> None:
    out = sala(*(part.replace("TINY", str(tiny)) for part in arguments), env={"SALA_MODEL": ""})
    assert out.returncode == code
    assert words in out.stderr
    assert "Traceback" not in out.stderr
    assert out.stdout == ""
    if out.stderr.startswith("sala: "):
        assert out.stderr.count("\n") == 1


@contextmanager
def without_rights(path: Path) -> Iterator[None]:
    """Nobody may read these files; not even root, who steps down for as long."""
    path.chmod(0)
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(65534)
        yield
    finally:
        if is_root:
            os.seteuid(0)
        path.chmod(0o700)


@pytest.fixture
def public(tiny: Path) -> Iterator[Path]:
    """A directory that every user may read, with a model."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        shutil.copytree(tiny, Path(name) / "model")
        yield Path(name)


@pytest.mark.skipif(os.name != "posix", reason="needs permissions of Unix")
def test_files_that_may_not_be_read(public: Path) -> None:
    text, source, model = public / "text.txt", public / "in.jsonl", public / "model"
    for file in (text, source):
        file.write_text("hello")
    asked = {
        text: (2, ["generate", "-f", str(text), "-m", str(model)]),
        source: (2, ["batch", str(source), "-o", "out.jsonl", "-m", str(model)]),
        model: (1, ["generate", "x", "-m", str(model), "--device", "cpu"]),
    }
    for path, (code, arguments) in asked.items():
        sala(*arguments[:1], "--help")
        import_module("sala.llm")  # what a command imports when it runs: the interpreter may lie where only root reads
        import_module("sala.server.batch")
        with without_rights(path):
            out = sala(*arguments)
        assert out.returncode == code, out.stderr
        assert str(path) in out.stderr
        assert "Permission denied" in out.stderr
        assert out.stderr.count("\n") == 1


def test_binary_input(tiny: Path) -> None:
    out = sala("generate", "-m", str(tiny), "-f", "-", stdin=b"\xff\xfe\x00")
    assert out.returncode == 2
    assert "not UTF-8" in out.stderr


def test_a_closed_pipe_is_no_drama(tiny: Path) -> None:
    command = f"{sys.executable} -m sala generate hello -m {tiny} -n 400 -t 1 --seed 1 | head -c 5"
    out = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert len(out.stdout) == 5
    assert "Traceback" not in out.stderr
    assert "Exception" not in out.stderr


def test_ctrl_c(tiny: Path) -> None:
    process = subprocess.Popen(
        [*SALA, "generate", "hello", "-m", str(tiny), "-n", "200000", "-t", "0", "--stop", "never"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_show(tiny: Path) -> None:
    out = sala("show", str(tiny))
    assert out.returncode == 0
    assert "S··S" in out.stdout
    assert "memory at 1M" in out.stdout
    facts = json.loads(sala("show", str(tiny), "--json").stdout)
    assert facts["parameters"] == 739776
    assert facts["state_bytes"] == 2 * 8 * 16 * 16 * 4
    assert facts["cache_bytes"]["1M"] - facts["state_bytes"] == (1 << 20) * 2 * (2 * 128 + 10)


def test_a_prompt_longer_than_the_training_is_answered_with_a_warning(tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "short"
    shutil.copytree(tiny, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "trained_length": 30}))
    asked = ["generate", "--raw", "-m", str(model), "-n", "5", "-t", "0"]
    short, long = sala(*asked, "a" * 29), sala(*asked, "a" * 30)  # and BOS
    assert (short.returncode, long.returncode) == (0, 0)
    assert "trained on up to" not in short.stderr
    assert "trained on up to 30 tokens" in long.stderr
    assert long.stdout == sala(*[str(tiny) if part == str(model) else part for part in asked], "a" * 30).stdout
    assert "trained context 30 tokens" in " ".join(sala("show", str(model)).stdout.split())
    assert "trained on up to 30)" in sala("chat", "-m", str(model), stdin="/bye\n").stderr
    estimated = sala("estimate", str(model), "--ctx", "31")
    assert "trained on up to 30 tokens" in estimated.stderr


def test_show_knows_the_release() -> None:
    """The arithmetic of `show` on the released shapes gives the published memory."""
    from sala.backends.memory import cache_bytes, state_bytes, token_bytes
    from sala.checkpoint.random import RELEASED

    assert token_bytes(RELEASED, 2) == 8192 + 320
    assert state_bytes(RELEASED) == 48 << 20
    assert (cache_bytes(RELEASED, 1 << 20, 2)) / 2**30 == pytest.approx(8.31, abs=0.005)


def test_counts() -> None:
    assert [count(text) for text in ("4096", "128k", "128K", "1m", "1M", "0.5M")] == [
        4096, 128_000, 131_072, 1_000_000, 1 << 20, 1 << 19,
    ]  # fmt: skip


def test_version_and_help() -> None:
    assert sala("--version").stdout.startswith("sala 0.")
    assert "generate" in sala("--help").stdout


def test_the_prefill_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from sala.cli import progress

    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress.prefill_bar() as bar:
        bar(0, 1000)
        time.sleep(0.3)
        bar(400, 1000)
        time.sleep(0.3)
        bar(1000, 1000)
    shown = capsys.readouterr().err
    assert "400/1,000 tokens" in shown
    assert "tok/s" in shown

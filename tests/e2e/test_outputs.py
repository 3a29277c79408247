"""What a command would overwrite, or could not write, is refused before a model is loaded."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from sala.backends.torch import loader
from sala.cli import run
from sala.llm import LLM

FILES = {
    "batch": ["batch", "in.jsonl", "-o", "OUT.jsonl", "-m", "TINY"],
    "eval needle": ["eval", "needle", "--lengths", "600", "-o", "OUT.json", "-m", "TINY"],
    "eval ruler": ["eval", "ruler", "--lengths", "2k", "-o", "OUT.json", "-m", "TINY"],
    "eval reasoning": ["eval", "reasoning", "-o", "OUT.json", "-m", "TINY"],
    "eval lm": ["eval", "lm", "--tasks", "arc_easy", "-o", "OUT.json", "-m", "TINY"],
    "perplexity": ["perplexity", "text.txt", "--lengths", "64", "-o", "OUT.json", "-m", "TINY"],
    "bench latency": ["bench", "latency", "--json", "OUT.json", "-m", "TINY"],
    "bench throughput": ["bench", "throughput", "--json", "OUT.json", "-m", "TINY"],
    "bench against": ["bench", "against", "tiny-random", "--json", "OUT.json", "-m", "TINY"],
    "bench serve": ["bench", "serve", "--json", "OUT.json", "-m", "TINY"],
    "report": ["report", "in.jsonl", "-o", "OUT.html"],
    "a picture": ["bench", "latency", "--plot", "OUT.png", "-m", "TINY"],
}
DIRECTORIES = {
    "quantize": ["quantize", "TINY", "-o", "OUT"],
    "fuse": ["fuse", "TINY", "--whole", "-o", "OUT"],
    "export": ["export", "TINY", "-o", "OUT"],
    "train": ["train", "recipe.toml", "-o", "OUT", "-m", "TINY"],
    "convert": ["convert", "TINY", "-r", "recipe.toml", "-o", "OUT"],
    "finetune": ["finetune", "TINY", "--train", "in.jsonl", "-o", "OUT"],
    "init": ["init", "OUT"],
}
NEEDED = {"eval lm": "lm_eval", "finetune": "peft", "a picture": "matplotlib", "export": "transformers"}


@pytest.fixture(autouse=True)
def _no_model_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(LLM, "__init__", fail)
    monkeypatch.setattr(loader, "load_model", fail)
    monkeypatch.chdir(tmp_path)
    for name in ("in.jsonl", "text.txt", "recipe.toml"):
        Path(name).write_text("a few words\n")


def call(command: str, output: str, tiny: Path) -> int:
    library = NEEDED.get(command)
    if library is not None and find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    arguments = {**FILES, **DIRECTORIES}[command]
    return run([part.replace("TINY", str(tiny)).replace("OUT", output) for part in arguments])


@pytest.mark.parametrize("command", FILES)
def test_an_existing_file(command: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(part for part in FILES[command] if part.startswith("OUT")).replace("OUT", "mine")
    Path(name).write_text("mine")
    assert call(command, "mine", tiny) == 2
    assert f"{name} exists" in capsys.readouterr().err
    assert Path(name).read_text() == "mine"


@pytest.mark.parametrize("command", DIRECTORIES)
def test_an_existing_directory(command: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    assert call(command, "mine", tiny) == 1
    assert "mine exists already" in capsys.readouterr().err
    assert list(Path("mine").iterdir()) == []


@pytest.mark.parametrize("command", FILES)
def test_a_file_without_a_directory(command: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(command, "nowhere/out", tiny) == 2
    err = capsys.readouterr().err
    assert "cannot be written" in err
    assert "does not exist" in err


@pytest.mark.parametrize("command", DIRECTORIES)
def test_a_directory_below_a_file(command: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(command, "text.txt/out", tiny) == 1
    assert "text.txt/out cannot be made" in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("command", [*FILES, *DIRECTORIES])
def test_no_permission(command: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("closed").mkdir(mode=0o500)
    assert call(command, "closed/out", tiny) in (1, 2)
    assert "closed/out" in capsys.readouterr().err


def test_force_goes_on_to_load_the_model(tiny: Path) -> None:
    Path("out.json").write_text("mine")
    with pytest.raises(AssertionError, match="a model is loaded"):
        run(["eval", "needle", "--lengths", "600", "-o", "out.json", "-m", str(tiny), "--force"])

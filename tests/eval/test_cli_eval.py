"""`sala eval` and `sala needle` as people use them, on a tiny model with random weights."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sala import cli
from sala.cli.eval import default_name
from sala.cli.progress import duration
from sala.errors import MissingExtra, install_command
from sala.lab.report import charts
from sala.lab.report.record import Record
from tests.eval.test_tasks import copy_with_thoughts

NEEDLE = ["eval", "needle", "--lengths", "600,0.9k", "--depths", "0,100", "--trials", "1", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_needle(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*NEEDLE, "-m", str(tiny)]) == 0
    out = capsys.readouterr()
    assert "needles found: tiny, 1 trial per cell" in out.out
    assert "prefill tok/s" in out.out
    assert "[4/4] 900 tokens, depth 100 %: missed" in out.err
    assert "left" in out.err
    found = {file.name for file in tmp_path.iterdir()}
    assert found == {f"needle-tiny.{suffix}" for suffix in ("json", "csv", "png", "jsonl")}
    record = Record.load(Path("needle-tiny.json"))
    assert [(row["length"], row["depth"]) for row in record.results] == [(600, 0), (600, 100), (900, 0), (900, 100)]
    assert all(row["exact"] == 0 and row["prefill_per_second"] > 0 for row in record.results)
    assert record.plots == ["needle-tiny.png"]
    assert record.settings["haystack"] == "prose"
    assert len(Path("needle-tiny.csv").read_text().splitlines()) == 5

    before = Path("needle-tiny.jsonl").read_bytes()
    assert cli.run([*NEEDLE, "-m", str(tiny)]) == 0
    assert "4 of 4 cases are known" in capsys.readouterr().err
    assert Path("needle-tiny.jsonl").read_bytes() == before

    assert record.notes == Record.load(Path("needle-tiny.json")).notes == []

    more = [*NEEDLE, "-m", str(tiny), "--trials", "2"]
    assert cli.run(more) == 2
    assert "belongs to another run" in capsys.readouterr().err
    assert cli.run([*more, "--force"]) == 0
    assert "4 of 8 cases are known" in capsys.readouterr().err
    (note,) = Record.load(Path("needle-tiny.json")).notes
    assert note.startswith("4 of 8 cases come from an earlier run")
    assert cli.run(more) == 0  # nothing is measured, and the note stays
    assert Record.load(Path("needle-tiny.json")).notes == [note]
    assert Path("needle-tiny.jsonl").read_bytes().startswith(before)


def test_another_attention_is_another_run(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers of one attention are never told as those of another."""
    command = [*NEEDLE, "-m", str(tiny)]
    assert cli.run(command) == 0
    capsys.readouterr()
    assert cli.run([*command, "--attention", "dense"]) == 2
    assert "attention" in capsys.readouterr().err
    assert cli.run([*command, "--attention", "dense", "--force"]) == 0
    assert "cases are known" not in capsys.readouterr().err
    assert "dense at any length" in Record.load(Path("needle-tiny.json")).settings["attention"]
    text = Path("text.txt")
    text.write_text("It rained again. The road was empty. " * 60)
    measure = ["perplexity", str(text), "-m", str(tiny), "--lengths", "256", "--device", "cpu", "-o", "p.json"]
    assert cli.run(measure) == 0
    assert cli.run([*measure, "--attention", "dense"]) == 2


def test_own_haystack_and_places(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "book.txt").write_text("It rained again. The road was empty. " * 10)
    (tmp_path / "out").mkdir()
    (tmp_path / "figures").mkdir()
    options = ["--haystack", "book.txt", "-o", "out/run.json", "--plot", "figures/run.pdf", "--values", "number"]
    assert cli.run([*NEEDLE, "-m", str(tiny), *options]) == 0
    assert "book.txt has 369 tokens; longer texts repeat it" in capsys.readouterr().err
    assert Record.load(Path("out/run.json")).plots == ["../figures/run.pdf"]
    assert Path("figures/run.pdf").read_bytes().startswith(b"%PDF")
    assert not Path("out/run.png").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--lengths", "1k,600k"], 2, "lengths beyond the context: 600,000, and it holds 524,288 tokens"),
        (["--lengths", "1k,4k", "--ctx", "2k"], 2, "lengths beyond the context: 4,000, and it holds 2,000 tokens"),
        (["--lengths", "lots"], 2, "not a valid count"),
        (["--lengths", "12"], 2, "at least 256"),
        (["--depths", "0,101"], 2, "from 0 (start) to 100 (end)"),
        (["--depths", "-1"], 2, "from 0 (start) to 100 (end)"),
        (["--depths", "half"], 2, "percentages"),
        (["--trials", "0"], 2, "trials"),
        (["--preset", "polaris"], 2, "varied, aurora"),
        (["--preset", "aurora", "--keys", "3"], 2, "its own needle"),
        (["--values", "poem"], 2, "number, word, uuid, mixed"),
        (["--haystack", "nowhere.txt"], 2, "does not exist"),
        (["--output", "run.txt"], 2, "does not end in .json"),
        (["--output", "nowhere/run.json"], 2, "its directory does not exist"),
        (["--plot", "nowhere/run.png"], 2, "its directory does not exist"),
        (["--plot", "run.jpg"], 2, "does not end in .png, .pdf, .svg"),
        (["--model", "/nowhere"], 1, "no model"),
    ],
)
def test_refusals(
    arguments: list[str], code: int, words: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*NEEDLE, "-m", str(tiny), *arguments]) == code
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["needle-tiny.csv", "needle-tiny.png"])
def test_files_of_others_stay(name: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(name).write_text("mine")
    assert cli.run([*NEEDLE, "-m", str(tiny)]) == 2
    assert f"{name} exists and belongs to something else" in capsys.readouterr().err
    assert [file.read_text() for file in tmp_path.iterdir()] == ["mine"]


def test_lm_eval_runs_have_names_of_their_own() -> None:
    assert default_name(["arc_easy"], "tiny") == "lm-arc_easy-tiny.json"
    assert default_name(["a", "tasks/my own.yaml"], "tiny") == "lm-a+my-own-tiny.json"
    first, second = (default_name([f"task_{at}" for at in range(start, 40)], "tiny") for start in (0, 1))
    assert first != second
    assert max(len(first), len(second)) < 120


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0.4, 59, 61, 3599, 12_000)] == [
        "0 s",
        "59 s",
        "1 min",
        "1 h 0 min",
        "3 h 20 min",
    ]


def test_without_matplotlib(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def missing() -> None:
        raise MissingExtra("matplotlib", "eval")

    monkeypatch.setattr(charts, "need_matplotlib", missing)
    assert cli.run([*NEEDLE, "-m", str(tiny), "--plot", "run.png"]) == 1
    assert install_command("eval") in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert cli.run([*NEEDLE, "-m", str(tiny)]) == 0
    assert "there will be no picture" in capsys.readouterr().err
    assert Record.load(Path("needle-tiny.json")).plots == []


def test_ruler(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.jsonl").write_text('{"text": "The gate is green.", "question": "Which colour?", "answers": ["green"]}\n')
    arguments = ["eval", "ruler", "-m", str(tiny), "--lengths", "2k", "--trials", "1", "--questions", "own.jsonl"]
    names = ["single", "chain", "frequent", "questions"]
    assert cli.run([*arguments, "--tasks", ",".join(names), "--device", "cpu", "-o", "."]) == 0
    out = capsys.readouterr()
    assert out.out.splitlines()[0] == "scores: tiny, 1 trial per cell"  # not wrapped into the first column
    record = Record.load(Path("ruler-tiny.json"))
    assert [row["task"] for row in record.results] == names
    assert all(row["score"] < 0.5 for row in record.results)
    assert Path("ruler-tiny.png").is_file()
    assert cli.run([*arguments, "--tasks", "single,singel"]) == 2
    assert "singel" in capsys.readouterr().err


def test_reasoning_with_and_without_a_budget(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A random model never closes its thoughts by itself, and always when its budget is spent."""
    model = copy_with_thoughts(tiny, tmp_path / "model")
    arguments = ["eval", "reasoning", "-m", str(model), "-c", "2", "-n", "48", "--device", "cpu", "-o", "out.json"]
    assert cli.run([*arguments, "--budget", "8"]) == 0
    out = capsys.readouterr()
    assert "stuck in reasoning" in out.err
    assert "answered" in out.out
    results = {(row["task"], row["budget"]): row for row in Record.load(Path("out.json")).results}
    assert set(results) == {
        (task, budget) for task in ("arithmetic", "steps", "constraints", "all") for budget in (None, 8)
    }
    assert results["all", None]["stuck"] == 1
    assert results["all", None]["answered"] == 0
    assert results["all", 8]["stuck"] == 0
    assert results["all", None]["tokens"] == 48


def test_single_needle(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["needle", "-m", str(tiny), "--context-len", "1500", "--depth", "0.5", "--device", "cpu"]
    assert cli.run(arguments) == 0
    out = capsys.readouterr()
    assert "not found: the text says 739258" in out.err
    assert "depth 5" in out.err
    assert cli.run([*arguments, "--json", "--preset", "varied"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["is_exact"] is False
    assert row["depth_found"] == pytest.approx(0.5, abs=0.1)
    for wrong, words in (
        (["--depth", "1.5"], "from 0 (start) to 1 (end)"),
        (["--depth", "-0.1"], "from 0 (start) to 1 (end)"),
        (["--context-len", "600k"], "context-len beyond the context: 600,000"),
        (["--context-len", "100"], "too short"),
        (["--haystack", "x.txt"], "--preset varied"),
        (["--preset", "polaris"], "varied, aurora"),
    ):
        assert cli.run([*arguments, *wrong]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(tiny: Path, tmp_path: Path) -> None:
    program = "import sys; from sala import cli; sys.exit(cli.run(sys.argv[1:]))"
    options = ["--lengths", "6k,60k", "--depths", "0,50,100", "--trials", "1", "-m", str(tiny), "--device", "cpu"]
    command = [sys.executable, "-c", program, "eval", "needle", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "40"}
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment)
    log = tmp_path / "needle-tiny.jsonl"
    deadline = time.monotonic() + 60
    while not (log.is_file() and log.read_bytes().count(b"\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    known = log.read_bytes().count(b"\n")
    assert 2 <= known < 6
    assert f"stopped; {known} of 6 cases are in needle-tiny.jsonl" in err
    assert "the same command continues from there: sala eval needle --lengths 6k,60k" in err
    assert "Traceback" not in err
    assert not (tmp_path / "needle-tiny.json").exists()
    short = [*command, "--lengths", "6k"]
    done = subprocess.run(short, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "of 3 cases are known from an earlier run" in done.stderr

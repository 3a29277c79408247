"""Scripts in benchmarks/ that are meant for a GPU run through with a tiny model on a CPU."""

import ast
import importlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import outputs
from sala.engine.engine import WARM_LENGTHS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_serving.py"


def run(*arguments: str, script: Path = SCRIPT, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *arguments]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def test_every_script_finds_what_it_imports_from_the_package() -> None:
    files = [file for name in ("benchmarks", "docs", "models") for file in sorted((ROOT / name).rglob("*.py"))]
    assert len(files) > 40
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "sala":
                module = importlib.import_module(node.module or "")
                for one in node.names:
                    has = hasattr(module, one.name) or importlib.util.find_spec(f"{node.module}.{one.name}")
                    assert has, f"{file}, line {node.lineno}: {one.name}"


def test_every_part_of_gpu_serving_runs(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    parts = ["first_token", "decode", "load", "quantized", "prefill", "long"]
    more = ["peer256"] if os.environ.get("SALA_TEST_FULL") else []  # needs transformers, which is long to import
    out = run("--smoke", "--output", str(file), "--commit", "1234abc", *parts, *more)
    assert out.returncode == 0, out.stderr
    found = json.loads(file.read_text())
    assert set(found["first_token"]) == {"40", "512", "2048", "4096"}
    assert len(found["decode"]) == 5
    assert all(one["tokens"] > 0 and one["per_second"] > 0 for one in found["decode"].values())
    assert {name: one["answers"] for name, one in found["load"].items()} == {
        "64 of 2048/128": 4, "128 of 300/128": 8, "256 of 300/128": 16, "16 of 32768/256": 1,
    }  # fmt: skip
    assert set(found["prefill"]) == {"128K auto", "256K auto"}
    assert found["long"]["1M auto"]["decode"]["tokens"] > 0
    assert all("ratio" in one for one in found.get("peer256", {}).values())
    assert {one["run"]["commit"] for cases in found.values() for one in cases.values()} == {"1234abc"}
    assert not {one["cold_length"] for one in found["first_token"].values()} & set(WARM_LENGTHS)
    assert "256 of 300/128, tok/s out" in out.stdout


def test_gpu_kv_home_runs_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file, script = tmp_path / "figures.json", ROOT / "benchmarks" / "gpu_kv_home.py"
    given = ("--smoke", "--output", str(file), "--commit")
    assert run(*given, "1234abc", "decode", script=script).returncode == 0
    before = json.loads(file.read_text())
    out = run(*given, "5678def", script=script)
    assert out.returncode == 0, out.stderr
    found = json.loads(file.read_text())
    assert found["decode"] == before["decode"]
    assert "decode, device: measured already" in out.stdout
    homes = {"device", "host, least hot pool", "host, hot pool of 1 GB"}
    assert set(found["decode"]) == homes
    same = {home: is_same for home, is_same in found["same"]["auto"].items() if home != "run"}
    assert same == dict.fromkeys(homes | {"host, no hot pool"}, True)
    assert len({tuple(one["first"]) for one in found["decode"].values()}) == 1
    assert set(found["small"]) == {"FP8 pages", "host"}
    every = [found["long"]["4M"], *found["decode"].values(), *found["small"].values()]
    assert all(one[kind]["per_second"] > 0 for one in every for kind in ("own", "repeated"))
    assert found["long"]["4M"]["run"]["commit"] == "5678def"


def test_the_start_is_measured_in_processes_of_its_own_and_other_parts_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    machine = {"device": "a GPU", "date": "2026-01-02"}
    file.write_text(json.dumps({"decode": {"1 x 4K greedy": {"per_second": 200.0}}, "machine": machine}))
    out = run("--smoke", "--output", str(file), "start", SALA_KERNELS="off", BENCH_COMMIT="5678def")
    assert out.returncode == 0, out.stderr
    found = json.loads(file.read_text())
    assert found["start"]["fresh"]["num_lengths"] == 3
    assert set(found["start"]["fresh"]["kinds"]) == {
        "alone", "sampled", "penalised", "masked", "follow-up", "beside others",
    }  # fmt: skip
    assert found["start"]["fresh"]["run"]["commit"] == "5678def"
    assert found["decode"]["1 x 4K greedy"]["run"] == {"commit": "unknown", **machine}
    assert "stall_s" not in found["start"]["cached"]
    assert 0 < found["start"]["cached"]["engine_s"] < found["start"]["cached"]["ready_s"]
    assert found["decode"]["1 x 4K greedy"]["per_second"] == 200.0
    assert "decode 1 x 4K greedy" in out.stdout


@pytest.mark.parametrize(
    ("argument", "words"), [("everything", "use start, first_token"), ("--smoke", "--smoke needs --output")]
)
def test_unknown_parts_and_smoke_figures_among_real_ones_are_refused(
    argument: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), argument])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", ["attention", "block_selection", "lightning", "linear", "model", "quant", "sampling"])
def test_every_script_says_where_its_results_go(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ROOT / "benchmarks" / f"gpu_{name}.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "--output" in said
    assert "--commit" in said


def test_a_part_that_fails_is_told_by_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are measured, what is printed is written, and parts alone do not replace all results."""

    def good() -> None:
        print("measured")

    def bad() -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(outputs.torch.cuda, "get_device_name", lambda: "a GPU")
    script, file = tmp_path / "gpu_it.py", tmp_path / "elsewhere" / "it.txt"
    monkeypatch.setattr(sys, "argv", [str(script), "bad", "good", "--output", str(file), "--commit", "1234abc"])
    assert outputs.measure_text("It.", str(script), [good, bad]) == 1
    assert file.read_text().startswith("commit 1234abc date ")
    assert "measured" in file.read_text()
    monkeypatch.setattr(sys, "argv", [str(script), "good"])
    assert outputs.measure_text("It.", str(script), [good, bad]) == 0
    assert not script.with_suffix(".txt").exists()
    assert "out of luck" in capsys.readouterr().err


def test_a_commit_is_given_or_asked_of_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(outputs.VARIABLE, raising=False)
    assert outputs.stamp("1234abc")["commit"] == "1234abc"
    monkeypatch.setattr(outputs, "ROOT", tmp_path)  # no repository
    assert outputs.stamp()["commit"] == "unknown"
    monkeypatch.setenv(outputs.VARIABLE, "5678def")
    assert outputs.stamp()["commit"] == "5678def"

"""The same tasks of lm-eval in one process with the model, and through the server: the same results."""

import json
import sysconfig
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sala
from tests.clients.conftest import Environment
from tests.clients.test_clients import MODEL, PROGRAMS, TASKS

NAMES = ("sala_pick", "sala_generate", "sala_last_word", "sala_read")
Results = dict[tuple[str, str], float]
Install = Callable[..., Environment]


@pytest.fixture
def environment(install: Install, tmp_path: Path) -> Callable[..., str]:
    made = install("lm-eval[api]")

    def run(*command: str) -> str:
        return made.run(*command, folder=TASKS, HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1")

    return run


def run_inside(environment: Callable[..., str], record: Path, *more: str) -> str:
    places = f"{Path(sala.__file__).parents[1]}:{sysconfig.get_path('purelib')}"
    return environment(
        "python", str(PROGRAMS / "lm_eval_inside.py"), places, "--tasks", ",".join(NAMES), "--include-path", str(TASKS),
        "-m", MODEL, "--device", "cpu", "--ctx", "4096", "-o", str(record), "--samples", *more,
    )  # fmt: skip


def test_both_ways(environment: Callable[..., str], address: str, tmp_path: Path) -> None:
    table = run_inside(environment, tmp_path / "inside.json")
    assert all(name in table for name in NAMES)
    rows = json.loads((tmp_path / "inside.json").read_text())["results"]
    inside = {(row["task"], row["metric"]): row["value"] for row in rows}

    with urllib.request.urlopen(f"{address}/tokenizer_info") as answer:  # noqa: S310
        prefix = json.load(answer)["bos_token_id"]
    server = f"model={MODEL},base_url={address}/v1/completions,max_retries=1,custom_prefix_token_id={prefix}"
    environment(
        "lm_eval", "--model", "local-completions", "--model_args", server, "--include_path", str(TASKS),
        "--tasks", ",".join(NAMES), "--output_path", str(tmp_path / "outside"), "--log_samples",
    )  # fmt: skip
    outside = _read(next(tmp_path.glob("outside/**/results_*.json")))
    assert inside.keys() == outside.keys()
    assert inside == pytest.approx(outside, rel=1e-3)
    assert inside["sala_pick", "acc"] == 1

    written = _written((tmp_path / "inside.samples.jsonl").read_text())
    assert len(written) == 2
    assert written == _written(next(tmp_path.glob("outside/**/samples_sala_generate_*.jsonl")).read_text())


def _read(file: Path) -> Results:
    results: dict[str, dict[str, Any]] = json.loads(file.read_text())["results"]
    return {
        (task, name.removesuffix(",none")): value
        for task, found in results.items()
        for name, value in found.items()
        if name.endswith(",none") and "_stderr" not in name
    }


def _written(lines: str) -> dict[str, str]:
    """The answers of the generating task, by question."""
    samples = [json.loads(line) for line in lines.splitlines()]
    return {
        one["doc"]["question"]: one["resps"][0][0]
        for one in samples
        if one.get("task", "sala_generate") == "sala_generate"
    }

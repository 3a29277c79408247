"""The runner on a real model: exact with and without reuse, nothing measured twice, refusals before anything runs."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sala.errors import InputError
from sala.lab.eval import runner
from sala.lab.eval.documents import read_source
from sala.lab.eval.runner import (
    answer,
    check_lengths,
    count_shared,
    run_cases,
    run_problems,
    summarise,
    summarise_reasoning,
    write_csv,
)
from sala.lab.eval.suite import Suite, reasoning_tasks
from sala.lab.eval.tasks.case import PromptWriter
from sala.lab.report.kinds import plot_record
from sala.lab.report.record import Log, Record, commit, key_of, machine, versions
from sala.llm import LLM
from tests.eval.oracle import StandIn, solve


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny, device="cpu", ctx=4_000, max_batch=2)


@pytest.fixture(scope="module")
def suite(llm: LLM) -> Suite:
    return Suite(PromptWriter.for_model(llm.tokenizer), partial(read_source, None))


class Notes:
    """Writes down what a watch is told."""

    def __init__(self) -> None:
        self.begun: tuple[int, int, int] | None = None
        self.tokens: list[int] = []
        self.rows: list[dict[str, Any]] = []

    def begin(self, *counts: int) -> None:
        self.begun = counts  # type: ignore[assignment]

    def advance(self, num_tokens: int) -> None:
        self.tokens.append(num_tokens)

    def tell(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


def test_reuse_changes_no_answer(llm: LLM, suite: Suite, tmp_path: Path) -> None:
    jobs = suite.needle([1_500, 3_000], [0, 50, 100], 1)
    notes = Notes()
    rows = run_cases(llm, jobs, Log(tmp_path / "log"), {}, notes)
    deep = [row for row in rows if row["depth"] == 100]
    assert all(0.4 < row["cached_tokens"] / row["prompt_tokens"] < 0.6 for row in deep)  # all up to the needle before
    for job, row in zip(jobs, rows, strict=True):
        llm.reset()
        alone = answer(llm, job.make())
        assert alone.usage.cached_tokens == 0
        assert alone.text == row["text"]
        assert row["prefill_n"] == row["prompt_tokens"] - row["cached_tokens"]
        assert row["prefill_s"] > 0
        assert row["decode_s"] > 0
    assert llm.engine.is_idle
    assert notes.begun == (6, 0, 13_500)
    assert notes.tokens == sorted(notes.tokens)
    assert notes.tokens[-1] == 13_500
    assert notes.rows == rows


def test_several_questions_read_the_text_once(llm: LLM, suite: Suite, tmp_path: Path) -> None:
    rows = run_cases(llm, suite.ruler(["multikey"], [3_000], 4, per_text=4), Log(tmp_path / "log"), {})
    assert rows[0]["cached_tokens"] < 300
    assert all(row["cached_tokens"] > 2_000 for row in rows[1:])


def test_a_run_that_was_cut_off_goes_on(tiny: Path, suite: Suite, tmp_path: Path) -> None:
    jobs = suite.needle([1_500], [0, 50, 100], 2)
    path = tmp_path / "log.jsonl"
    first = run_cases(StandIn(tiny, solve), jobs, Log(path), {"seed": 0})  # type: ignore[arg-type]
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:40])  # killed in the middle of a line
    llm, notes = StandIn(tiny, solve), Notes()
    again = run_cases(llm, jobs, Log(path), {"seed": 0}, notes)  # type: ignore[arg-type]
    assert again == first
    assert len(llm.prompts) == 3
    assert notes.begun is not None
    assert notes.begun[:2] == (6, 3)
    assert path.read_bytes() == whole


def test_other_settings_are_other_cases(tiny: Path, suite: Suite, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    jobs = suite.needle([1_500], [0, 50], 1)
    more = suite.needle([1_500, 2_500], [0, 50], 1)
    counts = []
    for settings, wanted in (({"seed": 0}, jobs), ({"seed": 1}, jobs), ({"seed": 0}, more), ({"seed": 1}, jobs)):
        llm = StandIn(tiny, solve)
        assert len(run_cases(llm, wanted, Log(path), settings)) == len(wanted)  # type: ignore[arg-type]
        counts.append(len(llm.prompts))
    assert counts == [2, 2, 2, 0]


def test_a_file_that_is_no_log(tmp_path: Path) -> None:
    for text in ("hello\n", "{}\n", "[1]\n", '"x"\n'):
        (tmp_path / "log").write_text(text)
        with pytest.raises(InputError, match="not the log"):
            Log(tmp_path / "log")
    (tmp_path / "log").write_text("half a line" * 20)  # of a run that was killed at its first line
    log = Log(tmp_path / "log")
    log.append("k", {"a": 1})
    assert json.loads((tmp_path / "log").read_text()) == {"key": "k", "a": 1}


def test_interrupted_between_two_cases(tiny: Path, suite: Suite, tmp_path: Path) -> None:
    jobs = suite.needle([1_500], [0, 50, 100], 1)
    prompts: list[str] = []

    def interrupt(text: str) -> str:
        prompts.append(text)
        if len(prompts) == 2:
            raise KeyboardInterrupt
        return solve(text)

    with pytest.raises(KeyboardInterrupt):
        run_cases(StandIn(tiny, interrupt), jobs, Log(tmp_path / "log"), {})  # type: ignore[arg-type]
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_lengths_beyond_the_context(llm: LLM, suite: Suite, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"5,000, 9,000, and it holds 4,000 tokens.*--ctx 9000"):
        run_cases(llm, suite.needle([1_500, 5_000, 9_000], [0], 1), Log(tmp_path / "log"), {})
    assert not (tmp_path / "log").exists()
    check_lengths([4_000], 4_000)


def test_what_is_shared() -> None:
    one, other = np.array([1, 2, 3, 4], np.int32), np.array([1, 2, 9], np.int32)
    assert count_shared(one, other) == 2
    assert count_shared(one, one[:3]) == 3
    assert count_shared(one, np.zeros(0, np.int32)) == 0
    assert key_of({"a": 1, "b": 2}, {}) == key_of({"b": 2, "a": 1}, {}) != key_of({"a": 1}, {"b": 2})


def test_problems_run_together_and_are_known_afterwards(llm: LLM, tmp_path: Path, monkeypatch: Any) -> None:
    tasks = reasoning_tasks(["arithmetic", "constraints"], 2, 0, [None, 4])
    rows = run_problems(llm, tasks, 12, Log(tmp_path / "log"), {})
    assert [(row["task"], row["budget"]) for row in rows] == [
        (task.labels["task"], task.labels["budget"]) for task in tasks
    ]
    assert all(row["completion_tokens"] <= 12 for row in rows)
    monkeypatch.setattr(runner, "Call", lambda *_, **__: pytest.fail("everything is known"))
    assert run_problems(llm, tasks, 12, Log(tmp_path / "log"), {}) == rows


def test_tables_and_pictures(tmp_path: Path) -> None:
    row = {"prompt_tokens": 90, "prefill_n": 50, "prefill_s": 0.5, "decode_n": 0, "decode_s": 0.0}
    rows = [
        {"length": length, "depth": depth, "task": "single", "is_exact": depth < 50, "score": 0.25 + depth / 200, **row}
        for length in (1024, 2048)
        for depth in (0, 0, 50)
    ]
    cells = summarise(rows, ("length", "depth"))
    assert [(cell["length"], cell["depth"], cell["trials"]) for cell in cells] == [
        (1024, 0, 2), (1024, 50, 1), (2048, 0, 2), (2048, 50, 1),
    ]  # fmt: skip
    assert cells[0]["exact"] == 1
    assert cells[1]["exact"] == 0
    assert cells[1]["score"] == 0.5
    assert cells[0]["prefill_per_second"] == 100
    assert cells[0]["decode_per_second"] is None
    write_csv(cells, tmp_path / "cells.csv")
    lines = (tmp_path / "cells.csv").read_text().splitlines()
    assert lines[0].startswith("length,depth,trials,exact,score")
    assert lines[1] == "1024,0,2,1.0,0.25,90,100.0,"
    tasks = summarise(rows, ("task", "length"))
    for kind, results, name in (("needle", cells, "grid.png"), ("ruler", tasks, "tasks.png")):
        plot_record(Record(kind, "tiny", {}, results), tmp_path / name, "a title")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("grid.png", "tasks.png"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cells.csv", "grid.png", "tasks.png"]


def test_answered_correct_and_stuck_are_three_numbers() -> None:
    rows = [
        {"task": "steps", "budget": None, "is_answered": a, "is_correct": c, "is_stuck": s, "completion_tokens": 10}
        for a, c, s in ((True, True, False), (True, False, False), (False, False, True), (False, False, False))
    ]
    steps, everything = summarise_reasoning(rows)
    assert (steps["answered"], steps["correct"], steps["stuck"]) == (0.5, 0.25, 0.25)
    assert everything == {**steps, "task": "all"}


def test_records(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    record = Record("needle", "tiny", {"lengths": (1, 2)}, [{"a": None, "b": "ö"}], ["run.png"])
    record.save(file)
    assert Record.load(file).results == record.results
    record.results = []
    record.save(file)  # the same run may replace itself
    assert Record.load(file).results == []
    other = Record("needle", "tiny", {"lengths": (1, 3)})
    with pytest.raises(InputError, match="another run"):
        other.save(file)
    assert Record.load(file).settings == {"lengths": [1, 2]}
    other.save(file, force=True)
    assert Record.load(file).settings == {"lengths": [1, 3]}
    assert [one.name for one in tmp_path.iterdir()] == ["run.json"]
    facts = json.loads(file.read_text())
    assert facts["versions"] == versions()
    assert facts["machine"] == machine()
    assert facts["commit"] == commit()
    assert facts["date"].startswith("20")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a JSON object"),
        ("[]", "not a JSON object"),
        ("{}", "lacks"),
        ('{"kind": "needle"}', "lacks date, machine"),
    ],
)
def test_files_that_are_no_records(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(InputError, match=words):
        Record.load(file)
    with pytest.raises(InputError, match="another run"):
        Record("needle", "m", {}).save(file)
    assert file.read_text() == text


def test_a_record_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    record = Record("needle", "m", {})
    record.save(file)
    before = file.read_bytes()
    record.results = [{"a": float("nan")}]
    with pytest.raises(ValueError, match="JSON"):
        record.save(file)
    assert file.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["run.json"]
    with pytest.raises(InputError, match="cannot be read"):
        Record.load(tmp_path / "nowhere.json")
    with pytest.raises(InputError, match="kind"):
        Record("poetry", "m", {})

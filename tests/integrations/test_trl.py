"""Preferences: their files are checked by line; on demand TRL learns from them, with and without our command."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sala import LLM
from sala.errors import MissingExtra, install_command
from sala.lab.finetune.dialogues import BadData, ReaderOptions
from sala.lab.finetune.options import FinetuneOptions
from sala.lab.finetune.preference import load_preferences
from sala.lab.finetune.run import need_libraries
from sala.text.tokenizer import Tokenizer
from tests.clients.conftest import Environment
from tests.integrations.conftest import EXAMPLES, PROGRAMS, history

DATA = EXAMPLES / "data"
USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Hello"), ("assistant", "No"))
)
ASKED = [USER]


@pytest.fixture(scope="module")
def reading(tiny: Path) -> ReaderOptions:
    return ReaderOptions(Tokenizer.load(tiny), 1024, frozenset({257, 259}), 259)


def read(tmp_path: Path, reading: ReaderOptions, objective: str, *records: Any) -> list[dict[str, Any]]:
    file = tmp_path / "data.jsonl"
    file.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return [one.row for one in load_preferences(file, reading, objective=objective)[0]]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": ASKED, "chosen": GOOD, "rejected": BAD},
        {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {
            "conversations": [{"from": "human", "value": "Hi"}],
            "chosen": {"from": "gpt", "value": "Hello"},
            "rejected": {"from": "gpt", "value": "No"},
        },
    ],
    ids=["messages", "prompt", "texts", "whole", "sharegpt"],
)
def test_pairs_come_in_many_shapes(tmp_path: Path, reading: ReaderOptions, record: dict[str, Any]) -> None:
    assert read(tmp_path, reading, "dpo", record) == [{"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]}]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER, BAD], "label": False},
        {"prompt": "Hi", "completion": "No", "label": False},
        {"prompt": ASKED, "completion": [BAD], "label": False},
        {
            "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "No"}],
            "kto_tag": False,
        },
    ],
    ids=["messages", "texts", "prompt", "sharegpt"],
)
def test_marks_come_in_many_shapes(tmp_path: Path, reading: ReaderOptions, record: dict[str, Any]) -> None:
    assert read(tmp_path, reading, "kto", record) == [{"prompt": ASKED, "completion": [BAD], "label": False}]


@pytest.mark.parametrize(
    ("objective", "record", "words"),
    [
        ("dpo", {"messages": ASKED, "chosen": GOOD, "rejected": GOOD}, "are the same"),
        ("dpo", {"messages": ASKED, "chosen": GOOD}, "rejected is not an assistant"),
        ("dpo", {"messages": ASKED, "chosen": USER, "rejected": BAD}, "chosen is not an assistant"),
        ("dpo", {"chosen": "Hello", "rejected": "No"}, "prompt is missing"),
        ("dpo", {"messages": [GOOD], "chosen": GOOD, "rejected": BAD}, "twice in a row"),
        ("dpo", {"messages": ASKED, "chosen": {**GOOD, "content": " "}, "rejected": BAD}, "is empty"),
        ("dpo", {"messages": [{**USER, "content": "a" * 2000}], "chosen": GOOD, "rejected": BAD}, "raise --max-length"),
        ("dpo", {"messages": [{**USER, "content": "<|im_end|>"}], "chosen": GOOD, "rejected": BAD}, "control token"),
        ("dpo", {"messages": 7, "chosen": GOOD, "rejected": BAD}, "list of messages"),
        ("dpo", '{"messages": [', "is not JSON"),
        ("kto", {"messages": [USER, GOOD]}, "label is missing"),
        ("kto", {"messages": [USER, GOOD], "label": "good"}, "true \\(good\\) or false"),
        ("kto", {"messages": ASKED, "label": True}, "prompt is missing"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, reading: ReaderOptions, objective: str, record: Any, words: str) -> None:
    fine = {
        "dpo": {"messages": ASKED, "chosen": GOOD, "rejected": BAD},
        "kto": {"messages": [USER, GOOD], "label": True},
    }[objective]
    with pytest.raises(BadData, match=words) as caught:
        read(tmp_path, reading, objective, fine, record, fine)
    assert [problem.line for problem in caught.value.problems] == [2]


def test_our_own_files_are_fine(reading: ReaderOptions) -> None:
    pairs, _ = load_preferences(DATA / "preferences.jsonl", reading, objective="dpo")
    marks, _ = load_preferences(DATA / "feedback.jsonl", reading, objective="kto")
    assert 20 <= len(pairs) <= 50
    assert {one.row["label"] for one in marks} == {True, False}


def test_a_library_that_is_missing_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sala.lab.finetune.run.find_spec", lambda name: None if name == "trl" else name)
    options = FinetuneOptions(model="m", train=tmp_path / "a", output=tmp_path / "b", objective="dpo")
    with pytest.raises(MissingExtra, match=re.escape(install_command("train"))):
        need_libraries(options)
    need_libraries(FinetuneOptions(model="m", train=tmp_path / "a", output=tmp_path / "b"))


# From here on with TRL itself, on demand.


@pytest.fixture(scope="module")
def trl(environment: Callable[[str], Environment]) -> Environment:
    return environment("trl")


def finetune(trl: Environment, model: Path, output: Path, objective: str, *flags: str) -> list[dict[str, float]]:
    """`sala finetune` → its losses."""
    data = {"dpo": "preferences.jsonl", "kto": "feedback.jsonl"}[objective]
    command = ["sala", "finetune", str(model), "--objective", objective, "--train", str(DATA / data), "-o", str(output)]
    options = ["--accumulate", "1", "--epochs", "1", "--eval-share", "0.1", "--device", "cpu"]
    trl.run(*command, *options, *flags, OMP_NUM_THREADS="1")
    losses: list[dict[str, float]] = json.loads((output / "losses.json").read_text())["losses"]
    return losses


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("objective", ["dpo", "kto"])
@pytest.mark.parametrize(("method", "rate"), [("lora", "1e-3"), ("qlora", "1e-3"), ("full", "1e-4")])
def test_sala_finetune_learns(
    trl: Environment, pupil: Path, tmp_path: Path, objective: str, method: str, rate: str
) -> None:
    """It begins as its own reference, and ends where it prefers what it was told to."""
    output = tmp_path / "out"
    losses = finetune(trl, pupil, output, objective, "--method", method, "--lr", rate)
    evals = [row["eval"] for row in losses if "eval" in row]
    if objective == "dpo":
        assert evals[0] == pytest.approx(math.log(2), abs=1e-4)
    assert evals[-1] < 0.95 * evals[0]
    model, options = (output, {}) if method == "full" else (pupil, {"adapter": output})
    with LLM(model, device="cpu", ctx=512, **options) as llm:
        assert llm.chat(ASKED, max_tokens=4, temperature=0).token_ids


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("program", ["trl_dpo", "trl_kto", "trainer"])
def test_scripts_that_know_nothing_of_our_commands(trl: Environment, pupil: Path, tmp_path: Path, program: str) -> None:
    """`sala.register()` is all that a script of transformers or TRL needs."""
    trl.run(
        "python", str(PROGRAMS / f"{program}.py"), str(pupil), str(DATA), str(tmp_path / "out"), OMP_NUM_THREADS="1"
    )
    losses = history(tmp_path / "out")
    assert losses[-1] < losses[0]
    with LLM(tmp_path / "out", device="cpu", ctx=512) as llm:
        assert llm.chat(ASKED, max_tokens=4, temperature=0).token_ids

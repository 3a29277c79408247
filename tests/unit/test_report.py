"""The report at the end of a conversion, on a tiny dense model and its hybrid."""

import json
from pathlib import Path

import pytest

from sala.cli import run
from tests.train.dense import write_dense_model

WORDS = ("river", "ran", "past", "the", "old", "mill", "while", "rain", "fell", "on", "town", "and", "nobody", "spoke")

RECIPE = """
is_compiled = false

[sparse]
window_size = 64
topk = 4
dense_len = 256

[[stage]]
name = "align"
kind = "align"
steps = 2
seq_len = 64
batch_rows = 2

[[stage.data]]
path = "text.jsonl"

[[stage]]
name = "choose"
kind = "select"
layers = [0, 3]

[report]
texts = ["text.jsonl"]
tasks = ["tasks.jsonl"]
haystack = "text.jsonl"
lengths = [512, 2560]
trials = 1
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("report")
    write_dense_model(base / "dense")
    (base / "recipe.toml").write_text(RECIPE)
    texts = [" ".join(WORDS[(i * 7 + j * (i % 5 + 1)) % len(WORDS)] for j in range(80)) + "." for i in range(40)]
    (base / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    task = {"context": "Water is", "choices": ["wet", "a kind of stone"], "gold": 0}
    (base / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    recipe = ["-r", str(base / "recipe.toml"), "--device", "cpu"]
    assert run(["convert", str(base / "dense"), "-o", str(base / "hybrid"), *recipe]) == 0
    return base / "hybrid.run" / "report"


def rows(report: Path) -> dict[tuple[str, str | int | None], tuple[float | None, float | None]]:
    """Return the measures of the record: (measure, on) → (source, hybrid)."""
    record = json.loads((report / "report.json").read_text())
    assert record["settings"]["names"] == {"before": "source", "after": "hybrid"}
    return {(row["measure"], row["on"]): (row["before"], row["after"]) for row in record["results"]}


def test_both_models_are_measured(report: Path) -> None:
    found = rows(report)
    for which in (0, 1):
        assert (found["perplexity", "text.jsonl"][which] or 0) > 1
        assert 0 <= (found["accuracy", "tasks"][which] or 0) <= 1
        assert found["needles found", 512][which] is not None
        assert 0 <= (found["needles found", 512][which] or 0) <= 1
        assert (found["prefill", 512][which] or 0) > 0
    source, hybrid = found["parameters", None]
    assert source is not None
    assert hybrid is not None
    assert hybrid > source


def test_a_source_is_not_asked_beyond_its_length(report: Path) -> None:
    found = rows(report)
    for measure in ("needles found", "prefill", "decode"):
        assert {on for name, on in found if name == measure} == {512, 2560}
        assert found[measure, 2560][0] is None  # it was made for 2,048 tokens
        assert found[measure, 2560][1] is not None
        assert found[measure, 512][0] is not None


def test_tables_and_pictures(report: Path) -> None:
    text = (report / "report.md").read_text()
    for measure in ("perplexity", "accuracy", "needles found", "prefill", "decode"):
        assert f"| {measure} | " in text
    assert "| needles found | 2560 |  | " in text
    pytest.importorskip("matplotlib")
    assert (report / "report.png").read_bytes().startswith(b"\x89PNG")

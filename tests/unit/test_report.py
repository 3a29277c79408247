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


def test_both_models_are_measured(report: Path) -> None:
    found = json.loads((report / "report.json").read_text())
    for who in ("source", "hybrid"):
        assert found[who]["perplexity"]["text.jsonl"] > 1
        assert 0 <= found[who]["tasks"]["tasks"]["acc"] <= 1
        assert 0 <= found[who]["needle"]["512"] <= 1
        assert found[who]["speed"]["512"]["prefill"] > 0
    assert found["hybrid"]["parameters"] > found["source"]["parameters"]


def test_a_source_is_not_asked_beyond_its_length(report: Path) -> None:
    found = json.loads((report / "report.json").read_text())
    assert set(found["source"]["needle"]) == {"512"}  # it was made for 2,048 tokens
    assert set(found["hybrid"]["needle"]) == set(found["hybrid"]["speed"]) == {"512", "2560"}


def test_tables_and_pictures(report: Path) -> None:
    text = (report / "report.md").read_text()
    for title in ("Perplexity", "Multiple choice", "Needles found", "Reading", "Writing"):
        assert f"## {title}" in text
    assert "| 2,560 | – | " in text
    pytest.importorskip("matplotlib")
    for name in ("recall.png", "speed.png"):
        assert (report / name).read_bytes().startswith(b"\x89PNG")

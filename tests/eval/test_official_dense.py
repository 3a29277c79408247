"""`--against`: a dense model that transformers runs answers as greedy decoding without a cache does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sala import cli
from sala.lab.eval.official import models
from sala.lab.eval.official.case import Prepared, Question
from sala.lab.eval.official.models import TimedAnswer, TransformersModel
from sala.lab.report.record import Record
from tests.eval.benchmark_data import write_data
from tests.train.dense import write_dense_model

MOST = 12  # tokens of an answer
RNG = np.random.default_rng(5)
TRUNK, LEFT, RIGHT, OTHER = (RNG.integers(32, 127, size) for size in (70, 25, 40, 50))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "dense"
    write_dense_model(path, "qwen3")
    return path


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "CHUNK", 16)


def prompt(*parts: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([np.atleast_1d(part) for part in parts]).astype(np.int32)


def ask(model: TransformersModel, ids: np.ndarray[Any, Any], stops: tuple[str, ...] = ()) -> TimedAnswer:
    read: list[int] = []
    question = Question("t", 128, 0, "", (), lambda _: 0.0, MOST, stops=stops)
    answer = model.answer(Prepared(question, ids), (), lambda done, total: read.append(done))
    assert read[-1] == len(ids) == answer.num_prompt
    assert read[0] == min(len(ids), answer.num_cached + 16)
    return answer


@torch.no_grad()
def greedy(path: Path, ids: np.ndarray[Any, Any]) -> list[int]:
    """Return the tokens of an answer, each computed from the whole text."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)  # in evaluation mode
    tokens: list[int] = ids.tolist()
    for _ in range(MOST):
        tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(ids) :]


def test_models_with_other_weights_have_other_fingerprints(dense: Path, tmp_path: Path) -> None:
    """Answers of the one would be reported as those of the other: both directories have the same name."""
    write_dense_model(tmp_path / "dense", "qwen3")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    model.model.norm.weight.data[0] += 1
    model.save_pretrained(tmp_path / "dense")
    one, two = TransformersModel(dense, "cpu"), TransformersModel(tmp_path / "dense", "cpu")
    assert one.fingerprint == TransformersModel(dense, "cpu").fingerprint != two.fingerprint
    assert one.name == two.name


def test_what_prompts_share_is_kept_and_changes_no_token(dense: Path) -> None:
    model = TransformersModel(dense, "cpu")
    asked = [
        (prompt(TRUNK, LEFT), 0),
        (prompt(TRUNK, RIGHT), 70),  # the cache loses the rest of the first prompt, and its answer
        (prompt(TRUNK, RIGHT, OTHER), 110),
        (prompt(TRUNK, RIGHT), 109),  # the last token is computed again
        (prompt(OTHER, TRUNK), 0),
        (prompt(OTHER), 49),
    ]
    for ids, num_cached in asked:
        answer = ask(model, ids)
        assert answer.num_cached == num_cached
        assert (answer.num_written, answer.is_cut) == (MOST, True)
        assert answer.text == model.tokenizer.decode(greedy(dense, ids))
    assert min(model.speeds()) > 0
    assert ask(model, prompt(OTHER)).num_cached == 0  # measuring has used the cache


def test_an_answer_ends_at_a_stop(dense: Path, tmp_path: Path) -> None:
    ids = prompt(TRUNK)
    tokens = greedy(dense, ids)
    model = TransformersModel(dense, "cpu")
    whole = model.tokenizer.decode(tokens)
    at = next(at for at in range(2, MOST) if tokens[at] not in tokens[:at])  # the end of an answer, or of a stop
    for stop in (whole[2:4], whole[-2:]):
        answer = ask(model, ids, (stop,))
        assert answer.text == whole.partition(stop)[0]
        assert not answer.is_cut
    again = ask(model, prompt(TRUNK, LEFT))
    assert again.num_cached == len(TRUNK)  # the answer that was cut off is no part of it
    assert again.text == model.tokenizer.decode(greedy(dense, prompt(TRUNK, LEFT)))
    write_dense_model(tmp_path / "ending", "qwen3")
    (tmp_path / "ending" / "generation_config.json").write_text(json.dumps({"eos_token_id": [259, tokens[at]]}))
    ended = ask(TransformersModel(tmp_path / "ending", "cpu"), ids)
    assert ended.text == model.tokenizer.decode(tokens[:at])
    assert (ended.num_written, ended.is_cut) == (at + 1, False)


def test_both_models_are_asked_the_same(
    dense: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "CHUNK", 2048)
    (tmp_path / "data").mkdir()
    write_data(tmp_path / "data")
    run_it = [
        "eval",
        "official",
        "ruler",
        "-m",
        str(tiny),
        "--against",
        str(dense),
        "--data",
        "data",
        "--device",
        "cpu",
    ]
    run_it += ["--tasks", "niah_single_1,fwe", "--lengths", "2K,3K", "--limit", "2,1"]
    assert cli.run(run_it) == 0
    printed = capsys.readouterr()
    assert "dense: 2 of 6 cases are longer than its context" in printed.err  # of 2,048 tokens
    record = Record.load(Path("ruler-tiny.json"))
    cells = {(row["model"], row["task"], row["length"]): row["trials"] for row in record.results}
    assert cells == {
        ("tiny", "niah_single_1", 2048): 2, ("tiny", "fwe", 2048): 2, ("tiny", "mean of 2 of 13", 2048): 4,
        ("tiny", "niah_single_1", 3072): 1, ("tiny", "fwe", 3072): 1, ("tiny", "mean of 2 of 13", 3072): 2,
        ("dense", "niah_single_1", 2048): 2, ("dense", "fwe", 2048): 2, ("dense", "mean of 2 of 13", 2048): 4,
    }  # fmt: skip
    lines = [json.loads(line) for line in Path("ruler-tiny.jsonl").read_text().splitlines()]
    asked = {name: sorted((one["task"], one["number"], one["wanted"]) for one in lines if one["model"] == name and
                          one["length"] == 2048) for name in ("tiny", "dense")}  # fmt: skip
    assert asked["tiny"] == asked["dense"]
    assert cli.run([*run_it, "--force"]) == 0  # nothing is asked again
    assert Path("ruler-tiny.jsonl").read_text().count("\n") == len(lines) == 10

"""The training loop: it learns, it can be killed at any moment, it stops before it ruins what was saved."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sala.errors import InputError
from sala.lab.train import loop
from sala.lab.train.accelerated import Accelerated
from sala.lab.train.data import Mixture, StreamRows, TokenStream, TrainingRow
from sala.lab.train.loop import Diverged, OutOfTime, Progress
from sala.lab.train.objectives import Distil, NextToken
from sala.lab.train.steps import collate
from tests.train.small import learn, rows_of, small_mixture, small_model, small_stage

EXACT = {"rtol": 0, "atol": 0}


@pytest.fixture(autouse=True)
def _log_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOG_EVERY", 1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    small_model(path)
    small_model(path, 1)
    return path


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def logged(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def check_same(model: torch.nn.Module, whole: torch.nn.Module) -> None:
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(model)[name], weight, **EXACT, msg=name)


def test_overfits_one_batch(models: Path, tmp_path: Path) -> None:
    model = small_model(models)
    same = rows_of(1)
    mixture = Mixture([lambda index: same(index % 2)], [1.0], 0)
    stage = small_stage(steps=120, lr=2e-2, final_lr=1e-3, save_every=1000, batch_rows=2)
    log = learn(model, tmp_path, stage, mixture)
    assert log[0]["loss"] > 4
    assert log[-1]["loss"] < 0.05
    assert log[-1]["answer"] < 0.05


def test_rates_follow_the_schedule_and_the_groups(models: Path, tmp_path: Path) -> None:
    stage = small_stage(schedule="wsd", decay_steps=3, steps=6)
    log = learn(small_model(models), tmp_path, stage)
    assert [entry["rate"] for entry in log] == [stage.learning_rate.at(step) for step in range(6)]
    model = small_model(models)
    before = weights(model)
    learn(model, tmp_path / "one", small_stage(steps=1, warmup_steps=0, clip=0.0))
    moved = {name: float((weight - before[name]).abs().max()) for name, weight in weights(model).items()}
    # Adam's first step moves every weight by its rate, which is half for the MLPs
    assert moved["model.layers.0.mlp.up_proj.weight"] == pytest.approx(0.5e-2, rel=1e-2)
    assert moved["model.layers.0.self_attn.q_proj.weight"] == pytest.approx(1e-2, rel=1e-2)


@pytest.mark.parametrize("stop", [1, 5, 7, 11])
def test_a_run_that_stops_goes_on_as_if_it_had_not(models: Path, tmp_path: Path, stop: int) -> None:
    whole_model = small_model(models)
    whole = learn(whole_model, tmp_path / "whole")

    def note(progress: Progress) -> None:
        if progress.step == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn(small_model(models), tmp_path / "cut", note=note)
    model = small_model(models)
    assert learn(model, tmp_path / "cut") == whole == logged(tmp_path / "cut") == logged(tmp_path / "whole")
    assert [entry["step"] for entry in whole] == list(range(1, 13))
    check_same(model, whole_model)


def test_a_killed_process_goes_on(models: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.train.small", "killed", str(models), str(tmp_path / "cut")]
    assert subprocess.run(command, cwd=Path(__file__).parents[2], check=False).returncode == -9
    assert len(logged(tmp_path / "cut")) == 10
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')  # killed while it wrote
    model, whole_model = small_model(models), small_model(models)
    stage = small_stage(save_every=4)
    assert learn(model, tmp_path / "cut", stage) == learn(whole_model, tmp_path / "whole", stage)
    assert len(logged(tmp_path / "cut")) == 12
    check_same(model, whole_model)


def test_out_of_time_then_on(models: Path, tmp_path: Path) -> None:
    whole_model, model = small_model(models), small_model(models)
    whole = learn(whole_model, tmp_path / "whole")
    for _ in range(3):
        with pytest.raises(OutOfTime, match="of 12") as caught:
            learn(small_model(models), tmp_path / "cut", deadline=time.monotonic())
        assert caught.value.remedy
    assert len(logged(tmp_path / "cut")) == 3
    assert learn(model, tmp_path / "cut") == whole
    check_same(model, whole_model)


def test_a_finished_run_does_nothing_more(models: Path, tmp_path: Path) -> None:
    model = small_model(models)
    log = learn(model, tmp_path)
    done = small_model(models)
    assert learn(done, tmp_path) == log
    check_same(done, model)
    assert logged(tmp_path) == log


def test_a_loss_that_is_no_number_stops_the_run(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = small_model(models)
    learn(good, tmp_path / "good", small_stage(steps=5, schedule="constant"))
    update, calls = Accelerated.update, []

    def poisoned(learner, *rest):
        calls.append(1)
        if len(calls) == 8:
            with torch.no_grad():
                next(learner.wrapped.parameters()).fill_(float("nan"))
        update(learner, *rest)

    monkeypatch.setattr(Accelerated, "update", poisoned)
    stage = small_stage(schedule="constant")
    with pytest.raises(Diverged, match=r"loss is not finite at step 8; the state of step 5 is kept") as caught:
        learn(small_model(models), tmp_path / "bad", stage)
    assert "lr" in caught.value.remedy
    assert [entry["step"] for entry in logged(tmp_path / "bad")] == list(range(1, 8))
    again = small_model(models)
    log = learn(again, tmp_path / "bad", replace(stage, steps=5))
    assert [entry["step"] for entry in log] == list(range(1, 6))
    check_same(again, good)


def test_a_huge_rate_never_saves_what_is_no_number(models: Path, tmp_path: Path) -> None:
    with pytest.raises(Diverged):
        learn(small_model(models), tmp_path, small_stage(lr=1e30, warmup_steps=0, save_every=1, weight_decay=0.9))
    model = small_model(models)
    calls: list[int] = []

    def note(progress: Progress) -> None:
        calls.append(progress.step)
        raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, Diverged)):
        learn(model, tmp_path, small_stage(lr=0.0, final_lr=0.0, schedule="constant"), note=note)
    # what was kept was finite: its weights are those of a state that was saved, or of the beginning
    if calls:
        assert all(torch.isfinite(weight).all() for weight in weights(model).values())


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_parts_of_a_batch_equal_the_whole(models: Path, tmp_path: Path, packing: str) -> None:
    logs = [
        learn(small_model(models), tmp_path / str(size), small_stage(micro_rows=size, packing=packing, steps=4))
        for size in (4, 2, 1)
    ]
    for part in logs[1:]:
        for got, want in zip(part, logs[0], strict=True):
            assert got == pytest.approx(want, rel=1e-4)


def test_packing_changes_what_is_seen(models: Path, tmp_path: Path) -> None:
    stream, documents = (
        learn(small_model(models), tmp_path / packing, small_stage(packing=packing, steps=1))[0]
        for packing in ("stream", "documents")
    )
    assert stream["loss"] != pytest.approx(documents["loss"], rel=1e-3)


def test_the_loss_is_the_mean_over_what_is_learnt(models: Path, tmp_path: Path) -> None:
    from torch.nn.functional import cross_entropy

    from sala.backends.torch.batch import whole

    mixture = small_mixture()
    rows = [mixture(number) for number in range(4)]
    model = small_model(models)
    learnt, answered = [], []
    for row in rows:
        tokens = torch.from_numpy(row.tokens)
        with torch.no_grad():
            logits = model.logits(model(whole(tokens[None])))
        loss = cross_entropy(logits[:-1], tokens[1:], reduction="none")
        learnt += loss[row.loss_mask[1:]].tolist()
        answered += loss[row.answer[1:]].tolist()
    entry = learn(model, tmp_path, small_stage(steps=1))[0]
    assert entry["loss"] == pytest.approx(np.mean(learnt), rel=1e-5)
    assert entry["answer"] == pytest.approx(np.mean(answered), rel=1e-5)


def test_distilling_from_oneself_costs_nothing(models: Path, tmp_path: Path) -> None:
    log = learn(small_model(models), tmp_path, small_stage(steps=1, answer_weight=0.0), teacher=small_model(models))
    assert log[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert log[0]["norm"] == pytest.approx(0, abs=1e-4)


def test_distilling_comes_nearer(models: Path, tmp_path: Path) -> None:
    log = learn(small_model(models), tmp_path, small_stage(steps=40), teacher=small_model(models, 1))
    assert log[-1]["kl"] < 0.8 * log[0]["kl"]


def test_truth_alone_is_the_next_token(models: Path) -> None:
    """All truth and no teacher: the loss of a plain stage, but for what is shown."""
    student, teacher = small_model(models), small_model(models, 1)
    rows = collate([replace(rows_of(0)(index), truth=1.0) for index in range(3)], "stream")
    plain = rows._replace(truth=None)
    scales = torch.tensor([0.5, 0.25])
    told, shown = Distil(student, teacher)(rows, scales)
    torch.testing.assert_close(told, NextToken(student)(plain, scales)[0])
    torch.testing.assert_close(shown, Distil(student, teacher)(plain, scales)[1])


def test_errors_of_the_data_reach_the_caller(models: Path, tmp_path: Path) -> None:
    def broken(index: int) -> TrainingRow:
        raise InputError("data", "is broken", "mend it")

    with pytest.raises(InputError, match="broken"):
        learn(small_model(models), tmp_path, mixture=Mixture([broken], [1.0], 0))


def test_too_few_tokens() -> None:
    line = TokenStream(np.zeros(10, np.uint32), np.ones(10, np.bool_), np.array([10]))
    with pytest.raises(InputError, match="fewer than a row's 32"):
        StreamRows(line, 32, 0)

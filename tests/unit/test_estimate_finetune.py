"""`sala estimate --finetune`: what can be counted is what a run holds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sala.backends.memory import Tuning, estimate_tuning
from sala.checkpoint.names import expected_tensors
from sala.checkpoint.random import RELEASED
from sala.cli import run
from sala.config import SalaConfig
from sala.lab.finetune.frozen import FrozenLinear
from sala.lab.finetune.options import FinetuneOptions
from sala.lab.finetune.target import load_target

GIB = 1 << 30
PARAMETERS = 9_477_203_968


def facts(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(["estimate", "--shape", "9b", "--finetune", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_full_fine_tuning_counts_every_weight(capsys: pytest.CaptureFixture[str]) -> None:
    wide = facts(capsys, "full", "--ctx", "4K")
    assert (wide["weights"], wide["gradients"], wide["optimizer"]) == tuple(PARAMETERS * size for size in (4, 4, 8))
    narrow = facts(capsys, "full", "--ctx", "64K", "--optimizer", "adamw-bf16")
    assert (narrow["weights"], narrow["gradients"], narrow["optimizer"]) == tuple(PARAMETERS * n for n in (2, 2, 4))
    assert narrow["total"] < 139 * GIB  # one H200


def test_the_loss_never_holds_all_scores(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, "lora", "--ctx", "64K")
    assert found["loss"] < 65536 * RELEASED.vocab_size * 4 / 4


def test_activations_grow_with_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    short, long = (facts(capsys, "qlora", "--ctx", length)["activations"] for length in ("16K", "64K"))
    assert long == 4 * short
    shapes = expected_tensors(RELEASED)
    kept, again = (
        estimate_tuning(RELEASED, shapes, Tuning(has_checkpointing=has)).activations for has in (False, True)
    )
    assert kept > 5 * again


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_weights_are_those_of_the_model(tiny: Path, tmp_path: Path, method: str) -> None:
    options = FinetuneOptions(model="m", train=tmp_path / "t", output=tmp_path / "o", method=method, rank=3)
    model = load_target(tiny, options, torch.device("cpu"))
    config = SalaConfig.load(tiny)
    needed = estimate_tuning(config, expected_tensors(config), Tuning(method=method, rank=3, element_bytes=4))
    own = [buffer for module in model.modules() if isinstance(module, FrozenLinear) for buffer in module.buffers()]
    held = sum(one.numel() * one.element_size() for one in [*model.parameters(), *own])
    assert held == needed.weights + needed.adapter
    learning = sum(one.numel() * one.element_size() for one in model.parameters() if one.requires_grad)
    assert (learning, 2 * learning) == (needed.gradients, needed.optimizer)


def test_wrong_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["lore"], ["lora", "--optimizer", "sgd"], ["lora", "--dtype", "int3"]):
        assert run(["estimate", "--shape", "9b", "--finetune", *words]) == 2
    assert "use full, lora, qlora" in capsys.readouterr().err

"""Two processes over which the weights are sharded fine-tune as one process does."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sala.checkpoint.random import write_random
from sala.lab.finetune.run import finetune
from tests.train.test_finetune import CONFIG
from tests.train.test_spread import SHARDED, launch
from tests.train.tuned import options_of

FILES = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("spread")
    write_random(room / "model", CONFIG)
    talks = (
        [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "ab" * (i % 5) + "."}] for i in range(16)
    )
    (room / "train.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return room


def values(output: Path, name: str) -> list[float]:
    return [entry[name] for entry in json.loads((output / "losses.json").read_text())["losses"]]


def test_two_processes_learn_what_one_learns(room: Path, tmp_path: Path) -> None:
    settings = SHARDED | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "SalaLayer"}
    assert launch(2, settings, "tests.train.tuned", str(room), str(tmp_path / "two"), "full", "lora") == [0, 0]
    for method in ("full", "lora"):
        one, two = tmp_path / "one" / method, tmp_path / "two" / method
        finetune(options_of(room, one, method, 4))
        assert values(two, "loss") == pytest.approx(values(one, "loss"), rel=1e-4)
        assert values(two, "norm") == pytest.approx(values(one, "norm"), rel=1e-3)
        learnt, wanted = load_file(two / FILES[method]), load_file(one / FILES[method])
        assert set(learnt) == set(wanted)
        for name, tensor in wanted.items():
            torch.testing.assert_close(learnt[name], tensor, atol=1e-3, rtol=0, msg=name)

"""`--kernels off` of the commands that train or quantize: whole sequences are computed by the reference operations."""

import json
from pathlib import Path
from typing import Any

import pytest

from sala import cli
from sala.backends.torch.fast import dispatch
from sala.backends.torch.kernels import native
from sala.backends.torch.ops import Ops

RECIPE = """
[[stage]]
name = "more"
kind = "train"
seq_len = 64
batch_rows = 1
steps = 1
[[stage.data]]
path = "text.jsonl"
"""


class Forbidden(Exception):
    """A kernel was about to run."""


@pytest.fixture
def room(tmp_path: Path, tiny: Path) -> Path:
    (tmp_path / "model").symlink_to(tiny)
    messages = [{"role": "user", "content": "Tea?"}, {"role": "assistant", "content": "Yes, with bread."}]
    for name, count in (("short", 4), ("chat", 80)):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps({'messages': messages})}\n" * count)
    (tmp_path / "text.jsonl").write_text(f"{json.dumps({'text': 'the ship sails over a calm sea. ' * 40})}\n" * 4)
    (tmp_path / "text.txt").write_text("the ship sails over a calm sea. " * 200)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every implementation beside the reference raises."""

    def fail(*_: Any, **__: Any) -> Any:
        raise Forbidden

    monkeypatch.setattr(dispatch, "_FAST", Ops(fail, fail, fail, fail))
    monkeypatch.setattr(native, "load", fail)


def command(name: str, room: Path) -> list[str]:
    model, output = str(room / "model"), ["-o", str(room / "out")]
    return {
        "train": ["train", str(room / "recipe.toml"), "-m", model, *output],
        "finetune": [
            "finetune", model, "--train", str(room / "short.jsonl"), *output, "--max-length", "64", "--epochs", "1",
            "--no-recall", "--keep-long", "0",
        ],
        "draft train": [
            "draft", "train", "-m", model, "--data", str(room / "chat.jsonl"), *output, "--row", "64", "--epochs", "1",
            "--max-tokens", "8",
        ],
        "quantize": ["quantize", model, *output, "--calibration", str(room / "text.txt"), "--tokens", "1024"],
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", ["train", "finetune", "draft train", "quantize"])
def test_no_kernel_runs(name: str, room: Path, forbidden: None, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*command(name, room), "--device", "cpu"]
    with pytest.raises(Forbidden):
        cli.run(arguments)
    assert cli.run([*arguments, "--kernels", "off"]) == 0, capsys.readouterr().err
    assert (room / "out").is_dir()

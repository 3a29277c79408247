"""Weights that are not numbers: found by samples when a model is loaded, otherwise by its first answer."""

import re
import shutil
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from sala import LLM
from sala.backends.torch import selftest
from sala.checkpoint.finite import PIECE, SAMPLES, check_finite
from sala.checkpoint.reader import Checkpoint
from sala.cli import run
from sala.errors import CheckpointError, ModelBroken

NAN = np.uint32(0x7FC00000)


def spoil(model: Path, name: str, rows: slice) -> None:
    """Overwrite values of an fp32 tensor."""
    info = Checkpoint(model).tensors[name]
    assert info.dtype == "F32"
    file = np.memmap(info.file, np.uint32, "r+", info.start, ((info.end - info.start) // 4,))
    file.reshape(info.shape)[rows] = NAN
    file.flush()


@pytest.fixture
def copied(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def test_a_sound_model_passes(tiny: Path) -> None:
    check_finite(Checkpoint(tiny))


def test_a_damaged_tensor_is_named(copied: Path) -> None:
    spoil(copied, "model.layers.1.mlp.up_proj.weight", slice(3, 4))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight in .*not finite; get the file"):
        LLM(copied, device="cpu")


def test_doctor_finds_it(copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "trials", lambda _: {})
    spoil(copied, "lm_head.weight", slice(0, 8))
    assert run(["doctor", "-m", str(copied)]) == 1
    assert re.search(r"warning: lm_head\.weight in .*not finite", capsys.readouterr().out)


def test_large_tensors_are_sampled(tmp_path: Path) -> None:
    from sala.checkpoint.writer import write_file

    size = 10 * SAMPLES * PIECE
    values = np.zeros(size, np.float32)
    values[-(size // SAMPLES) :] = np.inf  # the last piece of 32
    write_file(tmp_path / "model.safetensors", {"w": ("F32", (size,))}, lambda _: memoryview(values).cast("B"), {})
    with pytest.raises(CheckpointError, match="w in"):
        check_finite(Checkpoint(tmp_path))


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_an_answer_of_no_numbers_is_an_error(copied: Path, backend: str) -> None:
    """One value that the samples miss, as it may be in a large tensor."""
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    spoil(copied, "model.norm.weight", slice(0, 1))
    with (
        patch("sala.llm.base.check_finite"),
        LLM(copied, backend=backend, device="cpu") as llm,
        pytest.raises(ModelBroken, match="values that are not numbers; its weights may be damaged"),
    ):
        llm.generate("hello", max_tokens=2)

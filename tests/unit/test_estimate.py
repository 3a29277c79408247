"""`sala estimate` for models with fewer bits: the sizes are those of the files that `sala quantize` writes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sala.backends.memory import USABLE, estimate, weight_bytes
from sala.checkpoint.names import count_parameters, expected_tensors
from sala.checkpoint.packing import packed_specs, quantize
from sala.checkpoint.random import RELEASED, TINY
from sala.checkpoint.reader import Checkpoint
from sala.checkpoint.writer import new_directory, write_weights
from sala.cli import run
from sala.cli.estimate import CONTEXTS, MEMORIES
from sala.cli.models import describe
from sala.quantization_config import Groups, QuantConfig
from tests.foreign import fp8_case, write

GIB = 1 << 30


def show(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["estimate", *words]) == 0
    return capsys.readouterr().out


def facts(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(show(capsys, *words, "--json"))
    return found


def write_quantized(target: Path, bits: int, group_size: int) -> int:
    """A checkpoint with 8-bit edges → bytes of its tensors."""
    wide = Groups(8, group_size)
    quantization = QuantConfig(bits, group_size, (("model.embed_tokens", wide), ("lm_head", wide)))
    config = replace(TINY, dtype="bfloat16", quantization=quantization)
    specs: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for name, shape in expected_tensors(config).items():
        specs[name], tensors[name] = ("BF16", shape), np.zeros(shape, np.uint16)
        if len(shape) == 2:
            module = name.removesuffix(".weight")
            groups = quantization.of(module)
            assert groups is not None
            packed = quantize(np.ones(shape, np.float32), groups.bits, group_size, "BF16")
            specs |= packed_specs(module, packed)
            parts = {"weight": packed.codes, "scales": packed.scales, "biases": packed.biases}
            tensors |= {f"{module}.{part}": value for part, value in parts.items()}
    with new_directory(target) as draft:
        write_weights(draft, specs, lambda name: np.ascontiguousarray(tensors[name]).data.cast("B"))
        (draft / "config.json").write_text(json.dumps(config.to_dict()))
    with Checkpoint(target) as checkpoint:
        return checkpoint.nbytes


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_a_quantized_file_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bits: int, group_size: int
) -> None:
    stored = write_quantized(tmp_path / "m", bits, group_size)
    parameters = count_parameters(expected_tensors(TINY))
    assert weight_bytes(TINY, parameters, bits, 2, group_size) == pytest.approx(stored, rel=0.01)
    assert facts(capsys, str(tmp_path / "m"))["weights"] == stored
    (row,) = facts(capsys, str(tmp_path / "m"), "--table")["rows"]
    assert (row["weights"], row["weight_bytes"]) == ("as stored", stored)


def test_the_released_shapes_need_no_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    weights = [
        facts(capsys, "--shape", "9b", *words)["weights"] / GIB for words in ([], ["--bits", "8"], ["--bits", "4"])
    ]
    assert weights == pytest.approx([17.65, 9.38, 5.24], abs=0.01)
    coarse = facts(capsys, "--shape", "9b", "--bits", "4", "--group-size", "128")["weights"] / GIB
    assert weights[2] - coarse == pytest.approx(9_477_203_968 / 128 * 4 / GIB, rel=1e-3)
    small, large = (facts(capsys, "--shape", "9b", "--chunk", chunk)["activations"] for chunk in ("256", "8K"))
    assert large > 4 * small


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = facts(capsys, "--shape", "9b", "--table")["rows"]
    assert [row["weights"] for row in rows] == ["bfloat16", "8 bits", "4 bits"]
    parameters = count_parameters(expected_tensors(RELEASED))
    for row, bits in zip(rows, (None, 8, 4), strict=True):
        assert list(row["total"]) == [str(ctx) for ctx in CONTEXTS]
        for memory in MEMORIES:
            most, free = row["longest"][str(memory)], USABLE * memory * GIB
            assert estimate(RELEASED, parameters, most + 64, bits=bits).total > free
            assert not most or estimate(RELEASED, parameters, most, bits=bits).total <= free
    text = show(capsys, "--shape", "9b", "--table").splitlines()
    assert text[1].split() == ["weights", "alone", "32K", "128K", "512K", "1M"]
    assert text[-1].split()[:2] == ["4", "bits"]
    assert text[-3].split()[1:3] == ["-", "-"]  # bf16 in 8 and 16 GB
    (row,) = facts(capsys, "--shape", "9b", "--table", "--bits", "8")["rows"]
    assert row == rows[1]


@pytest.mark.parametrize("words", [["--bits", "5"], ["--group-size", "48"], ["--shape", "70b"]])
def test_refusals(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert run(["estimate", "--shape", "9b", *words]) == 2
    assert "use " in capsys.readouterr().err


def test_fp8_weights_count_as_what_they_become(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write(tmp_path / "fp8", fp8_case("tensor"))
    assert facts(capsys, str(tmp_path / "fp8"))["weights"] == count_parameters(expected_tensors(TINY)) * 4


def test_a_list_says_how_groups_lie() -> None:
    assert describe({"bits": 4, "group_size": 128}) == "4 bits, groups of 128"
    assert describe({"bits": 4, "group_size": -1}) == "4 bits, one group per row"


def test_tensor_parallel(capsys: pytest.CaptureFixture[str]) -> None:
    """Each GPU holds its share; the two kv heads of the released model can be halved, and no further."""
    one, two, four = (facts(capsys, "--shape", "9b", "--ctx", "1M", "--batch", "3", "--tp", n) for n in "124")
    assert (two["weights"], two["pages"], two["states"]) == tuple(
        one[name] // 2 for name in ("weights", "pages", "states")
    )
    assert four["weights"] == one["weights"] // 4
    assert four["states"] == one["states"] // 4
    assert four["pages"] == two["pages"]
    assert "each of 2 GPUs" in show(capsys, "--shape", "9b", "--tp", "2")
    assert run(["estimate", "--shape", "9b", "--tp", "3"]) == 2
    assert "it must divide 32 heads" in capsys.readouterr().err

"""Base and overlay together: what is new is there, what is not is the base's, changes are added."""

import lzma
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sala.checkpoint.names import expected_tensors
from sala.checkpoint.overlay import CHANGE_GROUPS, assemble, overlay_files, read_overlay, widen
from sala.checkpoint.packing import Packed, dequantize, quantize
from sala.checkpoint.random import TINY
from sala.checkpoint.reader import Checkpoint
from sala.errors import CheckpointError
from sala.quantization_config import QuantConfig
from tests.smol_sala import pack

RNG = np.random.default_rng(0)
GROUPS = QuantConfig(5, 32)


class FakeBase:
    """Every tensor random; the embedding packed."""

    def __init__(self) -> None:
        shapes = expected_tensors(TINY)
        self.tensors = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    def read(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def read_packed(self, name: str) -> Packed | None:
        return quantize(self.tensors[name], 8, 32, "F16") if name == "model.embed_tokens.weight" else None


def test_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "overlay-1.safetensors.xz").write_bytes(lzma.compress(b"x" * 100)[:-9])
    with pytest.raises(CheckpointError, match=r"overlay-1\.safetensors\.xz is damaged; install the package again"):
        read_overlay(tmp_path, GROUPS)


def test_assembled(tmp_path: Path) -> None:
    base = FakeBase()
    mixer = RNG.standard_normal((128, 128)).astype(np.float32)
    norm = RNG.standard_normal(128).astype(np.float32)
    up, down = RNG.standard_normal((256, 3)).astype(np.float32), RNG.standard_normal((3, 128)).astype(np.float32)
    modules = {"model.layers.1.self_attn.q_proj": quantize(mixer, 5, 32, "F16")}
    modules |= dict(pack.changes({"model.layers.0.mlp.up_proj": (up, down)}))
    pack.write_overlay(tmp_path, modules, {"model.norm.weight": norm}, file_bytes=8_000)
    last = overlay_files(tmp_path)[-1]
    assert len(overlay_files(tmp_path)) > 1
    last.with_name(f"{last.name}.xz").write_bytes(lzma.compress(last.read_bytes()))
    last.unlink()
    config = assemble(tmp_path, replace(TINY, quantization=GROUPS), base, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with Checkpoint(tmp_path) as checkpoint:
        names = set(checkpoint.tensors)

        def read(name: str, dtype: type) -> np.ndarray:
            return np.frombuffer(checkpoint.read(name).data, dtype).reshape(checkpoint.tensors[name].shape)

        def matrix(module: str) -> np.ndarray:
            groups = config.quantization.of(module)
            parts = (
                read(f"{module}.weight", np.uint32),
                *(read(f"{module}.{p}", np.float16) for p in ("scales", "biases")),
            )
            return dequantize(Packed(*parts, groups.bits, groups.group_size, "F16"))

        new = "model.layers.1.self_attn.q_proj"
        np.testing.assert_array_equal(matrix(new), dequantize(modules[new]))
        assert config.quantization.of(new).bits == 8  # wider words, the same values
        np.testing.assert_array_equal(read("model.norm.weight", np.float32), norm)
        name = "model.layers.0.mlp.up_proj"
        stored = dequantize(modules[f"{name}.up"]).T @ dequantize(modules[f"{name}.down"])
        changed = quantize(base.tensors[f"{name}.weight"] + stored, 8, 32, "F16")
        np.testing.assert_array_equal(matrix(name), dequantize(changed))
        wanted = base.tensors[f"{name}.weight"] + up @ down
        assert np.linalg.norm(matrix(name) - wanted) < 0.01 * np.linalg.norm(wanted)
        untouched = "model.layers.2.mlp.up_proj.weight"
        np.testing.assert_array_equal(read(untouched, np.float32), base.tensors[untouched])
        packed = dequantize(base.read_packed("model.embed_tokens.weight"))
        np.testing.assert_array_equal(matrix("model.embed_tokens"), packed)
        assert "model.layers.0.mlp.up_proj.up.weight" not in names


def test_low_rank_finds_the_change() -> None:
    change = (RNG.standard_normal((90, 4)) @ RNG.standard_normal((4, 70))).astype(np.float32)
    up, down = pack.low_rank(change, 4)
    np.testing.assert_allclose(up @ down, change, atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(up), np.linalg.norm(down), rtol=0.01)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_wider_words_same_values(bits: int) -> None:
    packed = quantize(RNG.standard_normal((6, 128)).astype(np.float32), bits, 64, "F16")
    wide = widen(packed)
    np.testing.assert_array_equal(dequantize(wide), dequantize(packed))
    assert wide.bits in (4, 8)


def test_bits_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    pack.write_overlay(tmp_path, {"model.layers.1.self_attn.q_proj": quantize(np.ones((4, 64), np.float32), 4, 32)}, {})
    with pytest.raises(CheckpointError, match="does not have the bits"):
        read_overlay(tmp_path, GROUPS)
    with pytest.raises(CheckpointError, match="no overlay"):
        read_overlay(tmp_path / "empty", GROUPS)
    assert CHANGE_GROUPS.bits == 8

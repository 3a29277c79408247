"""Our packing against MLX itself: the same words, scales and biases, and a checkpoint as MLX writes it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sala
from sala.backends.torch.kernels import native
from sala.backends.torch.linears import AffineLinear
from sala.checkpoint.names import expected_tensors
from sala.checkpoint.packing import Packed, dequantize, pack, quantize, unpack
from sala.checkpoint.random import TINY, write_byte_tokenizer
from sala.config import SalaConfig
from sala.quantization_config import BITS, GROUP_SIZES
from tests.foreign import Tensors, save

mx = pytest.importorskip("mlx.core")
mx.set_default_device(mx.cpu)

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 5))  # outputs, groups
ENTRIES = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "zero": lambda rng, shape: np.zeros(shape),
    "constant": lambda rng, shape: np.full(shape, rng.standard_normal()),
    "positive": lambda rng, shape: rng.uniform(0.5, 1, shape),
    "negative": lambda rng, shape: -rng.uniform(0, 2, shape),
    "tiny": lambda rng, shape: rng.standard_normal(shape) * 1e-9,
    "large": lambda rng, shape: rng.standard_normal(shape) * 1e6,
    "whole": lambda rng, shape: rng.integers(-8, 8, shape),  # halves of steps: how ties are rounded
    "one": lambda rng, shape: np.eye(*shape),
}


@st.composite
def matrices(draw: st.DrawFn, group_size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    num_out, num_groups = draw(SHAPES)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    kinds = draw(st.lists(st.sampled_from(sorted(ENTRIES)), min_size=num_groups, max_size=num_groups))
    columns = [ENTRIES[kind](rng, (num_out, group_size)) for kind in kinds]
    return np.concatenate(columns, 1).astype(np.float32)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_quantizing(bits: int, group_size: int, data: st.DataObject) -> None:
    weight = data.draw(matrices(group_size))
    ours = quantize(weight, bits, group_size)
    words, scales, biases = (np.array(x) for x in mx.quantize(mx.array(weight), group_size=group_size, bits=bits))
    np.testing.assert_array_equal(ours.codes, words)
    np.testing.assert_array_equal(ours.scales.view(np.uint32), scales.view(np.uint32))
    np.testing.assert_array_equal(ours.biases + np.float32(0), biases + np.float32(0))  # 0 and -0 are one
    theirs = mx.dequantize(mx.array(words), mx.array(scales), mx.array(biases), group_size=group_size, bits=bits)
    scale = np.abs(weight).max()
    np.testing.assert_allclose(dequantize(ours), np.array(theirs), rtol=1e-6, atol=1e-6 * scale + 1e-30)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_where_every_code_lies(bits: int, group_size: int, data: st.DataObject) -> None:
    num_out, num_groups = data.draw(SHAPES)
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    codes = rng.integers(0, 1 << bits, (num_out, num_groups * group_size)).astype(np.uint8)
    words = pack(codes, bits)
    ones = mx.ones((num_out, num_groups))
    read = mx.dequantize(mx.array(words), ones, mx.zeros_like(ones), group_size=group_size, bits=bits)
    np.testing.assert_array_equal(np.array(read), codes)
    np.testing.assert_array_equal(unpack(words, bits, codes.shape[1]), codes)


def to_bf16(array: "mx.array") -> np.ndarray[Any, np.dtype[np.uint16]]:
    return np.array(array.astype(mx.bfloat16).view(mx.uint16))


def write_published(directory: Path, bits: int) -> dict[str, torch.Tensor]:
    """Every matrix but the embedding in groups of 64, all in one file → the weights as MLX dequantizes them."""
    directory.mkdir()
    rng = np.random.default_rng(bits)
    tensors: Tensors = {}
    plain = {}
    for name, shape in expected_tensors(TINY).items():
        size = shape[-1] ** -0.5 if len(shape) == 2 else 0.1
        values = (rng.standard_normal(shape) * size + (len(shape) == 1)).astype(np.float32)
        array = mx.array(values).astype(mx.bfloat16)
        if len(shape) == 2 and name != "model.embed_tokens.weight":
            words, scales, biases = mx.quantize(array, group_size=64, bits=bits)
            module = name.removesuffix(".weight")
            tensors[name] = ("U32", np.array(words))
            tensors[f"{module}.scales"] = ("BF16", to_bf16(scales))
            tensors[f"{module}.biases"] = ("BF16", to_bf16(biases))
            wide = (x.astype(mx.float32) for x in (scales, biases))
            array = mx.dequantize(words, *wide, group_size=64, bits=bits)
        else:
            tensors[name] = ("BF16", to_bf16(array))
        plain[name] = torch.from_numpy(np.array(array.astype(mx.float32)))
    save(directory / "model.safetensors", tensors)
    config = TINY.to_dict() | {"dtype": "bfloat16", "quantization": {"group_size": 64, "bits": bits}}
    (directory / "config.json").write_text(json.dumps(config))
    write_byte_tokenizer(directory)
    return plain


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_kernel", [True, False], ids=["packed", "expanded"])
def test_a_published_checkpoint(tmp_path: Path, bits: int, has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = write_published(tmp_path / "model", bits)
    assert [file.name for file in (tmp_path / "model").glob("*safetensors*")] == ["model.safetensors"]
    if not has_kernel:
        monkeypatch.setattr(native, "load", lambda: None)
    elif native.load() is None:
        pytest.skip("no C++ compiler")
    model = sala.load_model(tmp_path / "model", device="cpu", dtype="float32")
    assert isinstance(model.lm_head, AffineLinear) == has_kernel
    assert isinstance(model.model.embed_tokens, torch.nn.Embedding)
    with torch.device("meta"):
        reference = type(model)(SalaConfig.load(tmp_path / "model"))
    reference.load_state_dict(plain, assign=True)
    tokens = np.random.default_rng(0).integers(0, 256, 90).tolist()
    found, wanted = (_logits(one, tokens) for one in (model, reference.eval()))
    assert (found - wanted).abs().max() <= 1e-3
    assert wanted.abs().max() > 0.1


def _logits(model: Any, tokens: list[int]) -> torch.Tensor:
    caches = sala.create_layer_caches(model, max_tokens=128)
    return torch.cat([sala.forward(model, part, caches) for part in (tokens[:70], *([t] for t in tokens[70:]))])


def test_what_mlx_quantizes_in_half_precision() -> None:
    """MLX rounds a bf16 matrix's scales to bf16; the weights are those of our own reading of the three tensors."""
    weight = np.random.default_rng(0).standard_normal((5, 192)).astype(np.float32)
    words, scales, biases = mx.quantize(mx.array(weight).astype(mx.bfloat16), group_size=64, bits=4)
    held = Packed(np.array(words), to_bf16(scales), to_bf16(biases), 4, 64, "BF16")
    rounded = np.array(mx.array(weight).astype(mx.bfloat16).astype(mx.float32))
    ours = quantize(rounded, 4, 64, "BF16")
    np.testing.assert_array_equal(ours.codes, held.codes)
    np.testing.assert_array_equal(ours.scales, held.scales)
    np.testing.assert_array_equal(ours.biases, held.biases)

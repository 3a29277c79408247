"""Few-bit layouts: what MLX writes, bit for bit; and what is no such layout is refused."""

import numpy as np
import pytest

from sala.checkpoint.packing import Packed, decode, dequantize, encode, pack, quantize, unpack
from sala.errors import CheckpointError
from sala.quantization_config import BITS, GROUP_SIZES
from tests.golden import DATA

GOLDEN = np.load(DATA / "packing.npz")
CASES = sorted({name.rpartition("-")[0] for name in GOLDEN})
FILE_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_mlx(case: str) -> None:
    bits, group_size, name = case.split("-")
    dtype = FILE_DTYPES[name]
    weight = decode(GOLDEN[f"{case}-w"], dtype)
    packed = quantize(weight, int(bits), int(group_size), dtype)
    assert packed.shape == weight.shape
    for part in ("codes", "scales", "biases"):
        found, wanted = getattr(packed, part), GOLDEN[f"{case}-{part}"]
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8), err_msg=part)
    if f"{case}-values" in GOLDEN:
        np.testing.assert_allclose(dequantize(packed), GOLDEN[f"{case}-values"], rtol=1e-6, atol=1e-30)


def test_mlx_made_every_case() -> None:
    assert {tuple(map(int, case.split("-")[:2])) for case in CASES} == {(b, g) for b in BITS for g in GROUP_SIZES}
    assert {case.split("-")[2] for case in CASES} == set(FILE_DTYPES)


@pytest.mark.parametrize("bits", BITS)
def test_codes_survive(bits: int) -> None:
    rng = np.random.default_rng(bits)
    for shape in [(1, 32), (3, 96), (2, 5, 64), (0, 32)]:
        codes = rng.integers(0, 1 << bits, shape).astype(np.uint8)
        words = pack(codes, bits)
        assert words.shape[-1] * 32 == shape[-1] * bits
        np.testing.assert_array_equal(unpack(words, bits, shape[-1]), codes)


@pytest.mark.parametrize("bits", BITS)
def test_the_stream_of_bits(bits: int) -> None:
    codes = np.random.default_rng(1).integers(0, 1 << bits, (1, 64))
    stream = sum(int(code) << (index * bits) for index, code in enumerate(codes[0]))
    assert pack(codes, bits).tobytes() == stream.to_bytes(8 * bits, "little")


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_quantizing_twice_changes_nothing(dtype: str) -> None:
    weight = np.random.default_rng(2).standard_normal((4, 128)).astype(np.float32)
    packed = quantize(weight, 8, 64, dtype)
    assert packed.dtype == dtype
    error = np.abs(dequantize(packed) - weight)
    assert error.max() < {"F32": 0.02, "F16": 0.02, "BF16": 0.06}[dtype]


def test_bfloat16_is_rounded_to_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5, 0.0, 3.3e38], np.float32)
    assert decode(encode(values, "BF16"), "BF16").tolist()[:5] == [1.0, 1.0, 1.015625, -2.5, 0.0]


def test_refusals() -> None:
    ones = np.ones((2, 64), np.float32)
    words = np.zeros((2, 8), np.uint32)
    for bad in (
        lambda: quantize(ones, 7, 64),
        lambda: quantize(ones, 4, 48),
        lambda: quantize(ones, 4, 128),
        lambda: quantize(ones[0], 4, 64),
        lambda: quantize(ones * np.float32("nan"), 4, 64),
        lambda: quantize(ones, 4, 64, "F64"),
        lambda: pack(np.full((1, 32), 16), 4),
        lambda: pack(np.zeros((1, 31), np.uint8), 4),
        lambda: unpack(words, 4, 96),
        lambda: decode(ones, "F16"),
        lambda: dequantize(Packed(words, ones, ones, 4, 64, "BF16")),
    ):
        with pytest.raises(CheckpointError) as caught:
            bad()
        assert caught.value.remedy

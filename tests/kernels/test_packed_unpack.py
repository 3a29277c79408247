"""The PTX that unpacks codes, bit for bit, run by an emulator of the few instructions that it uses."""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from sala.backends.torch.kernels import packed, packed_unpack, packed_weight
from tests.kernels.test_packed import brain_floats as brain_floats


def emulate(text: str, registers: dict[str, int], is_bfloat: bool) -> dict[str, int]:
    """What the few instructions that unpack codes would leave in the registers; a pair in braces is one of 32 bits."""

    def read(name: str) -> int:
        if name.startswith("{"):
            low, high = name[1:-1].split(",")
            return read(low.strip()) | read(high.strip()) << 16
        return registers[name] if name in registers else int(name, 0)

    for line in text.strip()[1:-1].split(";"):
        name, *operands = re.findall(r"\{[^}]*\}|[^\s,]+", line) or [".reg"]
        if name == ".reg":
            continue
        result = INSTRUCTIONS[name.split(".")[0]]([read(each) for each in operands[1:]], is_bfloat)
        if operands[0].startswith("{"):
            low, high = operands[0][1:-1].split(",")
            registers[low.strip()], registers[high.strip()] = result & 0xFFFF, result >> 16
        else:
            registers[operands[0]] = result
    return registers


def rounded(value: Fraction, is_bfloat: bool) -> float:
    """The nearest number of these 16 bits, the even one of two; PyTorch would go by fp32 and round twice."""
    digits, smallest = (8, -133) if is_bfloat else (11, -24)
    step = Fraction(2) ** max(math.frexp(value)[1] - digits, smallest)
    return float(round(value / step) * step)


def permute(values: list[int], _: bool) -> int:
    source = values[0] | values[1] << 32
    return sum((source >> 8 * (values[2] >> 4 * i & 7) & 255) << 8 * i for i in range(4))


def logic(values: list[int], _: bool) -> int:
    a, b, c, table = values
    return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))


def multiply_add(values: list[int], is_bfloat: bool) -> int:
    dtype = torch.bfloat16 if is_bfloat else torch.float16
    halves = [torch.tensor([v], dtype=torch.uint32).view(dtype).double().tolist() for v in values]
    exact = [Fraction(a) * Fraction(b) + Fraction(c) for a, b, c in zip(*halves, strict=True)]
    found = torch.tensor([rounded(value, is_bfloat) for value in exact], dtype=torch.float64).to(dtype)
    return int(found.view(torch.int32)) & 0xFFFFFFFF


INSTRUCTIONS: dict[str, Callable[[list[int], bool], int]] = {
    "prmt": permute,
    "lop3": logic,
    "and": lambda values, _: values[0] & values[1],
    "fma": multiply_add,
    "mov": lambda values, _: values[0],
    "shr": lambda values, _: values[0] >> values[1],
}


def text_of(code: Any) -> str:
    return str(getattr(code, "value", code))


@pytest.mark.parametrize("is_bfloat", [True, False])
def test_the_instructions_of_gpus_unpack_bytes(is_bfloat: bool) -> None:
    """The interpreter knows no PTX: here is enough of it. Scales of two values per word show the order."""
    dtype = torch.bfloat16 if is_bfloat else torch.float16
    words = np.random.default_rng(8).integers(0, 1 << 32, 2, np.uint32).tolist()
    pairs = torch.tensor([[0.5, 3.0], [0.25, -1.0]], dtype=dtype)
    groups = pairs.view(torch.int32)[:, 0].tolist()
    for plane in range(4):
        values = (*words, *(group & 0xFFFFFFFF for group in groups))
        registers = dict(zip(("$1", "$2", "$3", "$4"), values, strict=True))
        raw = emulate(text_of(packed_unpack._bytes(plane, is_bfloat)), registers, is_bfloat)["$0"]
        found = torch.tensor([raw], dtype=torch.uint32).view(dtype)
        codes = [word >> plane * 8 & 255 for word in words]
        codes = [(code & 127) + 0.5 if code < 128 else -(code & 127) - 0.5 for code in codes]
        wanted = (torch.tensor(codes).double() * pairs[:, 0].double() + pairs[:, 1].double()).to(dtype)
        assert torch.equal(found, wanted), (plane, found, wanted)


@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
@pytest.mark.parametrize("kind", ["bf16", "bf16, large", "fp16"])
def test_the_instructions_of_gpus_unpack_nibbles(kind: str, group_size: int) -> None:
    """Every code in every place, bit for bit: of scales of any size and sign, of which there are two blocks."""
    is_bfloat, k = kind != "fp16", 512
    dtype = torch.bfloat16 if is_bfloat else torch.float16
    random = torch.Generator().manual_seed(group_size)
    codes = (torch.arange(16)[:, None] + 7 * torch.arange(k)) % 16
    words = (codes.view(16, -1, 8) << torch.arange(0, 32, 4)).sum(2).to(torch.uint32).view(torch.int32)
    low, high = {"bf16": (-60, 19), "bf16, large": (-20, 30), "fp16": (-10, 4)}[kind]
    exponents = torch.randint(low, high, (16, k // group_size), generator=random)
    exponents[0] = torch.tensor([low, high - 1, -7, -8]).repeat(4)[: k // group_size]
    scales = ((1 + 0.99 * torch.rand(exponents.shape, generator=random)) * 2.0**exponents).to(dtype)
    scales = torch.where(torch.rand(scales.shape, generator=random) < 0.5, scales, -scales)
    biases = (scales.float() * -16 * torch.rand(scales.shape, generator=random)).to(dtype)
    held = packed_weight.pack(words, scales, biases, 4, group_size, dtype)
    assert held.power == (packed_weight.POWER if kind == "bf16" else 0)
    count = held.groups.shape[2]
    groups = held.groups.unflatten(2, (-1, min(2, count))).transpose(2, 3).flatten(2).transpose(0, 1).flatten(1)
    found = torch.empty(16, k, dtype=dtype)
    for plane in range(16):
        text = text_of(packed_unpack._nibbles(plane % 8, is_bfloat, held.power, count <= 2))
        for row in range(16):
            group = int(groups[row, plane * 32 // group_size]) & 0xFFFFFFFF
            for pair, word in enumerate(held.codes[plane // 8, row, plane % 8 // 4 :: 2].tolist()):
                registers = emulate(text, {"$2": word & 0xFFFFFFFF, "$3": group}, is_bfloat)
                both = torch.tensor([registers["$0"], registers["$1"]], dtype=torch.uint16).view(dtype)
                found[row, plane * 32 + 2 * pair :][:2] = both
    middle = 0 if held.power else 8
    offsets = (biases.float() + middle * scales.float()).to(dtype)
    wide = [part.double().repeat_interleave(group_size, 1).flatten().tolist() for part in (scales, offsets)]
    exact = [
        (Fraction(code - middle) * Fraction(s) + Fraction(b)) / 2**held.power
        for code, s, b in zip(codes.flatten().tolist(), *wide, strict=True)
    ]
    wanted = torch.tensor([rounded(value, is_bfloat) for value in exact], dtype=torch.float64).to(dtype).view(16, k)
    assert torch.equal(found, wanted)
    if not torch.cuda.is_available():
        assert torch.equal(packed.expand(held), wanted * 2.0**held.power)

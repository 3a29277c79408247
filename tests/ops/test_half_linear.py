"""Weights of 16 bits on the CPU: fp32 arithmetic, whatever the number of rows, and a model that is closer for it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sala.backends.torch.executor import TorchExecutor, open_executor
from sala.backends.torch.fast.dispatch import put_half_linears
from sala.backends.torch.kernels import native
from sala.backends.torch.linears import DECODE_ROWS, HalfLinear
from sala.checkpoint.random import TINY, write_random
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.llm import LLM
from sala.protocol import Options, Row

pytestmark = pytest.mark.skipif(native.load() is None, reason="no C++ compiler")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def half_of(linear: nn.Linear) -> HalfLinear:
    model = nn.Sequential(linear)
    put_half_linears(model)
    assert isinstance(model[0], HalfLinear)
    return model[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (33, 2176), (2100, 2064)])
@torch.inference_mode()
def test_the_linear_in_fp32(monkeypatch: pytest.MonkeyPatch, dtype: str, shape: tuple[int, int]) -> None:
    monkeypatch.setattr(native, "multiplies_in", lambda _: False)
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0]).to(DTYPES[dtype])
    if dtype == "float16":
        linear.weight[0, :4] = torch.tensor([6e-8, -6e-8, 3e-5, 65504.0])  # subnormal ones, and the largest
    half = half_of(linear)
    assert half.weight is linear.weight
    assert torch.equal(half.expand(0, shape[0]), linear.weight.float())
    x = torch.randn(DECODE_ROWS + 3, shape[1])
    wanted = F.linear(x.double(), linear.weight.double(), linear.bias.double())
    bound = 1e-5 * wanted.abs().amax(0)
    for rows in (1, 2, 3, 5, 8, 15, DECODE_ROWS, DECODE_ROWS + 3):
        found = half(x[:rows])
        assert ((found - wanted[:rows]).abs().amax(0) <= bound).all()
        if rows <= DECODE_ROWS:
            assert torch.equal(found[0], half(x[0]))  # the same bits, alone or among others
    assert half(x.to(DTYPES[dtype]).view(1, *x.shape)).dtype == DTYPES[dtype]


def test_where_the_processor_multiplies_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "multiplies_in", lambda dtype: dtype == "bfloat16")
    half = half_of(nn.Linear(64, 32).bfloat16())
    x = torch.randn(DECODE_ROWS + 1, 64).bfloat16()
    torch.testing.assert_close(half(x), F.linear(x, half.weight) + half.bias)


@torch.inference_mode()
def test_what_is_left_alone() -> None:
    model = nn.ModuleDict({"wide": nn.Linear(16, 16), "odd": nn.Linear(24, 16).bfloat16(), "low": nn.Linear(32, 8)})
    model["low"].half()
    put_half_linears(model)
    assert [type(module) for module in model.values()] == [nn.Linear, nn.Linear, HalfLinear]


def open_model(path: Path, **options: object) -> TorchExecutor:
    settings = Options(ctx=2048, device="cpu", **options)  # type: ignore[arg-type]
    return open_executor(Checkpoint(path), SalaConfig.load(path), settings)


@pytest.mark.parametrize("sparse_from", [0, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_is_nearer_to_fp32_than_16_bits_are(tmp_path: Path, dtype: str, sparse_from: int) -> None:
    """Keys and values are rounded to 16 bits, and nothing else."""
    write_random(tmp_path / "m", replace(TINY, dtype=dtype))
    exact, found, rounded = (open_model(tmp_path / "m", dtype=kind) for kind in ("float32", dtype, dtype))
    assert found.fused is not None
    rounded.fused = None
    pages = tuple(range(found.capacity.num_pages))
    rng = np.random.default_rng(0)
    errors = {"native": 0.0, "model": 0.0}
    for start in range(0, 320, DECODE_ROWS):
        row = Row(tuple(rng.integers(0, 256, DECODE_ROWS).tolist()), start, pages, 1, sparse_from)
        wanted = exact.logits(row)
        errors["native"] += float(np.linalg.norm(found.logits(row) - wanted) / np.linalg.norm(wanted))
        errors["model"] += float(np.linalg.norm(rounded.logits(row) - wanted) / np.linalg.norm(wanted))
    assert 0 < errors["native"] < errors["model"] / 2
    assert {kv.k.dtype for kv in found.cache.pages.values()} == {DTYPES[dtype]}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_tokens_with_drafts(tmp_path: Path, dtype: str) -> None:
    write_random(tmp_path / "m", replace(TINY, dtype=dtype))
    prompt = np.random.default_rng(1).integers(0, 256, 60).tolist() * 2
    settings = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    plain, drafted = (
        LLM(tmp_path / "m", device="cpu", ctx=512, **options).generate(prompt, **settings).token_ids
        for options in ({}, {"speculate": "lookup", "num_draft": 4})
    )
    assert plain == drafted

"""Products of a few rows with a big weight: against torch, and against the passes that they take in."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sala.backends.torch.kernels import fused, linear
from sala.backends.torch.kernels.launch import Config
from sala.backends.torch.ops.dense import rms_norm
from tests.kernels.aot import Build

EPS = 1e-6
DTYPES = [torch.float32, torch.float16]
LIMITS = {80: 163 << 10, 90: 227 << 10, 120: 99 << 10}  # shared memory of a program
SHAPES = [(64, 64), (192, 576), (136, 320)]  # N, K


def tile(columns: int, depth: int, splits: int, num_warps: int, num_stages: int, is_swapped: bool = True) -> Config:
    sizes = {"COLUMNS": columns, "DEPTH": depth, "SPLITS": splits, "IS_SWAPPED": is_swapped}
    return Config(sizes, num_warps, num_stages)


CONFIGS = [
    None,
    tile(64, 64, 1, 4, 3),
    tile(16, 64, 2, 4, 3, is_swapped=False),
    tile(128, 128, 4, 4, 3),
    tile(32, 256, 8, 8, 4, is_swapped=False),
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs begin as NaN: whatever is not written shows."""
    empty = torch.empty

    def empty_of_nan(*args: Any, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", empty_of_nan)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    return request.param


def rows(count: int, width: int, dtype: torch.dtype, device: torch.device, before: int = 8) -> Tensor:
    """A view whose neighbours in memory are NaN; with 8 numbers before and behind, its rows are well aligned."""
    wide = torch.full((count, width + 2 * before), float("nan"))
    wide[:, before : width + before] = torch.randn(count, width)
    return wide.to(dtype).to(device)[:, before : width + before]


def weights(n: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The middle of a taller matrix, as of one that several projections share; its neighbours are NaN."""
    tall = torch.full((n + 2, k), float("nan"))
    tall[1:-1] = torch.randn(n, k) / k**0.5
    return tall.to(dtype).to(device)[1:-1]


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    if found.dtype == torch.float16:
        tolerance = 2e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_split_linear(shape: tuple[int, int], config: Config | None, dtype: torch.dtype, device: torch.device) -> None:
    n, k = shape
    x, weight = rows(32, k, dtype, device), weights(n, k, dtype, device)
    partials = linear.split_linear(x, weight, config)
    assert partials.shape[1:] == (32, n)
    assert partials.dtype == torch.float32
    if config is not None:
        splits, depth = config.tile["SPLITS"], config.tile["DEPTH"]
        assert partials.shape[0] == splits
        size = -(-k // (depth * splits)) * depth
        parts = [x.float()[:, i * size : (i + 1) * size] for i in range(splits)]
        pieces = [weight.float()[:, i * size : (i + 1) * size] for i in range(splits)]
        assert_near(partials, torch.stack([F.linear(*both) for both in zip(parts, pieces, strict=True)]), 1e-5)
    assert_near(partials.sum(0), F.linear(x.float(), weight.float()), 1e-5)


@pytest.mark.parametrize("config", [None, tile(64, 64, 1, 4, 3), tile(32, 128, 1, 4, 3, is_swapped=False)], ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_whole_products(
    shape: tuple[int, int], config: Config | None, dtype: torch.dtype, device: torch.device
) -> None:
    n, k = shape
    x, weight = rows(32, k, dtype, device), weights(2 * n, k, dtype, device)
    product = linear.linear(x, weight, config)
    assert product.dtype == dtype
    assert_near(product, F.linear(x.float(), weight.float()).to(dtype), 1e-5)
    found = linear.linear_silu_mul(x, weight, config)
    assert found.shape == (32, n)
    if config is None:
        assert_near(found, fused.silu_mul(product), 1e-5)
    else:
        assert torch.equal(found, fused.silu_mul(product))


@pytest.mark.parametrize("count", [33, 100, 128])
def test_tall_tiles(count: int, device: torch.device) -> None:
    torch.manual_seed(0)
    x, weight = rows(count, 192, torch.float16, device), weights(272, 192, torch.float16, device)
    wanted = F.linear(x.float(), weight.float())
    assert_near(linear.linear(x, weight), wanted.half())
    assert_near(linear.split_linear(x, weight).sum(0), wanted, 1e-4)
    assert_near(linear.linear_silu_mul(x, weight), fused.silu_mul(wanted.half()))


@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize("width", [64, 576, 1024])
def test_add_partials(splits: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    x, partials = rows(5, width, dtype, device, 3), torch.randn(splits, 5, width, device=device)
    weight = torch.randn(width, device=device).to(dtype)
    delta = partials[0]
    for part in partials[1:]:
        delta = delta + part
    total, normed = linear.add_partials_rms_norm(x, partials, 0.2475, weight, EPS)
    expected = fused.add_rms_norm(x, delta.to(dtype), 0.2475, weight, EPS)
    assert torch.equal(total, expected[0])
    assert_near(normed, expected[1])
    assert_near(normed, rms_norm(total, weight, EPS))


def test_small_model(dtype: torch.dtype, device: torch.device) -> None:
    """The second half of a layer: hidden size 576, MLP 1536."""
    x, gate_up = rows(32, 576, dtype, device), rows(32, 2 * 1536, dtype, device)
    weight, norm = weights(576, 1536, dtype, device), torch.randn(576, device=device).to(dtype)
    partials = linear.split_linear(fused.silu_mul(gate_up), weight)
    assert partials.shape[0] > 1
    total, normed = linear.add_partials_rms_norm(x, partials, 0.25, norm, EPS)
    down = F.linear(fused.silu_mul(gate_up).float(), weight.float()).to(dtype)
    expected = fused.add_rms_norm(x, down, 0.25, norm, EPS)
    assert_near(total, expected[0], 1e-5)
    assert_near(normed, expected[1], 1e-5)


@pytest.mark.parametrize("config", [None, tile(64, 64, 4, 4, 3, is_swapped=False)], ids=str)
def test_rows_do_not_see_each_other(config: Config | None, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = rows(32, 320, dtype, device), weights(192, 320, dtype, device)
    others = rows(32, 320, dtype, device) * 100
    others[0] = x[0]
    others[7] = float("nan")
    together = linear.split_linear(x, weight, config)
    assert torch.equal(linear.split_linear(others, weight, config)[:, 0], together[:, 0])
    assert torch.equal(linear.split_linear(x[:3], weight, config), together[:, :3])
    norm = torch.randn(192, device=device).to(dtype)
    residual = rows(32, 192, dtype, device)
    both = linear.add_partials_rms_norm(residual, together, 0.5, norm, EPS)
    alone = linear.add_partials_rms_norm(residual[:1], together[:, :1].contiguous(), 0.5, norm, EPS)
    assert all(torch.equal(a, b[:1]) for a, b in zip(alone, both, strict=True))


def test_rows_of_any_layout(dtype: torch.dtype, device: torch.device) -> None:
    weight = weights(128, 64, dtype, device)
    odd = rows(6, 64, dtype, device, 3)
    expected = linear.split_linear(odd.contiguous(), weight)
    assert torch.equal(linear.split_linear(odd, weight), expected)
    assert torch.equal(linear.split_linear(odd.T.contiguous().T, weight), expected)


def test_nothing(device: torch.device) -> None:
    x, weight = torch.zeros(0, 64, device=device), torch.ones(128, 64, device=device)
    partials = linear.split_linear(x, weight)
    assert partials.shape[1:] == (0, 128)
    assert linear.linear_silu_mul(x, weight).shape == (0, 64)
    total, normed = linear.add_partials_rms_norm(torch.zeros(0, 128, device=device), partials, 1.0, weight[:, 0], EPS)
    assert total.shape == normed.shape == (0, 128)


@pytest.mark.parametrize("limit", LIMITS.values())
def test_splits_are_of_the_shape_alone(limit: int) -> None:
    assert [linear._config(n, k, 2, limit).tile["SPLITS"] for n, k in ((4096, 4096), (4096, 16384), (16384, 4096))] == [
        2,
        2,
        1,
    ]
    assert linear._config(576, 576, 2, limit).tile["SPLITS"] == 2
    assert linear._config(64, 64, 2, limit).tile["SPLITS"] == 1


def test_one_build_serves_all_numbers_of_rows_that_fit_a_tile() -> None:
    limit = LIMITS[90]
    for low, high in ((1, 32), (33, 64), (65, 128)):
        builds = []
        for rows in range(low, high + 1):
            config = linear._config(4096, 4096, 2, limit, rows)
            builds.append((linear.linear_constants(rows, 4096, 4096, torch.bfloat16, config), config))
        assert all(build == builds[0] for build in builds)


def build(kernel: Any, constants: dict[str, Any], options: dict[str, Any], dtype: str = "bf16") -> Build:
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name == "partials_ptr" or (name == "out_ptr" and not constants.get("IS_PAIR", True)):
            signature[name] = "*fp32"
        elif name.endswith("_ptr"):
            signature[name] = f"*{dtype}"
        else:
            signature[name] = "fp32" if name in ("eps", "scale") else "i32"
    return Build(kernel, signature, constants, options)


def linear_build(n: int, k: int, config: Config, dtype: str = "bf16", rows: int = 32) -> Build:
    number = torch.float32 if dtype == "fp32" else torch.bfloat16
    constants = linear.linear_constants(rows, n, k, number, config)
    return build(linear._linear_kernel, constants, config.options, dtype)


def pair_build(config: Config, rows: int) -> Build:
    constants = linear.linear_constants(rows, 16384, 4096, torch.bfloat16, config, is_pair=True)
    return build(linear._linear_kernel, constants, config.options)


def builds_for(capability: int) -> list[Build]:
    """The released shapes as this device would have them, and a small model; what is early, from Hopper on."""
    limit = LIMITS[capability]
    down = linear._config(4096, 16384, 2, limit)
    pair, tall_pair = (linear._config(32768, 4096, 2, limit, rows, 1, is_pair=True) for rows in (32, 128))
    row = {"SPLITS": 4, "WIDTH": 4096, "BLOCK": 4096, "PDL": 2 if capability >= 90 else 0}
    if capability >= 90:
        down, pair = (config._replace(uses_pdl=True) for config in (down, pair))
    return [
        linear_build(4096, 4096, linear._config(4096, 4096, 2, limit)),
        linear_build(4096, 16384, down),
        pair_build(pair, 32),
        build(linear._add_norm_kernel, row, {"num_warps": 32, "enable_fp_fusion": False}),
        linear_build(576, 1536, linear._config(576, 1536, 4, limit), dtype="fp32"),
        *(linear_build(4096, 16384, linear._config(4096, 16384, 2, limit, rows=rows), rows=rows) for rows in (64, 128)),
        pair_build(tall_pair, 128),
    ]


def builds_80() -> list[Build]:
    return builds_for(80)


def builds_90() -> list[Build]:
    return builds_for(90)


def builds_120() -> list[Build]:
    return builds_for(120)


@pytest.mark.parametrize("capability", LIMITS)
def test_compiles(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.aot", str(capability), f"{__name__}:builds_{capability}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for kernel in found:
        assert kernel["spills"] == 0, kernel
        assert kernel["shared"] <= LIMITS[capability], kernel
    if capability == 90:
        assert all(kernel["has_wgmma"] for kernel in found[:3]), found

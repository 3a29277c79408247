"""The passes between matrix products: against the ops and the lines of the model that they stand for."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sala.backends.torch.kernels import fused
from sala.backends.torch.ops.dense import apply_rope, grow_queries, query_growth, rms_norm, rope_angles
from tests.kernels.aot import Build

EPS = 1e-6
DTYPES = [torch.float32, torch.float16]


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


def rows(count: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A view whose neighbours in memory are NaN."""
    wide = torch.full((count, width + 9), float("nan"))
    wide[:, 3 : width + 3] = torch.randn(count, width)
    return wide.to(dtype).to(device)[:, 3 : width + 3]


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    tolerance = 2e-6 if found.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", [1, 300, 1024])
def test_norms(width: int, dtype: torch.dtype, device: torch.device) -> None:
    x, delta = (rows(5, width, dtype, device) for _ in range(2))
    weight = torch.randn(width, device=device).to(dtype)
    assert_near(fused.rms_norm(x, weight, EPS), rms_norm(x, weight, EPS))
    total, normed = fused.add_rms_norm(x, delta, 0.2475, weight, EPS)
    assert torch.equal(total, x + delta * 0.2475)
    assert_near(normed, rms_norm(total, weight, EPS))


def test_weights_of_another_precision(device: torch.device) -> None:
    x, weight = rows(3, 48, torch.float16, device), torch.randn(48, device=device)
    assert_near(fused.rms_norm(x, weight, EPS), rms_norm(x, weight, EPS).half())


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("has_gate", [True, False])
def test_norm_gate(has_norm: bool, has_gate: bool, dtype: torch.dtype, device: torch.device) -> None:
    o, z = (rows(4, 200, dtype, device) for _ in range(2))
    weight = torch.randn(200, device=device).to(dtype)
    expected = rms_norm(o, weight, EPS) if has_norm else o
    expected = expected * torch.sigmoid(z) if has_gate else expected
    found = fused.norm_gate(o, weight if has_norm else None, z if has_gate else None, EPS)
    assert_near(found, expected)


@pytest.mark.parametrize(("heads", "groups", "dim"), [(9, 3, 64), (32, 2, 16), (4, 4, 20)])
@pytest.mark.parametrize("parts", ["norm rope growth", "norm rope", "growth", "rope", ""])
def test_qk(heads: int, groups: int, dim: int, parts: str, dtype: torch.dtype, device: torch.device) -> None:
    positions = torch.tensor([0, 3, 100_003, 999_999], device=device)
    projected = rows(4, (heads + groups) * dim, dtype, device)
    q = projected[:, : heads * dim].unflatten(1, (heads, dim))
    k = projected[:, heads * dim :].unflatten(1, (groups, dim))
    q_weight, k_weight = (
        (torch.randn(dim, device=device).to(dtype) for _ in range(2)) if "norm" in parts else (None,) * 2
    )
    cos, sin = rope_angles(positions, dim, 10000.0) if "rope" in parts else (None, None)
    growth = query_growth(positions, 512.0) if "growth" in parts else None

    q_expected, k_expected = q, k
    if q_weight is not None and k_weight is not None:
        q_expected, k_expected = rms_norm(q, q_weight, EPS), rms_norm(k, k_weight, EPS)
    if cos is not None and sin is not None:
        q_expected, k_expected = apply_rope(q_expected, cos, sin), apply_rope(k_expected, cos, sin)
    if growth is not None:
        q_expected = grow_queries(q_expected, positions, 512.0)
    given = fused.Heads(q_weight, k_weight, EPS, cos, sin)
    q_found, k_found = fused.qk_norm_rope(q, k, given, growth)
    assert_near(q_found, q_expected)
    assert_near(k_found, k_expected)


@pytest.mark.parametrize("width", [1, 150, 2100])
def test_silu_mul(width: int, dtype: torch.dtype, device: torch.device) -> None:
    both = rows(3, 2 * width, dtype, device)
    gate, up = both.chunk(2, 1)
    assert_near(fused.silu_mul(both), F.silu(gate) * up)
    assert_near(fused.silu_mul(torch.cat((up, gate), 1)), F.silu(up) * gate)


def test_nothing(device: torch.device) -> None:
    x, weight = torch.zeros(0, 8, device=device), torch.ones(8, device=device)
    assert fused.rms_norm(x, weight, EPS).shape == (0, 8)
    assert fused.silu_mul(x).shape == (0, 4)


def test_rows_do_not_see_each_other(device: torch.device) -> None:
    torch.manual_seed(3)
    x, delta = (rows(6, 128, torch.float16, device) for _ in range(2))
    weight = torch.randn(128, device=device).half()
    together = fused.add_rms_norm(x, delta, 0.5, weight, EPS)[1]
    alone = [fused.add_rms_norm(x[i : i + 1], delta[i : i + 1], 0.5, weight, EPS)[1] for i in range(6)]
    assert torch.equal(torch.cat(alone), together)


def build(kernel: Any, constants: dict[str, Any], num_warps: int) -> Build:
    """Pointers to bf16, to fp32 where the model has it; the rest are sizes."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("cos_ptr", "sin_ptr", "growth_ptr"):
            signature[name] = "*fp32"
        elif name.endswith("_ptr"):
            signature[name] = "*bf16"
        else:
            signature[name] = "fp32" if name in ("eps", "scale") else "i32"
    return Build(kernel, signature, constants, {"num_warps": num_warps})


def builds() -> list[Build]:
    row = {"WIDTH": 4096, "BLOCK": 4096}
    heads = {"H": 32, "G": 32, "D": 128}
    everything = {"HAS_NORM": True, "HAS_ROPE": True, "HAS_GROWTH": True}
    return [
        build(fused._rms_norm_kernel, row | {"HAS_DELTA": True, "scales_ptr": None}, fused.warps(4096)),
        build(fused._norm_gate_kernel, row | {"HAS_NORM": True, "HAS_GATE": True, "PDL": 0}, fused.warps(4096)),
        build(fused._qk_kernel, heads | everything, 2),
        build(fused._silu_mul_kernel, {"WIDTH": 16384, "BLOCK": fused.COLUMNS}, 4),
    ]


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_compiles(capability: int) -> None:
    command = [sys.executable, "-m", "tests.kernels.aot", str(capability), f"{__name__}:builds"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)
    assert len(found) == 4
    for kernel in found:
        assert kernel["spills"] == 0, kernel
        assert kernel["shared"] <= 99 * 1024, kernel

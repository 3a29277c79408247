"""Lightning attention in segments and in steps: against the readable twin, and steps against each other bit by bit."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from sala.backends.torch.kernels import fused, lightning
from sala.backends.torch.kernels.launch import Config
from sala.backends.torch.kernels.lightning import (
    Heads,
    lightning_decode,
    lightning_fold,
    lightning_prefill,
)
from sala.backends.torch.ops import lightning as reference
from tests.kernels.aot import Build

SLOPES = [0.84, 0.5, 0.07]
POINTERS = Config({"CHUNK": 16, "COLUMNS": 32, "STAGES": 1, "TMA": False}, 4)
DESCRIPTORS = Config({"CHUNK": 64, "COLUMNS": 64, "STAGES": 1, "TMA": True}, 4)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs begin as NaN: whatever is not written shows."""
    empty = torch.empty

    def empty_of_nan(*args: Any, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", empty_of_nan)


def projected(n: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views of one projection; the rows after them in memory are NaN."""
    fused = torch.full((n + 70, 4 * heads * dim), float("nan"))
    fused[:n] = torch.randn(n, 4 * heads * dim)
    fused = fused.to(dtype).to(device)
    q, k, v, _ = (x.view(n, heads, dim) for x in fused[:n].chunk(4, 1))
    return q, k, v


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


@pytest.mark.parametrize(
    ("n", "heads", "dim", "config", "segment"),
    [
        (1, 2, 32, POINTERS, 16),
        (63, 2, 64, POINTERS, 32),
        (65, 1, 64, DESCRIPTORS, 64),
        (300, 2, 64, DESCRIPTORS, 64),
        (300, 2, 32, DESCRIPTORS._replace(tile=DESCRIPTORS.tile | {"COLUMNS": 32}), 128),
        (130, 3, 32, POINTERS._replace(tile=POINTERS.tile | {"CHUNK": 32}), 64),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_prefill(
    n: int, heads: int, dim: int, config: Config, segment: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(n)
    q, k, v = projected(n, heads, dim, dtype, device)
    state, slopes = torch.randn(heads, dim, dim, device=device), torch.tensor(SLOPES[:heads], device=device)
    output, after = lightning_prefill(q, k, v, state, slopes, dim**-0.5, config, segment)
    expected, state = reference.lightning_prefill(q.float(), k.float(), v.float(), state, slopes, dim**-0.5)
    assert output.dtype == dtype
    assert distance(output, expected) < (3e-6 if dtype == torch.float32 else 1e-3)
    assert distance(after, state) < (1e-6 if dtype == torch.float32 else 1e-3)


def test_prefill_with_its_own_choices(device: torch.device) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(50, 64, 2, device=device).transpose(1, 2) for _ in range(3))  # not as rows lie in memory
    state, slopes = torch.randn(2, 64, 64, device=device), torch.tensor(SLOPES[:2], device=device)
    output, after = lightning_prefill(q, k, v, state, slopes, 0.125)
    expected, state = reference.lightning_prefill(q, k, v, state, slopes, 0.125)
    assert distance(output, expected) < 3e-6
    assert distance(after, state) < 1e-6


@pytest.mark.parametrize("tokens", [1, 1000, 8192, 32768, 131072, 1 << 20])
@pytest.mark.parametrize("heads", [9, 32])
def test_segments_fill_the_gpu(tokens: int, heads: int) -> None:
    segment = lightning._segment(tokens, heads, 64, 132)
    assert segment % 64 == 0
    assert segment <= lightning.LONGEST_SEGMENT
    if tokens >= 8192:
        assert -(-tokens // segment) * heads >= 132


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_steps(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(1)
    n, heads, dim, scale = 4, 2, 64, 0.125
    q, k, v = (x.unflatten(0, (3, n)) for x in projected(3 * n, heads, dim, dtype, device))
    states = torch.randn(6, heads, dim, dim, device=device)
    states[1] = float("nan")  # nobody's
    slots, slopes = torch.tensor([4, -1, 0], device=device), torch.tensor(SLOPES[:2], device=device)
    before = states.clone()

    guessed = lightning_decode(q, k, v, states, slots, slopes, scale, keeps_states=True)
    assert torch.equal(states.nan_to_num(), before.nan_to_num())
    assert not guessed[1].any()

    after = states.clone()
    decoded, history = [], [states.clone()]
    for token in range(n):
        decoded.append(lightning_decode(q[:, token], k[:, token], v[:, token], after, slots, slopes, scale))
        history.append(after.clone())
    assert torch.equal(torch.stack(decoded, 1), guessed)
    for row, slot in ((0, 4), (2, 0)):
        wide = (x[row].float() for x in (q, k, v))
        expected, state = reference.lightning_prefill(*wide, before[slot], slopes, scale)
        assert distance(guessed[row], expected) < (1e-6 if dtype == torch.float32 else 1e-3)
        assert distance(after[slot], state) < 1e-6
    untouched = [1, 2, 3, 5]
    assert torch.equal(after[untouched].nan_to_num(), before[untouched].nan_to_num())

    counts = torch.tensor([3, 2, 0], device=device)
    lightning_fold(k, v, states, slots, counts, slopes)
    assert torch.equal(states[4], history[3][4])
    assert torch.equal(states[0], before[0])
    assert torch.equal(states[untouched].nan_to_num(), before[untouched].nan_to_num())


@pytest.mark.parametrize(("has_norm", "has_rope"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_steps_norm_and_rotate(dtype: torch.dtype, has_norm: bool, has_rope: bool, device: torch.device) -> None:
    """Queries and keys as `qk_norm_rope` would have made them, in steps, guesses and folds alike."""
    torch.manual_seed(3)
    n, heads, dim, scale = 3, 2, 64, 0.125
    q, k, v = projected(2 * n, heads, dim, dtype, device)
    norms = [(1 + torch.randn(dim, device=device) / 4).to(dtype) if has_norm else None for _ in range(2)]
    angles = [torch.randn(2 * n, dim, device=device) if has_rope else None for _ in range(2)]
    given = Heads(*norms, 1e-6, *angles)
    states, slopes = torch.randn(2, heads, dim, dim, device=device), torch.tensor(SLOPES[:2], device=device)
    slots, counts = torch.tensor([1, 0], device=device), torch.tensor([n, n - 1], device=device)
    made = [x.unflatten(0, (2, n)) for x in fused.qk_norm_rope(q, k, given)]
    q, k, v = (x.unflatten(0, (2, n)) for x in (q, k, v))
    near = 1e-6 if dtype == torch.float32 else 1e-3

    guessed = lightning_decode(q, k, v, states, slots, slopes, scale, heads=given, keeps_states=True)
    assert distance(guessed, lightning_decode(*made, v, states, slots, slopes, scale, keeps_states=True)) < near
    after, decoded = states.clone(), []
    for token in range(n):
        rows = slice(token, None, n)  # of the angles
        here = (
            given._replace(cos=None, sin=None)
            if not has_rope
            else given._replace(cos=given.cos[rows].contiguous(), sin=given.sin[rows].contiguous())
        )
        decoded.append(lightning_decode(q[:, token], k[:, token], v[:, token], after, slots, slopes, scale, heads=here))
    assert torch.equal(torch.stack(decoded, 1), guessed)
    folded, expected = states.clone(), states.clone()
    lightning_fold(k, v, folded, slots, counts, slopes, given)
    lightning_fold(made[1], v, expected, slots, counts, slopes)
    assert distance(folded, expected) < near
    assert torch.equal(folded[1], after[1])


def test_rows_do_not_see_each_other(device: torch.device) -> None:
    torch.manual_seed(2)
    q, k, v = projected(4, 2, 32, torch.float32, device)
    states, slopes = torch.randn(4, 2, 32, 32, device=device), torch.tensor(SLOPES[:2], device=device)
    slots = torch.tensor([2, 0, 3, 1], device=device)
    alone = [
        lightning_decode(q[i : i + 1], k[i : i + 1], v[i : i + 1], states.clone(), slots[i : i + 1], slopes, 0.2)
        for i in range(4)
    ]
    assert torch.equal(torch.cat(alone), lightning_decode(q, k, v, states, slots, slopes, 0.2))


def prefill_build(config: Config, dtype: str, dim: int, heads: int) -> Build:
    row = 4 * heads * dim
    signature = dict.fromkeys(lightning._prefill_kernel.arg_names, "constexpr")
    chunk, columns = config.tile["CHUNK"], config.tile["COLUMNS"]
    for name, width in (("q", dim), ("k", dim), ("v", columns), ("out", columns)):
        signature[name] = f"tensordesc<{dtype}[{chunk}, {width}]>" if config.tile["TMA"] else f"*{dtype}"
    signature |= dict.fromkeys(("state_ptr", "slopes_ptr", "next_ptr"), "*fp32")
    signature |= {"num_tokens": "i32", "segment": "i32", "scale": "fp32"}
    constants = {
        "Q_ROW": row,
        "K_ROW": row,
        "V_ROW": row,
        "H": heads,
        "D": dim,
        "HORIZON": lightning.HORIZON,
        "PRECISION": "ieee" if dtype == "fp32" else "tf32",
        **config.tile,
    }
    return Build(lightning._prefill_kernel, signature, constants, config.options)


def step_build(num_tokens: int, has_output: bool, has_counts: bool, keeps_state: bool, early: int) -> Build:
    signature = dict.fromkeys(lightning._step_kernel.arg_names, "constexpr")
    signature |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "q_weight_ptr", "k_weight_ptr", "out_ptr"), "*bf16")
    signature |= dict.fromkeys(("states_ptr", "slopes_ptr", "cos_ptr", "sin_ptr"), "*fp32")
    signature |= {"slots_ptr": "*i64", "counts_ptr": "*i64", "num_slots": "i32", "scale": "fp32", "eps": "fp32"}
    signature |= {f"{x}_{axis}": "i32" for x in "qkv" for axis in ("sequence", "token", "head")}
    constants = {
        "N": num_tokens,
        "H": 32,
        "D": 128,
        "COLUMNS": lightning.STEP_COLUMNS,
        "HAS_OUTPUT": has_output,
        "HAS_COUNTS": has_counts,
        "KEEPS_STATE": keeps_state,
        "HAS_NORM": True,
        "HAS_ROPE": True,
        "PDL": early,
    }
    options = {"num_warps": lightning.STEP_WARPS, "enable_fp_fusion": False}
    return Build(lightning._step_kernel, signature, constants, options)


def builds(capability: int) -> list[Build]:
    wide = lightning._config(128, torch.bfloat16, capability)
    narrow = lightning._config(64, torch.bfloat16, capability)
    full = lightning._config(128, torch.float32, capability)
    return [
        prefill_build(wide, "bf16", 128, 32),
        prefill_build(narrow, "bf16", 64, 9),
        prefill_build(full, "fp32", 128, 32),
        step_build(1, True, False, False, 2 if capability >= 90 else 0),
        step_build(8, True, False, True, 2 if capability >= 90 else 0),
        step_build(8, False, True, False, 2 if capability >= 90 else 0),
    ]


def builds_80() -> list[Build]:
    return builds(80)


def builds_90() -> list[Build]:
    return builds(90)


def builds_120() -> list[Build]:
    return builds(120)


@pytest.mark.parametrize(("capability", "limit"), [(80, 99), (90, 227), (120, 99)])
def test_compiles(capability: int, limit: int) -> None:
    command = [sys.executable, "-m", "tests.kernels.aot", str(capability), f"{__name__}:builds_{capability}"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)
    assert len(found) == 6
    for kernel in found:
        assert kernel["spills"] == 0, kernel
        assert kernel["shared"] <= limit * 1024, kernel
    assert found[0]["has_wgmma"] == (capability == 90)

"""Lightning attention over spans and in steps: against the readable twin, and against each other bit by bit."""

import itertools
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
from sala.backends.torch.kernels.spans import PackedSpan, table_of
from sala.backends.torch.ops import lightning as reference
from tests.kernels.aot import Build

SLOPES = [0.84, 0.5, 0.07]
SMALL = Config({"CHUNK": 16, "COLUMNS": 32, "STAGES": 1, "SWAPPED": True}, 4)
LARGE = Config({"CHUNK": 64, "COLUMNS": 16, "STAGES": 2, "SWAPPED": False}, 4)


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


def state_dtype(bits: int, device: torch.device) -> torch.dtype:
    """The interpreter does not compute in bf16; the code path is the same."""
    return torch.float32 if bits == 32 else torch.bfloat16 if device.type == "cuda" else torch.float16


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


@pytest.mark.parametrize(
    ("starts", "counts", "heads", "dim", "config"),
    [
        ([0], [1], 2, 32, SMALL),
        ([0, 0, 96], [63, 0, 17], 2, 64, SMALL),
        ([0, 5], [65, 130], 1, 64, LARGE),
        ([60, 0, 1000], [3, 100, 25], 2, 32, LARGE),
        ([7], [130], 3, 32, SMALL._replace(tile=SMALL.tile | {"CHUNK": 32, "SWAPPED": False})),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_prefill(
    starts: list[int],
    counts: list[int],
    heads: int,
    dim: int,
    config: Config,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Packed spans, one of them after a gap; states that are nobody's stay as they are."""
    torch.manual_seed(sum(counts))
    firsts = [sum(counts[:i]) + 5 * (i > 0) for i in range(len(counts))]
    spans = [PackedSpan(*span, slot) for span, slot in zip(zip(firsts, counts, starts), (3, 0, 2))]  # noqa: B905
    q, k, v = projected(sum(counts) + 5, heads, dim, dtype, device)
    states, slopes = torch.randn(5, heads, dim, dim, device=device), torch.tensor(SLOPES[:heads], device=device)
    before = states.clone()
    output = lightning_prefill(q, k, v, states, table_of(spans, device), slopes, dim**-0.5, config, num_parallel=2)
    assert output.dtype == dtype
    for span in spans:
        wide = (x[span.first : span.first + span.num_rows].float() for x in (q, k, v))
        found = output[span.first : span.first + span.num_rows]
        if span.num_rows:
            expected, state = reference.lightning_prefill(*wide, before[span.slot], slopes, dim**-0.5)
            assert distance(found, expected) < (3e-6 if dtype == torch.float32 else 1e-3)
            assert distance(states[span.slot], state) < (1e-6 if dtype == torch.float32 else 1e-3)
            before[span.slot] = states[span.slot]
    assert torch.equal(states, before)
    if len(counts) > 1:
        assert output[counts[0] : counts[0] + 5].isnan().all()  # of no span


@pytest.mark.parametrize(("config", "bits"), [(SMALL, 32), (LARGE, 32), (SMALL, 16), (LARGE, 16)])
def test_prefill_with_snapshots_is_prefill_of_pieces(config: Config, bits: int, device: torch.device) -> None:
    """Bit for bit: cut at snapshots and at multiples of a chunk, alone and in company."""
    torch.manual_seed(3)
    heads, dim, start, n = 2, 32, 40, 200
    q, k, v = projected(n + 33, heads, dim, torch.float32, device)
    states, slopes = torch.randn(8, heads, dim, dim, device=device), torch.tensor(SLOPES[:2], device=device)
    states = states.to(state_dtype(bits, device))
    cuts = [start, 50, 128, 171, start + n]
    pieces, outputs = states.clone(), []
    for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
        rows = slice(begin - start, end - start)
        table = table_of([PackedSpan(0, end - begin, begin, 1)], device)
        outputs.append(lightning_prefill(q[rows], k[rows], v[rows], pieces, table, slopes, 0.2, config))
        pieces[4 + i] = pieces[1]
    snapshots = [(50, 4), (128, 5), (171, 6), (start + n, 7)]
    table = table_of([PackedSpan(n, 33, 3, 0), PackedSpan(0, n, start, 1, snapshots=snapshots)], device)
    output = lightning_prefill(q, k, v, states, table, slopes, 0.2, config)
    assert torch.equal(output[:n], torch.cat(outputs))
    assert torch.equal(states[1:], pieces[1:])
    assert not torch.equal(states[0], pieces[0])


def test_states_of_16_bits(device: torch.device) -> None:
    """Cut anywhere at a multiple of a chunk, near the fp32 result, and near the definition."""
    torch.manual_seed(5)
    heads, dim, n = 2, 32, 150
    q, k, v = projected(n, heads, dim, torch.float32, device)
    slopes, dtype = torch.tensor(SLOPES[:2], device=device), state_dtype(16, device)
    exact = torch.randn(1, heads, dim, dim, device=device).to(dtype).float()
    whole, pieces, outputs = exact.to(dtype), exact.to(dtype), []
    expected, state = reference.lightning_prefill(q, k, v, whole[0], slopes, 0.2)
    output = lightning_prefill(q, k, v, whole, table_of([PackedSpan(0, n)], device), slopes, 0.2, LARGE)
    for begin, end in ((0, 64), (64, 128), (128, n)):
        table, rows = table_of([PackedSpan(0, end - begin, begin)], device), slice(begin, end)
        outputs.append(lightning_prefill(q[rows], k[rows], v[rows], pieces, table, slopes, 0.2, LARGE))
    assert torch.equal(output, torch.cat(outputs))
    assert torch.equal(whole, pieces)
    assert distance(output, expected) < 1e-4
    assert distance(whole[0], state) < 1e-3
    plain = lightning_prefill(q, k, v, exact, table_of([PackedSpan(0, n)], device), slopes, 0.2, LARGE)
    assert not torch.equal(output, plain)
    assert distance(output, plain) < torch.finfo(dtype).eps


def test_prefill_with_its_own_config(device: torch.device) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(50, 64, 2, device=device).transpose(1, 2) for _ in range(3))  # not as rows lie in memory
    state, slopes = torch.randn(2, 64, 64, device=device), torch.tensor(SLOPES[:2], device=device)
    states = state[None].clone()
    output = lightning_prefill(q, k, v, states, table_of([PackedSpan(0, 50)], device), slopes, 0.125)
    expected, state = reference.lightning_prefill(q, k, v, state, slopes, 0.125)
    assert distance(output, expected) < 3e-6
    assert distance(states[0], state) < 1e-6


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 32), (torch.float16, 32), (torch.float32, 16)])
def test_steps(dtype: torch.dtype, bits: int, device: torch.device) -> None:
    torch.manual_seed(1)
    n, heads, dim, scale = 4, 2, 64, 0.125
    q, k, v = (x.unflatten(0, (3, n)) for x in projected(3 * n, heads, dim, dtype, device))
    states = torch.randn(6, heads, dim, dim, device=device).to(state_dtype(bits, device))
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
        expected, state = reference.lightning_prefill(*wide, before[slot], slopes, scale, chunk=64 if bits == 32 else 1)
        assert distance(guessed[row], expected) < (1e-6 if dtype == torch.float32 and bits == 32 else 1e-3)
        assert distance(after[slot], state) < (1e-6 if bits == 32 else 1e-3)
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


def prefill_build(config: Config, dtype: str, dim: int, heads: int, state: str = "fp32") -> Build:
    row = 4 * heads * dim
    signature = dict.fromkeys(lightning._prefill_kernel.arg_names, "constexpr")
    signature |= dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}") | {"spans_ptr": "*i32", "num_spans": "i32"}
    signature |= {"states_ptr": f"*{state}", "slopes_ptr": "*fp32", "scale": "fp32"}
    constants = {"Q_ROW": row, "K_ROW": row, "V_ROW": row, "H": heads, "D": dim, **config.tile}
    constants["PRECISION"] = "ieee" if dtype == "fp32" else "tf32"
    return Build(lightning._prefill_kernel, signature, constants, config.options)


def step_build(
    num_tokens: int, has_output: bool, has_counts: bool, keeps_state: bool, early: int, state: str = "fp32"
) -> Build:
    signature = dict.fromkeys(lightning._step_kernel.arg_names, "constexpr")
    signature |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "q_weight_ptr", "k_weight_ptr", "out_ptr"), "*bf16")
    signature |= dict.fromkeys(("slopes_ptr", "cos_ptr", "sin_ptr"), "*fp32") | {"states_ptr": f"*{state}"}
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
    pdl = 2 if capability >= 90 else 0
    return [
        prefill_build(wide, "bf16", 128, 32),
        prefill_build(narrow, "bf16", 64, 9),
        prefill_build(full, "fp32", 128, 32),
        step_build(1, True, False, False, pdl),
        step_build(8, True, False, True, pdl),
        step_build(8, False, True, False, pdl),
        prefill_build(wide, "bf16", 128, 32, "bf16"),
        step_build(1, True, False, False, pdl, "bf16"),
        step_build(8, True, False, True, pdl, "bf16"),
        step_build(8, False, True, False, pdl, "bf16"),
    ]


def builds_80() -> list[Build]:
    return builds(80)


def builds_86() -> list[Build]:
    return builds(86)


def builds_89() -> list[Build]:
    return builds(89)


def builds_90() -> list[Build]:
    return builds(90)


def builds_100() -> list[Build]:
    return builds(100)


def builds_120() -> list[Build]:
    return builds(120)


@pytest.mark.parametrize(("capability", "limit"), [(80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99)])
def test_compiles(capability: int, limit: int) -> None:
    command = [sys.executable, "-m", "tests.kernels.aot", str(capability), f"{__name__}:builds_{capability}"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)
    assert len(found) == 10
    for kernel in found:
        assert kernel["spills"] == 0, kernel
        assert kernel["shared"] <= limit * 1024, kernel
        assert not kernel["hazards"], kernel
    assert found[0]["has_wgmma"] == (capability == 90)

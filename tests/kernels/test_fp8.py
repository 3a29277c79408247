"""FP8 for prompts: rows and matrices with a scale each, the passes that make them, and a model that reads with them."""

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sala.backends.torch.batch import pack
from sala.backends.torch.cache import HybridCache
from sala.backends.torch.fast.dispatch import select_forward
from sala.backends.torch.fast.gpu_forward import GpuForward
from sala.backends.torch.kernels import fp8, fused, linear
from sala.backends.torch.kernels.fp8 import Rows
from sala.errors import InputError
from sala.protocol import Options, Plan, Row
from tests.kernels.aot import Build
from tests.kernels.test_gpu_forward import MAX_TOKENS, SHAPE, make_model, tokens
from tests.kernels.test_linear import rows

DTYPES = [torch.float32, torch.float16]


def values(held: Rows) -> Tensor:
    return held.codes.float() * held.scales


def assert_rounded(held: Rows, wanted: Tensor) -> None:
    """Every row by its largest number, to the nearest code, or to the next one where the last bits decide.

    The interpreter loses the carry of a number that is rounded up to a power of two: on a CPU those are left out.
    """
    scales = wanted.float().abs().amax(1, keepdim=True).clamp(min=fp8.LEAST_SCALE) / fp8.MOST
    torch.testing.assert_close(held.scales, scales)
    exact = wanted.float() / held.scales
    nearest = exact.to(torch.float8_e4m3fn).float()
    carries = (torch.frexp(nearest)[0].abs() == 0.5) & (exact.abs() < nearest.abs())
    is_known = torch.ones_like(carries) if held.codes.is_cuda else ~carries
    assert is_known.float().mean() > 0.9
    found, nearest = held.codes.float()[is_known], nearest[is_known]
    assert (found == nearest).float().mean() > 0.98
    torch.testing.assert_close(found, nearest, rtol=0.13, atol=2**-9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_passes(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x, delta = rows(5, 96, dtype, device), rows(5, 96, dtype, device)
    weight = torch.randn(96, device=device).to(dtype)
    assert_rounded(fp8.quantize(x), x)
    assert_rounded(fp8.silu_mul(x), fused.silu_mul(x))
    assert_rounded(fp8.rms_norm(x, weight, 1e-6), fused.rms_norm(x, weight, 1e-6))
    total, normed = fp8.add_rms_norm(x, delta, 0.25, weight, 1e-6)
    wanted = fused.add_rms_norm(x, delta, 0.25, weight, 1e-6)
    assert torch.equal(total, wanted[0])
    assert_rounded(normed, wanted[1])
    assert fp8.quantize(x[:0]).codes.shape == (0, 96)


def test_rows_of_nothing_and_of_much(device: torch.device) -> None:
    x = torch.stack([torch.zeros(32), torch.full((32,), 6e4), torch.full((32,), -1e-7)]).half().to(device)
    torch.testing.assert_close(values(fp8.quantize(x)), x.float(), rtol=1e-6, atol=1e-12)


def test_matrices_and_products(device: torch.device) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(48, 64, device=device), torch.randn(32, 64, device=device).bfloat16()
    weight[3] *= 1e4
    held = fp8.from_weight(weight)
    assert_rounded(held, weight)
    with_scales = Rows(x.to(torch.float8_e4m3fn), torch.rand(32, 1, device=device))
    found = fp8.product(with_scales, held, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    wanted = F.linear(values(with_scales), values(held))
    torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().mean()))


@torch.inference_mode()
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_model_reads_with_it_and_decodes_without(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the exact one but not the same; what follows is exact, given the same past."""
    config = replace(SHAPE, num_hidden_layers=2, mixer_types=SHAPE.mixer_types[:2])
    monkeypatch.setattr(linear, "MAX_ROWS", 32)
    prompt = Plan((Row(tokens(1, 40), 0, (7, 3, 11), 0, 1 << 20),))
    after = Plan((Row(tokens(2, 1), 40, (7, 3, 11), 0, 1 << 20),))
    hidden, answers = {}, {}
    for prefill in ("auto", "fp8"):
        model = make_model(config).to(device)
        steps = GpuForward(model, device, MAX_TOKENS, has_graphs=False, prefill=prefill)
        cache = HybridCache(config, 20, 4, torch.float32, device)
        hidden[prefill] = steps(pack(prompt, device), cache)
        twin = copy.deepcopy(cache)
        answers[prefill] = steps(pack(after, device), cache)
        torch.testing.assert_close(answers[prefill], model(pack(after, device), twin), rtol=1e-4, atol=1e-4)
        last = steps(pack(prompt, device), cache, None, [39])
        assert last.shape == (1, config.hidden_size)
    error = (hidden["fp8"] - hidden["auto"]).norm() / hidden["auto"].norm()
    assert 1e-4 < error < 0.3
    assert not torch.equal(answers["fp8"], answers["auto"])


def test_fp8_prefill_needs_a_gpu_that_can() -> None:
    assert Options().prefill == "auto"
    with pytest.raises(InputError, match="auto or fp8"):
        Options(prefill="fast")
    with pytest.raises(InputError, match="compute capability"):
        select_forward(make_model(SHAPE), torch.device("cpu"), MAX_TOKENS, Options(prefill="fp8"))


def builds() -> list[Build]:
    types = {"codes_ptr": "*fp8e4nv", "out_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "x_row": "i32", "delta_row": "i32"}
    types |= dict.fromkeys(("x_ptr", "delta_ptr", "weight_ptr", "sum_ptr"), "*bf16")
    types |= dict.fromkeys(("scale", "eps"), "fp32")
    sizes = {"WIDTH": 4096, "BLOCK": 4096}
    options = {"num_warps": 8, "enable_fp_fusion": False}
    norm = Build(fused._rms_norm_kernel, types, sizes | {"HAS_DELTA": True}, options)
    silu = Build(fp8._silu_mul_kernel, types, {"WIDTH": 16384, "BLOCK": 16384, "HAS_SILU": True}, {"num_warps": 32})
    return [
        replace(one, signature={name: types.get(name, "constexpr") for name in one.kernel.arg_names})
        for one in (norm, silu)
    ]


@pytest.mark.parametrize("capability", [89, 90, 120])
def test_compiles(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.aot", str(capability), f"{__name__}:builds"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(kernel["spills"] == 0 for kernel in json.loads(done.stdout))

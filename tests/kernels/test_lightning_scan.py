"""Lightning attention with gradients: the scan kernel against the readable formula and its autograd."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from sala.backends.torch.kernels import lightning_scan as kernel
from sala.backends.torch.ops.lightning import lightning_whole
from tests.kernels.aot import Build

SLOPES = [0.84, 0.07, 0.004]


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def both(rows: int, length: int, dim: int, dtype: torch.dtype, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Output and the three gradients: by the kernel, and by autograd through the formula in fp64."""
    torch.manual_seed(length)
    q, k, v, weight = (torch.randn(rows * length, len(SLOPES), dim).to(device, dtype) for _ in range(4))
    slopes = torch.tensor(SLOPES, device=device)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    found = kernel.lightning_scan(*inputs, slopes, length, 0.125)
    found.backward(weight)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = lightning_whole(*exact, [length] * rows, slopes.double(), 0.125)
    wanted.backward(weight.double())
    return [(found, wanted), *((x.grad, y.grad) for x, y in zip(inputs, exact, strict=True))]


@pytest.mark.parametrize(
    ("rows", "length", "dim"), [(1, 1, 32), (3, 63, 32), (2, 64, 64), (1, 65, 64), (2, 200, 32), (1, 2049, 64)]
)
def test_scan_and_its_gradients(rows: int, length: int, dim: int, device: torch.device) -> None:
    for found, wanted in both(rows, length, dim, torch.float32, device):
        assert found.shape == wanted.shape
        assert distance(found, wanted) < 1e-5


def test_scan_in_half_precision(device: torch.device) -> None:
    """The interpreter does not compute in bf16; the code path is the same."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    for found, wanted in both(2, 300, 64, dtype, device):
        assert found.dtype == dtype
        assert distance(found, wanted) < 1e-2


def test_rows_do_not_see_each_other(device: torch.device) -> None:
    slopes = torch.tensor(SLOPES, device=device)
    q, k, v = (torch.randn(2 * 70, 3, 32, device=device) for _ in range(3))
    together = kernel.scan(q, k, v, slopes, 70, 1.0, False)
    alone = kernel.scan(*(x[70:].contiguous() for x in (q, k, v)), slopes, 70, 1.0, False)
    torch.testing.assert_close(together[70:], alone, rtol=0, atol=0)


def test_the_op_is_registered_correctly(device: torch.device) -> None:
    q, k, v = (torch.randn(40, 3, 32, device=device, requires_grad=True) for _ in range(3))
    arguments = (q, k, v, torch.tensor(SLOPES, device=device), 20, 0.5)
    torch.library.opcheck(kernel.lightning_scan, arguments, test_utils=("test_schema", "test_faketensor"))


def builds() -> list[Build]:
    signature = dict.fromkeys(("q", "k", "v", "out"), "*bf16") | {"slopes": "*fp32", "length": "i32"}
    constants = {"H": 9, "D": 64, "CHUNK": kernel.CHUNK, "COLUMNS": kernel.COLUMNS, "PRECISION": "tf32"}
    return [
        Build(
            kernel._scan_kernel,
            signature | {"scale": "fp32"} | dict.fromkeys((*constants, "REVERSE"), "constexpr"),
            constants | {"REVERSE": is_reversed},
            {"num_warps": 4, "num_stages": 2},
        )
        for is_reversed in (False, True)
    ]


def test_compiles_without_spilling() -> None:
    command = [sys.executable, "-m", "tests.kernels.aot", "90", f"{__name__}:builds"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    for report in json.loads(result.stdout):
        assert report["spills"] == 0

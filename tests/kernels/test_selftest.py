"""The kernel cases at small sizes: they know the kernels' signatures, and they can fail."""

from dataclasses import replace

import pytest
import torch

from sala.backends.torch import selftest
from sala.backends.torch.cases import Shapes, gpu_cases
from sala.backends.torch.selftest import Trial, case_trials, check
from sala.checkpoint.random import TINY
from sala.config import SparseConfig

SPARSE = SparseConfig(kernel_size=8, kernel_stride=4, block_size=16, window_size=32, topk=4, dense_len=128)
SMALL = replace(TINY, num_attention_heads=4, hidden_size=48, intermediate_size=40, sparse_config=SPARSE)


def trials(device: torch.device) -> dict[str, Trial]:
    shapes = Shapes(device, (133,), SMALL, torch.float32, num_rows=37, batches=(3,), rotated_bytes=1, shared=(0.75,))
    return case_trials("Triton", gpu_cases(shapes))


@pytest.mark.parametrize("name", list(trials(torch.device("cpu"))))
def test_every_kernel(name: str, device: torch.device) -> None:
    is_rounded = "FP8" in name and device.type == "cuda"  # the library's product returns bf16
    found = check(name, Trial(trials(device)[name].measure, 4e-3 if is_rounded else 1e-5))
    assert found.is_good, found


def test_a_wrong_kernel_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from sala.backends.torch.kernels import fused

    monkeypatch.setattr(fused, "silu_mul", lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1])
    found = check("silu", trials(device)["Triton silu and product"])
    assert not found.is_good


def test_every_step_has_its_trial() -> None:
    assert len(selftest.gpu_step_trials(torch.device("cuda"))) == 12

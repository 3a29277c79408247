"""The self-tests of the GPU's kernels, at small sizes: they know the kernels' signatures, and they can fail."""

from dataclasses import replace

import pytest
import torch

from sala.backends.torch import selftest_gpu
from sala.backends.torch.selftest import Trial, check
from sala.checkpoint.random import TINY
from sala.config import SparseConfig

SPARSE = SparseConfig(kernel_size=8, kernel_stride=4, block_size=16, window_size=32, topk=4, dense_len=128)
SMALL = replace(TINY, num_attention_heads=4, hidden_size=48, intermediate_size=40, sparse_config=SPARSE)
NAMES = list(selftest_gpu.kernel_trials(torch.device("cpu"), SMALL, torch.float32))


@pytest.mark.parametrize("name", NAMES)
def test_every_kernel(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest_gpu, "NUM_QUERIES", 3)
    trial = selftest_gpu.kernel_trials(device, SMALL, torch.float32)[name]
    found = check(name, Trial(trial.measure, 1e-5))
    assert found.is_good, found


def test_a_wrong_kernel_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from sala.backends.torch.kernels import fused

    monkeypatch.setattr(fused, "silu_mul", lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1])
    found = check("silu", selftest_gpu.kernel_trials(device, SMALL, torch.float32)["Triton silu"])
    assert not found.is_good


def test_every_step_has_its_trial() -> None:
    assert len(selftest_gpu.step_trials(torch.device("cuda"))) == 12

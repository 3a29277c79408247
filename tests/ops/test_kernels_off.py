"""`kernels="off"` runs the reference everywhere: no C++ kernel is even looked for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sala.backends.torch.executor import TorchExecutor, open_executor
from sala.backends.torch.kernels import native
from sala.backends.torch.linears import AffineLinear, HalfLinear
from sala.backends.torch.ops import REFERENCE
from sala.checkpoint.random import TINY, cut_layers, write_random
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import InputError
from sala.protocol import Options, Plan, Row, Sampling
from sala.quantization_config import QuantConfig
from tests.parity.test_quantized import write_pair

pytestmark = pytest.mark.skipif(native.load() is None, reason="no C++ compiler")

TEXT = tuple(range(1, 151))
GREEDY = Sampling(temperature=0)


def fail() -> None:
    raise AssertionError("a C++ kernel was looked for")


def opened(path: Path, **options: Any) -> TorchExecutor:
    return open_executor(Checkpoint(path), SalaConfig.load(path), Options(device="cpu", ctx=512, **options))


def run(executor: TorchExecutor) -> tuple[list[int], np.ndarray]:
    """A prompt in the sparse regime, two decode steps, drafts to be verified, and the logits of a last token."""
    pages, tokens, end = tuple(range(8)), list(TEXT), 0
    found = []
    for count, num_drafts in ((len(TEXT), 0), (1, 0), (1, 0), (3, 2)):
        row = Row(tuple(tokens[-count:]), end, pages, 1, 0, GREEDY, num_drafts)
        sampled = executor.run(Plan((row,))).sampled[0]
        end += count - num_drafts + len(sampled) - 1
        found += [token.token for token in sampled]
        tokens = [*tokens, found[-1], 5, 6]
    return found, executor.logits(Row((found[-1],), end, pages, 1, 0))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    sparse = replace(TINY.sparse_config, dense_len=64)
    write_random(tmp_path / "tiny", replace(cut_layers(TINY, 2), sparse_config=sparse))
    return tmp_path / "tiny"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_kernel_runs(tiny: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = opened(tiny, dtype=dtype)
    assert fast.fused is not None
    assert any(isinstance(one, HalfLinear) for one in fast.model.modules()) == (dtype == "bfloat16")
    wanted = run(fast)
    monkeypatch.setattr(native, "load", fail)
    slow = opened(tiny, dtype=dtype, kernels="off")
    assert slow.fused is None
    assert slow.ops is REFERENCE
    found = run(slow)
    if dtype == "float32":
        assert found[0] == wanted[0]
        np.testing.assert_allclose(found[1], wanted[1], rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError, match="looked for"):
        run(opened(tiny, dtype=dtype))


def test_quantized_matrices_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, _ = write_pair(tmp_path, cut_layers(TINY, 2), QuantConfig(4, 32))

    def num_packed(**options: Any) -> int:
        return sum(isinstance(one, AffineLinear) for one in opened(quantized, **options).model.modules())

    assert num_packed() == num_packed(packed=True) > 0
    assert num_packed(packed=False) == 0
    assert num_packed(packed=True, kernels="off") == 0
    monkeypatch.setattr(native, "load", fail)
    assert num_packed(kernels="off") == 0


def test_option_is_checked() -> None:
    with pytest.raises(InputError, match="kernels"):
        Options(kernels="some")


def test_closing_frees_and_may_be_repeated(tiny: Path) -> None:
    executor = opened(tiny)
    executor.close()
    executor.close()
    with pytest.raises(AttributeError):
        executor.logits(Row((1,), 0, (0,), 0, 0))

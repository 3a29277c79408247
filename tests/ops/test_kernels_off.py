"""`kernels="off"` runs the reference everywhere: no C++ kernel is even looked for."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sala
from sala.backends.torch.executor import TorchExecutor, open_executor
from sala.backends.torch.kernels import native, triton_kernels
from sala.backends.torch.linears import AffineLinear, HalfLinear
from sala.backends.torch.ops import REFERENCE
from sala.checkpoint.random import TINY, cut_layers, write_random
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.errors import InputError
from sala.llm import LLM
from sala.plugins.vllm import dispatch as vllm_dispatch
from sala.protocol import Options, Plan, Row, Sampling
from sala.quantization_config import QuantConfig
from tests.draft_heads import write_random_head
from tests.parity.test_quantized import write_pair

pytestmark = pytest.mark.skipif(native.load() is None, reason="no C++ compiler")

PACKAGE = Path(sala.__file__).parent
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


def test_a_draft_head_keeps_its_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its matrices have 16 bits only for the C++ kernels, and the model and the head compute in fp32."""
    deep = tmp_path / "deep"
    write_random(deep, cut_layers(TINY, 4))
    write_random_head(tmp_path / "head", deep)
    monkeypatch.setattr(native, "load", fail)
    plain = Options(device="cpu", dtype="float32", ctx=512, kernels="off")
    drafting = replace(plain, speculate="head", draft_head=tmp_path / "head")
    answers = []
    for options in (plain, drafting):
        with LLM(deep, options=options) as llm:
            answers.append(llm.generate([1, 2, 3], temperature=0, max_tokens=12).token_ids)
    assert answers[0] == answers[1]


def test_one_module_selects() -> None:
    """Others only describe what can run, check it or time it."""
    asks = re.compile(r"native\.load\(|(?<!def )\bwhy_not\(\w")
    files = (file for file in PACKAGE.rglob("*.py") if file.parent.name != "kernels")
    found = {file.relative_to(PACKAGE).as_posix() for file in files if asks.search(file.read_text(encoding="utf-8"))}
    told = {"backends/torch/selftest.py", "cli/doctor.py", "cli/bench.py"}
    assert found == {"backends/torch/fast/dispatch.py", *told}


@pytest.mark.parametrize(("value", "is_used"), [("", True), ("auto", True), ("0", False), ("off", False)])
def test_vllm_reads_the_option_from_its_variable(value: str, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "why_not", lambda _: None)
    monkeypatch.setenv("SALA_KERNELS", value)
    vllm_dispatch._option.cache_clear()
    assert vllm_dispatch.can_use_kernels(torch.zeros(1, 64)) == is_used
    assert not vllm_dispatch.can_use_kernels(torch.zeros(1, 48))
    vllm_dispatch._option.cache_clear()


def test_option_is_checked() -> None:
    with pytest.raises(InputError, match="kernels"):
        Options(kernels="some")


def test_closing_frees_and_may_be_repeated(tiny: Path) -> None:
    executor = opened(tiny)
    executor.close()
    executor.close()
    with pytest.raises(AttributeError):
        executor.logits(Row((1,), 0, (0,), 0, 0))

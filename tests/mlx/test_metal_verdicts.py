"""When a kernel is used: never without Metal; with it, if it was found equal and faster, which is remembered."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from sala.backends.mlx import dispatch, selftest
from sala.backends.mlx.executor import open_executor
from sala.backends.mlx.kernels import KERNELS, metal
from sala.backends.mlx.kernels.metal import Launch
from sala.backends.mlx.selftest import KernelVerdict
from sala.checkpoint.random import TINY, cut_layers, write_random
from sala.checkpoint.reader import Checkpoint
from sala.protocol import Options, Row
from tests.mlx.shim.runner import Shim

without_metal = pytest.mark.skipif(mx.metal.is_available(), reason="there is a Metal GPU")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    return Shim(tmp_path_factory.mktemp("verdicts"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(selftest.platformdirs, "user_cache_dir", lambda _: str(tmp_path))
    dispatch._is_trusted.cache_clear()
    yield
    dispatch._is_trusted.cache_clear()


@without_metal
@pytest.mark.parametrize("metal", ["auto", "on", "off"])
def test_no_kernel_without_metal(metal: str) -> None:
    assert all(dispatch.find(name, mx.zeros((1, 4, 64)), 2, metal) is None for name in KERNELS)
    assert selftest.why_not() == "there is no Metal GPU"
    assert list(selftest.verdicts()) == []


@pytest.mark.skipif(not mx.metal.is_available(), reason="needs a Metal GPU")
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_is_equal_on_this_gpu(name: str) -> None:
    with mx.stream(mx.gpu):
        verdict = selftest.check(name)
    assert verdict.is_equal, verdict.describe()


@without_metal
def test_kernel_that_cannot_start_is_not_used() -> None:
    """The real thing: MLX itself refuses here."""
    verdict = selftest.check("lightning_step")
    assert not verdict.is_equal
    assert not verdict.is_faster("decode")
    assert verdict.describe().startswith("not used: RuntimeError: [metal_kernel] No Metal back-end")


@needs_compiler
def test_equal_but_slow_kernel_is_not_used(shim: Shim) -> None:
    verdict = selftest.check("lightning_step", shim.run)
    assert verdict.is_equal
    assert verdict.error > 0
    assert not verdict.is_faster("decode")
    assert "not used" in verdict.describe()


@needs_compiler
@pytest.mark.parametrize("fault", ["nan", "bias"])
def test_wrong_kernel_is_not_used(shim: Shim, fault: str) -> None:
    """Wrong in one number of one of its outputs."""

    def run(launch: Launch) -> list[mx.array]:
        outputs = shim.run(launch)
        last = outputs[-1].reshape(-1)
        last[-1] = mx.nan if fault == "nan" else last[-1] + 1e-3 * mx.abs(last).max()
        return [*outputs[:-1], last.reshape(outputs[-1].shape)]

    verdict = selftest.check("lightning_step", run)
    assert not verdict.is_equal
    assert "differs from the op" in verdict.describe()


def test_verdict_decides_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Mac where the kernel of attention is faster for decode steps alone."""
    told = KernelVerdict(
        "sparse_attention", 1e-7, 2e-5, {"decode": 1.0, "prefill": 9.0}, {"decode": 2.0, "prefill": 8.0}
    )
    monkeypatch.setattr(selftest, "check", lambda name: told)
    monkeypatch.setattr(selftest, "why_not", lambda: None)
    few, many = mx.zeros((1, 4, 64)), mx.zeros((300, 4, 64))
    assert dispatch.find("sparse_attention", few, 2) is KERNELS["sparse_attention"].kernel
    assert dispatch.find("sparse_attention", many, 2) is None
    assert dispatch.find("sparse_attention", many, 2, metal="on") is not None
    assert dispatch.find("sparse_attention", mx.zeros((1, 16, 129)), 1, "on") is None  # wider than was ever checked
    assert dispatch.find("sparse_attention", mx.zeros((1, 17, 128)), 1, "on") is None


@pytest.mark.parametrize("options", [{"kernels": "off"}, {"kernels": "off", "metal": "on"}, {"metal": "off"}], ids=str)
def test_kernels_that_are_switched_off(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a Mac whose kernels would all be used: none is even asked for."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a kernel was asked for")

    config = replace(cut_layers(TINY, 2), sparse_config=replace(TINY.sparse_config, dense_len=64))
    write_random(tmp_path / "tiny", config)
    row = Row(tuple(range(1, 151)), 0, (0, 1, 2), 0, 64)

    def logits(**options: Any) -> Any:
        with Checkpoint(tmp_path / "tiny") as checkpoint:
            executor = open_executor(checkpoint, config, Options(device="cpu", ctx=512, **options))
            found = executor.logits(row)
            executor.close()
        return found

    wanted = logits()
    monkeypatch.setattr(dispatch, "find", fail)
    assert np.array_equal(logits(**options), wanted)
    with pytest.raises(AssertionError, match="asked for"):
        logits()


def test_verdict_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def check(name: str) -> KernelVerdict:
        asked.append(name)
        return KernelVerdict(name, 1e-7, 2e-5, {"decode": 1.0}, {"decode": 2.0})

    monkeypatch.setattr(selftest, "check", check)
    first = selftest.verdict("lightning_step")
    assert selftest.verdict("lightning_step") == first
    assert selftest.verdict("lightning_ragged").name == "lightning_ragged"
    assert asked == ["lightning_step", "lightning_ragged"]
    monkeypatch.setattr(metal, "source", lambda name: "another source")
    selftest.verdict("lightning_step")
    monkeypatch.setattr(selftest, "device_name", lambda: "another GPU")
    selftest.verdict("lightning_step")
    assert asked[2:] == ["lightning_step", "lightning_step"]
    file = tmp_path / "kernels" / selftest.FILE
    assert len(json.loads(file.read_text())) == 4
    file.write_text("{ not JSON")
    selftest.verdict("lightning_step")
    assert len(asked) == 5


def test_unwritable_cache_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("a file where the folder should be")
    monkeypatch.setattr(selftest, "check", lambda name: KernelVerdict(name, 0.0, 2e-5))
    assert selftest.verdict("lightning_step").is_equal

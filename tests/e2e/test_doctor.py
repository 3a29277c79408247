"""`sala doctor`: it says what is there, tests the kernels, and never falls over what it finds."""

import json
import math
from pathlib import Path

import pytest
import torch

from sala.backends.torch import selftest
from sala.backends.torch.kernels import native, triton_kernels
from sala.backends.torch.selftest import KernelCheck, Trial, check, checks
from sala.cli import doctor, run
from sala.errors import install_command


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the quickest of the self-tests."""
    monkeypatch.setattr(selftest, "trials", lambda _: {"one": Trial(lambda: 1e-7, 1e-5)})


def test_every_kernel_of_the_cpu_is_right() -> None:
    found = list(checks(torch.device("cpu")))
    assert all(one.is_good for one in found), found
    assert len(found) == (0 if native.load() is None else 10)


def test_text(capsys: pytest.CaptureFixture[str], few: None) -> None:
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    for words in ("torch ", "memory", "in use", "models", "smol-sala", "self-tests", "1.0e-07  ok"):
        assert words in out


def test_json(tiny: Path, capsys: pytest.CaptureFixture[str], few: None) -> None:
    assert run(["doctor", "--json", "--model", str(tiny)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["torch"]
    assert facts["machine"]["memory"] > facts["machine"]["memory_free"] > 0
    assert facts["in_use"]["backend"] == "torch"
    assert facts["model"]["parameters"] == 739776
    assert facts["checks"] == [
        {"name": "one", "error": 1e-7, "tolerance": 1e-5, "is_good": True},
    ]


def test_a_failed_kernel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> float:
        raise RuntimeError("no such\ninstruction")

    trials = {"wrong": Trial(lambda: 0.5, 1e-5), "broken": Trial(broken, 1e-5), "right": Trial(lambda: 0.0, 1e-5)}
    monkeypatch.setattr(selftest, "trials", lambda _: trials)
    assert run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "5.0e-01  FAILED: more than 1e-05" in out
    assert "FAILED: RuntimeError: no such instruction" in out
    assert "0.0e+00  ok" in out
    assert run(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["checks"][1]["error"] is None


def test_not_a_number_is_not_good() -> None:
    assert not KernelCheck("x", math.nan, 1.0).is_good
    assert not check("x", Trial(lambda: math.nan, 1.0)).is_good


def test_tests_that_cannot_even_begin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: object) -> None:
        raise OSError("the driver is gone")

    monkeypatch.setattr(selftest, "trials", fail)
    assert run(["doctor"]) == 1
    assert "kernels of cpu" in capsys.readouterr().out


def test_warnings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr(native, "describe", lambda: "no C++ compiler that works")
    monkeypatch.setattr(doctor, "LITTLE_MEMORY", 1 << 60)
    monkeypatch.setattr(doctor, "LITTLE_DISK", 1 << 60)
    monkeypatch.setenv("SALA_MODELS_DIR", str(tmp_path / "not" / "yet"))
    assert run(["doctor", "--model", "smol-sala"]) == 1  # it is not there, and looking for it must not fetch it
    out = capsys.readouterr().out
    for words in ("install g++ or clang++", "of memory are free", "of disk are free", "run: sala setup"):
        assert words in out
    assert "there are no kernels here to be tested" in out
    assert "not assembled yet" in out


def test_a_model_that_is_not_there(few: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "-m", "/nowhere"]) == 1
    out = capsys.readouterr().out
    assert "warning: there is no model at /nowhere" in out
    assert "self-tests" in out


def test_a_torch_that_does_not_work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ImportError("libtorch.so: undefined symbol")

    monkeypatch.setattr(doctor, "in_use", fail)
    assert run(["doctor"]) == 0
    assert "warning: torch does not work (ImportError: libtorch.so" in capsys.readouterr().out


def test_a_gpu_without_triton() -> None:
    use = {"has_native": True, "no_triton": f"Triton is not installed: {install_command('cuda')}"}
    assert install_command("cuda") in "".join(doctor._use_warnings(use, [{}]))
    assert triton_kernels.why_not(torch.device("cpu"))

"""What `sala doctor` says of the CPU's kernels, for every precision of weights."""

from dataclasses import replace
from pathlib import Path

import pytest

from sala.backends.torch.kernels import native
from sala.checkpoint.random import TINY, write_random
from sala.cli import doctor


@pytest.mark.skipif(native.load() is None, reason="no C++ compiler")
def test_the_kernels_and_what_they_read() -> None:
    use = doctor.in_use()
    assert use["instructions"] in ("AVX-512", "AVX2", "NEON", "SSE")
    for words in (native.describe(), use["instructions"], "4 and 8 bits", "bf16", "computes in fp32"):
        assert words in use["cpu_kernels"]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr(native, "describe", lambda: "no C++ compiler that works")
    use = doctor.in_use()
    assert use["instructions"] is None
    assert "no C++ compiler" in use["cpu_kernels"]
    assert "as stored" not in use["cpu_kernels"]
    assert any("every model decodes without the native step" in words for words in doctor._use_warnings(use, []))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_no_precision_needs_a_word_of_warning(tmp_path: Path, dtype: str) -> None:
    write_random(tmp_path / "m", replace(TINY, dtype=dtype))
    facts = doctor.about(str(tmp_path / "m"))
    assert facts["dtype"] == dtype
    assert list(doctor._model_warnings(facts, doctor.in_use() | {"device": "cpu"})) == []

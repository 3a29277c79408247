"""One policy for all engines and libraries: older is refused with a command, newer warns and is tried."""

import logging
import tomllib
from pathlib import Path

import pytest

from sala.plugins import versions
from sala.plugins.versions import SGLANG, TRANSFORMERS, VLLM, UnsupportedVersion, check

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())


@pytest.fixture(autouse=True)
def forget() -> None:
    check.cache_clear()


@pytest.mark.parametrize("version", ["0.25.0", "0.25.1", "0.31.0", "0.32.0+cpu", "0.32.7", "0.30.0rc1"])
def test_tested(version: str, caplog: pytest.LogCaptureFixture) -> None:
    check(VLLM, version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.33.0", "1.0", "0.33.0rc1.dev5+g1234", "dev"])
def test_newer_warns_once(version: str, caplog: pytest.LogCaptureFixture) -> None:
    check(VLLM, version)
    check(VLLM, version)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"vLLM {version} is newer than 0.32" in record.message
    assert "run: pip install 'vllm>=0.25,<0.33'" in record.message


@pytest.mark.parametrize("version", ["0.24.0", "0.3.2", "0.24.9+cpu"])
def test_older_is_refused(version: str) -> None:
    with pytest.raises(UnsupportedVersion, match=r"is older than 0\.25.*pip install .vllm>=0\.25,<0\.33."):
        check(VLLM, version)


def test_bounds_with_three_numbers() -> None:
    assert SGLANG.is_newer("0.5.24")
    assert SGLANG.is_older("0.5.22")
    assert not SGLANG.is_newer("0.5.23.post1")
    assert not SGLANG.is_older("0.5.23")
    assert SGLANG.requirement == "sglang>=0.5.23,<0.5.24"


@pytest.mark.parametrize(
    ("wanted", "extra"),
    [
        (VLLM.requirement, "vllm"),
        (SGLANG.requirement, "sglang"),
        (f"transformers>={TRANSFORMERS.oldest},", "train"),  # a newer one installs, and warns
    ],
)
def test_the_extras_install_what_is_supported(wanted: str, extra: str) -> None:
    assert any(one.startswith(wanted) for one in PYPROJECT["project"]["optional-dependencies"][extra])


def test_installed() -> None:
    assert versions.Supported("pytest", "8", "99", ("no-such-package", "pytest")).installed() == pytest.__version__
    assert versions.Supported("none", "8", "99", ("no-such-package",)).installed() is None

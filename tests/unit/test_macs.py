"""What `sala estimate --macs` and `sala doctor` say about Macs and MLX."""

import json
from typing import Any

import pytest

from sala.backends.memory import estimate, gpu_limit, raised_gpu_limit
from sala.checkpoint.names import count_parameters, expected_tensors
from sala.checkpoint.random import RELEASED
from sala.cli import doctor, run
from sala.cli.estimate import MAC_CHUNK, MAC_TILE, MACS
from sala.errors import install_command

GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "limit"), [(8, 5.33), (16, 10.67), (24, 16.0), (32, 21.33), (48, 36.0), (128, 96.0)]
)
def test_what_a_gpu_may_hold(memory: int, limit: float) -> None:
    assert gpu_limit(memory * GIB) / GIB == pytest.approx(limit, abs=0.01)
    assert gpu_limit(memory * GIB) <= raised_gpu_limit(memory * GIB) <= memory * GIB * 7 // 8


def test_longest_contexts_fit_and_longer_ones_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "--shape", "9b", "--macs", "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["macs"]
    assert [row["memory"] for row in rows] == list(MACS)
    parameters, block = count_parameters(expected_tensors(RELEASED)), RELEASED.sparse_config.block_size
    for row in rows:
        for limit in ("limit", "raised"):
            for bits, name in ((None, "bfloat16"), (8, "8 bits"), (4, "4 bits")):
                most = row[f"{limit}_longest"][name]
                needed = [
                    estimate(RELEASED, parameters, count, bits=bits, chunk=MAC_CHUNK, tile_bytes=MAC_TILE).total
                    for count in (most, most + block)
                ]
                assert not most or needed[0] <= row[limit]
                assert row[limit] < needed[1]
    assert rows[0]["raised_longest"]["4 bits"] == 0  # not on 8 GB


def test_table_of_macs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "--shape", "9b", "--macs"]) == 0
    out = capsys.readouterr().out
    assert "128 GB" in out
    assert "iogpu.wired_limit_mb=13312" in out


def test_doctor_says_why_there_are_no_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    mx = pytest.importorskip("mlx.core")
    if mx.metal.is_available():
        pytest.skip("there is a Metal GPU")
    facts = doctor.mlx()
    assert facts is not None
    assert facts["kernels"] == {}
    assert doctor._mlx_rows(facts)["Metal kernels"] == "none: there is no Metal GPU"


def test_doctor_on_a_mac() -> None:
    """The words of a Mac; the numbers are made up."""
    facts = {
        "device": "gpu, Apple M3",
        "gpu_limit": 16 * GIB,
        "no_kernels": None,
        "kernels": {"lightning_step": "used"},
    }
    rows = doctor._mlx_rows(facts)
    assert rows["GPU may hold"].startswith("16.00 GiB")
    assert rows["lightning_step"] == "used"
    assert "Metal kernels" not in rows


def test_doctor_misses_mlx_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert install_command("mlx") in next(iter(doctor._mlx_warnings(None)))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert list(doctor._mlx_warnings(None)) == []

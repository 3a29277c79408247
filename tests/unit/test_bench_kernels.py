"""`sala bench kernels` without a GPU: its refusal, its counts against numbers worked by hand, what it shows."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from sala.backends.torch.cases import KernelCase, Shapes
from sala.backends.torch.cases.attention import num_attended, num_windows
from sala.backends.torch.cases.shapes import KernelCall
from sala.cli import bench, run
from sala.config import SparseConfig
from sala.lab.bench import roofline
from sala.lab.bench.roofline import KernelResult, Roofline, measure, reason, result, timed_cases
from sala.lab.report.kinds import plot_record
from sala.lab.report.record import Record

H200 = Roofline(800e12, 4e12)
RELEASED = SparseConfig()  # blocks of 64, 96 chosen, 33 of them recent, 1 initial; windows of 32 every 16


def released(*lengths: int) -> dict[str, KernelCase]:
    return {f"{one.name}, {one.size}": one for one in timed_cases(Shapes(torch.device("cpu"), lengths))}


def made_up(name: str = "sort", size: str = "3 rows", flops: int = 0, num_bytes: int = 8_000_000) -> KernelCase:
    return KernelCase(name, size, lambda: [KernelCall(lambda: 1, lambda: 1)], flops, num_bytes, "copy")


# the refusal


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["bench", "kernels", "--device", "cpu", "--json", str(tmp_path / "figures.json")]) == 1
    out = capsys.readouterr()
    assert "the Triton kernels do not run on cpu: there are kernels for NVIDIA GPUs only" in out.err
    assert "sala doctor" in out.err
    assert out.out == ""
    assert list(tmp_path.iterdir()) == []


def test_refuses_before_anything_heavy() -> None:
    code = (
        "from sala.cli import run; import sys; code = run(['bench', 'kernels', '--device', 'cpu', '--plot', 'x.png']); "
        "print(code, [name for name in ('triton', 'matplotlib', 'sala.backends.torch.cases') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "1 []\n"


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--lengths", "8K,many"], "many"), (["--lengths", "0"], "at least 1")]
)
def test_asked_wrongly(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "kernels", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_help_is_cheap() -> None:
    code = "from sala.cli import run; run(['bench', 'kernels', '--help']); import sys; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--lengths" in out.stdout
    assert out.stdout.endswith("False\n")


# what must be done at least


def test_floors() -> None:
    assert H200.floor_ms(8 * 10**12, 10**9) == pytest.approx(10)  # 8 TFLOP at 800 a second
    assert H200.floor_ms(10**9, 8 * 10**9) == pytest.approx(2)  # 8 GB at 4 TB a second


def test_results() -> None:
    by_bytes = result(made_up(), H200, 0.004, 0.006)
    assert (by_bytes.floor_ms, by_bytes.share, by_bytes.ratio) == pytest.approx((0.002, 0.5, 1.5))
    assert by_bytes.tflops is None  # it is not what limits it
    by_products = result(made_up(flops=8 * 10**12), H200, 20.0, None)
    assert (by_products.share, by_products.tflops) == pytest.approx((0.5, 400))
    assert by_products.ratio is None
    failed = result(made_up(), H200, None, None, "out of memory")
    assert (failed.ms, failed.share, failed.ratio, failed.tflops) == (None, None, None, None)


def test_attended_keys() -> None:
    assert num_attended(0, 3, RELEASED) == 1 + 2 + 3
    assert num_attended(6143, 6144, RELEASED) == 6144  # the last that sees all 96 blocks
    assert num_attended(6144, 6145, RELEASED) == 95 * 64 + 1  # the first that leaves one out
    assert num_attended(131_071, 131_072, RELEASED) == 96 * 64


def test_windows_to_look_at() -> None:
    assert num_windows(6143, RELEASED) == (0, 0, 0)
    assert num_windows(6144, RELEASED) == (96 - 32 - 1, 63 * 4 + 1, (6145 - 128) // 64 + 1)
    assert num_windows(131_071, RELEASED) == (2014, 2014 * 4 + 1, 2047)


def test_released_counts() -> None:
    found = released(8192, 131_072)
    assert len(found) == 23
    assert found["output projection and norm, 32 rows"].num_bytes == 4096 * 4096 * 2
    assert found["MLP and norm, 1 row"].flops == 2 * 3 * 4096 * 16384
    lightning = found["lightning prefill, 128K"]
    assert lightning.num_bytes == 4 * 131_072 * 4096 * 2 + 2 * 32 * 128 * 128 * 4
    assert lightning.flops == 131_072 * 32 * 2 * (2 * 128 * 128)
    assert found["lightning decode, 32 rows"].num_bytes == 32 * (2 * 32 * 128 * 128 * 4 + 4 * 4096 * 2)
    assert found["dense attention, 8K"].flops == 4 * 32 * 128 * (8192 * 8193 // 2)
    assert found["dense attention, 8K"].num_bytes == 2 * 8192 * 4096 * 2 + 2 * 8192 * 256 * 2
    # 6144 queries see everything; of the others each sees 95 blocks and, on average, 32.5 keys of its own
    attended = 6144 * 6145 // 2 + (131_072 - 6144) * 95 * 64 + (131_072 - 6144) * 65 // 2
    assert found["sparse attention, 128K, 0% shared"].flops == 4 * 32 * 128 * attended
    assert found["decode attention, 1 row at 128K"].num_bytes == 2 * 96 * 64 * 2 * 128 * 2 + 2 * 4096 * 2
    pooled = (8057 + 2047) * 2 * 128 * 2
    assert found["decode block selection, 1 row at 128K"].num_bytes == pooled + 4096 * 2 + 2 * 96 * 4
    assert found["decode block selection, 1 row at 128K"].flops == 2 * 4096 * (8057 + 2047)
    assert found["block selection, 8K at 128K"].num_bytes == pooled + 8192 * 4096 * 2 + 8192 * 2 * 96 * 4
    assert found["top blocks, 8K rows of 2K"].num_bytes == 8192 * 2 * (2014 + 96) * 4
    assert found["append and pool, 8K tokens"].num_bytes == (4 * 8192 + 511 + 127) * 2 * 128 * 2
    assert found["add and norm, 8K rows"].num_bytes == (4 * 8192 + 1) * 4096 * 2
    assert found["norm and rope of q, k, 8K rows"].num_bytes == (4 * 8192 * 32 + 2) * 128 * 2 + 2 * 8192 * 128 * 4
    assert found["silu and product, 8K rows"].num_bytes == 3 * 8192 * 16384 * 2


def test_short_prompts_leave_something_to_choose() -> None:
    found = released(1024)
    assert "lightning prefill, 1K" in found
    assert found["block selection, 8K at 8K"].flops > 0


# by the clock


def test_a_failure_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room() -> list[KernelCall]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")

    def no_peer() -> None:
        raise ValueError("not for\n this GPU")

    monkeypatch.setattr(roofline, "milliseconds", lambda call: call() or 0.004)
    nothing = measure(KernelCase("sort", "3 rows", no_room, 0, 8_000_000, "copy"), H200)
    assert (nothing.ms, nothing.error) == (None, "out of memory")
    work = KernelCall(lambda: None, no_peer)
    alone = measure(KernelCase("sort", "3 rows", lambda: [work], 0, 8_000_000, "copy"), H200)
    assert (alone.ms, alone.peer_ms, alone.error) == (0.004, None, "copy: ValueError: not for this GPU")


def test_reasons_are_short() -> None:
    assert reason(RuntimeError("HIP out of memory")) == "out of memory"
    assert len(reason(RuntimeError("x" * 1000))) == 200


def test_one_after_another(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> list[KernelCall]:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(roofline, "milliseconds", lambda call: call() and 0.004)
    broken = KernelCase("shuffle", "1 row", fail, 0, 1, "copy")
    results = bench._time_all([broken, made_up()], H200)
    assert [one.ms for one in results] == [None, 0.004]
    notes = capsys.readouterr().err
    assert "shuffle, 1 row: failed: RuntimeError: no such instruction (1 of 2)" in notes
    assert "sort, 3 rows: 0.004 ms, 50% of the roofline (2 of 2)" in notes


# what is shown


def some_results() -> list[KernelResult]:
    return [
        result(made_up("sort"), H200, 0.004, 0.0123),
        result(made_up("multiply", "8K", flops=8 * 10**12), H200, 20.0, None, "copy: out of memory"),
        result(made_up("shuffle"), H200, None, None, "out of memory"),
        result(made_up("hash", num_bytes=800_000_000), H200, 160.0, 4.0),
    ]


def on_a_made_up_gpu(monkeypatch: pytest.MonkeyPatch, results: list[KernelResult]) -> None:
    monkeypatch.setattr(bench, "_gpu", lambda _: torch.device("cuda"))
    monkeypatch.setattr(bench, "_measure_kernels", lambda *_: ("Made-up GPU", H200, results))


def test_table_json_and_plot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    on_a_made_up_gpu(monkeypatch, some_results())
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    assert run(["bench", "kernels", "--json", str(figures), "--plot", str(picture), "--lengths", "4K"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert " ".join(lines).startswith(
        "kernels, bfloat16, Made-up GPU: 800 TFLOP/s and 4.00 TB/s at best kernel ms share"
    )
    assert lines[-4:] == [
        "sort, 3 rows 0.004 50% 3.08 x copy",
        "multiply, 8K 20 50% 400 copy: out of memory",
        "shuffle, 3 rows failed out of memory",
        "hash, 3 rows 160 0% 0.025 x copy",
    ]
    facts = json.loads(figures.read_text())
    assert (facts["kind"], facts["tflops"], facts["tb_per_s"], facts["lengths"]) == ("kernels", 800, 4, [4096])
    assert facts["results"][0] == {
        "name": "sort", "size": "3 rows", "ms": 0.004, "floor_ms": 0.002, "share": 0.5, "peer": "copy",
        "peer_ms": 0.0123, "ratio": pytest.approx(3.075), "tflops": None, "error": "",
    }  # fmt: skip
    assert facts["results"][2]["error"] == "out of memory"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_nothing_ran(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    failed = some_results()[2:3]
    on_a_made_up_gpu(monkeypatch, failed)
    assert run(["bench", "kernels"]) == 1
    assert "no kernel ran: out of memory" in capsys.readouterr().err
    record = Record("kernels", "a GPU", {}, [asdict(one) for one in failed])
    plot_record(record, tmp_path / "empty.png", "nothing")
    assert (tmp_path / "empty.png").is_file()

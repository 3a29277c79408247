"""`sala bench` on a tiny model: figures of every kind are there, whatever they are."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sala.cli import run
from sala.errors import SalaError, install_command
from sala.lab.bench import measure
from sala.lab.bench.measure import open_checkpoint, open_random
from sala.options import Options


def test_latency(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    arguments = ["bench", "latency", "-m", str(tiny), "--lengths", "300,64", "-n", "4", "--device", "cpu"]
    assert run([*arguments, "--json", str(figures), "--plot", str(picture)]) == 0
    out = capsys.readouterr()
    assert "vs. shortest" in out.out
    assert "tiny, float32, cpu" in out.out
    assert "300: prefill" in out.err
    found = json.loads(figures.read_text())
    assert [one["num_tokens"] for one in found["results"]] == [64, 300]
    assert found["results"][0]["decode_ratio"] == 1
    for one in found["results"]:
        assert all(value > 0 for value in one.values())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_throughput_with_random_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    arguments = ["bench", "throughput", "--random", "tiny", "--batches", "1,3", "--length", "40", "-n", "4"]
    assert run([*arguments, "--device", "cpu", "--json", str(figures), "--plot", str(picture)]) == 0
    assert "random tiny" in capsys.readouterr().out
    found = json.loads(figures.read_text())
    assert [one["batch"] for one in found["results"]] == [1, 3]
    assert found["new_tokens"] == 4
    assert picture.is_file()


def test_all_requests_are_decoded_together() -> None:
    subject = open_random("tiny", Options(device="cpu"))
    prompts = measure._prompts(3, 20, subject.config.vocab_size, seed=0)
    with subject.service(32, 3) as (service, _):
        course = measure.run(service, prompts, 6, subject.device)
        assert service.engine.is_idle
    assert course.num_decoded == 3 * 5
    assert course.peak_bytes > 0


def test_what_does_not_fit_is_left_out(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = measure.measure_latency

    def small_only(subject: object, num_tokens: int, new_tokens: int) -> object:
        if num_tokens > 32:
            raise RuntimeError("CUDA out of memory")
        return real(subject, num_tokens, new_tokens)  # type: ignore[arg-type]

    monkeypatch.setattr(measure, "measure_latency", small_only)
    base = ["bench", "latency", "-m", str(tiny), "--device", "cpu", "-n", "2", "--lengths"]
    assert run([*base, "16,64,128"]) == 0
    assert "64 and above left out: out of memory" in capsys.readouterr().err
    assert run([*base, "64"]) == 1
    assert "64: out of memory" in capsys.readouterr().err


def test_more_than_the_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sala.backends.torch import executor

    subject = open_checkpoint(tiny, Options(device="cpu"))
    monkeypatch.setattr(executor, "free_bytes", lambda _: 25 << 20)  # of which a step needs 23 MiB
    with pytest.raises(SalaError, match="50 sequences of 640 tokens"), subject.service(640, 50):
        pass
    with pytest.raises(SalaError, match=r"weights take 17\.\d GiB"):
        open_random("released", Options(device="cpu"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["latency", "--random", "huge"], "random is 'huge'"),
        (["latency", "--random", "tiny", "--lengths", "4K,many"], "many"),
        (["latency", "--random", "tiny", "--lengths", "0"], "at least 1"),
        (["latency", "--random", "tiny", "--json", "/nowhere/at/all.json"], "cannot be written"),
        (["throughput", "--random", "tiny", "--length", "0"], "length is 0"),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, list) else "",
)
def test_errors(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *arguments]) == 2
    out = capsys.readouterr()
    assert words in out.err
    assert out.out == ""


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["bench", "latency", "--random", "tiny", "--plot", "picture.png"]) == 1
    assert install_command("eval") in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["bench", "latency"], ["bench", "throughput"], ["bench", "serve"], ["doctor"]])
def test_help_is_cheap(verb: list[str]) -> None:
    code = f"from sala.cli import run; run({[*verb, '--help']}); import sys; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.endswith("False\n")

"""The command, from a checkpoint to answers of the quantized one; and its report."""

import json
import sys
from pathlib import Path

import pytest
import torch

from sala.cli import run as command
from sala.lab.quantize.check import Check, remedy
from sala.lab.quantize.pipeline import quantize_model
from sala.lab.quantize.plan import QuantizeSettings
from sala.lab.quantize.report import NAME, measure, to_record
from sala.lab.quantize.texts import FileText
from sala.lab.report.kinds import save
from sala.lab.report.record import Record
from sala.lab.train.recall import Recall
from tests.command import sala
from tests.quant.prose import prose

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "prose.txt"
    file.write_text(prose(2000))
    return file


def test_quantize_then_generate(tiny: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "four"
    arguments = ["--calibration", str(text), "--tokens", "2048", "--keep", "k_proj", "--group-size", "32"]
    done = sala("quantize", str(tiny), "-o", str(out), *arguments, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "quantizing  4/4" in done.stderr
    assert f"ready: {out}" in done.stderr
    table = json.loads((out / "config.json").read_text())["quantization"]
    assert (table["bits"], table["group_size"]) == (4, 32)
    assert table["model.layers.2.self_attn.k_proj"] == {"bits": 8, "group_size": 32}
    answer = sala("generate", "hello", "-m", str(out), "-t", "0", "-n", "8", "--json", "--device", "cpu")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["usage"]["completion_tokens"] == 8
    assert command(["quantize", str(tiny), "-o", str(out), "--bits", "8"]) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["TINY", "--bits", "3"], 2, "bits is '3'; use 8, 4"),
        (["TINY", "--group-size", "50"], 2, "group_size"),
        (["TINY", "--method", "magic"], 2, "use rtn, gptq, awq"),
        (["TINY", "--bits", "8", "--keep", "nothing"], 2, "no module of this model"),
        (["TINY", "--calibration", "/nowhere.txt"], 2, "cannot be read"),
        (["/nowhere"], 1, "no model"),
        (["TINY", "--device", "tpu"], 2, "device"),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, list) else str(item),
)
def test_errors(
    tiny: Path, tmp_path: Path, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [part.replace("TINY", str(tiny)) for part in arguments]
    assert command(["quantize", *given, "-o", str(tmp_path / "out")]) == code
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.iterdir()) == []


def test_the_report_of_the_command(tiny: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "eight"
    arguments = ["--bits", "8", "--report", "--report-text", str(text), "--report-tokens", "512", "--needles", "1"]
    done = sala("quantize", str(tiny), "-o", str(out), *arguments, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    for words in ("original", "quantized", "perplexity", "KL to the original", "same first choice", "needles found"):
        assert words in done.stdout
    rows = Record.load(out / f"{NAME}.json").results
    assert next(row["after"] for row in rows if row["measure"] == "same first choice") > 0.8
    assert {row["on"] for row in rows if row["measure"] == "needles found"} == {1024, 4096}
    assert (out / f"{NAME}.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_on_a_model_that_is_there(tiny: Path, text: Path, tmp_path: Path) -> None:
    """A run that was cut after the model was written is measured by the same command; another model is not."""
    out = tmp_path / "eight"
    quantize_model(tiny, out, QuantizeSettings(8))
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    arguments = ["--report", "--report-text", str(text), "--report-tokens", "512", "--needles", "0", "--device", "cpu"]
    for bits, code in (("4", 1), ("8", 0)):
        assert command(["quantize", str(tiny), "-o", str(out), "--bits", bits, "--method", "rtn", *arguments]) == code
    assert {name: (out / name).read_bytes() for name in before} == before
    assert Record.load(out / f"{NAME}.json").results[0]["measure"] == "weights"


def test_a_model_beside_itself(tiny: Path, text: Path, tmp_path: Path) -> None:
    """Nothing is lost where nothing was done, and much where there are few bits."""
    tokens = FileText(text, tiny).held_out(1024, 256)
    same = measure(tiny, tiny, tokens, CPU, num_needles=2, lengths=(600,))
    assert same["perplexity_ratio"] == 1
    assert abs(same["kl"]) < 1e-6
    assert same["agreement"] == 1
    assert same["original"] == same["quantized"]
    quantize_model(tiny, tmp_path / "four", QuantizeSettings(4, method="rtn"))
    found = measure(tiny, tmp_path / "four", tokens, CPU, num_needles=0)
    assert found["kl"] > 1e-3
    assert 0.3 < found["agreement"] < 1
    assert found["quantized"]["bytes"] < 0.4 * found["original"]["bytes"]
    assert found["quantized"]["needle"] is None
    rows = to_record(found, "tiny", {}).results
    assert [row["measure"] for row in rows][:2] == ["weights", "perplexity"]


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = {"perplexity": 10.0, "bytes": 1 << 20, "needle": None}
    results = {"original": half, "quantized": half, "kl": 0.0, "agreement": 1.0, "perplexity_ratio": 1.0}
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not save(to_record(results, "tiny", {}), tmp_path, NAME)
    assert Record.load(tmp_path / f"{NAME}.json").results[2]["after"] == 0
    assert not (tmp_path / f"{NAME}.png").exists()


def test_a_check_of_what_is_complete(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four bits of random weights change perplexity; the check of a finished model does not quantize it again."""
    out = tmp_path / "four"
    quantize_model(tiny, out, QuantizeSettings(4, 32, "rtn"))
    written = (out / "config.json").stat().st_mtime_ns
    arguments = ["--method", "rtn", "--group-size", "32", "--check", "--device", "cpu"]
    assert command(["quantize", str(tiny), "-o", str(out), *arguments]) == 0
    shown = capsys.readouterr()
    assert "is complete; measuring it" in shown.err
    assert (out / "config.json").stat().st_mtime_ns == written
    for words in ("perplexity", "KL to the original, nats", "facts found at 2K"):
        assert words in shown.out
    assert " of 16" in shown.out
    assert not (out / f"{NAME}.json").exists()


def test_what_a_check_advises() -> None:
    def found(ratio: float, after: int) -> Check:
        return Check((10.0, 10.0 * ratio), 0.1, ([Recall(2048, 10, 16, 0.1)], [Recall(2048, after, 16, 0.1)]))

    plain, fine = QuantizeSettings(4, method="rtn"), QuantizeSettings(4, 32, "gptq")
    assert remedy(found(1.05, 9), plain) is None
    assert remedy(found(1.2, 10), plain) == "try --method gptq with --calibration FILE"
    assert remedy(found(1.0, 8), QuantizeSettings(4, method="gptq")) == "try --group-size 32"
    assert remedy(found(1.0, 8), fine) == "try --keep down_proj, or --bits 8"

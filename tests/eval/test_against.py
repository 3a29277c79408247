"""Ours beside a dense model: the comparison by its arithmetic; the dense model itself where transformers is there."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sala.cli import run
from sala.errors import InputError, SalaError
from sala.lab.bench import dense as work
from sala.lab.bench.dense import compare, count_parameters, verdict
from sala.lab.bench.measure import Latency
from sala.lab.dense import need_transformers
from sala.lab.report.kinds import plot_record
from sala.lab.report.page import read_runs, to_page
from sala.lab.report.record import Record
from tests.train.dense import write_dense_model


def latency(length: int, first_s: float, decode: float) -> Latency:
    return Latency(length, first_s, length / first_s, decode, 1 << 30)


def rows() -> list[dict[str, Any]]:
    """The dense model reads faster up to 4,000 tokens, where both take the same; it writes slower everywhere."""
    ours = [latency(length, length / 1000, 100.0) for length in (1000, 2000, 8000, 16000)]
    theirs = [latency(length, length / 1000 * length / 4000, 50.0) for length in (1000, 2000, 8000)]
    return compare(ours, theirs)


def test_compare() -> None:
    found = rows()
    assert [row["num_tokens"] for row in found] == [1000, 2000, 8000, 16000]
    assert [row["first_token_ratio"] for row in found[:3]] == pytest.approx([0.25, 0.5, 2.0])
    assert [row["decode_ratio"] for row in found[:3]] == [2.0, 2.0, 2.0]
    assert [row["crossover"] for row in found] == [{}, {}, {"first_token": 4000}, {}]
    last = found[3]  # the dense model did not get so far
    assert last["first_token_s"] == 16
    assert [last[name] for name in ("dense_first_token_s", "first_token_ratio", "decode_ratio")] == [None] * 3


def test_verdicts() -> None:
    found = rows()
    assert verdict(found, "first_token") == "faster from about 4,000 tokens on"
    assert verdict(found, "decode") == "faster at every length measured"
    assert verdict(found[:2], "first_token") == "slower at the longest length measured"
    assert verdict(found[3:], "decode") == "no length was measured on both"
    back = compare(
        [latency(length, first, 1.0) for length, first in ((1, 4.0), (2, 1.0), (4, 4.0))],
        [latency(length, 2.0, 1.0) for length in (1, 2, 4)],
    )
    assert verdict(back, "first_token") == "faster at some lengths only"


def test_picture(tmp_path: Path) -> None:
    plot_record(Record("against", "ours", {}, rows()), tmp_path / "sampled.png", "both")
    assert (tmp_path / "sampled.png").read_bytes().startswith(b"\x89PNG")


def test_parameters() -> None:
    assert count_parameters(work.RANDOM["qwen3-8b-random"]) == pytest.approx(8.19e9, rel=0.005)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for words in (["against", "tiny-random"], ["--against", "tiny-random"], ["--against=tiny-random"]):
        assert run(["bench", *words, "--random", "tiny", "--device", "cpu"]) == 1
    out = capsys.readouterr()
    assert "transformers is not installed; run: pip install --upgrade transformers" in out.err
    assert "prefill" not in out.err  # nothing was measured in vain


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Neither model is loaded if the weights alone fit but running it does not."""
    from sala.backends.torch import executor
    from sala.lab.bench import measure

    monkeypatch.setattr("sala.lab.dense.need_transformers", lambda: None)
    monkeypatch.setattr(executor, "free_bytes", lambda _: 19 << 30)
    command = ["bench", "against", "qwen3-8b-random", "--random", "released", "--device", "cpu", "--dtype", "bfloat16"]
    assert run(command) == 1
    assert "random released: the weights take 17.7 GiB and running" in capsys.readouterr().err
    monkeypatch.setattr(executor, "free_bytes", lambda _: 15 << 30)
    assert run(command) == 1
    assert "qwen3-8b-random: the weights take 15.3 GiB" in capsys.readouterr().err
    (tmp_path / "memory.max").write_text(str(4 << 30))
    (tmp_path / "memory.current").write_text(str(1 << 30))
    monkeypatch.setattr(measure, "CGROUP", tmp_path)
    assert run(command) == 1
    assert "3.0 GiB are free" in capsys.readouterr().err  # of a container


def test_a_transformers_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    old = type(sys)("transformers")
    monkeypatch.setitem(sys.modules, "transformers", old)
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", type(sys)("transformers.cache_utils"))
    with pytest.raises(SalaError, match="transformers is too old"):
        need_transformers()


class TestWithTransformers:
    @pytest.fixture(autouse=True)
    def _needed(self) -> None:
        pytest.importorskip("transformers")

    def open(self) -> work.DenseModel:
        import torch

        torch.manual_seed(0)
        return work.open_dense("tiny-random", torch.device("cpu"), torch.float32)

    def test_the_reserved_cache_changes_nothing(self) -> None:
        import torch

        dense = self.open()
        assert dense.is_plain
        ids = torch.arange(2, 42)[None]
        wanted = dense.model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)[0, 40:].tolist()
        cache, tokens, found = work._preallocate(dense, 46), ids, []
        with torch.inference_mode():
            for _ in range(6):
                out = dense.model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                tokens = out.logits[:, -1:].argmax(-1)
                found.append(int(tokens))
        assert found == wanted
        assert cache.get_seq_length() == 45

    def test_a_step_can_be_run_again(self) -> None:
        """As a graph does it: the same place is written again, and the same comes out."""
        import torch

        dense = self.open()
        ids, token = torch.arange(2, 42)[None], torch.tensor([[5]])
        cache = work._preallocate(dense, 46)
        with torch.inference_mode():
            dense.model(input_ids=ids, past_key_values=cache, use_cache=True)
            first, second = (self._step(dense, cache, token) for _ in range(2))
        assert torch.equal(first, second)

    def _step(self, dense: work.DenseModel, cache: Any, token: Any) -> Any:
        work._rewind(cache, 40)
        return dense.model(input_ids=token, past_key_values=cache, use_cache=True).logits

    def test_measuring(self) -> None:
        found = work.measure_dense(self.open(), 64, 4)
        assert found.num_tokens == 64
        assert min(found.first_token_s, found.prefill_per_second, found.decode_per_second, found.peak_bytes) > 0

    def test_a_length_that_does_not_fit_is_left_out(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        """It is refused before anything is allocated, and the lengths before it are kept."""
        from sala.backends.torch import executor
        from sala.lab.bench import measure

        dense, figures = self.open(), tmp_path / "figures.json"
        with monkeypatch.context() as patch:
            patch.setattr(executor, "free_bytes", lambda _: 0)
            patch.setattr(work, "_run", None)  # would fail if anything were run
            with pytest.raises(SalaError, match="20,000 tokens take 0"):
                work.measure_dense(dense, 20000, 3)
        needed = work.running_bytes(work.RANDOM["tiny-random"], 60 + 3, 4)
        asked = []

        def free_bytes(_: object) -> int:
            asked.append(1)
            return needed * 2

        monkeypatch.setattr(measure, "free_memory", free_bytes)
        monkeypatch.setattr(measure, "check_memory", lambda *_: None)
        base = ["bench", "against", "tiny-random", "--random", "tiny", "-n", "3", "--device", "cpu"]
        assert run([*base, "--dtype", "float32", "--lengths", "16,60,600", "--json", str(figures)]) == 0
        assert "600 and above left out: 600 tokens take" in capsys.readouterr().err
        assert [row["dense_decode_per_second"] is not None for row in json.loads(figures.read_text())["results"]] == [
            True, True, False,
        ]  # fmt: skip
        assert len(asked) == 3

    def test_a_directory(self, tmp_path: Path) -> None:
        import torch

        self.open().model.save_pretrained(tmp_path / "dense")
        dense = work.open_dense(str(tmp_path / "dense"), torch.device("cpu"), torch.float32)
        assert dense.name == "dense"
        assert dense.model.config.num_hidden_layers == 2
        with pytest.raises(InputError, match="nothing is not a model directory"):
            work.open_dense("nothing", torch.device("cpu"), torch.float32)
        (tmp_path / "dense" / "config.json").write_text('{"model_type": "no such"}')
        with pytest.raises(SalaError, match="transformers cannot load"):
            work.open_dense(str(tmp_path / "dense"), torch.device("cpu"), torch.float32)

    def test_command(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        figures, picture, log = tmp_path / "figures.json", tmp_path / "sampled.png", tmp_path / "figures.jsonl"
        base = ["bench", "against", "tiny-random", "--random", "tiny", "-n", "3", "--device", "cpu"]
        base += ["--json", str(figures), "--plot", str(picture), "--lengths"]
        assert run([*base, "16,64"]) == 0
        out = capsys.readouterr()
        assert "against tiny-random" in out.out
        assert "decode: " in out.err
        found = json.loads(figures.read_text())
        assert found["kind"] == "against"
        assert found["plots"] == ["sampled.png"]
        assert [row["num_tokens"] for row in found["results"]] == [16, 64]
        assert len(log.read_text().splitlines()) == 4
        assert "tiny-random" in to_page(read_runs([figures]))
        assert run([*base, "16,64"]) == 0  # all is known: nothing is measured again
        assert json.loads(figures.read_text())["results"] == found["results"]
        assert run([*base, "16"]) == 2
        assert "belongs to another run" in capsys.readouterr().err
        assert run([*base, "16", "--force"]) == 0
        assert len(log.read_text().splitlines()) == 4

    def test_packed_as_ours(self) -> None:
        """In 8 bits nearly the same logits come out; in 4 bits other ones, by the packed linears."""
        import torch

        from sala.backends.torch.linears import AffineLinear

        ids, found = torch.arange(2, 42)[None], {}
        for bits in (16, 8, 4):
            torch.manual_seed(0)
            dense = work.open_dense("tiny-random", torch.device("cpu"), torch.float32, bits)
            packed = [module for module in dense.model.modules() if isinstance(module, AffineLinear)]
            assert bool(packed) == (bits < 16)
            with torch.inference_mode():
                found[bits] = dense.model(input_ids=ids).logits
        errors = [float((found[bits] - found[16]).norm() / found[16].norm()) for bits in (8, 4)]
        assert 0 < errors[0] < 0.02 < errors[1] < 0.5

    def test_command_in_fewer_bits(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        figures = tmp_path / "figures.json"
        base = ["bench", "against", "tiny-random", "--random", "tiny", "-n", "3", "--device", "cpu", "--lengths", "16"]
        assert run([*base, "--bits", "8", "--json", str(figures)]) == 0
        assert json.loads(figures.read_text())["settings"]["bits"] == 8
        assert "tiny-random, 8 bits" in capsys.readouterr().err
        assert run([*base, "--bits", "3"]) == 2
        assert "bits is 3; use 16, 8 or 4" in capsys.readouterr().err


def test_too_little_memory_for_a_checkpoint(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sala.backends.torch import executor
    from sala.lab.bench.measure import check_checkpoint
    from sala.options import Options

    check_checkpoint(tiny, Options(device="cpu"), 4096)
    monkeypatch.setattr(executor, "free_bytes", lambda _: 1 << 20)
    with pytest.raises(SalaError, match="the weights take"):
        check_checkpoint(tiny, Options(device="cpu"), 4096)


class TestOnMlx:
    @pytest.fixture(autouse=True)
    def _needed(self) -> None:
        pytest.importorskip("mlx_lm")

    @pytest.fixture
    def dense(self, tmp_path: Path) -> Path:
        write_dense_model(tmp_path / "dense", "qwen3")
        return tmp_path / "dense"

    @pytest.mark.parametrize("bits", [16, 4])
    def test_command(
        self, tiny: Path, dense: Path, bits: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        figures = tmp_path / "figures.json"
        base = ["bench", "against", str(dense), "-m", str(tiny), "--backend", "mlx", "--device", "cpu", "-n", "3"]
        assert run([*base, "--bits", str(bits), "--lengths", "16,96", "--json", str(figures)]) == 0
        (first, second) = json.loads(figures.read_text())["results"]
        for row in (first, second):
            assert min(value for name, value in row.items() if name != "crossover") > 0
        assert f"{bits} bits, mlx-lm" in capsys.readouterr().err

    def test_memory_is_asked_first(
        self, tiny: Path, dense: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from sala.backends.mlx import executor

        monkeypatch.setattr(executor, "free_bytes", lambda _: 100_000)
        monkeypatch.setattr("sala.lab.bench.dense_mlx.SalaOnMlx", None)  # would fail if anything were loaded
        base = ["bench", "against", str(dense), "-m", str(tiny), "--backend", "mlx", "--device", "cpu"]
        assert run([*base, "--lengths", "16"]) == 1
        assert "the weights take" in capsys.readouterr().err

    def test_lengths_that_do_not_fit_are_left_out(
        self, tiny: Path, dense: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:  # fmt: skip
        """Ours is opened for the longest that fits; the dense model is asked for each length."""
        from sala.lab.bench import dense_mlx

        monkeypatch.setattr(dense_mlx, "_own_bytes", lambda _, num_tokens: num_tokens * (1 << 60) // 300)
        monkeypatch.setattr(dense_mlx, "_dense_bytes", lambda _, num_tokens: num_tokens * (1 << 60) // 100)
        monkeypatch.setattr(dense_mlx, "_free", lambda _: 1 << 60)
        figures = tmp_path / "figures.json"
        base = ["bench", "against", str(dense), "-m", str(tiny), "--backend", "mlx", "--device", "cpu", "-n", "3"]
        assert run([*base, "--lengths", "16,96,400", "--json", str(figures)]) == 0
        assert capsys.readouterr().err.count("and above left out: ") == 2
        rows = json.loads(figures.read_text())["results"]
        assert [(row["num_tokens"], row["dense_decode_per_second"] is not None) for row in rows] == [
            (16, True), (96, False),
        ]  # fmt: skip

    def test_what_is_refused(self, tiny: Path, dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
        mlx = ["--backend", "mlx", "--device", "cpu", "--lengths", "16"]
        assert run(["bench", "against", str(dense), "--random", "tiny", *mlx]) == 2
        assert "random is for --backend torch" in capsys.readouterr().err
        assert run(["bench", "against", "qwen3-8b-random", "-m", str(tiny), *mlx]) == 2
        assert "is not a model directory" in capsys.readouterr().err

"""Perplexity by length on a tiny model: the arithmetic against its logits, windows, files, the command."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from sala.cli.eval import perplexity
from sala.errors import InputError
from sala.lab.eval.documents import read_documents
from sala.lab.eval.perplexity import TokenizedText, Window, choose_lengths, cut, measure, to_text
from sala.lab.report.page import read_runs
from sala.lab.report.record import Log, Record
from sala.llm import LLM

BOS = 256


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, device="cpu", ctx=1024, max_batch=1, snapshots=0) as llm:
        yield llm


def text_of(count: int, seed: int = 1) -> TokenizedText:
    return TokenizedText("made up", [*"".join(random.Random(seed).choices("abcdefgh ", k=count)).encode()])


def losses(llm: LLM, ids: list[int]) -> Any:
    """By definition: of every token but the first."""
    logits = llm.logits(ids).astype(np.float64)[:-1]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -logprobs[np.arange(len(ids) - 1), ids[1:]]


def test_windows_side_by_side(llm: LLM) -> None:
    """Each begins with BOS, which counts for its length; all lengths look at the same text."""
    text = text_of(700)
    rows = list(measure(llm, text, [65, 257]))
    assert [row["length"] for row in rows] == [65, 257]
    assert [row["windows"] for row in rows] == [8, 2]
    assert [row["tokens"] for row in rows] == [row["bytes"] for row in rows] == [512, 512]
    for row, size in zip(rows, (64, 256), strict=True):
        pieces = [losses(llm, [BOS, *text.ids[at : at + size]]) for at in range(0, 512, size)]
        every = np.concatenate(pieces)
        assert row["loss"] == pytest.approx(every.mean(), abs=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(every.mean()), rel=1e-5)
        assert row["bits_per_byte"] == pytest.approx(every.sum() / math.log(2) / 512, abs=1e-5)
        assert row["stderr"] == pytest.approx(row["perplexity"] * every.std() / math.sqrt(512), rel=1e-3)
    assert rows[1]["perplexity"] == pytest.approx(
        math.sqrt(math.prod(llm.perplexity([BOS, *text.ids[at : at + 256]]) for at in (0, 256))), rel=1e-4
    )


def test_windows_that_overlap(llm: LLM) -> None:
    """Only what is new in a window is scored, with the rest of it as context."""
    text = text_of(200)
    (row,) = measure(llm, text, [101], stride=25)
    assert row["windows"] == 5
    new = [losses(llm, [BOS, *text.ids[at : at + 100]])[-25:] for at in (25, 50, 75, 100)]
    every = np.concatenate([losses(llm, [BOS, *text.ids[:100]]), *new])
    assert row["tokens"] == len(every) == 200
    assert row["loss"] == pytest.approx(every.mean(), abs=1e-5)


def test_a_text_beyond_the_switch_to_sparse_attention(tiny: Path) -> None:
    with LLM(tiny, device="cpu", ctx=2048, max_batch=1) as llm:
        text = text_of(1500)
        (row,) = measure(llm, text, [1400])
        assert row["loss"] == pytest.approx(losses(llm, [BOS, *text.ids[:1399]]).mean(), abs=1e-5)


@pytest.mark.parametrize("has_bos", [True, False])
@pytest.mark.parametrize("stride", [None, 1, 3, 10])
@pytest.mark.parametrize("count", [10, 11, 37, 100])
def test_every_token_is_scored_once(count: int, stride: int | None, has_bos: bool) -> None:
    spans = cut(count, 10, stride, has_bos)
    size = 9 if has_bos else 10
    assert all(span.end - span.start == size and span.start <= span.first < span.end <= count for span in spans)
    scored = [at for span in spans for at in range(span.first, span.end)]
    assert scored == sorted(set(scored))
    unseen = 0 if has_bos else 1  # a first token follows nothing
    step = size if stride is None else min(stride, size)
    assert count - spans[-1].end < step
    missing = len(spans) * unseen if step == size else unseen
    assert len(scored) == spans[-1].end - missing
    assert spans[0] == Window(0, unseen, size)


def test_lengths() -> None:
    assert choose_lengths([1024, 64, 64, 4096], 2000, 8192) == [64, 1024]
    assert choose_lengths([1024, 64], 2000, 512) == [64]
    assert choose_lengths([1024], 300, 8192) == [300]
    for lengths, words in (([1], "at least 2"), ([9000], "context holds 8,192")):
        with pytest.raises(InputError, match=words):
            choose_lengths(lengths, 5000, 8192)


def test_files(tmp_path: Path, llm: LLM) -> None:
    (tmp_path / "a.txt").write_text("plain é")
    lines = [json.dumps({"text": "one\u2028"}), "", json.dumps({"text": "two", "source": "x"})]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    assert read_documents(tmp_path / "a.txt") == ["plain é"]
    assert read_documents(tmp_path / "b.jsonl") == ["one\u2028", "two"]
    text = to_text(llm, "b", ["one", "two"])
    end = llm.config.eos_token_id[0]
    assert text.ids == [*b"one", end, *b"two", end]  # an end mark after each of several
    assert to_text(llm, "a", ["one"]).ids == [*b"one"]
    assert to_text(llm, "a", ["one"], 2).ids == [*b"on"]
    assert text.digest != text_of(8).digest


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"words": 1}', ":2 cannot be used: .*text"),
        ("a.jsonl", b"nonsense", ":1 cannot be used: .*text"),
        ("a.txt", None, "cannot be read"),
        ("", None, "cannot be read"),  # a directory
    ],
)
def test_bad_files(name: str, content: bytes | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_documents(tmp_path / name)


def test_a_text_of_nothing(llm: LLM) -> None:
    with pytest.raises(InputError, match="needs at least two"):
        to_text(llm, "empty.txt", ["a"])


def test_what_is_in_the_log_is_not_read_again(tiny: Path, tmp_path: Path) -> None:
    file, text = tmp_path / "run.jsonl", text_of(300)
    seen: list[tuple[str, int, int]] = []
    with LLM(tiny, device="cpu", ctx=256, max_batch=1) as llm:
        first = list(measure(llm, text, [65], log=Log(file), note=lambda *news: seen.append(news)))
        lines = file.read_text().splitlines(keepends=True)
        assert len(lines) == 4
        assert seen[-1] == ("65 tokens", 256, 256)
        file.write_text("".join(lines[:2]) + lines[2][:20])  # the power went in the third window
        (again,) = measure(llm, text, [65], log=Log(file))
        assert again["loss"] == first[0]["loss"]
        assert len(file.read_text().splitlines()) == 4
        assert file.read_text().splitlines(keepends=True)[:2] == lines[:2]  # their times are those of the first run


def run(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(perplexity)
    return CliRunner().invoke(app, [str(one) for one in arguments])


def test_command(tiny: Path, tmp_path: Path) -> None:
    file, record = tmp_path / "text.txt", tmp_path / "run.json"
    file.write_bytes(bytes(text_of(600).ids))
    base = (file, "-m", tiny, "--device", "cpu", "-o", record)
    done = run(*base, "--lengths", "64,128,4K")
    assert done.exit_code == 0, done.output
    assert "bits per byte" in done.output
    assert "4,096 tokens left out: the text has 600" in done.output
    found = Record.load(record)
    assert (found.kind, found.model, found.plots) == ("perplexity", "tiny", ["run.png"])
    assert [row["length"] for row in found.results] == [64, 128]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert read_runs([record])[0].record.results == found.results
    again = run(*base, "--lengths", "64,128,4K")  # nothing is measured, the same is written
    assert Record.load(record).results == found.results, again.output
    other = run(*base, "--lengths", "64")
    assert "belongs to another run" in str(other.exception)
    assert run(*base, "--lengths", "64", "--force", "--tokens", "200").exit_code == 0
    assert Record.load(record).settings["tokens"] == 200


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lengths", "64", "--stride", "65"], "stride is 65"),
        (["--lengths", "64", "--stride", "1"], "at least 2"),
        (["--lengths", "64", "--tokens", "0"], "tokens is 0"),
        (["--lengths", "1"], "lengths hold 1"),
        (["-o", "run.csv"], "does not end in .json"),
        (["-o", "/nowhere/at/all.json"], "cannot be written"),
    ],
)
def test_bad_settings(arguments: list[str], words: str, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(text_of(100).ids))
    done = run(file, "-m", tiny, "--device", "cpu", "-o", tmp_path / "run.json", *arguments)
    assert words in str(done.exception)
    assert isinstance(done.exception, InputError)
    assert not (tmp_path / "run.json").exists()


def test_the_text_is_not_overwritten(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.json"
    file.write_text("abc")
    assert "is the text itself" in str(run(file, "-m", tiny, "-o", file).exception)

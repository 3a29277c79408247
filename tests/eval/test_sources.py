"""`sala eval sources`: texts with facts at known places, how they are judged, and what is learnt from them."""

import json
from pathlib import Path

import numpy as np
import pytest

from sala import cli
from sala.lab.eval.documents import read_source
from sala.lab.eval.sources import Judged, learn
from sala.lab.eval.tasks.case import PromptWriter, Solution
from sala.lab.eval.tasks.haystack import Haystack
from sala.lab.eval.tasks.reading import UserPassage
from sala.lab.eval.tasks.sources import DISTRACTORS, ONE, SEVERAL, SourceMaker, SourceQuestion, passages
from sala.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def writer(tiny: Path) -> PromptWriter:
    return PromptWriter.for_model(Tokenizer.load(tiny))


@pytest.fixture(scope="module")
def haystack(writer: PromptWriter) -> Haystack:
    return Haystack(read_source(None).documents, writer.encode)


@pytest.mark.parametrize("split", ["train", "test"])
def test_facts_lie_where_they_are_said_to(tiny: Path, writer: PromptWriter, haystack: Haystack, split: str) -> None:
    text = SourceMaker(writer, haystack, 3, split).make(6000, 0, 3)  # type: ignore[arg-type]
    tokenizer = Tokenizer.load(tiny)
    assert [question.kind for question in text.questions] == [ONE, ONE, ONE, SEVERAL, DISTRACTORS]
    for question in text.questions:
        facts = [tokenizer.decode(text.ids[fact.start : fact.stop].tolist()) for fact in question.facts]
        assert len(facts) == len(question.solution.wanted)
        assert all(value in fact for fact, value in zip(facts, question.solution.wanted, strict=True))
        assert len(text.ids) + len(question.tail) + question.max_tokens <= 6000
        assert question.text in tokenizer.decode(question.tail.tolist())


def test_passages_lie_where_they_are_said_to(tiny: Path, writer: PromptWriter, haystack: Haystack) -> None:
    known = [UserPassage(f"The ship number {at} is made of wood and tar.", "Of what?", ("wood",)) for at in range(3)]
    text = passages(writer, known, haystack, 3000, 0)
    tokenizer = Tokenizer.load(tiny)
    for passage, question in zip(known, text.questions, strict=True):
        (fact,) = question.facts
        assert tokenizer.decode(text.ids[fact.start : fact.stop].tolist()).strip() == passage.text


def judged(block: int, heads: np.ndarray, is_right: bool = True) -> Judged:
    fact = range(16 * block + 2, 16 * block + 14)
    question = SourceQuestion(ONE, "?", np.zeros(3, np.int32), [fact], Solution(("x",)), 5)
    return Judged(question, 16 * 40, heads, 16, 1, is_right, "x")


def test_heads_that_retrieve_get_the_weight() -> None:
    rng = np.random.default_rng(0)
    cases = []
    for block in (5, 11, 20, 28):
        heads = rng.random((6, 40)) + 0.1
        heads[:, 0] = 50.0
        heads[3, block] = 200.0
        heads[4, 33] = 400.0  # a head that looks elsewhere
        cases.append(judged(block, heads))
    wrong = judged(7, np.ones((6, 40)), is_right=False)
    weights = learn([*cases, wrong], 2)
    assert weights.shape == (2, 3)
    assert weights.sum() == pytest.approx(1)
    assert weights[1, 0] > 0.95
    for case in cases:
        assert case.rank(weights) == 1
        assert case.rank(np.eye(6)[4].reshape(2, 3)) is None
    with pytest.raises(ValueError, match="rightly"):
        learn([wrong], 2)


def test_the_command(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", "sources", "-m", str(tiny), "--lengths", "3K", "--ones", "1", "--device", "cpu"]
    file = tmp_path / "sources.json"
    assert cli.run([*command, "-o", str(file)]) == 0
    first = json.loads(file.read_text())
    assert [row["text"] for row in first["rows"]] == [0, 0, 0]
    assert cli.run([*command, "-o", str(file), "--seed", "1"]) == 2
    assert "exists already, of another run" in capsys.readouterr().err
    assert cli.run([*command, "-o", str(file), "--texts", "2"]) == 0
    assert capsys.readouterr().err.count("3,072 tokens") == 3  # only the second text is read
    extended = json.loads(file.read_text())
    assert extended["rows"][:3] == first["rows"]
    assert [row["text"] for row in extended["rows"]] == [0, 0, 0, 1, 1, 1]
    assert cli.run([*command, "-o", str(file), "--force", "--attention", "dense"]) == 0
    assert "facts among the top 3 passages: tiny" in capsys.readouterr().out
    record = json.loads(file.read_text())
    assert "dense at any length" in record["settings"]["attention"]
    rows = record["rows"]
    assert [row["kind"] for row in rows] == [ONE, SEVERAL, DISTRACTORS]
    assert cli.run([*command, "--learn"]) == 2
    assert "no question was answered rightly" in capsys.readouterr().err
    assert not (tiny / "sources.json").exists()

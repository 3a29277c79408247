"""HELMET's citations, by ALCE's rules: a judge of words, a scripted reader and a guesser, and the command."""

import json
from pathlib import Path
from typing import Any

import pytest

from sala import cli
from sala.errors import InputError
from sala.lab.eval.official.benchmarks import BENCHMARKS
from sala.lab.eval.official.case import Question
from sala.lab.eval.official.citations import (
    PRECISION,
    RECALL,
    CitedAnswer,
    EntailmentModel,
    citation_scores,
    judge_citations,
    summarise_citations,
)
from sala.lab.eval.official.data import Data
from sala.lab.eval.official.request import BenchmarkRequest
from sala.lab.report.record import Record
from sala.text.tokenizer import Tokenizer
from tests.eval.benchmark_data import write_data
from tests.eval.lm_eval_ruler import TOKENIZER

DOCUMENTS = ("Title: A\nred", "Title: B\nblue", "Title: C\nred blue", "Title: D\ngreen")


def has_words(premise: str, hypothesis: str) -> bool:
    """A judge: whether the premise has all words in capitals of the hypothesis, in small letters."""
    return all(word.lower() in premise.split() for word in hypothesis.strip(".").split() if word.isupper())


def scored(*statements: str) -> tuple[float, float]:
    found = citation_scores(statements, DOCUMENTS, has_words)
    return found[RECALL], found[PRECISION]


def test_what_a_statement_is_worth() -> None:
    assert scored("It is RED [1].") == (1, 1)
    assert scored("It is RED [2].") == (0, 0)
    assert scored("It is RED.") == scored("It is RED [0].") == scored("It is RED [5].") == (0, 0)
    assert scored("It is RED and BLUE [1][2].") == (1, 1)  # neither alone, and not without the other
    assert scored("It is RED and BLUE [1][2][4].") == (1, 2 / 3)
    assert scored("It is RED [1][3].") == (1, 1)  # each is enough
    assert scored("It is RED [2][4][4][1].") == (0, 0)  # the fourth does not count
    assert scored("It is RED [1].", "It is GREEN [1].", "It is so.") == (1 / 3, 1 / 2)
    assert scored("It is RED [1].", "It is RED [1][9].") == (1 / 2, 1)
    assert citation_scores([], DOCUMENTS, has_words) == {}


def test_what_the_judge_is_asked() -> None:
    asked: list[tuple[str, str]] = []

    def note(premise: str, hypothesis: str) -> bool:
        asked.append((premise, hypothesis))
        return False

    citation_scores(["Both [1][4] it is [2]."], DOCUMENTS, note)
    assert asked == [("\n".join((DOCUMENTS[0], DOCUMENTS[3], DOCUMENTS[1])), "Both it is.")]


def test_statements() -> None:
    answer = CitedAnswer(len, "Where?", DOCUMENTS, False)
    assert answer("four") == 4
    assert answer.statements("1. Oslo is\n\na town [1]. So it is [2].") == ["Oslo is a town [1].", "So it is [2]."]
    assert answer.statements(" ") == []
    names = CitedAnswer(len, "Where?", DOCUMENTS, True)
    assert names.statements("Oslo [1], Bergen [2][3].\n") == ["Where? Oslo [1]", "Where? Bergen [2][3]"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    write_data(path)
    return path


def cited(directory: Path) -> list[Question]:
    request = BenchmarkRequest(("asqa", "qampari"), {4096: 1}, Tokenizer.load(TOKENIZER), Data(directory))
    return [*BENCHMARKS["helmet"].make(request, lambda *_: None)]


def test_who_cites_what_was_read_scores_all_and_who_guesses_nothing(directory: Path) -> None:
    questions = cited(directory)

    def judged(text: str) -> list[dict[str, Any]]:
        rows = [{"model": "m", **one.labels, "text": text} for one in questions]
        rows += [{"model": "m", "task": "json_kv", "length": 4096, "number": 0, "text": text}]
        return summarise_citations(
            judge_citations(questions, rows, lambda premise, claim: "Oslo" in premise and "Oslo" in claim)
        )

    tasks = [f"{one}, {score}" for one in ("asqa", "qampari") for score in (RECALL, PRECISION)]
    for text, share in (("It is Oslo [1].", 1.0), ("It is Oslo [2].", 0.0), ("I do not know.", 0.0)):
        assert [(row["task"], row["score"], row["trials"]) for row in judged(text)] == [
            (task, share, 1) for task in tasks
        ]
    assert [row["task"] for row in judged("Yes.")] == tasks[2:]  # too short for a statement of a text


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the form of TRUE's T5 with random weights, whose head makes it say 1 to everything."""
    transformers = pytest.importorskip("transformers")
    import torch
    from tokenizers import Tokenizer as Words
    from tokenizers import models, pre_tokenizers

    path = tmp_path_factory.mktemp("judge")
    words = Words(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, "0": 3, "1": 4, "premise": 5}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(path)
    config = transformers.T5Config(
        vocab_size=6, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config)
    model.generation_config.max_new_tokens = 1
    model.generation_config.forced_eos_token_id = None
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.save_pretrained(path)
    return path


def test_a_model_judges(judge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = EntailmentModel(judge, "cpu")
    import torch

    said: list[str] = []
    monkeypatch.setattr(
        model._model, "generate", lambda ids, **_: said.append(model._tokenizer.decode(ids[0])) or answer
    )
    answer = torch.tensor([[0, 4, 1]])
    assert model("premise", "0")
    assert said == ["premise <unk> premise <unk> <unk> 0"]
    answer = torch.tensor([[0, 3, 1]])
    assert not model("premise", "0")
    with pytest.raises(InputError, match="cannot be loaded"):
        EntailmentModel(TOKENIZER.parent, "cpu")


def test_the_command(tiny: Path, directory: Path, judge: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["eval", "official", "helmet", "-m", str(tiny), "--data", str(directory), "--limit", "1"]
    command += ["--tasks", "qampari,json_kv", "--device", "cpu", "--lengths", "4K"]
    assert cli.run(command) == 0
    plain = Record.load(Path("helmet-tiny.json"))
    assert any("citations are not scored" in note for note in plain.notes)
    assert cli.run([*command, "--judge", str(judge), "--force"]) == 0
    record = Record.load(Path("helmet-tiny.json"))
    assert not any("citations are not scored" in note for note in record.notes)
    assert record.settings["judge"] == judge.name
    assert {row["task"] for row in record.results} - {row["task"] for row in plain.results} == {
        f"qampari, {RECALL}", f"qampari, {PRECISION}"
    }  # fmt: skip
    assert record.results[: len(plain.results)] == plain.results
    assert len(Path("helmet-tiny.jsonl").read_text().splitlines()) == 2  # nothing was asked twice
    assert json.loads(Path("helmet-tiny.json").read_text())["kind"] == "official"


@pytest.mark.parametrize(("name", "words"), [("mrcr", "does not apply to mrcr"), ("helmet", "is no directory")])
def test_refusals(name: str, words: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["eval", "official", name, "-m", str(tiny), "--judge", str(tmp_path / "none")]) != 0
    assert words in capsys.readouterr().err

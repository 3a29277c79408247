"""Published benchmarks: questions from data laid beside, metrics, and runs of the command on a tiny model."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sala import cli
from sala.cli.official import _print_scores
from sala.errors import InputError, MissingExtra, SalaError
from sala.lab.eval.official import data, scores
from sala.lab.eval.official.benchmarks import BENCHMARKS
from sala.lab.eval.official.case import Prepared, Question
from sala.lab.eval.official.data import Data, HubDataset
from sala.lab.eval.official.models import TimedAnswer
from sala.lab.eval.official.plan import Volume, arrange
from sala.lab.eval.official.request import BenchmarkRequest
from sala.lab.eval.official.run import run, summarise
from sala.lab.report.record import Log, Record
from sala.text.tokenizer import Tokenizer
from tests.eval.benchmark_data import write_data
from tests.eval.lm_eval_ruler import TOKENIZER


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("benchmarks")
    write_data(path)
    return path


def ask(name: str, directory: Path | None, *tasks: str, lengths: dict[int, int] | None = None) -> list[Question]:
    benchmark = BENCHMARKS[name]
    request = BenchmarkRequest(
        tasks or benchmark.tasks, lengths or {1024: 9}, Tokenizer.load(TOKENIZER), Data(directory)
    )
    begun: list[tuple[str, int]] = []
    questions = [*benchmark.make(request, lambda *one: begun.append(one))]
    assert len(begun) == len(set(begun))  # progress is told once for each task and length
    return questions


def read(question: Question) -> str:
    """Answer from the text alone, as whoever knows where the fact is."""
    text = question.text or " ".join(one["content"] for one in question.messages)
    if "a1 -> b2" in text:
        wanted = {"From a1, one step?": "b2, c3", "To d4?": "c3", "To a1?": ""}[text.rpartition("\n")[2]]
        return f"So it is.\nFinal Answer: [{wanted}]"
    fact = re.findall(r"FACT: .*?(?:in the|it is|is) ([^.]+?)(?:, who .*?)?\.", text)[-1].removeprefix("in the ")
    if question.messages:
        return f"Xy12FACT: it is {fact}."
    if question.task in ("short", "medium", "long"):
        return f"The correct answer is ({fact[-1].upper()})"
    return f"The answer is: {fact}" if question.task == "code_debug" else fact


@pytest.mark.parametrize(
    ("name", "tasks", "guessed"),
    [
        ("longbench2", (), 0.25),
        ("babilong", ("qa1", "qa8", "qa19"), 0),
        (
            "infinitebench",
            ("passkey", "kv_retrieval", "number_string", "code_run", "math_find", "longdialogue_qa_eng"),
            0,
        ),
        ("infinitebench", ("longbook_qa_eng", "longbook_qa_chn"), 0),
        ("infinitebench", ("code_debug", "longbook_choice_eng"), 0.25),
        ("mrcr", (), 0),
        ("graphwalks", (), 0),
        ("nolima", (), 0),
        ("helmet", (), 0),
    ],
)
def test_who_reads_scores_all_and_who_guesses_what_chance_gives(
    name: str, tasks: tuple[str, ...], guessed: float, directory: Path
) -> None:
    questions = ask(name, directory, *tasks)
    assert {one.task for one in questions} == set(tasks or BENCHMARKS[name].tasks)
    assert [one.score(read(one)) for one in questions] == [1] * len(questions)
    blind = [one.score("A. It is hard to say.") for one in questions]
    assert sum(blind) / len(blind) == guessed


def test_metrics() -> None:
    assert scores.overlap(["a", "b"], "Final Answer: [a, c]") == 0.5
    assert scores.overlap(["a"], "Final Answer: [a]\nand more") == 0
    assert scores.overlap([], "Final Answer: []") == 1
    assert scores.overlap(["a"], "Final Answer: []") == 0
    assert scores.continues("Qabcd", "Q", "Qabxy") == 0.5
    assert scores.continues("Qabcd", "Q", "abcd") == 0
    assert scores.word_f1(["the old mill"], "An old boat.") == 0.5
    assert scores.word_f1(["红船"], "红", is_chinese=True) == pytest.approx(2 / 3)
    assert scores.choice("C", "**The correct answer is (C)**") == 1
    assert scores.choice("C", "C. because of A") == 1
    assert scores.choice("C", "A") == scores.choice("C", "") == 0
    assert scores.first_number("12", "no. 12, or 13") == 1
    assert scores.first_number("12", "none") == 0
    assert scores.first_value("1.50", "it is 1.5") == 1
    assert scores.last_number("-7", "it returns `-7`.") == scores.last_number("7", "07") == 1
    assert scores.last_number("7", "**7**") == scores.last_number("7", "7 it is") == scores.last_number("7", "") == 0
    assert scores.has_word("ab", '{"ab"}') == 1
    assert scores.has_word("ab", "abc") == 0
    assert scores.long_answer([["x", "y"], ["z"]], "a y") == 0.5
    assert scores.long_answer([["Rome, Italy"]], "It was in Rome [1], Italy [23].") == 1
    answers = [[name] for name in ("Oslo", "Bergen", "Moss", "Bodø", "Voss", "Hamar")]
    assert scores.listed(answers, "the Oslo [1], Bergen[2][3], Moss, Paris.") == 0.6
    assert scores.listed(answers, "Hamar, Oslo, Bergen, Moss, Bodø, Voss") == 1
    assert scores.listed(answers, "I have heard of Oslo and of Bergen") == 0
    assert scores.listed([["Oslo", "Christiania"]], "Christiania [1].") == 1


def test_a_name_counts_only_if_no_other_is_named(directory: Path) -> None:
    question = ask("babilong", directory, "qa1")[0]
    assert question.text.startswith("Where is who?\nAnn is in the shed.\nWhere is Ann? shed\n\n")
    assert question.score("In the garden.") == 1
    assert question.score("In the garden or the kitchen.") == 0
    assert question.score("In the garden. Then the kitchen.") == 1
    things, milk, _ = ask("babilong", directory, "qa8")
    assert things.score("A football and an apple.") == 1
    assert things.score("An apple.") == things.score("An apple, a football and milk.") == 0
    assert milk.score("Milk, an apple") == 0
    way = ask("babilong", directory, "qa19")[0]
    assert way.score("I do not know.") == 0  # has both letters
    assert way.score("n,w") == 1


def test_graphs_of_any_length() -> None:
    questions = ask("graphwalks", None, "made_bfs", "made_parents", lengths={1500: 3, 3000: 1})
    assert len(questions) == 8
    for question in questions:
        edges = re.findall(r"(\w{10}) -> (\w{10})", question.text)
        node = re.findall(r"(?:from|to) (\w{10})\?", question.text)[-1]
        depth = re.findall(r"exactly (\d)", question.text)
        if depth:
            distance, around = {node: 0}, [node]
            for one in around:
                for source, target in edges:
                    if source == one and target not in distance:
                        distance[target] = distance[one] + 1
                        around.append(target)
            found = [one for one, steps in distance.items() if steps == int(depth[0])]
        else:
            found = [source for source, target in edges if target == node]
        assert question.score(f"Final Answer: {sorted(set(found))}") == 1
        assert question.score("Final Answer: [0000000000]") == 0
        assert len(Tokenizer.load(TOKENIZER).encode(question.text)) + question.max_tokens <= question.length
    texts = {one.text.partition("\n\nWhich")[0] for one in questions if one.length == 1500}
    assert len(texts) == 1  # several questions about one graph


def test_texts_go_to_the_smallest_length_that_holds_them(directory: Path) -> None:
    questions = ask("infinitebench", directory, "passkey", lengths={100: 9, 200: 9, 1024: 1})
    assert [one.length for one in questions] == [1024]
    assert ask("infinitebench", directory, "passkey", lengths={100: 9}) == []


def test_choices_of_infinitebench_are_told_as_its_authors_tell_them(directory: Path) -> None:
    """As `compute_scores.py` has it, by every branch of its rules."""
    (book,) = (one for one in ask("infinitebench", directory, "longbook_choice_eng") if one.answers == ("v",))
    right = ["B. A boat", "B", "Boats, not A", "v", "I say the answer is: B or A", "the answer is v!", "So B, not A."]
    wrong = ["", "A. B", "As I say: B", "b", "it is v", "the answer is:B", "the answer is A, option is B", "AB, B"]
    assert [book.score(text) for text in right + wrong] == [1] * len(right) + [0] * len(wrong)
    (code,) = (one for one in ask("infinitebench", directory, "code_debug") if one.answers == ("v",))
    right = ["B.", "B: v", "The answer is: B", "The error is: `v`", "my answer: Option B", "**It is: v"]
    wrong = ["", "B", "v", "B is wrong", "A. The answer is:", "The answer is: A. My answer: B", "The answer is B"]
    assert [code.score(text) for text in right + wrong] == [1] * len(right) + [0] * len(wrong)
    assert scores.has_name("ANN", "That is Ann, of course.") == 1
    assert scores.has_name("ANN", "Anna") == 0  # a word, not a part of one


def test_the_mean_of_a_benchmark_that_is_not_here_as_a_whole_says_so() -> None:
    row = {"model": "m", "prefill_s": 1.0, "prefill_n": 5, "prompt_tokens": 10, "cached_tokens": 4, "score": 1}
    for name, mean in (("infinitebench", "mean of 11 of 12"), ("helmet", "mean of 6 of 21"), ("ruler", "all")):
        benchmark = BENCHMARKS[name]
        rows = [{**row, "task": task, "length": 65536, "is_exact": True} for task in benchmark.tasks]
        assert summarise(rows, whole=benchmark.whole)[-1]["task"] == mean


def prepared(*prompts: list[int], task: str = "t") -> list[Prepared]:
    return [
        Prepared(Question(task, 1, at, "", ("x",), lambda text: float(text == "x"), 5), np.array(ids, np.int32))
        for at, ids in enumerate(prompts)
    ]


class Reader:
    """A model that keeps every prefix for which a snapshot was asked, as the engine does."""

    name, fingerprint, max_tokens = "reader", "f", 1 << 20
    tokenizer: Any = None

    def __init__(self) -> None:
        self.kept: list[list[int]] = []
        self.num_read = 0

    def speeds(self) -> tuple[float, float]:
        return 100.0, 10.0

    def answer(self, case: Prepared, boundaries: tuple[int, ...], on_progress: Any) -> TimedAnswer:
        ids = case.token_ids.tolist()
        known = max((len(one) for one in self.kept if ids[: len(one)] == one), default=0)
        self.kept += [ids[:at] for at in boundaries if at > known]
        self.num_read += len(ids) - known
        return TimedAnswer("x", len(ids), known, 1, 1.0, 1.0, False)


def test_what_begins_alike_is_read_once(tmp_path: Path) -> None:
    """A tree of prefixes: each branch is read once, whatever the order of the cases."""
    trunk, left, right = [1] * 1000, [2] * 500, [3] * 400
    cases = prepared(
        [*trunk, *right, 8], [*trunk, *left, 4], [9] * 300, [*trunk, *left, 5], [*trunk, *right, 7], [*trunk, *left, 6]
    )
    steps, reader = arrange(cases), Reader()
    assert Volume.of(steps).read == 1000 + 500 + 3 + 400 + 2 + 300
    rows = run(reader, cases, Log(tmp_path / "log.jsonl"), {"threads": 2})
    assert reader.num_read == Volume.of(steps).read
    assert [row["number"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert sum(row["prompt_tokens"] - row["cached_tokens"] for row in rows) == reader.num_read
    again = Reader()
    assert run(again, cases, Log(tmp_path / "log.jsonl"), {"threads": 1}) == rows
    assert again.num_read == 0
    assert run(Reader(), cases, Log(), {}, minutes=0) == []


def test_the_mean_gives_each_task_the_same_weight() -> None:
    row = {"model": "m", "length": 4, "prefill_s": 1.0, "prefill_n": 5, "prompt_tokens": 10, "cached_tokens": 4}
    rows = [
        {**row, "task": task, "score": score, "is_exact": score == 1}
        for task, score in (("a", 1), ("a", 1), ("b", 0.5))
    ]
    first, second, mean = summarise(rows, whole=("a", "b"))
    assert (first["score"], second["score"], mean["score"]) == (1, 0.5, 0.75)
    assert (mean["task"], mean["trials"], mean["asked"], mean["read"]) == ("all", 3, 30, 18)
    other = summarise([*rows, {**row, "model": "other", "task": "a", "score": 1, "is_exact": True}], whole=("b", "a"))
    assert [one["model"] for one in other if one["task"] == "all"] == ["m"]  # the other was not asked all tasks


def test_a_file_of_text_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The datasets library itself makes a row of every line unless it is told otherwise."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    books = ["One line.\nAnother line.\n", "A second book.\n\nIts end.\n"]
    (tmp_path / "books").mkdir()
    for number, book in enumerate(books):
        (tmp_path / "books" / f"{number}.txt").write_text(book)
    hub = HubDataset(str(tmp_path), files="books/*.txt", is_text=True)
    assert [one.strip() for one in Data().texts("haystack", hub)] == [book.strip() for book in books]


def test_a_mean_of_some_tasks_says_so() -> None:
    row = {"model": "m", "prefill_s": 1.0, "prefill_n": 5, "prompt_tokens": 10, "cached_tokens": 4, "score": 1}
    rows = [{**row, "task": task, "length": 65536, "is_exact": True} for task in ("vt", "cwe")]
    assert summarise(rows, whole=BENCHMARKS["ruler"].tasks)[-1]["task"] == "mean of 2 of 13"
    assert summarise(rows, whole=("vt", "fwe"))[-1]["task"] == "mean of 2"  # one of them is not among the usual tasks


def test_published_means_stand_beside_means_of_the_same_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    cell = {"model": "m", "length": 65536, "trials": 4, "score": 0.5}
    for tasks, is_shown in ((("vt", "all"), True), (("vt", "mean of 2 of 13"), False), (("vt",), False)):
        _print_scores([{**cell, "task": task} for task in tasks], "RULER", "ruler")
        assert ("MiniCPM-SALA (published)" in capsys.readouterr().out) is is_shown


def test_data(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        asked: Any = None

        def load_dataset(self, *arguments: Any, **more: Any) -> list[dict[str, int]]:
            self.asked = (arguments, more)
            return [{"a": 1}]

    library = Library()
    monkeypatch.setattr(data, "_datasets", lambda: library)
    assert Data(tmp_path).rows("x", HubDataset("owner/name", "test", "4k")) == [{"a": 1}]
    assert library.asked == (("owner/name", "4k"), {"split": "test", "data_files": None})
    library.load_dataset = lambda *_, **__: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(SalaError, match="owner/name cannot be downloaded"):
        Data().rows("x", HubDataset("owner/name"))

    def nothing() -> Any:
        raise MissingExtra("datasets", "eval")

    monkeypatch.setattr(data, "_datasets", nothing)
    with pytest.raises(MissingExtra):
        Data(tmp_path).rows("x", HubDataset("owner/name"))
    used = Data(directory)
    assert used.rows("helmet_json_kv", HubDataset("?"))[0]["answer"] == "v88"
    assert used.used["helmet_json_kv"].startswith("helmet_json_kv.jsonl ")
    (tmp_path / "y.json").write_text("[1]")
    with pytest.raises(InputError, match="not an object"):
        Data(tmp_path).rows("y", HubDataset("?"))
    (tmp_path / "z.jsonl").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        Data(tmp_path).rows("z", HubDataset("?"))
    with pytest.raises(InputError, match="not a directory"):
        Data(tmp_path / "none").rows("z", HubDataset("?"))
    (tmp_path / "mrcr_2needle.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="without prompt, answer"):
        ask("mrcr", tmp_path, "2needle")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("ruler", ["--tasks", "niah_single_1,qa_1", "--lengths", "2K"]),
        ("longbench2", []),
        ("babilong", ["--tasks", "qa1", "--lengths", "1K"]),
        ("infinitebench", ["--tasks", "passkey,code_debug"]),
        ("mrcr", ["--tasks", "2needle", "--plain"]),
        ("graphwalks", ["--tasks", "bfs,made_parents", "--lengths", "4K"]),
        ("nolima", ["--lengths", "2K"]),
        ("helmet", ["--tasks", "json_kv,asqa"]),
    ],
)
def test_every_benchmark_runs(
    name: str, more: list[str], tiny: Path, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["eval", "official", name, "-m", str(tiny), "--data", str(directory), "--limit", "1", "--device", "cpu"]
    assert cli.run([*arguments, *more]) == 0
    record = Record.load(Path(f"{name}-tiny.json"))
    assert record.results
    assert all(row["trials"] >= 1 and 0 <= row["score"] <= 1 and row["model"] == "tiny" for row in record.results)
    lines = [json.loads(line) for line in Path(f"{name}-tiny.jsonl").read_text().splitlines()]
    assert all(line["wanted"] is not None and "text" in line and "score" in line for line in lines)


def test_made_graphs_with_the_default_number_of_cases(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_it = ["eval", "official", "graphwalks", "-m", str(tiny), "--device", "cpu", "--estimate"]
    assert cli.run([*run_it, "--tasks", "made_bfs,made_parents", "--lengths", "1500,2K"]) == 0
    assert "tiny: 80 cases ask for" in capsys.readouterr().err


def test_a_run_of_the_command(
    tiny: Path, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_it = ["eval", "ruler", "--official", "-m", str(tiny), "--data", str(directory), "--device", "cpu", "--plain"]
    run_it += ["--haystack", "prose", "--tasks", "niah_single_1,fwe", "--lengths", "2K", "--trials", "2"]
    assert cli.run([*run_it, "--estimate"]) == 0
    assert "tokens to read, at most 356 to write, about" in capsys.readouterr().err
    assert not Path("ruler-tiny.json").exists()
    assert cli.run([*run_it, "--minutes", "0"]) == 0
    assert "0 of 4 cases were asked" in capsys.readouterr().err
    assert cli.run([*run_it, "--force", "--threads", "1"]) == 0
    out = capsys.readouterr()
    assert re.search(r"tiny +niah_single_1 +0 \[0–66\] n=2", out.out)
    assert re.search(r"[\d,]+ tokens of prompts were asked for, [\d,]+ were read", out.err)
    log = Path("ruler-tiny.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        line["conditions"]["threads"] = 7
    log.write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
    assert cli.run([*run_it, "--force"]) == 0
    record = Record.load(Path("ruler-tiny.json"))
    assert "tiny: 3 of 4 cases were run under other settings: threads 7 (now 1)" in record.notes
    assert {row["task"] for row in record.results} == {"niah_single_1", "fwe", "mean of 2 of 13"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["official", "chess"], "choose one of ruler, longbench2"),
        (["official", "ruler", "--tasks", "qa_3"], "niah_single_1, niah_single_2"),
        (["official", "mrcr", "--haystack", "prose"], "does not apply to mrcr"),
        (["official", "ruler", "--limit", "2,3,4"], "there are 2 lengths"),
        (["official", "ruler", "--limit", "few"], "give a number"),
        (["official", "ruler", "--against", "nowhere"], "not a model directory"),
        (["official", "ruler", "--lengths", "100"], "at least 512"),
        (["ruler", "--official", "--per-text", "2"], "leave out --questions"),
        (["ruler", "--plain"], "add --official"),
        (["lm", "--tasks", "babilong_qa1,niah_single_1", "--lengths", "4K"], ""),
    ],
)
def test_refusals(arguments: list[str], words: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["eval", *arguments, "-m", str(tiny)]) != 0
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err

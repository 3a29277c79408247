"""RULER's official tasks: the cases are lm-eval's, and the scores are those of the metrics."""

import json
import re
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from sala.errors import InputError, MissingExtra
from sala.lab.eval.official import prompts, texts
from sala.lab.eval.official import ruler as ruler_module
from sala.lab.eval.official.ruler import NEEDLES, TASKS, Ruler, RulerCase
from sala.lab.eval.official.scores import contains_all, contains_any
from sala.lab.eval.official.texts import READERS, Essays, WordPairs
from sala.lab.eval.tasks.prose import write_documents
from sala.text.tokenizer import Tokenizer
from tests.eval.lm_eval_ruler import EXPECTED, PROMPTS, TOKENIZER, digest, hotpotqa, lm_eval_cases, squad

WORDING = json.loads(PROMPTS.read_text("utf-8"))
CASES = json.loads(EXPECTED.read_text("utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TOKENIZER)


@pytest.fixture(scope="module")
def ruler(tokenizer: Tokenizer) -> Ruler:
    essays = Essays(write_documents())
    documents = {name: READERS[name](data) for name, data in (("squad", squad()), ("hotpotqa", hotpotqa()))}
    return Ruler(lambda text: len(tokenizer.encode(text)), WORDING, lambda: essays, documents.__getitem__)


@pytest.mark.parametrize("name", CASES)
def test_the_cases_are_those_of_lm_eval(name: str, ruler: Ruler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "has_punkt", lambda: False)
    task, length, seed = name.split()
    seeded = Ruler(ruler._count, WORDING, ruler.essays, ruler.documents, int(seed))
    made = islice(seeded.cases(task, int(length)), len(CASES[name]))
    assert [digest(one.input, one.outputs, one.opening, one.length) for one in made] == CASES[name]


@pytest.mark.parametrize("task", ["niah_multiquery", "vt", "cwe", "fwe"])
def test_the_cases_are_those_of_an_installed_lm_eval(task: str, ruler: Ruler) -> None:
    for package in ("lm_eval", "datasets", "nltk", "wonderwords", "scipy", "transformers"):
        pytest.importorskip(package)
    official = prompts.ruler_prompts()
    ours = Ruler(ruler._count, official, ruler.essays, ruler.documents)
    for row, case in zip(lm_eval_cases(task, 1500, TOKENIZER, official), ours.cases(task, 1500), strict=False):
        assert (row["input"], tuple(row["outputs"]), row["gen_prefix"]) == (case.input, case.outputs, case.opening)


def solve(task: str, case: RulerCase) -> str:
    """Answer from the text alone."""
    if task in NEEDLES:
        asked = re.search(r"belong to (.*)\?$", case.input)
        assert asked is not None
        keys = re.split(r", and |, ", asked[1])
        return ", ".join(value for key in keys for value in re.findall(rf" of {key}: ([\w-]+)\.", case.input))
    if task == "vt":
        text = case.input.rpartition("Follow the variables")[2]
        held = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text))
        (value,) = re.findall(r"have the value (\d+)\?", text)
        first = next(name for name, other in held.items() if other == value)
        chain = [first]
        while follower := next((name for name, other in held.items() if other == chain[-1]), None):
            chain.append(follower)
        return " ".join(chain)
    if task in ("cwe", "fwe"):
        body = case.input.split("numbers.\n" if task == "cwe" else "in code. ")[1].split("\nQuestion")[0]
        words = [word for word in body.split() if not re.fullmatch(r"\d+\.|\.\.\.", word)]
        if task == "cwe":
            words = re.sub(r"(?:^| )\d+\. ", "\n", body).split("\n")[1:]
        return ", ".join(word for word, _ in Counter(words).most_common(10 if task == "cwe" else 3))
    if found := re.search(r"opens number (\d+)\?$", case.input):
        parts = re.split(r"\[\d+\]\n", case.input)
        return next(part for part in parts if f"This is number {found[1]}." in part).split()[0]
    found = re.search(r"third word of (Title \d+)\?$", case.input)
    assert found is not None
    return case.input.split(f"\n{found[1]}\n")[1].split()[2]


@pytest.mark.parametrize("task", TASKS)
def test_who_reads_scores_all_and_who_guesses_nothing(task: str, ruler: Ruler) -> None:
    case = next(ruler.cases(task, 2048))
    metric = contains_any if task.startswith("qa") else contains_all
    assert metric(case.outputs, solve(task, case)) == 1
    assert metric(case.outputs, "I do not know; perhaps 1234567 or ABCDE.") == 0
    assert case.length <= 2048 + (50 if task == "fwe" else 0)


def test_metrics() -> None:
    assert contains_all(["Ab", "cd"], "x AB\x00y") == 0.5
    assert contains_any(["Ab", "cd"], "x AB y") == 1
    assert contains_any(["Ab", "cd"], "") == 0


def test_short_lengths_are_refused(ruler: Ruler) -> None:
    for task in ("niah_single_1", "niah_multikey_3", "vt", "cwe", "fwe"):
        with pytest.raises(InputError, match="too short"):
            next(ruler.cases(task, 160))


def test_word_pairs_are_those_of_the_whole_sorted_list() -> None:
    adjectives, nouns = ["b", "a", "a-b", "well", "well-known", "a"], ["z", "c", "known-x", "c"]
    pairs = WordPairs(adjectives, nouns)
    assert [*pairs] == sorted({f"{one}-{noun}" for one in adjectives for noun in nouns})
    assert len(pairs) == len([*pairs])


def test_essays_are_repeated_where_they_end() -> None:
    essays = Essays(["One two three. Four five.", "Six."])
    assert " ".join(essays.sentences(8)) == "One two three. Four five. Six. One two"
    assert " ".join(essays.sentences(3)) == "One two three."


@pytest.mark.parametrize(
    ("task", "length", "seed"), [("cwe", 3000, 0), ("cwe", 16384, 1), ("vt", 16384, 0), ("niah_single_2", 16384, 2)]
)
def test_texts_that_are_not_encoded_would_not_have_reached_the_limit(
    task: str, length: int, seed: int, ruler: Ruler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a token per digit, as many models have, tokens per character rise while a numbered list grows."""
    counted: list[int] = []

    def count(text: str) -> int:
        counted.append(len(text))
        return len(re.findall(r"\d|\w+|\W", text))

    monkeypatch.setattr(texts, "has_punkt", lambda: False)
    seeded = Ruler(count, WORDING, ruler.essays, ruler.documents, seed)
    found = [*islice(seeded.cases(task, length), 2)]
    num_counted = len(counted)
    monkeypatch.setattr(ruler_module, "LONG", sys.maxsize)
    assert [*islice(seeded.cases(task, length), 2)] == found
    assert num_counted < len(counted) - num_counted or task == "cwe"


def test_the_documents_of_a_task_stay_as_they_are(ruler: Ruler) -> None:
    before = [*ruler.documents("squad").texts]
    assert len([*islice(ruler.cases("qa_1", 32768), 2)]) == 2  # all documents fit, and are shuffled
    assert ruler.documents("squad").texts == before


def test_prompts_of_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps({**WORDING, "more": "text"}))
    assert prompts.ruler_prompts(tmp_path) == WORDING
    file.write_text(json.dumps({"niah": "text"}))
    with pytest.raises(InputError, match="lacks needle, noise"):
        prompts.ruler_prompts(tmp_path)
    file.write_text("[]")
    with pytest.raises(InputError, match="not a JSON object"):
        prompts.ruler_prompts(tmp_path)
    prompts.lm_eval_tasks.cache_clear()
    monkeypatch.setattr(prompts.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra):
        prompts.lm_eval_tasks()
    prompts.lm_eval_tasks.cache_clear()

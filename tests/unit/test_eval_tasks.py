"""Multiple choice and simple questions: what is asked of the model, and what counts as right."""

import json
from pathlib import Path
from typing import Any

import pytest

from sala.errors import InputError
from sala.lab.eval.tasks import choice
from sala.lab.eval.tasks.choice import ChoiceTask
from tests.smol_sala import rules

TASK = ChoiceTask("The sky is", ("blue", "a very hot soup"), 0)


def encode(text: str) -> list[int]:
    return [1, *text.encode()]


def test_requests_continue_the_context() -> None:
    for request, answer in zip(choice.requests(TASK, encode), TASK.choices, strict=True):
        assert request.context_ids == tuple(encode("The sky is"))
        assert bytes(request.continuation_ids).decode() == f" {answer}"


def test_spaces_of_the_context_go_to_the_continuation() -> None:
    request = choice.requests(ChoiceTask("Q: \n", ("no", "yes"), 1), encode, delimiter="")[1]
    assert request.context_ids == tuple(encode("Q:"))
    assert bytes(request.continuation_ids) == b" \nyes"


def test_continuation_has_the_tokens_of_running_text() -> None:
    words = lambda text: [hash(word) for word in text.replace(" ", "| ").split("|")]  # noqa: E731
    request = choice.requests(ChoiceTask("The sky is", ("blue",), 0), words)[0]
    assert request.continuation_ids == (hash(" blue"),)


def test_empty_context_needs_bos() -> None:
    task = ChoiceTask("", ("a",), 0)
    assert choice.requests(task, encode, delimiter="")[0] == ((1,), (ord("a"),))
    with pytest.raises(InputError):
        choice.requests(task, lambda text: list(text.encode()))


def test_accuracy_by_sum_and_by_character() -> None:
    long_wins = ChoiceTask("", ("blue", "a very hot soup"), 1)
    scores = [-4.0, -6.0]  # per character -1 and -0.4
    assert choice.accuracy([TASK], [scores]) == (1, 0)
    assert choice.accuracy([long_wins], [scores]) == (0, 1)
    assert choice.accuracy([TASK, TASK, long_wins, long_wins], [scores] * 4) == (0.5, 0.5)
    with pytest.raises(ValueError, match="zip"):
        choice.accuracy([TASK], [])
    with pytest.raises(ValueError, match="zip"):
        choice.accuracy([TASK], [[-1.0]])
    with pytest.raises(InputError):
        choice.accuracy([], [])


def test_tasks_are_read_from_jsonl(tmp_path: Path) -> None:
    record = {"context": "The sky\u2028is", "choices": ["blue", "a very hot soup"], "gold": 0}
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(record, ensure_ascii=False) + "\n\n" + json.dumps(record | {"gold": 1}) + "\n", "utf-8")
    first, second = choice.read_tasks(file)
    assert first == ChoiceTask("The sky\u2028is", TASK.choices, 0)
    assert second.gold == 1


@pytest.mark.parametrize(
    "change",
    [{"gold": 2}, {"gold": -1}, {"gold": True}, {"gold": "0"}, {"choices": []}, {"choices": [1]}, {"choices": [""]},
     {"context": 3}, {"choices": None}],
    ids=str,
)  # fmt: skip
def test_bad_records_name_their_line(tmp_path: Path, change: dict) -> None:
    record = {"context": "a", "choices": ["b", "c"], "gold": 0}
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(record) + "\n" + json.dumps(record | change))
    with pytest.raises(InputError, match=r"tasks.jsonl:2"):
        choice.read_tasks(file)


def test_lines_that_are_no_records_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    for line in ("{", "[]", "3", '{"context": "a"}'):
        file.write_text(line)
        with pytest.raises(InputError, match=r"tasks.jsonl:1"):
            choice.read_tasks(file)


def test_there_are_64_different_questions() -> None:
    questions = rules.simple_questions()
    assert len({question.turns for question in questions}) == 64
    for question in questions:
        assert question.turns[0][-1] in "?."
        assert all(answer == answer.strip() != "" for answer in question.rules["any"])
        assert not rules.is_met(question, question.turns[0]), "the question gives its answer away"


@pytest.mark.parametrize("question", rules.simple_questions(), ids=lambda question: question.rules["any"][0])
def test_every_spelling_counts_and_other_answers_do_not(question: Any) -> None:
    for answer in question.rules["any"]:
        assert rules.is_met(question, f"Well, it is **{answer.upper()}**.")
        assert not rules.is_met(question, f"x{answer}")
        assert not rules.is_met(question, f"{answer}x")
    for other in ("", "I do not know.", "Banana-shaped things, or 99."):
        assert not rules.is_met(question, other)


def test_accuracy_of_questions() -> None:
    asked = rules.simple_questions()[:4]
    assert rules.accuracy(asked, ["Paris", "Kyoto", "rome", "It is Bonn"]) == 0.5

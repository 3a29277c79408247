"""Composed prompts: many wordings, each once, and none that a test asks."""

import json
from collections import Counter
from pathlib import Path

import pytest

from sala.errors import ConfigError, InputError
from sala.lab.train.documents import HeldOut, read_held_out, read_turns
from tests.smol_sala import compose, rules

PromptTable = compose.PromptTable
MODEL = Path(__file__).parents[2] / "models" / "smol-sala"
HELD_OUT = [MODEL / "everyday.jsonl", MODEL / "development.jsonl"]


@pytest.fixture(scope="module")
def table() -> PromptTable:
    return PromptTable.load(MODEL / "prompts.toml")


def write_table(path: Path, text: str) -> Path:
    (path / "table.toml").write_text(text)
    return path / "table.toml"


def test_slots(tmp_path: Path) -> None:
    text = """
    [lists]
    pet = ["cat", "dog", "owl"]
    do = ["feed the {pet}"]
    [[kind]]
    name = "all"
    templates = [["I {do}. It is {n=3..5}, a {a=pet}, {2*pet}.", "{n} {a}"]]
    """
    prompts = list(PromptTable.load(write_table(tmp_path, text)).prompts(40, 1))
    assert len({prompt.turns for prompt in prompts}) == len(prompts) > 20
    for prompt in prompts:
        number, pet = prompt.turns[1].split()
        assert f"It is {number}, {'an' if pet == 'owl' else 'a'} {pet}," in prompt.turns[0]
        assert "{" not in "".join(prompt.turns)


def test_a_missing_list_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names the unknown list 'pets'"):
        PromptTable.load(write_table(tmp_path, '[[kind]]\nname = "a"\ntemplates = ["A {pets}"]\n'))


def test_prompts_are_many_different_and_determined_by_the_seed(table: PromptTable) -> None:
    prompts = list(table.prompts(6000, 1))
    assert len(prompts) > 5950
    assert len({prompt.turns for prompt in prompts}) == len(prompts)
    assert prompts[:300] == list(table.prompts(6000, 1))[:300]
    assert prompts[:300] != list(table.prompts(6000, 2))[:300]
    kinds = Counter(prompt.kind for prompt in prompts)
    assert len(kinds) == 11
    assert min(kinds.values()) > 300


def test_no_prompt_is_a_test_question(table: PromptTable) -> None:
    held_out = read_held_out(HELD_OUT)
    questions = [question for file in HELD_OUT for question in rules.read_questions(file)]
    plain = HeldOut([turn for question in questions for turn in question.turns if len(turn.split()) > 3])
    prompts = list(table.prompts(5000, 3, held_out))
    assert not any(turn in plain for prompt in prompts for turn in prompt.turns)
    asked = [" ".join(prompt.turns).lower() for prompt in prompts]
    for question in questions:  # nor does one ask for the same value
        if question.kind == "sums":
            numbers = [word for word in question.turns[0].replace("?", " ").split() if word.isdigit()]
            same = question.turns[0].lower().strip("?.")
            assert not numbers or not any(same in text for text in asked)


def test_the_two_sets_of_questions_are_different() -> None:
    test, development = (rules.read_questions(file) for file in HELD_OUT)
    assert len(test) == len(development) == 200
    assert set(Counter(question.kind for question in test).values()) == {20}
    assert Counter(q.kind for q in test) == Counter(q.kind for q in development)
    assert not {question.turns for question in test} & {question.turns for question in development}


def test_held_out_files_have_words_to_avoid(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"turns": ["What is 17 + 26?"], "avoid": ["17", "26"]}) + "\n")
    held_out = read_held_out([tmp_path / "a.jsonl"])
    assert "Add 26 to 17." in held_out
    assert "Add 26 to 18." not in held_out


def test_a_bad_line_of_turns_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"turns": ["Hi"]}\n{"turn": ["Hi"]}\n')
    with pytest.raises(InputError, match=r"a.jsonl:2 cannot be used: turns: Field required.*each line is"):
        read_turns(tmp_path / "a.jsonl")

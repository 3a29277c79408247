"""Rules that judge everyday answers."""

from pathlib import Path

import pytest

from sala.errors import InputError
from tests.smol_sala import rules as work


@pytest.mark.parametrize(
    ("rules", "right", "wrong"),
    [
        ({"any": ["Lima"]}, "It is lima.", "It is Climax."),
        ({"all": [["milk"], ["rice", "grain"]]}, "Milk and grain", "Milk"),
        ({"none": ["Ben"]}, "Benno", "It was Ben."),
        ({"number": ["43", "forty-three"]}, "17 + 26 = 43.", "It is 143 or 43.5"),
        ({"number": ["1200"]}, "about 1,200 people", "12000"),
        ({"items": 3}, "Here:\n1. a cat\n2. a dog\n3. a cow", "1. a cat\n2. a dog\n3. a cat"),
        ({"items": 3}, "Red, blue and green.", "Red and blue."),
        ({"json": ["name"]}, 'Sure: {"name": "A", "age": 3}', '{"name": "A"'),
        ({"min_words": 2, "max_words": 3}, "one two three", "one"),
        ({"pattern": "^No\\b"}, "No, it is not.", "Nothing"),
        ({"not_pattern": "sorry"}, "Fine", "I am sorry"),
    ],
)
def test_rules(rules: dict, right: str, wrong: str) -> None:
    question = work.RuledQuestion("kind", ("?",), rules)
    assert work.is_met(question, right)
    assert not work.is_met(question, wrong)


def test_items_of_lists_in_several_forms() -> None:
    assert work.list_items("- one\n- two\n\nThat is all.") == ["one", "two"]
    assert work.list_items("The colours are: red, blue, and green.") == ["red", "blue", "green"]
    assert work.list_items("apple\npear\nplum") == ["apple", "pear", "plum"]


def test_an_unknown_rule_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"kind": "a", "turns": ["?"], "rules": {"al": ["x"]}}\n')
    with pytest.raises(InputError, match="line 1: al"):
        work.read_questions(tmp_path / "a.jsonl")

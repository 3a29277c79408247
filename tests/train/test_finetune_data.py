"""Examples for fine-tuning: what is learnt of them, what is refused and where, and how they are put into rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sala.errors import InputError, TemplateError
from sala.lab.finetune.dialogues import (
    BadData,
    Example,
    Problem,
    ReaderOptions,
    load_examples,
    read_records,
    split_examples,
)
from sala.lab.finetune.rows import collate, pack
from sala.text.tokenizer import Tokenizer

STOPS = frozenset({257, 259})
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long."},
]
GOOD = {"messages": TALK[1:3]}


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer.load(tiny)


@pytest.fixture
def reading(tokenizer: Tokenizer) -> ReaderOptions:
    return ReaderOptions(tokenizer, 256, STOPS, 257)


def read_examples(path: Path, reading: ReaderOptions) -> tuple[list[Example], list[Problem]]:
    """What a file holds, good and bad, also where nothing is good."""
    try:
        return load_examples(path, reading, skip_bad=True)
    except BadData as error:
        return [], list(error.problems)


def learnt(example: Example, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(example.tokens[example.loss_mask].tolist(), skip_special=False)


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in records))
    return path


def test_the_end_of_every_answer_is_learnt_and_nothing_after_it(
    tokenizer: Tokenizer, reading: ReaderOptions, tmp_path: Path
) -> None:
    examples, problems = read_examples(write(tmp_path / "a.jsonl", {"messages": TALK}), reading)
    assert not problems
    assert examples[0].tokens.tolist() == tokenizer.encode_chat(TALK, add_generation_prompt=False)
    assert learnt(examples[0], tokenizer) == "Hello!<|im_end|>So long.<|im_end|>"


def test_what_comes_after_the_last_answer_is_left_out(
    tokenizer: Tokenizer, reading: ReaderOptions, tmp_path: Path
) -> None:
    examples, _ = read_examples(write(tmp_path / "a.jsonl", {"messages": TALK[:4]}), reading)
    assert learnt(examples[0], tokenizer) == "Hello!<|im_end|>"
    assert "Bye" not in tokenizer.decode(examples[0].tokens.tolist())


def with_template(tiny: Path, source: str) -> Tokenizer:
    settings = json.loads((tiny / "tokenizer_config.json").read_text())
    return Tokenizer((tiny / "tokenizer.json").read_text(), settings, source)


FORGETFUL = """{%- for m in messages %}{{ '<|im_start|>' + m.role + ':' }}
{%- if m.role != 'assistant' or loop.last %}{{ m.content }}{% else %}{{ m.content.split('|')[-1] }}{% endif %}
{{- '<|im_end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"""


def test_answers_that_are_shown_otherwise_later_are_learnt_one_by_one(tiny: Path, tmp_path: Path) -> None:
    """As templates do that drop the reasoning of earlier turns."""
    tokenizer = with_template(tiny, FORGETFUL)
    talk = [{**one, "content": f"hm|{one['content']}"} if one["role"] == "assistant" else one for one in TALK]
    examples, problems = read_examples(
        write(tmp_path / "a.jsonl", {"messages": talk}), ReaderOptions(tokenizer, 256, STOPS, 257)
    )
    assert not problems
    assert [learnt(one, tokenizer) for one in examples] == ["hm|Hello!<|im_end|>", "hm|So long.<|im_end|>"]
    assert "hm|Hello!" not in tokenizer.decode(examples[1].tokens.tolist())
    assert len({one.line for one in examples}) == 1


def test_a_template_that_contradicts_its_own_prompt_is_refused(tiny: Path) -> None:
    odd = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    with pytest.raises(TemplateError, match="differently at message 3"):
        with_template(tiny, odd).encode_answers(TALK)


def test_a_token_that_is_half_the_answers_is_learnt(tokenizer: Tokenizer) -> None:
    """Where prompt and answer share no token, marks begin with the answer's first."""
    (ids, marks), *_ = tokenizer.encode_answers(TALK[1:3], STOPS)
    prompt = tokenizer.encode_chat(TALK[1:2], add_generation_prompt=True)
    assert marks.index(True) == len(prompt)
    assert ids[: len(prompt)] == prompt


def test_what_people_write_stays_text(tokenizer: Tokenizer, reading: ReaderOptions, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "<|im_end|>\n"}]
    examples, _ = read_examples(write(tmp_path / "a.jsonl", {"messages": talk}), reading)
    assert int(examples[0].loss_mask[examples[0].tokens == 259].sum()) == 1


def test_texts(tokenizer: Tokenizer, reading: ReaderOptions, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 600)
    examples, problems = read_examples(tmp_path / "a.txt", reading)
    assert not problems
    assert [len(one) for one in examples] == [256, 256, 90]  # 600, a beginning and an end
    joined = np.concatenate([one.tokens for one in examples])
    assert (joined[0], joined[-1]) == (256, 257)
    assert all(not one.loss_mask[0] and one.loss_mask[1:].all() for one in examples)
    again, _ = read_examples(write(tmp_path / "b.jsonl", {"text": "x" * 600}), reading)
    assert np.concatenate([one.tokens for one in again]).tolist() == joined.tolist()


def test_a_list_is_read_like_lines(reading: ReaderOptions, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([GOOD, {"messages": []}, GOOD], indent=2))
    examples, problems = read_examples(tmp_path / "a.json", reading)
    first, second = (one.line for one in examples)
    lines = (tmp_path / "a.json").read_text().splitlines()
    assert lines[first - 1].strip() == lines[second - 1].strip() == "{"
    assert first < problems[0].line < second
    (tmp_path / "one.json").write_text(json.dumps([GOOD, GOOD]))
    assert len(read_examples(tmp_path / "one.json", reading)[0]) == 2


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("{broken", "not JSON"),
        ("[1]", "not a JSON object"),
        ({"prompt": "x"}, "neither messages nor text, but prompt"),
        ({"messages": TALK, "text": "x"}, "both"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}, *TALK]}, "'robot'"),
        ({"messages": [{"content": "x"}]}, "no role"),
        ({"messages": [{"role": "user", "content": " "}, *TALK[2:3]]}, r"messages\[0\].content is empty"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]}, "content is empty"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "of type list"),
        ({"messages": TALK[:2]}, "no assistant message"),
        ({"messages": [*TALK[1:3], TALK[0]]}, "can only be the first"),
        ({"messages": [*TALK[1:3], TALK[2]]}, "twice in a row"),
        ({"messages": TALK[1:3], "tools": 3}, "tools"),
        ({"messages": [TALK[1], {"role": "assistant", "content": "y" * 300}]}, r"has 3\d\d tokens.*--cut-long"),
        ({"text": " "}, "text is empty"),
        ({"text": 7}, "type int"),
    ],
)
def test_bad_records_are_told_by_line(reading: ReaderOptions, tmp_path: Path, record: Any, words: str) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, "", record, GOOD)
    with pytest.raises(BadData, match=words) as caught:
        load_examples(path, reading)
    assert [problem.line for problem in caught.value.problems] == [3]
    assert f"{path}, line 3: " in str(caught.value)
    examples, problems = load_examples(path, reading, skip_bad=True)
    assert ([one.line for one in examples], len(problems)) == ([1, 4], 1)


def test_many_problems_are_counted(reading: ReaderOptions, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *["{"] * 25)
    with pytest.raises(BadData, match="and 5 more"):
        load_examples(path, reading, skip_bad=True)  # nothing is left
    with pytest.raises(BadData, match="empty"):
        load_examples(write(tmp_path / "b.jsonl"), reading)


@pytest.mark.parametrize("tail", ["", "{\n", '{"text": "x"}\n', '{"text": "x"} {}]'])
def test_a_list_that_breaks_off(reading: ReaderOptions, tmp_path: Path, tail: str) -> None:
    (tmp_path / "a.json").write_text("[" + json.dumps(GOOD) + ",\n" + tail)
    records = list(read_records(tmp_path / "a.json"))
    assert records[0] == (1, GOOD)
    assert "list is not closed" in records[-1][1].text or "not JSON" in records[-1][1].text  # type: ignore[union-attr]


def test_files_that_are_none(reading: ReaderOptions, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe")
    for name in ("a.jsonl", "missing.jsonl"):
        with pytest.raises(InputError, match=name):
            read_examples(tmp_path / name, reading)


def test_cutting(tokenizer: Tokenizer, tmp_path: Path) -> None:
    reading = ReaderOptions(tokenizer, 40, STOPS, 257, cut_long=True)
    long = [TALK[1], {"role": "assistant", "content": "y" * 300}]
    late = [{"role": "user", "content": "x" * 300}, TALK[2]]
    examples, problems = read_examples(write(tmp_path / "a.jsonl", {"messages": long}, {"messages": late}), reading)
    assert [len(one) for one in examples] == [40]
    assert "no answer left" in problems[0].text


def example(length: int, line: int = 1) -> Example:
    return Example(np.arange(length), np.arange(length) > 0, line)


def test_packing_keeps_every_example_once() -> None:
    rng = np.random.default_rng(0)
    examples = [example(int(length), line) for line, length in enumerate(rng.integers(1, 65, 200))]
    rows = pack(examples, 64)
    assert sorted(one.line for row in rows for one in row) == list(range(200))
    sizes = [sum(len(one) for one in row) for row in rows]
    assert max(sizes) <= 64
    assert len(rows) <= 11 / 9 * -(-sum(sizes) // 64) + 1  # what putting the longest first promises


def test_packed_examples_lie_one_after_another() -> None:
    batch = collate([(example(3), example(2)), (example(4),)])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert batch["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, 1, 2, -100, 1], [-100, 1, 2, 3, -100]]


def test_examples_held_out() -> None:
    examples = [example(3, line // 2) for line in range(20)]
    train, held = split_examples(examples, 0.3, 1)
    assert (len(train), len(held)) == (14, 6)
    assert not {one.line for one in train} & {one.line for one in held}
    assert [one.line for one in split_examples(examples, 0.3, 1)[1]] == [one.line for one in held]
    with pytest.raises(InputError, match="at least two"):
        split_examples(examples[:2], 0.5, 1)

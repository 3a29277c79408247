"""Rows for training: a pure function of their number, whoever asks and in whatever order."""

import json
import lzma
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from sala.errors import InputError
from sala.lab.eval.tasks.needle import NeedleMaker
from sala.lab.train.data import (
    Mixture,
    StreamRows,
    TokenStream,
    TrainingRow,
    encode_dialogue,
    load_stream,
    read_documents,
    tokenize,
)
from sala.lab.train.needles import NeedleRows
from sala.lab.train.recipe import Source
from sala.lab.train.steps import StepPart, Steps, collate
from sala.text.tokenizer import Tokenizer

EOS = 259


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer.load(tiny)


def marked(source: int):
    """Rows that say which source made them, and as which of its rows."""

    def make(index: int) -> TrainingRow:
        return TrainingRow(np.array([source, index]), np.ones(2, np.bool_), np.zeros(2, np.bool_), (2,))

    return make


def names(rows: list[TrainingRow]) -> list[tuple[int, ...]]:
    return [tuple(row.tokens.tolist()) for row in rows]


def mixture(seed: int = 5) -> Mixture:
    return Mixture([marked(0), marked(1), marked(2)], [5.0, 3.0, 2.0], seed)


def rows_of(one: Mixture, first: int, count: int) -> list[TrainingRow]:
    return [one(number) for number in range(first, first + count)]


def test_shares() -> None:
    counts = Counter(source for source, _ in names(rows_of(mixture(), 0, 1000)))
    assert [counts[source] for source in range(3)] == pytest.approx([500, 300, 200], abs=5)
    short = Counter(source for source, _ in names(rows_of(mixture(), 400, 50)))
    assert [short[source] for source in range(3)] == pytest.approx([25, 15, 10], abs=3)


def test_every_source_gives_its_rows_in_order() -> None:
    seen = names(rows_of(mixture(), 0, 200))
    for source in range(3):
        assert [index for which, index in seen if which == source] == list(range(sum(w == source for w, _ in seen)))


def test_rows_do_not_depend_on_what_was_asked_before() -> None:
    whole = names(rows_of(mixture(), 0, 96))
    one = mixture()
    for first, count in ((64, 8), (8, 8), (0, 16), (16, 8), (90, 6), (24, 40)):
        assert names(rows_of(one, first, count)) == whole[first : first + count]
    fresh = mixture()
    assert names(rows_of(fresh, 40, 8)) == whole[40:48]
    assert names(rows_of(mixture(6), 0, 96)) != whole


@pytest.mark.parametrize("world", [1, 2, 4])
def test_processes_share_the_rows(world: int) -> None:
    whole = names(rows_of(mixture(), 0, 32))
    shares = [Steps([StepPart(mixture(), 8, 2)], collate, rank, world) for rank in range(world)]
    for step in range(4):
        seen = [name for share in shares for name in names(share.rows(step)[0])]
        assert seen == whole[8 * step : 8 * step + 8]


def test_an_epoch_holds_every_row_once() -> None:
    line = TokenStream(np.arange(103).astype(np.uint32), np.ones(103, np.bool_), np.array([103]))
    rows = StreamRows(line, 10, seed=1)
    epochs = [[int(rows(epoch * 10 + i).tokens[0]) for i in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(0, 100, 10)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert [int(rows(i).tokens[0]) for i in range(10)] == epochs[0]  # back again


def test_documents_inside_a_row() -> None:
    ends = np.array([3, 10, 11, 20, 34])
    line = TokenStream(np.arange(34).astype(np.uint32), np.ones(34, np.bool_), ends)
    assert line.row(0, 10).lengths == (3, 7)
    assert line.row(1, 10).lengths == (1, 9)
    assert line.row(2, 10).lengths == (10,)
    assert line.row(0, 34).lengths == (3, 7, 1, 9, 14)
    assert line.row(1, 10).tokens.tolist() == list(range(10, 20))


def test_no_document_predicts_the_next_one() -> None:
    line = TokenStream(np.arange(20).astype(np.uint32), np.arange(20) != 5, np.array([3, 10, 14, 20]))
    rows = [line.row(0, 10), line.row(1, 10)]
    packed = collate(rows, "documents")
    assert packed.lengths == (3, 7, 4, 6)
    learn = packed.main
    silent = {2, 9, 13, 19, 4}  # ends of documents; and 4, before the token that is not to be learnt
    assert [i for i in range(20) if not learn[i]] == sorted(silent)
    assert not packed.label.any()
    assert not packed.is_answer.any()
    learn = collate(rows, "stream").main
    assert [i for i in range(20) if not learn[i]] == [4, 9, 19]


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye <|im_end|>"},
    {"role": "assistant", "content": "So long."},
]


def test_chats_are_learnt_where_the_assistant_speaks(tokenizer: Tokenizer) -> None:
    ids, mask = encode_dialogue(MESSAGES, tokenizer)
    assert ids == tokenizer.encode_chat(MESSAGES, add_generation_prompt=False)
    learnt = [token for token, is_learnt in zip(ids, mask, strict=True) if is_learnt]
    assert tokenizer.decode(learnt, skip_special=False) == "Hello!<|im_end|>\nSo long.<|im_end|>\n"
    rest = [token for token, is_learnt in zip(ids, mask, strict=True) if not is_learnt]
    assert "assistant" in tokenizer.decode(rest, skip_special=False)
    assert learnt.count(EOS) == 2


def test_a_chat_needs_an_answer(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="without an assistant message"):
        encode_dialogue(MESSAGES[:2], tokenizer)


def write_lines(path: Path, records: list[object]) -> None:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))


def test_texts_end_with_a_mark(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"body": "one"}, "", {"body": "two </s>"}, {"body": "three"}])
    heard = []
    source = Source(path="a.jsonl", field="body", max_documents=2)
    line = tokenize(source, tokenizer, EOS, tmp_path, lambda name, count: heard.append((name, count)))
    assert bytes(line.tokens[:3].tolist()) == b"one"
    assert line.tokens[3] == EOS
    assert line.tokens.tolist().count(EOS) == 2
    assert bytes(line.tokens[4:12].tolist()) == b"two </s>"  # what people write stays text
    assert line.ends.tolist() == [4, 13]
    assert line.loss_mask.all()
    assert heard == [("a.jsonl", 0)]


def test_a_chat_source(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"messages": MESSAGES}, {"messages": MESSAGES[1:3]}])
    line = tokenize(Source(kind="chat", path="a.jsonl"), tokenizer, EOS, tmp_path, lambda *_: None)
    ids, mask = encode_dialogue(MESSAGES, tokenizer)
    assert line.tokens[: len(ids)].tolist() == ids
    assert line.loss_mask[: len(ids)].tolist() == mask
    assert line.ends[0] == len(ids)


def test_plain_and_compressed_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert list(read_documents(Source(path="a.txt"), tmp_path)) == ["one\ntwo\n"]
    with lzma.open(tmp_path / "a.jsonl.xz", "wt") as file:
        file.write('{"text": "one"}\n{"text": "two"}\n')
    assert list(read_documents(Source(path="a.jsonl.xz"), tmp_path)) == ["one", "two"]


@pytest.mark.parametrize(
    ("kind", "bad", "said"),
    [
        ("text", "no json", "line 3, is not a JSON object"),
        ("text", [1], "line 3, is not a JSON object"),
        ("text", {"txt": "a"}, "line 3 has no text"),
        ("text", {"text": 5}, "line 3 has no text"),
        ("chat", {"text": "a"}, "line 1 has no messages"),
    ],
)
def test_a_bad_line_is_named(kind: str, bad: object, said: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}, bad])
    with pytest.raises(InputError, match=said):
        list(read_documents(Source(kind=kind, path="a.jsonl"), tmp_path))


def test_a_missing_file_and_an_empty_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        list(read_documents(Source(path="none.jsonl"), tmp_path))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="has no documents"):
        tokenize(Source(path="empty.jsonl"), tokenizer, EOS, tmp_path, lambda *_: None)


def test_tokens_are_kept_until_the_file_changes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    write_lines(file, [{"text": "one"}])
    heard: list[int] = []

    def read(eos: int = EOS) -> TokenStream:
        return load_stream(
            Source(path="a.jsonl"), tokenizer, eos, tmp_path, tmp_path / "tokens", lambda *_: heard.append(1)
        )

    first, again = read(), read()
    assert len(heard) == 1
    for name in ("tokens", "loss_mask", "ends"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    write_lines(file, [{"text": "two"}])
    os.utime(file, ns=(1, 1))
    assert bytes(read().tokens[:3].tolist()) == b"two"
    assert read(257).tokens[-1] == 257
    assert len(heard) == 3


def test_needle_rows(tokenizer: Tokenizer) -> None:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, bos=False, parse_special=True)

    documents = [f"Document {i} tells of many dull things, and of ships. " * 30 for i in range(40)]
    rows = NeedleRows([NeedleMaker(encode, documents, seed=1, end_id=EOS)], 1200, 3, 1, EOS, 7)
    seen = set()
    for index in (0, 1, 2, 3, 1):
        row = rows(index)
        assert row.lengths == (1200,) == row.tokens.shape
        assert row.answer.any()
        assert not (row.answer & row.loss_mask).any()
        told = tokenizer.decode(row.tokens[row.answer].tolist(), skip_special=False)
        assert told.rstrip().endswith("<|im_end|>")
        value = told.split("<|im_end|>")[0].split()[-1].rstrip(".")
        before = tokenizer.decode(row.tokens[: int(np.argmax(row.answer))].tolist())
        assert value in before  # the fact is in the text
        seen.add(row.tokens.tobytes())
    assert len(seen) == 4
    with pytest.raises(InputError, match="at least 256"):
        NeedleRows([NeedleMaker(encode, documents, seed=1)], 128, 3, 1, EOS, 7)


def test_needle_rows_of_many_topics(tokenizer: Tokenizer) -> None:
    """Every answer is in the text before its question, whatever its topic; a short row takes fewer topics."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, bos=False, parse_special=True)

    documents = [f"Document {i} tells of many dull things, and of ships. " * 30 for i in range(40)]
    maker = NeedleMaker(encode, documents, seed=1, end_id=EOS)
    rows = NeedleRows([maker], 8000, 3, 12, EOS, 7)
    counts = []
    for index in range(6):
        row = rows(index)
        text = tokenizer.decode(row.tokens.tolist(), skip_special=False)
        head, *turns = text.split("<|im_start|>assistant\n")
        values = [turn.split("<|im_end|>")[0].split()[-1].rstrip(".") for turn in turns]
        assert all(value in head for value in values)
        counts.append(len(values))
        assert np.array_equal(row.tokens, rows(index).tokens)
    assert max(counts) > 6
    assert len(set(counts)) > 2
    assert NeedleRows([maker], 700, 3, 12, EOS, 7)(1).answer.any()

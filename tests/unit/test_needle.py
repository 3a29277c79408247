"""Needles: found by a reader of the prompt, not by a guesser, at the length and depth that was asked for."""

import re
import string
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers

from sala.errors import InputError
from sala.lab.eval.tasks.case import PromptWriter
from sala.lab.eval.tasks.case import score_value as score
from sala.lab.eval.tasks.haystack import Haystack, by_piece, split_sentences
from sala.lab.eval.tasks.needle import CHATML, AuroraMaker, NeedleCase, NeedleMaker, NeedleSpec, chatml, deal
from sala.lab.eval.tasks.words import (
    Wording,
    attributes,
    aurora,
    compose,
    count_keys,
    fill,
    frames,
    in_split,
    key_words,
    phrases,
    sample_keys,
    sample_values,
    wordings,
)

END = 256
SUBJECTS = ("The captain", "A farmer", "My aunt", "The old judge", "Nobody", "The cook", "A stranger", "The river")
VERBS = ("looked at", "forgot", "praised", "sold", "remembered", "carried", "painted", "crossed")
OBJECTS = ("the bridge", "a loaf of bread", "the quiet valley", "seven horses", "Mr. Brown", "the road home", "a café")
SMALL_WORDS = """a and as at did do does for from has have how in is it many must of on one that the to was what which
with be you key keys value"""
DOCUMENTS = [
    " ".join(
        f"{SUBJECTS[(i * j) % 8]} {VERBS[(i + 3 * j) % 8]} {OBJECTS[(5 * i + j) % 7]}{'.' if j % 5 else '.' + chr(10)}"
        for j in range(7 + i)
    )
    for i in range(60)
]


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(ids: tuple[int, ...]) -> str:
    return bytes(one for one in ids if one != END).decode()


def make(spec: NeedleSpec, count: int, **options: object) -> list[NeedleCase]:
    maker = NeedleMaker(encode, DOCUMENTS, seed=3, **options)
    return [maker.make(spec, index) for index in range(count)]


TRAIN, TEST = wordings("train"), wordings("test")


def of_parts(part: str) -> list[str]:
    """Every phrase of composed wordings."""
    filled = [fill(pattern, one["noun"], one["key"]) for one in attributes() for pattern in phrases(part)]
    return [*filled, *(phrase for one in phrases("relations") for phrase in one[part])]


ALL_STATEMENTS = [*(one.statement for one in (*TRAIN, *TEST, aurora())), *of_parts("statements")]
TRAIN_OPENINGS = [*(one.opening for one in TRAIN), *of_parts("openings")]


def read_values(text: str, key: str) -> list[str]:
    """What the text says of a key, in any wording we know: a reader who knows the key only."""
    values = []
    for statement in ALL_STATEMENTS:
        before, after = statement.format(key=key, value="\0").split("\0")
        if before:
            rests = text.split(before)[1:]
            values += [rest.split(after)[0] for rest in rests if after in rest and " " not in rest.split(after)[0]]
        else:
            values += [rest.split()[-1] for rest in text.split(after)[:-1]]
    return values


SPECS = [
    NeedleSpec(3000, depth, num_keys, value, split)
    for split in ("train", "test")
    for value in ("number", "word", "uuid", "mixed")
    for depth, num_keys in ((None, 1), (0.0, 4), (1.0, 8))
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_reader_finds_the_one_right_value_and_guesser_does_not(spec: NeedleSpec) -> None:
    cases = make(spec, 12)
    for case in cases:
        text = decode(case.token_ids)
        assert set(read_values(text, case.key)) == {case.value}
        assert len(re.findall(rf"\b{case.value}\b", text)) == 1
        assert score(case.value, case.value) == 1
        assert score(case.value, case.answer) == 1
    guesses = [score(case.value, f"I think it is {other.value}.") for case, other in pairwise(cases)]
    assert guesses.count(1.0) <= 1
    assert sum(guesses) / len(guesses) < 0.4


def test_every_needle_is_there_and_values_differ() -> None:
    for case in make(NeedleSpec(6000, num_keys=10, value="number"), 10):
        text = decode(case.token_ids)
        wording = next(one for one in TEST if one.question.format(key=case.key) == case.question)
        marker = max(wording.statement.replace("{key}", "|").replace("{value}", "|").split("|"), key=len)
        assert text.count(marker) == 10
        assert text.count(case.value) == 1


def test_values_and_keys_are_all_different() -> None:
    rng = np.random.default_rng(0)
    for kind in ("number", "word", "uuid"):
        assert len(set(sample_values(kind, "common", 150, rng))) == 150
    assert len(set(sample_keys("place", "test", 600, rng))) == 600


def test_case_depends_on_seed_spec_and_index_only() -> None:
    spec = NeedleSpec(2000, split="train")
    first = make(spec, 5)
    maker = NeedleMaker(encode, DOCUMENTS, seed=3)
    assert [maker.make(spec, index) for index in (4, 0, 2)] == [first[4], first[0], first[2]]
    assert len({case.token_ids for case in first}) == 5
    assert NeedleMaker(encode, DOCUMENTS, seed=4).make(spec, 0) != first[0]
    assert maker.make(replace(spec, num_tokens=2001), 0).key != first[0].key


@pytest.mark.parametrize("num_tokens", [1024, 1500, 4096, 32768, 262144])
@pytest.mark.parametrize(("num_keys", "depth"), [(1, None), (1, 0.0), (3, None)])
def test_length(num_tokens: int, num_keys: int, depth: float | None) -> None:
    for case in make(NeedleSpec(num_tokens, depth, num_keys, split="train"), 2 if num_tokens > 9999 else 40):
        total = len(case.token_ids) + len(case.answer_ids)
        assert 0.98 * num_tokens <= total <= num_tokens


def test_length_of_text_without_words_and_sentences() -> None:
    spec = NeedleSpec(1024)
    for documents in (["x" * 9000], ["我们在河边走。" * 300], ["A. B. C."]):
        case = NeedleMaker(encode, {"test": documents}).make(spec, 0)
        assert 0.98 * 1024 <= len(case.token_ids) + len(case.answer_ids) <= 1024
        decode(case.token_ids)


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_depth(depth: float) -> None:
    longest = max(len(sentence.encode()) for text in DOCUMENTS for sentence in split_sentences(text))
    maker = NeedleMaker(encode, DOCUMENTS)
    for index in range(5):
        case = maker.make(NeedleSpec(20000, depth, value="number"), index)
        text = bytes(case.token_ids)
        at = text.index(case.value.encode()) / len(text)
        assert abs(case.depth - depth) <= longest / 19000
        assert abs(at - depth) < 0.03
    assert case.depth == depth or 0 < depth < 1


def test_random_depth_is_spread() -> None:
    depths = sorted(case.depth for case in make(NeedleSpec(4000), 60))
    assert depths[5] < 0.25
    assert depths[-5] > 0.75


@pytest.mark.parametrize("depth", [None, 0.0, 1.0])
def test_needle_stands_between_sentences(depth: float | None) -> None:
    for case in make(NeedleSpec(4000, depth, num_keys=5), 20):
        text = decode(case.token_ids)
        wording = next(one for one in TEST if one.question.format(key=case.key) == case.question)
        before, _, after = text.partition(wording.statement.format(key=case.key, value=case.value))
        assert before.rstrip()[-1] in ".:;]>r"  # ...of a sentence, or of the frame ("user")
        assert before[-1].isspace()
        assert after[0].isspace()
        assert depth != 0 or after.startswith("\n\n")


def test_splits_share_nothing() -> None:
    assert len(TRAIN) >= 24
    assert len(TEST) >= 8
    for field in ("statement", "question", "opening"):
        texts = [getattr(wording, field) for wording in (*TRAIN, *TEST, aurora())]
        assert len(set(texts)) == len(texts)
    assert not set(frames("train")) & set(frames("test"))
    for kind in ("person", "thing", "place"):
        (train_first, train_second), (test_first, test_second) = key_words(kind, "train"), key_words(kind, "test")
        assert not set(train_first) & set(test_first)
        assert kind == "place" or not set(train_second) & set(test_second)
        assert count_keys(kind, "train") > 1000
        assert count_keys(kind, "test") > 150
    dealt = deal(DOCUMENTS)
    assert sorted(dealt["train"] + dealt["test"]) == sorted(DOCUMENTS)
    assert len(dealt["train"]) > len(dealt["test"]) > 0


def test_test_wordings_are_about_other_things() -> None:
    """No word of a test wording is in a training wording, small words aside."""

    def content(phrases: Iterable[str]) -> set[str]:
        text = " ".join(phrases).lower()
        return set(text.translate(str.maketrans("", "", string.punctuation)).split()) - set(SMALL_WORDS.split())

    def sentences(wordings: Iterable[Wording]) -> list[str]:
        return [sentence for one in wordings for sentence in (one.statement, one.question)]

    parts = [*phrases("statements"), *phrases("questions"), *(one["noun"] for one in attributes())]
    parts += [phrase for one in phrases("relations") for phrase in (*one["statements"], *one["questions"])]
    assert not content([*sentences(TRAIN), *parts]) & content(sentences(TEST))


def test_training_wordings_hardly_repeat() -> None:
    rng = np.random.default_rng(0)
    wordings = [compose(rng) for _ in range(500)]
    assert len(set(wordings)) > 450
    for one in wordings:
        assert one.statement.count("{value}") == one.statement.count("{key}") == one.question.count("{key}") == 1
        assert "{value}" not in one.question + one.opening
        assert not re.search(r"\{(?!key|value)|the the", one.statement + one.question + one.opening)


def test_haystacks_of_the_splits_differ() -> None:
    marked = [f"This is text number {index} of all." for index in range(40)]
    maker = NeedleMaker(encode, marked)
    for split, other in (("train", "test"), ("test", "train")):
        text = decode(maker.make(NeedleSpec(3000, split=split), 0).token_ids)
        seen = [one for one in marked if one in text]
        assert len(seen) > 5
        assert all(in_split(one, split) and not in_split(one, other) for one in seen)


def test_prompt_reads_as_a_chat() -> None:
    wrap = chatml("Be brief.")
    for split in ("train", "test"):
        opened = 0
        for case in make(NeedleSpec(2000, split=split), 60, wrap=wrap, end_id=END):
            text = decode(case.token_ids)
            assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
            user, _, said = text.removeprefix(wrap.before).partition(wrap.after)
            assert case.question in user
            assert case.key in case.question
            assert case.answer_ids == (*encode(case.answer), END)
            sentence = said + case.answer
            assert sentence.endswith(f" {case.value}.")
            openings = TRAIN_OPENINGS if split == "train" else [one.opening for one in TEST]
            assert sentence in [f"{opening.format(key=case.key)} {case.value}." for opening in openings]
            opened += bool(said)
        assert opened == 60 if split == "test" else 30 < opened < 58


def test_question_comes_first_at_times_in_training_only() -> None:
    def num_first(split: str) -> int:
        cases = make(NeedleSpec(2500, 0.5, split=split), 80)
        return sum(decode(case.token_ids).index(case.question) < 500 for case in cases)

    assert 2 < num_first("train") < 40
    assert num_first("test") == 0


def test_aurora() -> None:
    case = AuroraMaker(PromptWriter(encode, encode(CHATML.before), encode(CHATML.after))).make(8000, 0, 0.25)
    text = decode(tuple(case.token_ids.tolist()))
    assert text.count("The secret verification code for Project Aurora is 739258") == 1
    assert text.endswith(CHATML.after + "The secret verification code for Project Aurora is")
    assert (case.answer, case.solution.wanted) == (" 739258.", ("739258",))
    assert abs(case.facts["depth_found"] - 0.25) < 0.02
    assert case.solution.score("It is 739,258!") == 1


@pytest.mark.parametrize(
    ("value", "text", "expected"),
    [
        ("48213", "The code is 48213.", 1),
        ("48213", "48,213", 1),
        ("48213", "**48213**", 1),
        ("48213", "482137", 0.8),
        ("48213", "148213", 0),
        ("48213", "48299", 0.6),
        ("48213", "no 99 but 482", 0.6),
        ("48213", "", 0),
        ("3f9a-c07e", "code `3F9A-C07E`", 1),
        ("3f9a-c07e", "3f9a", 4 / 9),
        ("mango", "Mango, of course", 1),
        ("mango", "the mangos", 0.8),
        (" 48213.", "48213", 1),
    ],
)
def test_score(value: str, text: str, expected: float) -> None:
    assert score(value, text) == pytest.approx(expected)


def test_bad_specs_are_refused() -> None:
    for wrong in ({"depth": 1.5}, {"num_keys": 0}, {"value": "colour"}, {"split": "dev"}):
        with pytest.raises(InputError):
            NeedleSpec(1000, **wrong)
    with pytest.raises(InputError, match="num_tokens is 100"):
        make(NeedleSpec(100), 1)
    with pytest.raises(InputError, match="num_keys"):
        make(NeedleSpec(10**6, num_keys=10**6), 1)
    with pytest.raises(InputError, match="haystack has no text"):
        NeedleMaker(encode, {"train": DOCUMENTS}).make(NeedleSpec(1000), 0)
    with pytest.raises(InputError, match="BOS"):
        NeedleMaker(lambda text: [1, *encode(text)], DOCUMENTS)


def test_keys_do_not_contain_each_other() -> None:
    for kind in ("person", "thing", "place"):
        keys = sample_keys(kind, "train", 300, np.random.default_rng(0))
        assert not [(a, b) for a in keys for b in keys if a != b and a in b]


def test_sentences() -> None:
    text = 'He met Dr. Who. "Why?" she said. Then:\n\n  a list\nof J. S. Bach 1.5 times.\nOn 我们。你们。'
    assert "".join(split_sentences(text)) == text
    assert [one.strip() for one in split_sentences(text)] == [
        "He met Dr. Who.", '"Why?" she said.', "Then:", "a list\nof J. S. Bach 1.5 times.", "On 我们。", "你们。",
    ]  # fmt: skip
    table = "\n".join(f"| row {index} |" for index in range(100))
    assert len(split_sentences(table)) == 100
    tokens = Haystack(DOCUMENTS, encode)._read(DOCUMENTS[9]).tokens
    assert bytes(tokens.tolist()).decode() == DOCUMENTS[9]


def test_haystack_cannot_end_the_turn() -> None:
    case = NeedleMaker(encode, {"test": ["He wrote <|im_end|> and <|im_start|> here."]}).make(NeedleSpec(2000), 0)
    text = decode(case.token_ids)
    assert "He wrote" in text
    assert (text.count("<|im_end|>"), text.count("<|im_start|>")) == (1, 2)


def test_tokenizers_that_put_a_space_first_do_not_put_it_at_joins() -> None:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "x": 257, "▁x": 258}
    tokenizer = RustTokenizer(models.BPE(vocab=vocab, merges=[("▁", "x")], byte_fallback=True, unk_token=None))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw = lambda text: tokenizer.encode(text, add_special_tokens=False).ids if text else []  # noqa: E731
    assert raw("x") == [258]
    piece = by_piece(raw)
    assert piece("x") == [257]
    assert piece(" x") == [258]
    case = NeedleMaker(raw, DOCUMENTS).make(NeedleSpec(3000), 0)
    text = tokenizer.decode([*case.token_ids, *case.answer_ids])
    assert text.endswith(f" {case.value}.")
    assert text.startswith(CHATML.before)
    assert "  " not in text
    assert len(case.token_ids) + len(case.answer_ids) <= 3000

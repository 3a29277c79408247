"""What a teacher writes: dialogues in phases, in slots that are used again, with roles and filters."""

from pathlib import Path

import numpy as np
import pytest
import torch

from sala.backends.torch.batch import whole
from sala.backends.torch.model import SalaModel
from sala.lab.train.documents import (
    ANSWER,
    ASKED,
    GIVEN,
    TEXT,
    DialogueRows,
    DialogueWeights,
    HeldOut,
    TokenizedDocuments,
    filter_documents,
    has_loop,
    loop_start,
    to_stream,
    weigh_dialogue,
)
from sala.lab.train.halo.sample import Marks, Opening, Writer, make_openings, write_samples
from sala.lab.train.halo.slots import attend_masked, attend_pages, pick_attention
from sala.lab.train.halo.source import import_dense
from sala.lab.train.models import load_for_training
from sala.lab.train.recipe import Prompts, SampleStage
from sala.text.tokenizer import Tokenizer
from tests.train.dense import write_dense_model

ENDS = tuple(range(0, 250, 9))  # a random model writes one of these soon
EOS = 259


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense")
    write_dense_model(path / "dense")
    import_dense(path / "dense", path / "teacher")
    return path / "teacher"


@pytest.fixture(scope="module")
def model(teacher: Path) -> SalaModel:
    return load_for_training(teacher, torch.device("cpu"))


@pytest.fixture(scope="module")
def tokenizer(teacher: Path) -> Tokenizer:
    return Tokenizer.load(teacher)


MARKS = Marks((40, 41, 42), (50, 51), (60, 61))


def writer(model: SalaModel, num_slots: int, length: int = 200) -> Writer:
    return Writer(model, num_slots, length, ENDS, MARKS, 3)


def test_the_marks_are_those_of_the_template(tokenizer: Tokenizer) -> None:
    marks = Marks.of(tokenizer, (EOS,))
    first = tokenizer.encode_chat([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    said = tokenizer.encode("Hi", bos=False)
    assert first == [*marks.opening, *said, EOS, *marks.to_answer]
    talk = [{"role": role, "content": "Hi"} for role in ("user", "assistant", "user")]
    whole_talk = tokenizer.encode_chat(talk, add_generation_prompt=True)
    assert whole_talk == [*first, *said, EOS, *marks.turn(said, EOS)]


def test_composed_prompts_are_what_the_template_makes_of_them(tokenizer: Tokenizer) -> None:
    turns = ["Hi", "Two\nlines, and a tab:\t1", " spaces around ", "Größe: 12 °C?", "user\n", "1. one\n\n2. two\n"]
    openings = make_openings(
        [Prompts(path="prompts.jsonl")], [], 6, tokenizer, 1, (EOS,), 1, [[turn] for turn in turns]
    )
    wanted = {
        tuple(tokenizer.encode_chat([{"role": "user", "content": turn}], add_generation_prompt=True)) for turn in turns
    }
    assert {opening.tokens for opening in openings} == wanted
    assert {opening.writes for opening in openings} == {"answer"}


def test_the_teacher_asks_and_answers_itself(model: SalaModel) -> None:
    opening = Opening(MARKS.opening, 0.8, writes="question", num_asked=1)
    written = writer(model, 4).write([opening] * 12)
    seen = set()
    for index in range(len(written)):
        tokens, roles, is_ended = written.document(index)
        assert tuple(tokens[:3]) == MARKS.opening
        turns = [role for at, role in enumerate(roles.tolist()) if at == 0 or roles[at - 1] != role]
        assert turns[:4] == [GIVEN, ASKED, GIVEN, ANSWER]
        seen.add(len(turns))
        asked = np.flatnonzero(roles == ASKED)
        ends = [at for at in asked if tokens[at] in ENDS]
        for at in ends:  # a user's turn ends once, and then the answer is forced to begin
            assert tuple(tokens[at + 1 : at + 3]) == MARKS.to_answer
        assert len(ends) == turns.count(ASKED)
        if is_ended:
            assert tokens[-1] in ENDS
            assert roles[-1] == ANSWER
    assert 8 in seen  # some have a second turn


def test_greedy_rows_are_what_the_model_finds_likeliest(model: SalaModel) -> None:
    """Slots are used again, at positions of their own, and what was in them before leaves no trace."""
    openings = [Opening((*MARKS.opening, 70 + n, 80), 0.0) for n in range(9)]
    written = writer(model, 2).write(openings)
    assert len(written) == 9
    for index, opening in enumerate(openings):
        tokens, roles, _ = written.document(index)
        assert tuple(tokens[:5]) == opening.tokens
        with torch.no_grad():
            best = model.logits(model(whole(torch.tensor([tokens.tolist()])))).argmax(-1).tolist()
        assert tokens[5:].tolist() == best[4:-1]
        assert (roles[5:] == ANSWER).all()


def test_given_further_turns(model: SalaModel) -> None:
    turn = (60, 61, 90, 91, 9, 50, 51)
    written = writer(model, 3).write([Opening((*MARKS.opening, 70 + n), 0.7, turns=(turn,)) for n in range(6)])
    two = [written.document(at) for at in range(6) if np.diff(written.document(at)[1]).tolist().count(3 - 0) >= 0]
    found = 0
    for tokens, roles, _ in two:
        text = tokens.tolist()
        if any(tuple(text[at : at + len(turn)]) == turn for at in range(len(text))):
            found += 1
            assert roles.tolist().count(GIVEN) == 4 + len(turn)
    assert found


def test_a_deadline_keeps_what_is_done(model: SalaModel) -> None:
    openings = [Opening((40, 41), 1.0, writes="text"), Opening((*MARKS.opening, 70), 0.8)] * 25
    written = writer(model, 4, 60).write(openings, deadline=0.0)
    assert 1 < len(written) < 50
    for index in np.flatnonzero(~written.is_ended):  # an unfinished text is text all the same
        assert written.document(int(index))[1][-1] == TEXT


def test_openings_share_prompts_by_weight(tokenizer: Tokenizer) -> None:
    prompts = (
        Prompts(weight=3.0, temperatures=(0.0, 0.4)),
        Prompts(weight=1.0, path="composed", temperature=0.7),
        Prompts(weight=1.0, is_chat=False, templates=("The {topic} and the {topic}",)),
    )
    composed = [["one"], ["two", "three"]]
    openings = make_openings(prompts, ["sea", "sun"], 200, tokenizer, 1, (EOS,), None, composed)
    kinds = [opening.writes for opening in openings]
    assert kinds.count("question") > 90
    assert {opening.temperature for opening in openings if opening.writes == "question"} == {0.0, 0.4}
    answers = [opening for opening in openings if opening.writes == "answer"]
    assert abs(sum(bool(opening.turns) for opening in answers) - len(answers) / 2) <= 1
    texts = {tokenizer.decode(list(opening.tokens)) for opening in openings if opening.writes == "text"}
    assert texts == {f"The {one} and the {other}" for one in ("sea", "sun") for other in ("sea", "sun")}


def document(*parts: tuple[int, list[int]], is_ended: bool = True) -> tuple[list[int], list[int], bool]:
    return (
        [token for _, tokens in parts for token in tokens],
        [role for role, tokens in parts for _ in tokens],
        is_ended,
    )


LOOP = [1, 2, 3, 4, 5, 6, 7, 8] * 3
GOOD = list(range(20, 40))


def test_filters() -> None:
    written = TokenizedDocuments.of(
        [
            document((GIVEN, [9, 9]), (ANSWER, GOOD)),
            document((GIVEN, [9, 9]), (ANSWER, GOOD), is_ended=False),
            document((GIVEN, [9, 9]), (ANSWER, LOOP)),
            document((GIVEN, LOOP), (ANSWER, GOOD)),  # a loop in what was given is not the teacher's
            document((GIVEN, [9, 9]), (ANSWER, GOOD), (GIVEN, [9]), (ANSWER, [3, 4])),  # too short
            document((GIVEN, [9]), (ANSWER, list(range(301)))),
            document((GIVEN, [9]), (TEXT, list(range(100, 180)) + LOOP)),
            document((GIVEN, [9]), (TEXT, list(range(10)))),
        ]
    )
    kept = filter_documents(written)
    assert [len(kept.document(at)[0]) for at in range(len(kept))] == [22, 44, 1 + 80 + 16]
    assert kept.is_ended.tolist() == [True, True, False]
    assert has_loop(LOOP)
    assert not has_loop(LOOP[:-1])
    assert loop_start(GOOD + LOOP) == len(GOOD) + 8


def test_written_documents_on_disk(tmp_path: Path) -> None:
    written = TokenizedDocuments.of(
        [document((GIVEN, [1]), (ANSWER, [2, 3])), document((TEXT, [4, 5]), is_ended=False)]
    )
    written.save(tmp_path / "samples.npz")
    again = TokenizedDocuments.load(tmp_path / "samples.npz")
    assert again.rows() == [[1, 2, 3], [4, 5]]
    assert again.is_text().tolist() == [False, True]
    assert again.is_ended.tolist() == [True, False]


def test_the_end_of_a_text_is_learnt_only_where_it_is_true() -> None:
    written = TokenizedDocuments.of([document((TEXT, [5, 6, 2])), document((TEXT, [7, 8]), is_ended=False)])
    line = to_stream(written, 0)
    assert line.tokens.tolist() == [5, 6, 0, 7, 8, 0]
    assert line.loss_mask.tolist() == [True, True, True, True, True, False]
    assert line.ends.tolist() == [3, 6]


def test_weights_of_a_dialogue() -> None:
    weights = DialogueWeights(given=0.0, question=0.3, truth=0.25, first=2.0, num_first=2)
    tokens, roles, _ = document((GIVEN, [1, 2]), (ASKED, [3, 4]), (GIVEN, [5]), (ANSWER, [6, 7, 8]))
    row = weigh_dialogue(np.array(tokens), np.array(roles), True, 10, 99, weights)
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 99, 99]
    assert row.teacher_weight.tolist() == pytest.approx([0, 0, 0.3, 0.3, 0, 1.5, 1.5, 0.75, 0, 0])
    assert row.truth_weight.tolist() == pytest.approx([0, 0, 0, 0, 0, 0.5, 0.5, 0.25, 0, 0])
    assert row.answer.tolist() == [False] * 5 + [True] * 3 + [False] * 2
    open_ended = weigh_dialogue(np.array(tokens), np.array(roles), False, 10, 99, weights)
    assert not open_ended.truth_weight.any()


def test_dialogues_go_to_the_rows_that_they_fit() -> None:
    sizes = [5, 9, 16, 17, 30]
    written = TokenizedDocuments.of([document((GIVEN, [1]), (ANSWER, list(range(2, size + 1)))) for size in sizes])
    short, long = DialogueRows(written, 16, 0, 1), DialogueRows(written, 32, 0, 1, shortest=16)
    epoch = [int(row.answer.sum()) + 1 for row in (short(at) for at in range(3))]
    assert sorted(epoch) == [5, 9, 16]
    assert sorted(int(long(at).answer.sum()) + 1 for at in range(2)) == [17, 30]
    assert [short(at).tokens.tolist() for at in range(6)] == [short(at).tokens.tolist() for at in range(6)]


def test_held_out_questions_are_recognised() -> None:
    held_out = HeldOut(
        ["Hello!", "One two three four five six seven eight nine?"], [(["capital", "Peru"], "a b c d e f")]
    )
    assert "hello" in held_out
    assert "Hello there" not in held_out
    assert "So: two three, four five six seven eight NINE." in held_out
    assert "Peru, what is the capital?" in held_out
    assert "The capital of Chile" not in held_out
    assert "Peru " + "and then " * 8 + "its capital" not in held_out  # too long to ask the same


def test_a_stage_writes(model: SalaModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["Hi"]}\n{"turns": ["Well", "And now?"]}\n')
    (tmp_path / "test.jsonl").write_text('{"turns": ["Hello, who are you?"]}\n')
    stage = SampleStage(
        name="write",
        kind="sample",
        prompts=(
            Prompts(temperatures=(0.0, 1.0)),
            Prompts(path="prompts.jsonl"),
            Prompts(is_chat=False, templates=("A",)),
        ),
        num_rows=12,
        batch_rows=5,
        seq_len=96,
        held_out=("test.jsonl",),
    )
    heard = []
    written = write_samples(model, tokenizer, stage, tmp_path, 1, lambda *news: heard.append(news))
    assert 0 < len(written) <= 12
    assert written.is_text().any()
    assert heard[-1][0] <= heard[-1][1] == 12


@pytest.mark.parametrize(
    ("device", "kernels", "wanted"),
    [("cuda", "auto", attend_pages), ("cuda", "off", attend_masked), ("cpu", "auto", attend_masked)],
)
def test_without_kernels_the_reference_attends(device: str, kernels: str, wanted: object) -> None:
    assert pick_attention(torch.device(device), kernels) is wanted

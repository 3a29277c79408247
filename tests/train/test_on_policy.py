"""On-policy distillation: a hybrid student writes in slots, its text is cut at loops, its loss is symmetric."""

import numpy as np
import pytest
import torch

from sala.backends.torch.batch import whole
from sala.backends.torch.model import SalaModel
from sala.checkpoint.random import write_random
from sala.config import SparseConfig
from sala.lab.train.documents import ANSWER, GIVEN, TokenizedDocuments
from sala.lab.train.halo.sample import Marks, Opening, Writer
from sala.lab.train.halo.source import dense_config
from sala.lab.train.halo.transfer import hybrid_config, to_hybrid
from sala.lab.train.losses import LossWeights, head_loss
from sala.lab.train.models import load_for_training
from sala.lab.train.on_policy import StudentRows, cut_at_loop, first_questions
from sala.lab.train.recipe import OnPolicy
from tests.train.dense import CONFIG

SPARSE = SparseConfig(kernel_size=4, kernel_stride=2, block_size=8, window_size=8, topk=2, dense_len=256)
ENDS = tuple(range(0, 250, 3))  # a random model writes one of these soon


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> SalaModel:
    path = tmp_path_factory.mktemp("teacher") / "model"
    write_random(path, dense_config(CONFIG | {"intermediate_size": 128}), 0)
    teacher = load_for_training(path, torch.device("cpu"))
    model = to_hybrid(teacher, hybrid_config(teacher.config, (0, 3), SPARSE), 0)
    generator = torch.Generator().manual_seed(1)
    for value in model.parameters():
        value.data += 0.05 * torch.randn(value.shape, generator=generator)
    return model


def greedy(model: SalaModel, tokens: list[int], begin: int) -> list[int]:
    with torch.no_grad():
        best = model.logits(model(whole(torch.tensor([tokens])))).argmax(-1).tolist()
    return best[begin - 1 : -1]


def test_a_hybrid_writes_what_it_finds_likeliest(student: SalaModel) -> None:
    """Slots are used again: no state of an earlier row is left in them."""
    writer = Writer(student, 2, 60, ENDS, Marks((40, 41, 42), (50, 51), (60, 61)), 0)
    openings = [Opening((40, 41, 42, 70 + n, 80), 0.0) for n in range(7)]
    written = writer.write(openings)
    assert len(written) == 7
    for (tokens, roles, _), opening in zip(written.items(), openings, strict=True):
        assert tuple(tokens[:5]) == opening.tokens
        assert tokens[5:].tolist() == greedy(student, tokens.tolist(), 5)
        assert (roles[5:] == ANSWER).all()


def test_a_hybrid_goes_on_after_a_second_question(student: SalaModel) -> None:
    turn = (60, 61, 90, 91, 9, 50, 51)
    writer = Writer(student, 3, 200, ENDS, Marks((40, 41, 42), (50, 51), (60, 61)), 0)
    found = 0
    for tokens, roles, _ in writer.write([Opening((40, 41, 70 + n), 0.0, turns=(turn,)) for n in range(8)]).items():
        given = np.flatnonzero(roles == GIVEN)
        if len(given) > 3:
            found += 1
            begin = int(given[-1]) + 1
            assert tokens[begin:].tolist() == greedy(student, tokens.tolist(), begin)
    assert found


def test_a_writer_takes_over_new_weights(student: SalaModel) -> None:
    writer = Writer(student, 2, 40, ENDS, Marks(), 0)
    before = writer.write([Opening((40, 41), 0.0)]).rows()
    kept = student.model.layers[1].self_attn.v_proj.weight.data.clone()
    student.model.layers[1].self_attn.v_proj.weight.data *= -3
    writer.restart()
    after = writer.write([Opening((40, 41), 0.0)]).rows()[0]
    assert after[2:] == greedy(student, after, 2)
    assert before != [after]
    student.model.layers[1].self_attn.v_proj.weight.data = kept


def test_rows_of_a_round_carry_a_loss_on_the_answers_only(student: SalaModel) -> None:
    options = OnPolicy(path="write", rows=3, seq_len=32, every=2, weight=2.0)
    rows = StudentRows(student, [[40, 41, 42], [40, 50]], options, seed=1)
    first, second = rows(4), rows(5)
    assert [row.tokens.shape for row in first] == [(32,)] * 3
    assert not all(np.array_equal(one.tokens, two.tokens) for one, two in zip(first, second, strict=True))
    for row in first:
        assert set(np.unique(row.teacher_weight)) <= {0.0, 2.0}
        assert (row.teacher_weight[row.answer] == 2).all()
        assert (row.truth_weight == 0).all()
    again = StudentRows(student, [[40, 41, 42], [40, 50]], options, seed=1)
    for one, two in zip(again(5), second, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)


def test_an_answer_is_cut_where_it_repeats_itself() -> None:
    loop = list(range(20, 30))
    tokens, roles = [1, 2, *loop, *loop, *loop, 3], [GIVEN] * 2 + [ANSWER] * 31
    ids, marks, is_ended = cut_at_loop(tokens, roles, True)
    assert ids == [1, 2, *loop, *loop[:8]]
    assert len(marks) == len(ids)
    assert not is_ended
    assert cut_at_loop([1, *loop], [GIVEN] + [ANSWER] * 10, True) == ([1, *loop], [GIVEN] + [ANSWER] * 10, True)


def test_questions_are_what_precedes_the_first_answer() -> None:
    documents = TokenizedDocuments.of(
        [([1, 2, 3, 4], [0, 0, 2, 2], True), ([1] * 9, [0] * 8 + [2], True), ([5, 6], [3, 3], True)]
    )
    assert first_questions(documents, 5) == [[1, 2]]


def test_the_symmetric_loss_has_the_gradient_of_its_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, wanted = (torch.randn(6, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    head = torch.randn(12, 8, generator=generator, dtype=torch.float64)
    weights = LossWeights(torch.rand(6, generator=generator).double(), torch.rand(6, generator=generator).double())
    labels = torch.arange(6)
    one, two = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    found, sums = head_loss(one, head, labels, weights, (wanted, head), 4, is_symmetric=True)
    p, t = (two @ head.T).softmax(-1), (wanted @ head.T).softmax(-1)
    middle = (p + t) / 2
    divergence = 0.5 * (p * (p / middle).log()).sum(-1) + 0.5 * (t * (t / middle).log()).sum(-1)
    label_loss = -p.log()[torch.arange(6), labels]
    formula = (divergence * weights.main + label_loss * weights.answer).sum()
    torch.testing.assert_close(found, formula)
    torch.testing.assert_close(sums[0], divergence.sum())
    found.backward()
    formula.backward()
    torch.testing.assert_close(one.grad, two.grad)

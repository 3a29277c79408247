"""Steps that mix rows of several lengths, and the probe that judges what they teach."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sala.backends.torch.batch import whole
from sala.backends.torch.model import SalaModel
from sala.errors import InputError
from sala.lab.eval.tasks.needle import NeedleMaker
from sala.lab.train.data import TrainingRow
from sala.lab.train.halo.source import import_dense
from sala.lab.train.models import load_for_training
from sala.lab.train.needles import NeedleRows, ReadingRows, ReadingTable, chat_wrap
from sala.lab.train.probe import Probe, read_cases
from sala.lab.train.steps import StepPart, Steps, collate, weigh_needle, weigh_text
from sala.text.tokenizer import Tokenizer
from tests.train.dense import write_dense_model


def part(name: int, rows: int, length: int, is_sparse: bool = False) -> StepPart:
    def make(index: int) -> TrainingRow:
        weight = np.ones(length, np.float32)
        weight[0] = 0
        answer = np.zeros(length, np.bool_)
        tokens = np.full(length, name * 1000 + index)
        return TrainingRow(tokens, weight > 0, answer, (length,), 0.0, str(name), weight, weight * 0)

    return StepPart(make, rows, length, is_sparse)


def test_every_step_has_the_same_shapes() -> None:
    steps = Steps([part(1, 4, 16), part(2, 2, 32), part(3, 2, 16), part(4, 2, 16, is_sparse=True)], collate)
    for step in (0, 3):
        batches = steps(step)
        assert [tuple(batch.tokens.shape) for batch in batches] == [(6, 16), (2, 32), (2, 16)]
        assert [row.kind for row in steps.rows(step)[0]] == ["1"] * 4 + ["3"] * 2
        assert batches[0].tokens[:, 0].tolist() == [1000 + 4 * step + at for at in range(4)] + [
            3000 + 2 * step + at for at in range(2)
        ]
        assert batches[0].counts[2] == 6 * 15


def test_processes_share_the_rows_of_a_step() -> None:
    parts = [part(1, 4, 16), part(2, 2, 32)]
    whole = Steps(parts, collate)(2)
    halves = [Steps(parts, collate, rank, 2)(2) for rank in range(2)]
    for index, batch in enumerate(whole):
        joined = np.concatenate([half[index].tokens for half in halves])
        assert sorted(joined[:, 0]) == sorted(batch.tokens[:, 0])
    with pytest.raises(InputError, match="multiple of 3"):
        Steps(parts, collate, 0, 3)


def test_weights_of_text_and_needles() -> None:
    learn = np.array([True, True, False, True])
    text = weigh_text(TrainingRow(np.arange(4), learn, np.zeros(4, np.bool_), (4,), 0.3))
    assert text.teacher_weight.tolist() == pytest.approx([0, 0.7, 0, 0.7])
    assert text.truth_weight.tolist() == pytest.approx([0, 0.3, 0, 0.3])
    answer = np.array([False, False, True, False])
    needle = weigh_needle(TrainingRow(np.arange(4), learn, answer, (4,)), 1.5)
    assert needle.teacher_weight.tolist() == [0, 1, 0, 1]
    assert needle.truth_weight.tolist() == [0, 0, 6, 0]


def test_needles_in_the_tokenizers_own_template(tiny: Path) -> None:
    tokenizer = Tokenizer.load(tiny)
    wrap = chat_wrap(tokenizer)
    talk = [{"role": role, "content": text} for role, text in (("user", "A"), ("assistant", "B"), ("user", "C"))]
    text = tokenizer.render_chat(talk, add_generation_prompt=True)
    end = text[text.index("B") + 1 :]
    assert text.startswith(wrap.before + "A")
    assert text.endswith((wrap.again or "") + "C" + wrap.after)
    assert end == "<|im_end|>" + (wrap.again or "") + "C" + wrap.after
    documents = [" ".join(f"Sentence number {at} of text {n}." for at in range(120)) for n in range(12)]

    def encode(said: str) -> list[int]:
        return tokenizer.encode(said, bos=False, parse_special=True)

    makers = [NeedleMaker(encode, documents, 1, one, 259) for one in (wrap, wrap)]
    row = NeedleRows(makers, 2048, 2, 1, 0, 5)(1)
    assert tokenizer.decode(row.tokens.tolist(), skip_special=False).startswith(wrap.before)
    assert row.answer.any()


def test_questions_on_passages(tiny: Path) -> None:
    tokenizer, model = Tokenizer.load(tiny), Path(__file__).parents[2] / "models" / "smol-sala"
    table = ReadingTable.load(model / "reading.toml", model / "prompts.toml")
    documents = [
        "\n\n".join(f"This is paragraph number {at} of text number {n}." for at in range(90)) for n in range(4)
    ]

    def encode(said: str) -> list[int]:
        return tokenizer.encode(said, bos=False, parse_special=True)

    rows = ReadingRows(table, documents, encode, chat_wrap(tokenizer), 259, 6000, 2, 3, 5)
    for index in range(6):
        row = rows(index)
        text = tokenizer.decode(row.tokens.tolist(), skip_special=False)
        first = np.flatnonzero(row.answer)
        answers = tokenizer.decode(row.tokens[first].tolist()).rstrip(".").split(".")
        assert text.startswith(chat_wrap(tokenizer).before)
        assert "{" not in text
        assert all(any(word in text[: text.index("assistant\n")] for word in answer.split()) for answer in answers)
        assert (row.tokens[first[-1]] == 259).all()
        assert not (row.loss_mask & row.answer).any()


def test_the_probe(tmp_path: Path) -> None:
    write_dense_model(tmp_path / "dense")
    write_dense_model(tmp_path / "other", seed=1)
    for name in ("dense", "other"):
        import_dense(tmp_path / name, tmp_path / f"{name}-ours")
    teacher, other = (load_for_training(tmp_path / f"{name}-ours", torch.device("cpu")) for name in ("dense", "other"))
    cases = [{"prompt": [40, 41 + n], "answer": [50, 51, 259][: 1 + n], "is_ended": n == 2} for n in range(3)]
    (tmp_path / "probe.json").write_text(json.dumps(cases))
    probe = Probe(read_cases(tmp_path / "probe.json"), teacher, rows=2, length=16)
    same, far = probe(teacher), probe(other)
    assert same["kl"] == pytest.approx(0, abs=1e-5)
    assert same["agree"] == 1
    assert far["kl"] > 0.01
    assert far["agree"] < 1
    answers = [greedy(teacher, case["prompt"], 6) for case in cases]
    for end in {259, *(token for ids in answers for token in ids)}:
        assert probe.ended(teacher, end, max_tokens=6) == sum(end in ids for ids in answers) / 3
    assert len(set(answers[0])) > 1


@torch.no_grad()
def greedy(model: SalaModel, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model.logits(model(whole(torch.tensor([ids]))))[-1].argmax()))
    return ids[len(prompt) :]

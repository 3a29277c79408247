"""Mixed training: weights per token, stacks of latent weights, overlays to begin with and to deliver, resumption."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sala.backends.torch.batch import whole
from sala.backends.torch.model import SalaModel
from sala.checkpoint.overlay import OverlayPacking, assemble
from sala.checkpoint.random import TINY, write_random
from sala.config import SparseConfig
from sala.lab.train import loop
from sala.lab.train.adapters import round_to_codes
from sala.lab.train.data import TrainingRow
from sala.lab.train.fast_paths import FastPaths, check_head, check_scan
from sala.lab.train.halo.source import dense_config
from sala.lab.train.halo.transfer import hybrid_config, to_hybrid
from sala.lab.train.latent import LatentLearner, Latents
from sala.lab.train.loop import OutOfTime, read_state, train, write_state
from sala.lab.train.losses import LossWeights, head_loss
from sala.lab.train.models import load_for_training
from sala.lab.train.objectives import Distil
from sala.lab.train.on_policy import StudentRows
from sala.lab.train.overlays import TeacherBase, load_overlay, overlay_storage
from sala.lab.train.recipe import MixStage, OnPolicy, Schedule, Source
from sala.lab.train.steps import StepPart, TrainingBatch, collate
from sala.quantization_config import MLP_LINEARS
from tests.smol_sala import pack
from tests.train.dense import CONFIG

PACKING = OverlayPacking(bits=4, gate_bits=5, group_size=32, rank=6)
SPARSE = SparseConfig(kernel_size=4, kernel_stride=2, block_size=8, window_size=8, topk=2, dense_len=64)
CPU = torch.device("cpu")


def overlay_tensors(model: SalaModel) -> dict[str, Any]:
    """Return the hybrid's tensors under the names of an ordinary checkpoint, changes added, for `pack_overlay`."""
    out = {}
    for name, value in model.named_parameters():
        if ".mlp." in name:
            continue
        out[name] = value.detach().float().cpu().numpy()
    for index, layer in enumerate(model.model.layers):
        for name in MLP_LINEARS:
            module = getattr(layer.mlp, name)
            out[f"model.layers.{index}.mlp.{name}.weight"] = module.weight.detach().float().cpu().numpy()
    return out


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> SalaModel:
    path = tmp_path_factory.mktemp("teacher") / "model"
    write_random(path, dense_config(CONFIG | {"intermediate_size": 128}), 0)
    return load_for_training(path, CPU)


@pytest.fixture
def overlay(teacher: SalaModel, tmp_path: Path) -> Path:
    """A hybrid of the teacher, a little changed everywhere, as an overlay of rank 6."""
    model = to_hybrid(teacher, hybrid_config(teacher.config, (0, 3), SPARSE), 0)
    generator = torch.Generator().manual_seed(1)
    tensors = overlay_tensors(model)
    for name in tensors:
        if "embed" not in name and "lm_head" not in name:
            noise = torch.randn(tensors[name].shape, generator=generator).numpy() * 0.02
            tensors[name] = (tensors[name] + noise).astype(np.float32)
    write_packed(model, tensors, teacher, tmp_path)
    return tmp_path


def write_packed(model: SalaModel, tensors: dict[str, np.ndarray], teacher: SalaModel, target: Path) -> None:
    target.mkdir(exist_ok=True)
    modules, norms, quantization = pack.pack_overlay(model.config, tensors, TeacherBase.of(teacher), PACKING)
    pack.write_overlay(target, modules, norms)
    config = replace(model.config, quantization=quantization).to_dict()
    (target / "config.json").write_text(json.dumps(config))


def rows_of(seed: int, rows: int = 3, length: int = 20, kind: str = "dialogue") -> list[TrainingRow]:
    rng = np.random.default_rng(seed)
    weights = rng.random((2, rows, length)).astype(np.float32) * (rng.random((2, rows, length)) > 0.4)
    weights[:, :, 0] = 0
    weights[:, :, -3:] = 0
    tokens = rng.integers(0, TINY.vocab_size, (rows, length)).astype(np.int64)
    answer, mask = rng.random((rows, length)) > 0.7, weights[0] > 0
    return [
        TrainingRow(tokens[at], mask[at], answer[at], (length,), 0.0, kind, weights[0, at], weights[1, at])
        for at in range(rows)
    ]


def prepare(rows: list[TrainingRow]) -> TrainingBatch:
    return collate(rows, tile_rows=16)


def loss_of(objective: Distil, batch: TrainingBatch, total: int = 10) -> tuple[Tensor, Tensor]:
    """The loss of a batch in a step with `total` positions."""
    scales = torch.tensor([1.0, 1.0, 1.0 / 64])
    return objective(batch._replace(main=batch.main / total, label=batch.label / total), scales)


def learner(overlay: Path, teacher: SalaModel, rank: int = 8) -> tuple[SalaModel, Latents]:
    base = TeacherBase.of(teacher)
    student = load_overlay(overlay, teacher, base, rank, seed=0)
    for name, value in student.named_parameters():
        value.requires_grad_(not name.endswith(("embed_tokens.weight", "lm_head.weight", "base.weight")))
    return student, Latents(student, overlay_storage(student, base, PACKING), (0.9, 0.95))


def hidden_of(model: SalaModel, tokens: Tensor) -> Tensor:
    return model(whole(tokens)) / model.config.logit_divisor


def test_a_packed_hybrid_is_the_assembled_one(overlay: Path, teacher: SalaModel, tmp_path: Path) -> None:
    target = tmp_path / "whole"
    target.mkdir()
    student = load_overlay(overlay, teacher, TeacherBase.of(teacher), 6, seed=0)
    config = assemble(target, replace(student.config), TeacherBase.of(teacher), overlay)
    (target / "config.json").write_text(json.dumps(config.to_dict()))
    whole_model = load_for_training(target, CPU)
    tokens = torch.arange(60).view(2, 30)
    with torch.no_grad():
        found, wanted = hidden_of(student, tokens), hidden_of(whole_model, tokens)
    assert (found - wanted).norm() < 0.02 * wanted.norm()  # the assembled one is rounded to 8 bits


def test_a_higher_rank_begins_with_the_same_model(overlay: Path, teacher: SalaModel) -> None:
    tokens = torch.arange(40).view(2, 20)
    models = [load_overlay(overlay, teacher, TeacherBase.of(teacher), rank, seed=0) for rank in (6, 12)]
    with torch.no_grad():
        found, wanted = (hidden_of(model, tokens) for model in models)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_the_model_computes_with_what_will_be_stored(overlay: Path, teacher: SalaModel) -> None:
    student, latents = learner(overlay, teacher)
    for stack in latents.stacks:
        stack.latent.data += torch.randn_like(stack.latent) * 0.01
    latents.use_latent()
    storage = overlay_storage(student, TeacherBase.of(teacher), PACKING)
    parameters, seen = dict(student.named_parameters()), set()
    for stack in latents.stacks:
        for index, name in enumerate(stack.names):
            how, value = storage.get(name), stack.latent[index]
            if how is not None:
                origin = how.base if how.base is not None else torch.zeros(())
                value = origin + round_to_codes(value - origin, how.bits, how.group_size)
                assert how.bits == (5 if name.endswith(("z_proj.weight", "o_gate.weight")) else 4)
            torch.testing.assert_close(parameters[name].detach(), value.detach(), rtol=0, atol=1e-7)
            seen.add(name)
    assert seen == {name for name, value in parameters.items() if value.requires_grad}


def test_what_is_packed_is_what_was_computed_with(overlay: Path, teacher: SalaModel, tmp_path: Path) -> None:
    student, latents = learner(overlay, teacher, rank=6)
    for stack in latents.stacks:
        stack.mean += torch.randn_like(stack.mean) * 0.01
    latents.use_mean()
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        wanted = hidden_of(student, tokens)
        latents.use_mean(is_rounded=False)
        write_packed(student, overlay_tensors(student), teacher, tmp_path / "new")
        again = load_overlay(tmp_path / "new", teacher, TeacherBase.of(teacher), 6, seed=0)
        found = hidden_of(again, tokens)
    assert (found - wanted).norm() < 5e-3 * wanted.norm()  # the factors of the MLPs are rounded to 8 bits


def test_positions_and_labels() -> None:
    rows = rows_of(0)
    part = prepare(rows)
    assert part.at is not None
    assert len(part.at) % 16 == 0
    flat, length = np.concatenate([row.tokens for row in rows]), len(rows[0].tokens)
    total = np.zeros(2)
    for at, label, teacher, truth in zip(*(x.tolist() for x in (part.at, *part[1:4])), strict=True):
        if teacher or truth:
            row, place = divmod(at, length)
            assert label == flat[at + 1]
            assert teacher == rows[row].teacher_weight[place + 1]
            assert truth == rows[row].truth_weight[place + 1]
            total += teacher, truth
    pairs = [(row.teacher_weight, row.truth_weight) for row in rows]
    wanted = [sum(weight.sum() for weight in one) for one in zip(*pairs, strict=True)]
    np.testing.assert_allclose(total, wanted, rtol=1e-5)
    assert part.counts[2] == sum(np.count_nonzero(row.teacher_weight + row.truth_weight) for row in rows)
    np.testing.assert_array_equal(part.is_answer[:, :-1].numpy(), np.stack([row.answer for row in rows])[:, 1:])


def test_the_loss_is_what_the_weights_say(overlay: Path, teacher: SalaModel) -> None:
    student, _ = learner(overlay, teacher)
    objective = Distil(student, teacher, is_mixed=True, tile_rows=16)
    rows = rows_of(1)
    loss, sums = loss_of(objective, prepare(rows))
    tokens = torch.from_numpy(np.stack([row.tokens for row in rows]))
    with torch.no_grad():
        logp, wanted = (model.lm_head(hidden_of(model, tokens)).log_softmax(-1) for model in (student, teacher))
    divergence = (wanted.exp() * (wanted - logp)).sum(-1).view(3, 20)[:, :-1]
    entropy = -logp.view(3, 20, -1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    kl = torch.from_numpy(np.stack([row.teacher_weight[1:] for row in rows]))
    truth = torch.from_numpy(np.stack([row.truth_weight[1:] for row in rows]))
    torch.testing.assert_close(loss.detach(), (kl * divergence + truth * entropy).sum() / 10, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(sums[0], (divergence * (kl != 0)).sum(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sums[1], (entropy * (truth != 0)).sum(), rtol=1e-4, atol=1e-5)


def test_long_rows_are_sparse_and_learn_to_select_blocks(overlay: Path, teacher: SalaModel) -> None:
    student, _ = learner(overlay, teacher)
    objective = Distil(student, teacher, 32, has_selection_loss=True, is_mixed=True, tile_rows=16)
    _, short = loss_of(objective, prepare(rows_of(1, 2, 20)))
    loss, long = loss_of(objective, prepare(rows_of(2, 2, 64)))
    assert short[2] == 0
    assert long[2] > 0
    loss.backward()
    assert student.model.layers[0].self_attn.q_proj.weight.grad.abs().max() > 0


@dataclass
class Run:
    learner: LatentLearner
    stage: MixStage
    directory: Path
    parts: list[StepPart]
    probe: Callable[[bool], Mapping[str, float]] | None = None

    def train(self, deadline: float | None = None) -> list[dict[str, float]]:
        return train(self.learner, self.stage, self.parts, self.directory, lambda p: None, deadline, self.probe)


@pytest.fixture(autouse=True)
def _log_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOG_EVERY", 1)


def run_of(overlay: Path, teacher: SalaModel, directory: Path, **changes: object) -> Run:
    student, latents = learner(overlay, teacher)
    values = {"name": "mixed", "kind": "mix", "data": (Source(),), "steps": 6, "warmup_steps": 2, "lr": 3e-3}
    stage = MixStage(**values | {"final_lr": 1e-4, "probe_every": 3} | changes)  # type: ignore[arg-type]
    objective = Distil(student, teacher, is_mixed=True, tile_rows=16)
    parts = [
        StepPart(lambda index: rows_of(2 * (index // 3))[index % 3], 3, 20),
        StepPart(lambda index: rows_of(2 * (index // 2) + 1, 2, 36, "text")[index % 2], 2, 36),
    ]
    return Run(LatentLearner(objective, latents, stage, note=lambda text: None), stage, directory, parts)


def test_a_stopped_run_goes_on_as_if_it_had_not(overlay: Path, teacher: SalaModel, tmp_path: Path) -> None:
    straight = run_of(overlay, teacher, tmp_path / "a")
    straight.train()
    for _ in range(5):
        run = run_of(overlay, teacher, tmp_path / "b")
        with pytest.raises(OutOfTime):  # one step at a time
            run.train(deadline=0.0)
    run = run_of(overlay, teacher, tmp_path / "b")
    run.train(deadline=0.0)
    for one, two in zip(straight.learner.latents.stacks, run.learner.latents.stacks, strict=True):
        torch.testing.assert_close(two.latent, one.latent, rtol=0, atol=0)
        torch.testing.assert_close(two.mean, one.mean, rtol=0, atol=0)
    entries = [json.loads(line) for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5, 6]
    assert {"kl.dialogue-20", "kl.text-36"} <= entries[0].keys()


def test_a_stage_bounded_by_time(overlay: Path, teacher: SalaModel, tmp_path: Path) -> None:
    """Its schedule follows the clock, and the seconds of earlier runs count."""
    run = run_of(overlay, teacher, tmp_path, steps=0, seconds=3600)
    with pytest.raises(OutOfTime, match="of "):
        run.train(deadline=0.0)
    _, facts = read_state(tmp_path)
    assert facts["step"] == 1
    assert 0 < facts["elapsed"] < 3600
    write_state(tmp_path, run.learner, facts | {"elapsed": 3600.0})
    done = run_of(overlay, teacher, tmp_path, steps=0, seconds=3600)
    assert [entry["step"] for entry in done.train()] == [1]


def test_the_probe_measures_the_mean_at_both_ends_and_between(
    overlay: Path, teacher: SalaModel, tmp_path: Path
) -> None:
    run = run_of(overlay, teacher, tmp_path)
    seen = []

    def probe(is_last: bool) -> dict[str, float]:
        stack = run.learner.latents.stacks[-1]
        how = stack.mean if not stack.bits else None
        seen.append(is_last)
        assert how is None or torch.equal(stack.work, how)
        return {"kl": 0.5}

    run.probe = partial(run.learner.measure, probe)
    log = run.train()
    assert seen == [False, False, True]
    assert [entry["step"] for entry in log if "probe_s" in entry] == [0, 3, 6]


def test_it_learns(overlay: Path, teacher: SalaModel, tmp_path: Path) -> None:
    run = run_of(overlay, teacher, tmp_path, steps=60, lr=5e-3, mean_decay=0.8)
    run.parts = [StepPart(lambda index: rows_of(5)[index % 3], 3, 20)]
    run.train()
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert entries[-1]["truth.dialogue-20"] < 0.8 * entries[0]["truth.dialogue-20"]


def test_gradients_that_are_not_numbers_teach_nothing(overlay: Path, teacher: SalaModel) -> None:
    _, latents = learner(overlay, teacher)
    before = [stack.latent.detach().clone() for stack in latents.stacks]
    latents.stacks[0].latent.grad[0, 0] = float("nan")
    assert not torch.isfinite(latents.update(1e-2, 1.0, 0.9))
    for old, stack in zip(before, latents.stacks, strict=True):
        torch.testing.assert_close(stack.latent.detach(), old, rtol=0, atol=0)
        assert not stack.latent.grad.any()


def test_plain_paths_take_over_where_fast_ones_fail(
    overlay: Path, teacher: SalaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(overlay, teacher, tmp_path, steps=8)
    run.learner.objective.fast = FastPaths(has_bf16_head=True)
    learn = Distil.forward

    def spoil(self: Distil, batch: TrainingBatch, scales: Tensor) -> tuple[Tensor, Tensor]:
        loss, sums = learn(self, batch, scales)
        return (loss if self.fast.is_plain else loss * float("nan")), sums

    monkeypatch.setattr(Distil, "forward", spoil)
    run.train()
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [bool(np.isfinite(entry["norm"])) for entry in entries] == [False] * 3 + [True] * 5


def test_rates() -> None:
    options = Schedule("wsd", 1.0, 0.2, 0, warmup_steps=4, decay_share=0.5)
    assert options.at(0, 0.0) == pytest.approx(0.2)
    assert options.at(10, 0.4) == 1.0
    assert options.at(10, 0.75) == pytest.approx(0.6)
    assert options.at(10, 1.2) == pytest.approx(0.2)


def test_narrow_products_give_the_same_loss() -> None:
    assert check_head(CPU) < 2e-2


def test_head_loss_does_not_depend_on_tiles() -> None:
    hidden, head = torch.randn(48, 16), torch.randn(64, 16)
    weights = LossWeights(torch.rand(48), torch.rand(48))
    results = []
    for tile in (16, 48):
        rows = hidden.clone().requires_grad_()
        loss, _ = head_loss(rows, head, torch.arange(48), weights, (torch.ones(48, 16), head), tile)
        loss.backward()
        results.append((loss.detach(), rows.grad))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_scan_on_a_gpu() -> None:
    assert check_scan(torch.device("cuda")) < 2e-2


def test_a_run_takes_the_students_own_answers_into_its_steps(overlay: Path, teacher: SalaModel, tmp_path: Path) -> None:
    run = run_of(overlay, teacher, tmp_path / "a", steps=4)
    options = OnPolicy(path="write", rows=2, seq_len=32, every=2, after=0.5)
    run.learner.student_rows = StudentRows(run.learner.objective.student, [[40, 41, 42]], options, seed=1)
    run.train()
    entries = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert ["kl.on-policy-32" in entry for entry in entries] == [False, False, True, True]
    assert all(0 < entry["kl.on-policy-32"] < 0.7 for entry in entries[2:])  # a symmetric divergence is below ln 2

"""Learning to choose: the loss, what it picks, and that it teaches."""

import time
from functools import partial
from pathlib import Path

import pytest
import torch

from sala.config import SparseConfig
from sala.lab.train.block_selection_loss import NUM_QUERIES, min_length, select_queries, selection_loss
from sala.lab.train.data import Mixture
from sala.lab.train.loop import OutOfTime, Progress
from sala.lab.train.objectives import Distil, NextToken
from sala.lab.train.steps import collate
from tests.train.small import learn, rows_of, small_model, small_stage

SPARSE = SparseConfig(kernel_size=4, kernel_stride=2, block_size=8, window_size=16, topk=2, dense_len=0)
LENGTH = 160


def random_row(seed: int = 0, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, LENGTH, 4, 8, generator=generator)
    k = torch.randn(rows, LENGTH, 2, 8, generator=generator)
    tokens = torch.randint(0, 256, (rows, LENGTH), generator=generator)
    return q, k, select_queries(tokens, torch.zeros_like(tokens, dtype=torch.bool), SPARSE)


def naive_loss(q: torch.Tensor, k: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Query by query, head by head."""
    total = q.new_zeros(())
    for row in range(len(q)):
        for position in at[row].tolist():
            free = range(SPARSE.init_blocks, position // SPARSE.block_size - SPARSE.num_window_blocks)
            for group in range(2):
                keys, heads = k[row, :, group], q[row, position, 2 * group : 2 * group + 2] * 8**-0.5
                seen = (heads @ keys[: position + 1].T).softmax(-1).mean(0)
                share = torch.stack([seen[b * 8 : b * 8 + 8].sum() for b in free]).detach()
                windows = {}
                coarse = [keys[s : s + 16].mean(0) for s in range(0, position + 2 - 16, 8)]
                lse = torch.stack([heads @ key for key in coarse]).logsumexp(0)
                for start in range(0, position + 2 - 4, 2):
                    windows[start] = (heads @ keys[start : start + 4].mean(0) - lse).exp().sum()
                best = [max(w for s, w in windows.items() if s + 4 > b * 8 and s < b * 8 + 8) for b in free]
                logp = torch.stack(best).log().log_softmax(0)
                total = total + (share * ((share / share.sum()).log() - logp)).sum() / 2
    return total


def test_loss_and_gradient_follow_the_definition() -> None:
    q, k, at = random_row()
    at = at[:, :5]
    grads = []
    for measure in (lambda q, k: selection_loss(q, k, at, SPARSE), lambda q, k: naive_loss(q, k, at)):
        ours = q.clone().requires_grad_(), k.clone().requires_grad_()
        loss = measure(*ours)
        loss.backward()
        grads.append((loss.detach(), ours[0].grad, ours[1].grad))
    for found, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_queries_that_answer_come_first_and_all_have_a_choice() -> None:
    tokens = torch.randint(0, 256, (3, 400), generator=torch.Generator().manual_seed(1))
    is_answer = torch.zeros(3, 400, dtype=torch.bool)
    is_answer[:, 390:395] = True
    is_answer[:, 3] = True  # too early: nothing to choose among
    at = select_queries(tokens, is_answer, SPARSE)
    assert at.shape == (3, NUM_QUERIES)
    assert all({390, 391, 392, 393, 394} <= set(row) for row in at.tolist())
    assert int(at.min()) >= min_length(SPARSE) - 1
    torch.testing.assert_close(at, select_queries(tokens, is_answer, SPARSE))


def test_it_teaches_the_choice() -> None:
    """Queries and keys from one matrix each: after some steps the chosen blocks hold more of the attention."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, LENGTH, 16, generator=generator)
    x[:, 40] *= 5  # what one position says sharply, pooling drowns
    w_q, w_k = (torch.randn(16, 4 * 8, generator=generator).requires_grad_() for _ in range(2))
    at = torch.arange(120, 160)[None]
    optimizer = torch.optim.Adam([w_q, w_k], lr=0.02)
    losses = []
    for _ in range(60):
        q, k = ((x @ w).unflatten(-1, (4, 8)) for w in (w_q, w_k))
        loss = selection_loss(q, k, at, SPARSE) / at.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("is_distilling", [False, True])
def test_an_objective_with_choices_adds_its_term_and_nothing_else(tmp_path: Path, is_distilling: bool) -> None:
    model, teacher = small_model(tmp_path), small_model(tmp_path, 1)
    rows = collate([rows_of(1, 96)(i) for i in range(2)], "stream")
    make = (
        (lambda is_on: Distil(model, teacher, None, is_on))
        if is_distilling
        else (lambda is_on: NextToken(model, is_on))
    )
    plain, objective = make(False), make(True)
    assert objective.terms == (*plain.terms, "choice")
    assert len(objective.counts(rows)) == 3
    loss, sums = objective(rows, torch.tensor([1.0, 0.5, 0.0]))
    expected, shown = plain(rows, torch.tensor([1.0, 0.5]))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(sums[:2], shown)
    assert sums[2] > 0
    assert all(layer.self_attn.observer is None for layer in model.model.layers[::2])


def test_a_run_with_choices_lowers_their_loss_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    stage = small_stage(is_sparse=True, block_selection_weight=20.0, steps=30, save_every=10, seq_len=96, lr=3e-3)
    rows = partial(Mixture, [rows_of(1, 96)], [1.0], 3)
    whole = learn(small_model(tmp_path), tmp_path / "whole", stage, rows())
    assert whole[-1]["choice"] < 0.7 * whole[0]["choice"]
    seen: list[Progress] = []
    with pytest.raises(OutOfTime):
        learn(small_model(tmp_path), tmp_path / "cut", stage, rows(), seen.append, deadline=time.monotonic())
    resumed = learn(small_model(tmp_path), tmp_path / "cut", stage, rows())
    assert [entry["choice"] for entry in resumed[1:]] == [entry["choice"] for entry in whole[1:]]

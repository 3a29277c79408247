"""The model over whole sequences, as training sees it, against the model on its cache, as inference sees it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sala.backends.torch.batch import whole
from sala.backends.torch.executor import open_executor
from sala.backends.torch.model import SalaModel
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.lab.train.models import load_for_training
from sala.lab.train.score import perplexity, score_rows
from sala.protocol import Options, Row
from tests.golden import CASES, DATA, Case

CPU = torch.device("cpu")
MODELS = [DATA / "block16", DATA / "block64"]


def draw(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed))


def logits(model: SalaModel, tokens: Tensor, lengths: list[int] | None = None) -> Tensor:
    with torch.no_grad():
        return model.logits(model(whole(tokens if lengths else tokens[None], lengths)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_golden_prompts(case: Case) -> None:
    expected = case.data["prefill_logits"]
    tokens = torch.from_numpy(case.data["input_ids"][: len(expected)]).long()
    got = logits(load_for_training(case.model, CPU), tokens)
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("directory", MODELS, ids=lambda path: path.name)
@pytest.mark.parametrize("length", [1, 63, 65, 127, 128, 200, 511, 515])
def test_equals_the_cached_model(directory: Path, length: int) -> None:
    config = SalaConfig.load(directory)
    tokens = draw(length)
    with Checkpoint(directory) as checkpoint:
        executor = open_executor(checkpoint, config, Options(ctx=1024, device="cpu", dtype="float32"))
        pages = tuple(range(executor.capacity.num_pages))
        row = Row(tuple(tokens.tolist()), 0, pages, 0, config.sparse_config.sparse_from(length))
        expected = executor.logits(row)
    got = logits(load_for_training(directory, CPU), tokens)
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("lengths", [[5, 64, 1, 90, 63], [140, 3, 130], [129, 129], [7, 7, 7]], ids=str)
def test_packed_documents_do_not_see_each_other(lengths: list[int]) -> None:
    """block16 becomes sparse at 128 tokens: each document by its own length."""
    model = load_for_training(MODELS[0], CPU)
    tokens = draw(sum(lengths))
    apart = torch.cat([logits(model, part) for part in tokens.split(lengths)])
    torch.testing.assert_close(logits(model, tokens, lengths), apart, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("length", "padded"), [(50, 64), (100, 127), (130, 192)])
def test_padding_on_the_right_is_harmless(length: int, padded: int) -> None:
    model = load_for_training(MODELS[0], CPU)
    tokens = draw(length)
    longer = torch.cat((tokens, torch.zeros(padded - length, dtype=torch.long)))
    torch.testing.assert_close(logits(model, longer)[:length], logits(model, tokens), atol=1e-4, rtol=0)


def gradients(model: SalaModel, tokens: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    model.logits(model(whole(tokens, lengths))).log_softmax(-1)[:, 7].sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("lengths", [[40, 9], [150, 20]], ids=str)
def test_checkpointing_changes_no_gradient(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_for_training(MODELS[0], CPU).requires_grad_(True)
    tokens = draw(sum(lengths))
    plain = gradients(model, tokens, lengths)
    assert plain.keys() == dict(model.named_parameters()).keys()
    model.is_checkpointing = True
    calls = []
    layer = type(model.model.layers[0])
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *args: calls.append(1) or forward(*args))
    again = gradients(model, tokens, lengths)
    assert len(calls) == 2 * len(model.model.layers)  # once forward, once again for the gradient
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, atol=1e-6, rtol=1e-5)


def test_gradients_of_packed_documents_add_up() -> None:
    model = load_for_training(MODELS[0], CPU).requires_grad_(True)
    lengths = [140, 1, 66]
    tokens = draw(sum(lengths))
    together = gradients(model, tokens, lengths)
    parts = [gradients(model, part, [len(part)]) for part in tokens.split(lengths)]
    for name, gradient in together.items():
        total = sum(part[name] for part in parts)
        torch.testing.assert_close(gradient, total, atol=1e-4 * float(total.abs().max()), rtol=0)


def test_scores_of_continuations() -> None:
    model = load_for_training(MODELS[0], CPU)
    rows = [(draw(n, n).tolist(), draw(m, m + 1).tolist()) for n, m in ((1, 1), (60, 3), (60, 9), (2, 70), (115, 10))]
    greedy = logits(model, torch.tensor(rows[1][0]))[-1].argmax()
    rows[1] = (rows[1][0], [int(greedy)])
    for (context, continuation), score in zip(rows, score_rows(model, rows), strict=True):
        logp = logits(model, torch.tensor([*context, *continuation])).log_softmax(-1)[len(context) - 1 : -1]
        wanted = torch.tensor(continuation)
        assert score.logprob == pytest.approx(float(logp.gather(1, wanted[:, None]).sum()), abs=1e-3)
        assert score.is_first == tuple((logp.argmax(-1) == wanted).tolist())
    assert all(score_rows(model, rows)[1].is_first)


def test_perplexity() -> None:
    model = load_for_training(MODELS[0], CPU)
    tokens = draw(130)
    losses = []
    for piece in tokens[:120].view(3, 40):
        losses += (-logits(model, piece).log_softmax(-1)[:-1].gather(1, piece[1:, None])).flatten().tolist()
    assert perplexity(model, tokens.tolist(), 40, rows_at_once=2) == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)

"""Against the vendor's numbers: logits, selected blocks, pooled keys, states, keys and values, hidden states."""

import numpy as np
import pytest
import torch

from sala.backends.torch.executor import TorchExecutor, open_executor
from sala.backends.torch.model import SparseMixer
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.llm import LLM
from sala.protocol import Options, Row
from tests.golden import CASES, DEVICE, Case

WHOLE = 100_000
ROUNDING = 1e-5 if DEVICE == "cpu" else 3e-5  # of states, after a thousand sums in fp32; a GPU adds in another order
CHUNKS = [1, 7, 63, 64, 65, 1000, WHOLE]


class Run:
    """One golden case on the executor, with everything that the model computed on the way."""

    def __init__(self, case: Case, chunk: int, monkeypatch: pytest.MonkeyPatch, shuffled: bool = False) -> None:
        self.case, self.data = case, case.data
        self.config = SalaConfig.load(case.model)
        self.selected: dict[int, list[np.ndarray]] = {layer: [] for layer in self.config.sparse_layers}
        self.executor: TorchExecutor = open_executor(
            Checkpoint(case.model), self.config, Options(ctx=2048, device=DEVICE, dtype="float32")
        )
        mixers = {layer: self.executor.model.model.layers[layer].self_attn for layer in self.config.sparse_layers}
        layer_of = {id(mixer): layer for layer, mixer in mixers.items()}
        choose = SparseMixer.select

        def spy(mixer, span, q, positions, pages):
            selected = choose(mixer, span, q, positions, pages)
            self.selected[layer_of[id(mixer)]] += list(selected.cpu().numpy())
            return selected

        monkeypatch.setattr(SparseMixer, "select", spy)
        ids = self.data["input_ids"].tolist()
        self.prompt_len = len(self.data["prefill_logits"])
        pages = np.arange(self.executor.capacity.num_pages)
        self.pages = tuple((np.random.default_rng(0).permutation(pages) if shuffled else pages).tolist())
        chunk = min(chunk, self.prompt_len)
        self.prefill = self.feed(ids[: self.prompt_len], 0, chunk)
        self.num_prefill_choices = len(next(iter(self.selected.values())))
        self.decode = self.feed(ids[self.prompt_len :], self.prompt_len, 1)
        self.length = len(ids)

    def feed(self, ids: list[int], start: int, chunk: int) -> np.ndarray:
        sparse_from = self.config.sparse_config.sparse_from(self.prompt_len)
        rows = [
            Row(tuple(ids[at : at + chunk]), start + at, self.pages, 0, sparse_from) for at in range(0, len(ids), chunk)
        ]
        return np.concatenate([self.executor.logits(row) for row in rows])

    def of_layers(self, prefix: str) -> dict[int, np.ndarray]:
        return {int(name.rsplit(".", 1)[1]): value for name, value in self.data.items() if name.startswith(prefix)}

    def span(self):
        from sala.backends.torch.batch import pack
        from sala.protocol import Plan

        return pack(Plan((Row((0,), self.length - 1, self.pages, 0, 0),)), torch.device(DEVICE)).spans[0]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_number(case: Case, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(case, chunk, monkeypatch)
    check(run)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scattered_pages(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check(Run(case, 65, monkeypatch, shuffled=True))


def check(run: Run) -> None:
    np.testing.assert_allclose(run.prefill, run.data["prefill_logits"], atol=1e-4, rtol=0)
    np.testing.assert_allclose(run.decode, run.data["decode_logits"], atol=1e-4, rtol=0)
    check_chosen(run)
    for layer, state in run.of_layers("final.state").items():
        got = run.executor.cache.states[layer][0].cpu().numpy()
        np.testing.assert_allclose(got, state, atol=ROUNDING * np.abs(state).max(), rtol=0)
    for layer in run.config.sparse_layers:
        pages = run.executor.cache.pages[layer]
        k1, k2 = pages.pooled(run.span(), run.length)
        for got, prefix in ((k1, "final.k1"), (k2, "final.k2")):
            if layer in (expected := run.of_layers(prefix)):
                assert got.shape[1] == len(expected[layer])
                np.testing.assert_allclose(got.transpose(0, 1).cpu(), expected[layer], atol=1e-5, rtol=0)
        keys, values = pages.keys_values(run.span(), run.length)
        for got, prefix in ((keys, "final.k_cache"), (values, "final.v_cache")):
            if layer in (expected := run.of_layers(prefix)):
                np.testing.assert_allclose(got.cpu(), expected[layer], atol=1e-5, rtol=0)


def check_chosen(run: Run) -> None:
    """[layer, kv head, row] → the set of blocks, for the prefill and for every decode step."""
    prefill = run.data.get("prefill_topk_idx")
    decode = run.data.get("decode_topk_idx")
    for number, layer in enumerate(run.config.sparse_layers):
        selected = run.selected[layer]
        if prefill is not None:
            assert run.num_prefill_choices == prefill.shape[2]
            for row in range(prefill.shape[2]):
                for head in range(prefill.shape[1]):
                    assert as_set(selected[row][head]) == as_set(prefill[number, head, row])
        if decode is not None:
            steps = selected[run.num_prefill_choices :]
            assert len(steps) == len(decode)
            for step, expected in zip(steps, decode, strict=True):
                for head in range(expected.shape[1]):
                    assert as_set(step[head]) == as_set(expected[number, head])


def as_set(blocks: np.ndarray) -> set[int]:
    return {int(block) for block in blocks if block >= 0}


@pytest.mark.parametrize("case", [case for case in CASES if "prefill_hidden_states" in case.data], ids=str)
def test_hidden_states(case: Case) -> None:
    config = SalaConfig.load(case.model)
    executor = open_executor(Checkpoint(case.model), config, Options(ctx=2048, device=DEVICE))
    states: list[torch.Tensor] = []
    for layer in executor.model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: states.append(args[0].clone()))
    executor.model.model.norm.register_forward_hook(lambda *args: states.append(args[2].clone()))
    data = case.data
    expected = data["prefill_hidden_states"]
    prompt_len = expected.shape[1]
    ids = tuple(data["input_ids"][:prompt_len].tolist())
    pages = tuple(range(executor.capacity.num_pages))
    executor.logits(Row(ids, 0, pages, 0, config.sparse_config.sparse_from(prompt_len)))
    for got, want in zip(states, expected, strict=True):
        np.testing.assert_allclose(got.cpu(), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_through_the_llm(case: Case) -> None:
    llm = LLM(case.model, device=DEVICE)
    data = case.data
    prompt_len = len(data["prefill_logits"])
    logits = llm.logits(data["input_ids"].tolist(), chunk=50, prompt_len=prompt_len)
    assert logits.dtype == np.float32
    expected = np.concatenate((data["prefill_logits"], data["decode_logits"]))
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)

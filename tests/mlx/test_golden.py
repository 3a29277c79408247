"""The MLX backend against the vendor's numbers: logits, selected blocks, pooled keys, states, keys and values."""

import numpy as np
import pytest

from sala.backends.mlx.cache import Span
from sala.backends.mlx.executor import MlxExecutor, open_executor
from sala.backends.mlx.model import SparseMixer
from sala.checkpoint.reader import Checkpoint
from sala.config import SalaConfig
from sala.protocol import Options, Row
from tests.golden import CASES, Case
from tests.mlx.place import DEVICE
from tests.parity.test_golden import WHOLE, as_set

# Every case once, in chunks of sizes that go wrong easily; decoding is one token at a time in all of them.
CHUNKS = {
    "block16-boundary_127": 64,
    "block16-boundary_128": 1,
    "block16-dense_to_sparse_decode": 63,
    "block16-long_sparse": 65,
    "block16-odd_length": 7,
    "block16-short_dense": WHOLE,
    "block64-dense_to_sparse_decode": WHOLE,
    "block64-long_sparse": 300,
    "block64-short_dense": 5,
}


class Run:
    """One golden case on the executor, with everything that the model computed on the way."""

    def __init__(self, case: Case, chunk: int, monkeypatch: pytest.MonkeyPatch, shuffled: bool = False) -> None:
        self.data, self.config = case.data, SalaConfig.load(case.model)
        self.selected: dict[int, list[np.ndarray]] = {layer: [] for layer in self.config.sparse_layers}
        options = Options(ctx=2048, device=DEVICE, dtype="float32", max_batch=1, snapshots=0)
        self.executor: MlxExecutor = open_executor(Checkpoint(case.model), self.config, options)
        self.listen(monkeypatch)
        ids = self.data["input_ids"].tolist()
        self.prompt_len = len(self.data["prefill_logits"])
        pages = np.arange(self.executor.capacity.num_pages)
        self.pages = tuple((np.random.default_rng(0).permutation(pages) if shuffled else pages).tolist())
        self.prefill = self.feed(ids[: self.prompt_len], 0, min(chunk, self.prompt_len))
        self.num_prefill_choices = len(next(iter(self.selected.values())))
        self.decode = self.feed(ids[self.prompt_len :], self.prompt_len, 1)
        self.span = Span(len(ids) - 1, 1, 0, 0, 0, self.pages)

    def listen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layers, choose = self.executor.model.model.layers, SparseMixer.select
        layer_of = {id(layers[layer].self_attn): layer for layer in self.config.sparse_layers}

        def spy(mixer, *args):
            selected = choose(mixer, *args)
            self.selected[layer_of[id(mixer)]] += list(np.array(selected))
            return selected

        monkeypatch.setattr(SparseMixer, "select", spy)

    def feed(self, ids: list[int], start: int, chunk: int) -> np.ndarray:
        sparse_from = self.config.sparse_config.sparse_from(self.prompt_len)
        rows = [
            Row(tuple(ids[at : at + chunk]), start + at, self.pages, 0, sparse_from) for at in range(0, len(ids), chunk)
        ]
        return np.concatenate([self.executor.logits(row) for row in rows])

    def of_layers(self, prefix: str) -> dict[int, np.ndarray]:
        return {int(name.rsplit(".", 1)[1]): value for name, value in self.data.items() if name.startswith(prefix)}


def check(run: Run) -> None:
    np.testing.assert_allclose(run.prefill, run.data["prefill_logits"], atol=1e-4, rtol=0)
    np.testing.assert_allclose(run.decode, run.data["decode_logits"], atol=1e-4, rtol=0)
    check_chosen(run)
    for layer, state in run.of_layers("final.state").items():
        got = np.array(run.executor.cache.states[layer][0])
        np.testing.assert_allclose(got, state, atol=1e-5 * np.abs(state).max(), rtol=0)
    for layer in run.config.sparse_layers:
        pages = run.executor.cache.pages[layer]
        k1, k2 = pages.pooled(run.span, run.span.end)
        keys, values = pages.keys_values(run.span, run.span.end)
        found = {"k1": k1.swapaxes(0, 1), "k2": k2.swapaxes(0, 1), "k_cache": keys, "v_cache": values}
        for name, got in found.items():
            if layer in (expected := run.of_layers(f"final.{name}")):
                np.testing.assert_allclose(np.array(got), expected[layer], atol=1e-5, rtol=0)


def check_chosen(run: Run) -> None:
    prefill, decode = run.data.get("prefill_topk_idx"), run.data.get("decode_topk_idx")
    for number, layer in enumerate(run.config.sparse_layers):
        selected = run.selected[layer]
        if prefill is not None:
            expected = prefill[number].swapaxes(0, 1)  # [row, head, k]
            assert run.num_prefill_choices == len(expected)
            assert sets(selected[: len(expected)]) == sets(expected)
        if decode is not None:
            assert sets(selected[run.num_prefill_choices :]) == sets(decode[:, number])


def sets(choices) -> list[list[set[int]]]:
    return [[as_set(head) for head in row] for row in choices]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_number(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check(Run(case, CHUNKS[str(case)], monkeypatch))


def test_scattered_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if str(case) == "block16-dense_to_sparse_decode")
    check(Run(case, 33, monkeypatch, shuffled=True))

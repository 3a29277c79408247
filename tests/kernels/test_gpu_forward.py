"""The model by its kernels against the model by its definition, in Triton's interpreter: the same hidden states."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from sala.backends.torch.batch import pack
from sala.backends.torch.cache import HybridCache
from sala.backends.torch.fast.dispatch import select_forward, select_ops
from sala.backends.torch.fast.gpu_forward import GpuForward
from sala.backends.torch.kernels import block_selection, triton_kernels
from sala.backends.torch.model import SalaModel
from sala.checkpoint.random import TINY
from sala.config import SalaConfig, SparseConfig
from sala.protocol import Options, Plan, Row, Sampling

SPARSE = SparseConfig(kernel_size=8, kernel_stride=4, block_size=16, window_size=32, topk=2, dense_len=64)
SHAPE = replace(
    TINY,
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    mixer_types=("minicpm4", "lightning-attn", "minicpm4"),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    lightning_nh=2,
    lightning_nkv=2,
    lightning_head_dim=16,
    sparse_config=SPARSE,
)
MAX_TOKENS = 256
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # rows of padding hold anything, and nobody reads them


def make_model(config: SalaConfig) -> SalaModel:
    torch.manual_seed(0)
    model = SalaModel(config).requires_grad_(False)
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.3)
    return model


def tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, 64, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


class Both:
    """Two caches, one filled by the definition and one by the kernels; spare memory is poisoned."""

    def __init__(self, model: SalaModel, device: torch.device) -> None:
        self.model = model.to(device)
        self.steps = GpuForward(self.model, device, MAX_TOKENS, has_graphs=device.type == "cuda")
        self.caches = [HybridCache(model.config, 40, 4, torch.float32, device) for _ in range(2)]
        for cache in self.caches:
            for pages in cache.pages.values():
                for pool in (pages.k, pages.v, pages.k1, pages.k2):
                    pool.fill_(float("nan"))
        self.device = device

    @torch.inference_mode()
    def run(self, *rows: Row, accepted: tuple[int, ...] = (), wanted: list[int] | None = None) -> None:
        found = []
        for cache, is_fast in zip(self.caches, (False, True), strict=True):
            batch = pack(Plan(rows), self.device)
            if is_fast:
                found.append(self.steps(batch, cache, None, wanted))
            else:
                hidden = self.model(batch, cache)
                found.append(hidden if wanted is None else hidden[wanted])
            cache.fold(batch, accepted or [row.num_drafts + 1 for row in rows])
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
        for layer, states in self.caches[0].states.items():
            torch.testing.assert_close(self.caches[1].states[layer], states, rtol=1e-4, atol=1e-4)


def row(ids: tuple[int, ...], start: int, pages: tuple[int, ...], slot: int, num_drafts: int = 0) -> Row:
    return Row(ids, start, pages, slot, SPARSE.dense_len, Sampling(temperature=0), num_drafts)


TWO = {"num_hidden_layers": 2, "mixer_types": ("minicpm4", "lightning-attn")}
CHANGES: list[dict] = [{}, TWO | {"attn_use_rope": True, "num_key_value_heads": 4}, TWO | {"qk_norm": False}]


@pytest.mark.parametrize("changes", CHANGES)
def test_prefill_then_decode(changes: dict, device: torch.device) -> None:
    both = Both(make_model(replace(SHAPE, **changes)), device)
    first, second = (7, 3, 11, 20, 5, 2, 30, 31), (12, 13, 1, 4)
    both.run(row(tokens(1, 78), 0, first[:5], 0))  # dense, then sparse
    both.run(row(tokens(2, 15), 0, second[:2], 2))
    for step in range(2):  # together, of different lengths and regimes, over the border of a page
        both.run(row(tokens(3 + step, 1), 78 + step, first[:5], 0), row(tokens(9 + step, 1), 15 + step, second[:2], 2))
    both.run(row(tokens(20, 17), 80, first, 0))
    both.run(row(tokens(21, 1), 97, first, 0))


REVERSED = {"num_hidden_layers": 2, "mixer_types": ("lightning-attn", "minicpm4")}


@pytest.mark.parametrize("changes", [REVERSED | {"attn_use_rope": True}, TWO])
def test_only_wanted_rows_go_through_the_last_layer(changes: dict, device: torch.device) -> None:
    both = Both(make_model(replace(SHAPE, **changes)), device)
    pages, others = (7, 3, 11, 20, 5, 2, 30, 31), (12, 13, 1, 4)
    both.run(row(tokens(1, 50), 0, pages[:4], 0), wanted=[])
    both.run(row(tokens(2, 20), 50, pages[:5], 0), row(tokens(3, 20), 0, others[:2], 1), wanted=[19, 39])  # a switch
    both.run(row(tokens(4, 1), 70, pages[:5], 0), row(tokens(5, 18), 20, others, 1), wanted=[0, 17, 18])
    both.run(row(tokens(6, 10), 71, pages, 0), row(tokens(7, 3), 38, others, 1), wanted=[2, 5, 11, 12])
    both.run(row(tokens(8, 1), 81, pages, 0), row(tokens(9, 1), 41, others, 1))


def test_drafts(device: torch.device) -> None:
    both = Both(make_model(SHAPE), device)
    pages = (7, 3, 11, 20, 5, 2, 30, 31)
    both.run(row(tokens(1, 70), 0, pages[:5], 1))
    both.run(row(tokens(2, 4), 70, pages[:5], 1, num_drafts=3), row(tokens(3, 2), 0, (9,), 0), accepted=(2, 2))
    both.run(row(tokens(4, 1), 72, pages[:5], 1), row(tokens(5, 1), 2, (9,), 0))


@torch.inference_mode()
def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    model = make_model(SHAPE)
    hidden = []
    for others in (0, 2):
        both = Both(model, device)
        cache = both.caches[1]
        sparse = partial(replace, sparse_from=0)  # at once, so that a short prompt will do
        both.steps(pack(Plan((sparse(row(tokens(1, 70), 0, (7, 3, 11, 20, 5), 0)),)), device), cache)
        rows = [sparse(row(tokens(2, 1), 70, (7, 3, 11, 20, 5), 0))]
        rows += [row(tokens(3 + i, 1), 0, (30 + i,), 1 + i) for i in range(others)]
        found = both.steps(pack(Plan(tuple(rows)), device), cache)[0]
        hidden.append((found, both.steps.logits(found[None])))
    torch.testing.assert_close(hidden[0][0], hidden[1][0], rtol=0, atol=0)
    torch.testing.assert_close(hidden[0][1], hidden[1][1], rtol=0, atol=0)


def test_kernels_that_are_switched_off(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every Triton kernel could run, `kernels="off"` selects none."""
    model = make_model(SHAPE).to(device)
    monkeypatch.setattr(triton_kernels, "why_not", lambda _: None)
    assert isinstance(select_forward(model, device, MAX_TOKENS, Options()), GpuForward)
    assert select_forward(model, device, MAX_TOKENS, Options(kernels="off")) is None
    sparse, width = SHAPE.sparse_config, SHAPE.head_dim
    q, k, v = (torch.randn(70, heads, width, device=device) for heads in (4, 2, 2))
    wanted = select_ops().whole_sparse_attention(q, k, v, sparse, 0.3)

    def fail(*_: object) -> None:
        raise AssertionError("a Triton kernel ran")

    monkeypatch.setattr(block_selection, "select_rows", fail)
    found = select_ops("off").whole_sparse_attention(q, k, v, sparse, 0.3)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError, match="Triton kernel ran"):
        select_ops().whole_sparse_attention(q, k, v, sparse, 0.3)

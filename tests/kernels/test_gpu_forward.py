"""The model by its kernels against the model by its definition, in Triton's interpreter: the same hidden states."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sala.backends.torch.batch import Features, pack
from sala.backends.torch.cache import HybridCache
from sala.backends.torch.fast import gpu_prefill, gpu_staging
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


@pytest.fixture(autouse=True)
def small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little padding: the interpreter is slow, and in fp32 our product kernels take 32 rows only."""
    monkeypatch.setattr(gpu_prefill, "MIN_ROWS", 64)


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

    def __init__(self, model: SalaModel, device: torch.device, state_dtype: torch.dtype = torch.float32) -> None:
        self.model = model.to(device)
        self.tolerance = 1e-4 if state_dtype == torch.float32 else 10 * torch.finfo(state_dtype).eps
        self.steps = GpuForward(self.model, device, MAX_TOKENS, has_graphs=device.type == "cuda")
        self.caches = [
            HybridCache(model.config, 40, 4, torch.float32, device, state_dtype=state_dtype) for _ in range(2)
        ]
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
            batch.fold_accepted(accepted or [row.num_drafts + 1 for row in rows])
        near = {"rtol": self.tolerance, "atol": self.tolerance}
        torch.testing.assert_close(found[1], found[0], **near)
        for layer, states in self.caches[0].states.items():
            torch.testing.assert_close(self.caches[1].states[layer], states, **near)


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


def test_states_of_16_bits(device: torch.device) -> None:
    """Prefill, decoding beside a neighbour, drafts; the interpreter does not compute in bf16."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    both = Both(make_model(replace(SHAPE, **TWO)), device, dtype)
    pages = (7, 3, 11, 20, 5, 2, 30, 31)
    both.run(row(tokens(1, 78), 0, pages[:5], 0))
    both.run(row(tokens(2, 15), 0, (12,), 2))
    both.run(row(tokens(3, 1), 78, pages[:5], 0), row(tokens(9, 1), 15, (12,), 2))
    both.run(row(tokens(4, 4), 79, pages, 0, num_drafts=3), accepted=(2,))
    both.run(row(tokens(5, 1), 81, pages, 0))


def test_hidden_states_are_kept_for_a_draft_head(device: torch.device) -> None:
    """Those after each layer but the last, of prompts, decode rows and drafts together, in the order of the batch."""
    both = Both(make_model(SHAPE), device)
    both.steps.feature_layers = (1, 2)
    first, second = (7, 3, 11, 20, 5, 2, 30, 31), (12, 13, 1, 4)
    plans = [
        (row(tokens(1, 78), 0, first[:5], 0), row(tokens(2, 15), 0, second[:2], 2)),
        (row(tokens(3, 1), 78, first[:5], 0), row(tokens(4, 20), 15, second, 2)),
        (row(tokens(5, 4), 79, first, 0, num_drafts=3), row(tokens(6, 1), 35, second, 2)),
    ]
    for rows in plans:
        found = []
        for cache, is_fast in zip(both.caches, (False, True), strict=True):
            batch = pack(Plan(rows), device, features=Features((1, 2)))
            with torch.inference_mode():
                _ = both.steps(batch, cache, None, []) if is_fast else both.model(batch, cache)
                batch.fold_accepted([row.num_drafts + 1 for row in rows])
            assert batch.features is not None
            found.append(batch.features.states)
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


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


def sparse_row(*arguments: Any, **changes: Any) -> Row:
    """A row in the sparse regime at once, so that a short prompt will do."""
    return replace(row(*arguments), sparse_from=0, **changes)


def test_several_prompts_in_one_pass(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense, sparse and changing ones that begin or go on, beside decode rows; all rows wanted, some, none."""
    both = Both(make_model(SHAPE), device)
    first, second, third = (7, 3, 11, 20, 5), (12, 13, 1, 4), (30, 31, 32, 33)
    a, b = row(tokens(1, 40), 0, first[:3], 0), sparse_row(tokens(2, 50), 0, second, 2)
    both.run(a, b)
    a, b = row(tokens(3, 30), 40, first, 0), sparse_row(tokens(4, 9), 50, second, 2, prompt_len=64)
    c, d = replace(row(tokens(5, 1), 0, third[:1], 3), prompt_len=5), row(tokens(6, 1), 0, (39,), 1)  # prompt, decode
    both.run(a, c, d, b, wanted=[29, 30, 31, 40])
    monkeypatch.setattr(gpu_staging, "MAX_SPANS", 1)
    a, b = row(tokens(7, 1), 70, first, 0), sparse_row(tokens(8, 5), 59, second, 2, prompt_len=64)
    both.run(a, b, row(tokens(9, 20), 1, third[:2], 3), wanted=[0])
    both.run(row(tokens(10, 1), 71, first, 0), row(tokens(11, 1), 21, third[:2], 3))


@torch.inference_mode()
def test_packed_is_alone_and_whole_is_cut(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: prompts in one pass, with snapshots, and each alone, cut where the snapshots are."""
    model, pages, others = make_model(SHAPE), (7, 3, 11, 20, 5), (12, 13, 1, 4)
    whole, cut = Both(model, device), Both(model, device)
    long, short = tokens(1, 75), tokens(2, 17)
    rows = (
        row(short, 0, others[:2], 1),
        replace(row(long, 0, pages, 0), snapshots=((37, 2), (75, 3)), prompt_len=75),
    )
    monkeypatch.setattr(gpu_prefill, "MIN_ROWS", 128)  # the products of a CPU depend on the number of rows
    found = whole.steps(pack(Plan(rows), device), whole.caches[1], None, [16, 91])
    alone = [cut.steps(pack(Plan((rows[0],)), device), cut.caches[1], None, [16])]
    for begin, end, slot in ((0, 37, 2), (37, 75, 3)):
        piece = replace(row(long[begin:end], begin, pages[: -(-end // 16)], 0), prompt_len=75)
        last = cut.steps(pack(Plan((piece,)), device), cut.caches[1], None, [end - begin - 1])
        cut.caches[1].copy_states([(0, slot)])
    assert torch.equal(found, torch.cat([*alone, last]))
    for layer, states in whole.caches[1].states.items():
        assert torch.equal(states, cut.caches[1].states[layer])
        assert not torch.equal(states[2], states[3])
    for layer, pool in whole.caches[1].pages.items():
        for one, other in zip(pool.pools, cut.caches[1].pages[layer].pools, strict=True):
            assert torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0))


def test_graphs_take_dense_passes_that_fit(device: torch.device) -> None:
    graph = gpu_prefill.PassSize.of_graph(256, 127, SparseConfig())
    longest = Row(tokens(1, 100), 8000, tuple(range(127)), 0, 8191)
    (span,) = pack(Plan((longest,)), device).spans
    assert gpu_prefill.PassSize.of([span], 1, 64).fit(graph)
    fits = [(256, 16, 16, 128), (192, 1, 0, 1)]
    too_much = [(320, 1, 1, 1), (192, 17, 1, 1), (192, 1, 17, 1), (192, 1, 1, 129), (192, 1, None, 1)]
    assert all(gpu_prefill.PassSize(*size).fit(graph) for size in fits)
    assert not any(gpu_prefill.PassSize(*size).fit(graph) for size in too_much)


class Replay:
    """In place of a CUDA graph, where there is no GPU: computes again into the same tensor."""

    def __init__(self, forward: Callable[[], Tensor], hidden: Tensor) -> None:
        self.forward, self.hidden = forward, hidden

    def replay(self) -> None:
        self.hidden.copy_(self.forward())


@torch.inference_mode()
def test_a_graph_computes_what_a_pass_does(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with padding of all kinds, pass after pass."""
    model = make_model(SHAPE)
    captured, passes = Both(model, device), Both(model, device)
    captured.steps.has_graphs, passes.steps.has_graphs = True, False
    if device.type == "cpu":
        monkeypatch.setattr(gpu_prefill, "capture", lambda forward, _: (Replay(forward, hidden := forward()), hidden))
        captured.steps.pool = object()
    monkeypatch.setattr(gpu_prefill, "MIN_ROWS", 192)
    first, second = (7, 3, 11), (12, 13)
    one = row(tokens(1, 40), 0, first, 0), replace(row(tokens(2, 20), 0, second, 2), snapshots=((9, 3),))
    two = (row(tokens(3, 8), 40, first, 0), row(tokens(4, 7), 20, second, 3))
    for rows, wanted in ((one, [39, 59]), ([replace(one, prompt_len=60) for one in two], [14]), (one[:1], [])):
        found = [
            both.steps(pack(Plan(tuple(rows)), device), both.caches[1], None, wanted) for both in (captured, passes)
        ]
        assert torch.equal(*found)
    assert list(captured.steps.prefill_graphs) == [192]
    for layer, states in passes.caches[1].states.items():
        assert torch.equal(captured.caches[1].states[layer], states)
    for layer, pages in passes.caches[1].pages.items():
        for pool, other in zip(pages.pools, captured.caches[1].pages[layer].pools, strict=True):
            assert torch.equal(pool.nan_to_num(9.0), other.nan_to_num(9.0))


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
        both.steps(pack(Plan((sparse_row(tokens(1, 70), 0, (7, 3, 11, 20, 5), 0),)), device), cache)
        rows = [sparse_row(tokens(2, 1), 70, (7, 3, 11, 20, 5), 0)]
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

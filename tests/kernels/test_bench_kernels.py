"""What `sala bench kernels` measures, at tiny shapes: ours and the peer do the same work, as much as is counted."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sala.backends.torch.cases import KernelCase, Shapes, attention, rows
from sala.backends.torch.cases.shapes import KernelCall
from sala.checkpoint.random import TINY
from sala.config import SparseConfig
from sala.lab.bench import roofline
from sala.lab.bench.roofline import Roofline, timed_cases

SPARSE = SparseConfig(kernel_size=8, kernel_stride=4, block_size=16, window_size=32, topk=4, dense_len=128)
SMALL = replace(TINY, num_attention_heads=4, hidden_size=48, intermediate_size=40, sparse_config=SPARSE)
ROWS = ("1 row", "3 rows")
PASSES = (
    "add and norm, 32 rows",
    "norm and rope of q, k, 32 rows",
    "norm and gate, 32 rows",
    "silu and product, 32 rows",
)


def tiny(device: torch.device) -> dict[str, KernelCase]:
    """128 tokens are 8 blocks, of which 6 are selected; the last 32 tokens have a choice."""
    shapes = Shapes(device, (40,), SMALL, torch.float32, num_rows=32, batches=(1, 3), rotated_bytes=1)
    return {f"{one.name}, {one.size}": one for one in timed_cases(shapes)}


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(attention, "sdpa_kernel", lambda *_, **__: lambda attend: attend)  # its backends may lack fp32
    monkeypatch.setattr(rows, "simple_gla", lambda: None)


def build(name: str, device: torch.device) -> list[KernelCall]:
    with torch.inference_mode():
        case = tiny(device)[name]
        return list(case.build(case.num_sets))


def results(name: str, device: torch.device, call: int = 0) -> tuple[Any, Any]:
    """Of ours and of the peer, which comes first: ours may advance what both begin with."""
    works = build(name, device)
    assert len(works) == (2 if tiny(device)[name].in_graph else 1)
    with torch.inference_mode():
        peer = (works[call].peer or works[call].reference)()
        return works[call].kernel(), peer


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def num_bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def test_lightning_prefill(device: torch.device) -> None:
    (work,) = build("lightning prefill, 40", device)
    expected, next_state = work.reference()
    found, state = work.kernel(), work.also() if work.also is not None else None
    assert_near(found, expected)
    assert_near(state, next_state)
    inputs = work.kernel.args[:4]  # type: ignore[attr-defined]
    assert num_bytes(*inputs, found, state) == tiny(device)["lightning prefill, 40"].num_bytes


@pytest.mark.parametrize("rows", ["1 row", "3 rows"])
def test_lightning_decode(rows: str, device: torch.device) -> None:
    found, (expected, _) = results(f"lightning decode, {rows}", device, call=1)
    assert_near(found, expected)


def test_block_scores(device: torch.device) -> None:
    found, expected = results("block scores, 32 at 128", device)
    assert found.shape == (32, 2, 5)  # up to the last query's window
    assert_near(found[:16, :, 1:4], expected[:16, :, 1:4])  # the rest is forced on some of the queries
    assert_near(found[16:, :, 1:5], expected[16:, :, 1:5])


@pytest.mark.parametrize("size", ["block selection, 32 at 128", *(f"decode block selection, {n} at 128" for n in ROWS)])
def test_block_selection(size: str, device: torch.device) -> None:
    found, expected = results(size, device)
    assert torch.equal(found.long(), expected.sort(-1).values)


def test_top_blocks(device: torch.device) -> None:
    found, (_, ids) = results("top blocks, 32 rows of 8", device)
    assert found.shape == (32, 2, 6)
    assert torch.equal(found[..., 1:3].long(), ids.sort(-1).values + 1)
    assert found[..., [0, 3, 4, 5]].unique(dim=0).tolist() == [[[0, 5, 6, 7]] * 2]


@pytest.mark.parametrize("name", ["sparse attention, 128, 75% shared", "sparse attention, 128, 0% shared"])
def test_sparse_attention(name: str, device: torch.device) -> None:
    found, everything = results(name, device)
    assert found.shape == (128, 4, 16)
    few = SPARSE.agreement_len  # up to there, both look at all
    assert_near(found[:few], everything[0].transpose(0, 1)[:few])
    assert not torch.allclose(found[few:], everything[0].transpose(0, 1)[few:])


def test_dense_attention(device: torch.device) -> None:
    found, expected = results("dense attention, 128", device)
    assert_near(found, expected[0].transpose(0, 1))


@pytest.mark.parametrize("rows", ["1 row", "3 rows"])
def test_decode_attention(rows: str, device: torch.device) -> None:
    found, expected = results(f"decode attention, {rows} at 128", device, call=1)
    assert_near(found, expected)


def test_append(device: torch.device) -> None:
    found, expected = results("append and pool, 32 tokens", device, call=1)
    assert len(found) == 4
    for ours, theirs in zip(found, expected, strict=True):
        assert_near(ours, theirs)
        assert ours.any()


@pytest.mark.parametrize("rows", ["1 row", "3 rows"])
@pytest.mark.parametrize("name", ["output projection and norm", "MLP and norm"])
def test_products(name: str, rows: str, device: torch.device) -> None:
    for found, expected in zip(*results(f"{name}, {rows}", device, call=1), strict=True):
        assert_near(found, expected)


@pytest.mark.parametrize("name", PASSES)
def test_passes_move_as_much_as_the_copy(name: str, device: torch.device) -> None:
    one = tiny(device)[name]
    with torch.inference_mode():
        (work,) = one.build(1)
        assert work.peer is not None
        found, copied = work.kernel(), work.peer()
    outputs = found if isinstance(found, tuple) else (found,)
    parts = [part if isinstance(part, tuple) else (part,) for part in work.kernel.args]  # type: ignore[attr-defined]
    inputs = [x for part in parts for x in part if isinstance(x, Tensor)]
    assert num_bytes(*inputs, *outputs) == one.num_bytes
    assert copied.numel() == one.num_bytes // 2
    assert all(x.isfinite().all() and x.shape[0] == 32 for x in outputs)


def test_all_are_tested(device: torch.device) -> None:
    assert len(tiny(device)) == 1 + 2 + 1 + 3 + 1 + 2 + 1 + 2 + 1 + 4 + len(PASSES)


def test_choices_share_what_they_should(device: torch.device) -> None:
    sparse = replace(SPARSE, topk=14)  # 12 of them free
    positions = torch.arange(1600, 1600 + 2 * attention.RUN, device=device)
    for shared, least, most in ((0.75, 9, 10.5), (0.0, 0, 4)):
        selected = attention.random_selection(positions, 110, 2, sparse, shared)
        assert selected.dtype == torch.int32
        assert selected.shape == (2 * attention.RUN, 2, sparse.num_selected)
        assert (selected[..., 1:] > selected[..., :-1]).all()
        own = positions[:, None] // sparse.block_size
        for back in range(sparse.num_window_blocks + 1):
            assert (selected == (own - back)[..., None]).any(-1).all()
        free = selected[: attention.RUN, :, 1:-3]  # of one run, between the initial and the recent ones
        common = (free[:-1, :, :, None] == free[1:, :, None]).any(-1).sum(-1).double().mean()
        assert least <= common <= most


def test_first_queries_choose_all_there_is(device: torch.device) -> None:
    selected = attention.random_selection(torch.arange(40, device=device), 3, 1, SPARSE, 0.75)
    assert selected[[0, 16, 39], 0].tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2]]


def test_measure(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "milliseconds", lambda call: 2.0 if call() is not None else 0.0)
    monkeypatch.setattr(roofline, "milliseconds_in_graph", lambda calls: 4.0 if calls[0]() is not None else 0.0)
    best = Roofline(1e9, 1e9)
    for name, ms in (("silu and product, 32 rows", 2.0), ("append and pool, 32 tokens", 4.0)):
        one = tiny(device)[name]
        found = roofline.measure(one, best)
        assert (found.ms, found.peer_ms, found.ratio, found.error) == (ms, ms, 1.0, "")
        assert found.share == pytest.approx(one.num_bytes / 1e6 / ms)

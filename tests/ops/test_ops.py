"""Every reference op against its definition, at ugly sizes."""

import math
from types import SimpleNamespace

import pytest
import torch

from sala.backends.rows import TIE_ULPS
from sala.backends.torch.executor import prefill_chunk
from sala.backends.torch.ops.dense import apply_rope, dense_attention, rms_norm, rope_angles
from sala.backends.torch.ops.lightning import (
    decay_slopes,
    lightning_prefill,
    lightning_ragged,
    lightning_step,
)
from sala.backends.torch.ops.sparse import block_scores, pool_keys, select_blocks, sparse_attention, top_blocks
from sala.config import SparseConfig

SPARSE = SparseConfig(kernel_size=8, kernel_stride=4, init_blocks=1, block_size=16, window_size=32, topk=4, dense_len=0)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_rounds_where_the_model_does() -> None:
    x, weight = rand(5, 24).bfloat16(), rand(24, seed=1).bfloat16()
    wide = x.double()
    normed = (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()).bfloat16()
    out = rms_norm(x, weight, 1e-6)
    assert out.dtype == torch.bfloat16
    assert (out == normed * weight).float().mean() > 0.98  # fp32 against fp64 may round a few elements otherwise


def test_rope_is_a_rotation_by_position() -> None:
    q, k = rand(1, 2, 16), rand(1, 2, 16, seed=1)

    def product(i: int, j: int) -> torch.Tensor:
        at = [apply_rope(x, *rope_angles(torch.tensor([p]), 16, 10000.0)) for x, p in ((q, i), (k, j))]
        return (at[0] * at[1]).sum(-1)

    torch.testing.assert_close(product(900, 893), product(7, 0), atol=2e-4, rtol=0)
    torch.testing.assert_close(apply_rope(q, *rope_angles(torch.tensor([0]), 16, 1e4)), q)


def test_slopes() -> None:
    assert decay_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert decay_slopes(32)[31].item() == pytest.approx(1 / 256)
    twelve = decay_slopes(12).tolist()
    assert twelve[:8] == decay_slopes(8).tolist()
    assert twelve[8:] == decay_slopes(16).tolist()[0::2][:4]


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 77, 129, 300])
@pytest.mark.parametrize("fresh", [True, False])
def test_lightning_prefill_is_the_recurrence(length: int, fresh: bool) -> None:
    heads, dim = 4, 6
    q, k, v = (rand(length, heads, dim, seed=s) for s in range(3))
    slopes = decay_slopes(heads)
    start = torch.zeros(heads, dim, dim) if fresh else rand(heads, dim, dim, seed=9)
    state, want = start.double(), []
    for t in range(length):
        decay = torch.exp(-slopes.double())[:, None, None]
        state = decay * state + k[t].double()[:, :, None] * v[t].double()[:, None]
        want.append((q[t].double()[:, None] @ state)[:, 0] * 0.3)
    got, end = lightning_prefill(q, k, v, start, slopes, 0.3)
    torch.testing.assert_close(got.double(), torch.stack(want), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(end.double(), state, atol=2e-5, rtol=1e-5)


def test_lightning_state_forgets_by_the_true_length() -> None:
    """A prompt of 77 tokens decays the old state 77 times, not 128."""
    heads, dim = 32, 4
    slopes = decay_slopes(heads)
    zeros = torch.zeros(77, heads, dim)
    _, end = lightning_prefill(zeros, zeros, zeros, torch.ones(heads, dim, dim), slopes, 1.0)
    torch.testing.assert_close(end[:, 0, 0], torch.exp(-77 * slopes), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("lengths", [[1, 1, 1], [5], [3, 1, 70], [64, 65, 1, 2]])
def test_lightning_ragged_rows_are_strangers(lengths: list[int]) -> None:
    heads, dim, total = 3, 4, sum(lengths)
    q, k, v = (rand(total, heads, dim, seed=s) for s in range(3))
    states, slopes = rand(len(lengths), heads, dim, dim, seed=5), decay_slopes(heads)
    got, ends = lightning_ragged(q, k, v, states, lengths, slopes, 1.0)
    at = 0
    for index, length in enumerate(lengths):
        piece = slice(at, at + length)
        want, end = lightning_prefill(q[piece], k[piece], v[piece], states[index], slopes, 1.0)
        torch.testing.assert_close(got[piece], want)
        torch.testing.assert_close(ends[index], end)
        at += length


def test_lightning_state_stays_finite_over_a_million_tokens() -> None:
    heads, dim, count = 2, 4, 1_000_000
    q, k, v = (rand(count, heads, dim, seed=s) for s in range(3))
    slopes = torch.tensor([0.5, 1 / 256])
    got, state = lightning_prefill(q, k, v, torch.zeros(heads, dim, dim), slopes, 1.0)
    assert bool(torch.isfinite(got).all())
    _, recent = lightning_prefill(q[-9000:], k[-9000:], v[-9000:], torch.zeros(heads, dim, dim), slopes, 1.0)
    torch.testing.assert_close(state, recent, atol=1e-4, rtol=1e-4)  # what is older has decayed away


def test_lightning_step_keeps_fp32_for_bf16_inputs() -> None:
    q, k, v = (rand(2, 3, 4, seed=s).bfloat16() for s in range(3))
    output, state = lightning_step(q, k, v, torch.zeros(2, 3, 4, 4), decay_slopes(3), 1.0)
    assert output.dtype == state.dtype == torch.float32


@pytest.mark.parametrize(("n", "start"), [(1, 0), (1, 40), (5, 0), (300, 0), (257, 31)])
def test_dense_attention_is_causal_softmax(n: int, start: int) -> None:
    heads, groups, dim = 6, 2, 8
    q, k, v = rand(n, heads, dim), rand(groups, start + n, dim, seed=1), rand(groups, start + n, dim, seed=2)
    got = dense_attention(q, k, v, start, 0.5)
    for head in range(heads):
        scores = 0.5 * q[:, head] @ k[head // 3].T
        hidden = torch.arange(start + n)[None] > start + torch.arange(n)[:, None]
        want = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[head // 3]
        torch.testing.assert_close(got[:, head], want, atol=1e-5, rtol=1e-5)


def test_pooling_by_hand() -> None:
    keys = torch.arange(20.0)[None, :, None]
    assert pool_keys(keys, 8, 4)[0, :, 0].tolist() == [3.5, 7.5, 11.5, 15.5]


def test_a_block_takes_the_best_window_that_touches_it() -> None:
    windows = torch.zeros(1, 1, 11)
    windows[0, 0, 3] = 5.0  # tokens 12…19: the end of block 0 and the beginning of block 1
    assert block_scores(windows, 3, SPARSE)[0, 0].tolist() == [5.0, 5.0, 0.0]


def test_forced_blocks_and_ties() -> None:
    scores = torch.zeros(1, 1, 12)
    scores[0, 0, 4:7] = 1.0  # three equal scores for two places: the lowest ids win
    position = torch.tensor([11 * 16 + 3])
    selected = top_blocks(scores, position, SPARSE)[0, 0].tolist()
    assert sorted(selected) == [0, 4, 5, 9, 10, 11]


def test_rounding_does_not_decide_ties() -> None:
    """Blocks with equal scores, each rounded at random, of which some are selected: always the lowest."""
    positions, generator = torch.full((500,), 11 * 16 + 3), torch.Generator().manual_seed(0)
    ulps = torch.randint(0, TIE_ULPS // 2, (500, 1, 12), generator=generator, dtype=torch.int32)
    equal = torch.linspace(0.3, 0.7, 500)[:, None, None].repeat(1, 1, 12)
    scores = (equal.view(torch.int32) + ulps).view(torch.float32)
    scores[..., 3] *= 0.9999  # less by more than rounding
    selected = top_blocks(scores, positions, SPARSE).sort(-1).values
    assert selected.unique(dim=0).tolist() == [[[0, 1, 2, 9, 10, 11]]]
    scores[..., 7] *= 1.0001  # and more
    selected = top_blocks(scores, positions, SPARSE).sort(-1).values
    assert selected.unique(dim=0).tolist() == [[[0, 1, 7, 9, 10, 11]]]


def test_no_score_displaces_a_forced_block() -> None:
    scores = torch.full((1, 1, 12), torch.finfo(torch.float32).max)
    selected = top_blocks(scores, torch.tensor([11 * 16]), SPARSE)[0, 0].tolist()
    assert sorted(selected) == [0, 1, 2, 9, 10, 11]


def test_fewer_blocks_than_places() -> None:
    selected = top_blocks(torch.zeros(1, 1, 3), torch.tensor([20]), SPARSE)[0, 0].tolist()
    assert sorted(selected) == [-1, 0, 1]


def test_the_future_is_never_chosen() -> None:
    n, groups, dim = 200, 2, 8
    q, keys = rand(n, 4, dim), rand(groups, n, dim, seed=1)
    k1, k2 = pool_keys(keys, 8, 4), pool_keys(keys, 32, 16)
    positions = torch.arange(n)
    selected = select_blocks(q, k1, k2, positions, 13, SPARSE, dim**-0.5)
    assert bool((selected <= (positions // 16)[:, None, None]).all())
    q2, keys2 = q.clone(), keys.clone()
    q2[100:], keys2[:, 100:] = 7.0, -7.0  # another future, the same choice
    again = select_blocks(q2, pool_keys(keys2, 8, 4), pool_keys(keys2, 32, 16), positions, 13, SPARSE, dim**-0.5)
    assert torch.equal(selected[:100], again[:100])


def test_tiles_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    import sala.backends.torch.ops.sparse as module

    n, dim = 150, 8
    q, keys = rand(n, 4, dim), rand(2, n, dim, seed=1)
    pools = (pool_keys(keys, 8, 4), pool_keys(keys, 32, 16))
    whole = select_blocks(q, *pools, torch.arange(n), 10, SPARSE, 1.0)
    monkeypatch.setitem(module.TILE_BYTES, "cpu", 1)
    assert torch.equal(whole, select_blocks(q, *pools, torch.arange(n), 10, SPARSE, 1.0))


@pytest.mark.parametrize("tile_bytes", [1, 1 << 30])
def test_sparse_attention_is_dense_attention_over_the_chosen(tile_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import sala.backends.torch.ops.sparse as module

    monkeypatch.setitem(module.TILE_BYTES, "cpu", tile_bytes)
    n, heads, groups, dim, block, num_pages = 70, 4, 2, 8, 16, 9
    table = torch.tensor([7, 0, 3, 8, 2])
    k_pages, v_pages = rand(groups, num_pages, block, dim), rand(groups, num_pages, block, dim, seed=1)
    q, positions = rand(n, heads, dim, seed=2), torch.arange(n)
    selected = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:3] for i in range(2 * n)])
    selected = selected.view(n, groups, 3)
    own = (positions // block)[:, None, None]
    selected = selected.masked_fill(selected >= own, -1)
    selected[:, :, :1] = own
    got = sparse_attention(q, k_pages, v_pages, table, selected, positions, 0.4)
    keys, values = (pages[:, table].flatten(1, 2) for pages in (k_pages, v_pages))
    for t in range(n):
        for head in range(heads):
            group = head // 2
            seen = [j for j in range(t + 1) if j // block in selected[t, group].tolist()]
            want = (0.4 * keys[group, seen] @ q[t, head]).softmax(0) @ values[group, seen]
            torch.testing.assert_close(got[t, head], want, atol=1e-5, rtol=1e-5)


def test_cost_of_a_sparse_row_is_bounded() -> None:
    """The blocks that a query gathers do not grow with the context."""
    counts = set()
    for num_blocks in (20, 200, 2000):
        position = torch.tensor([num_blocks * 16 - 1])
        counts.add(top_blocks(rand(1, 1, num_blocks), position, SPARSE).shape[-1])
    assert counts == {SPARSE.num_selected}


@pytest.mark.parametrize(("processors", "wanted"), [(132, 8448), (108, 6912), (128, 8192), (20, 7680), (200, 12800)])
def test_a_chunk_is_whole_waves_of_tiles(processors: int, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    assert prefill_chunk(torch.device("cuda")) == wanted
    assert prefill_chunk(torch.device("cpu")) == 256

"""Pooling and choice of blocks against ops/sparse.py and the cache, in fp32; and what the compiler makes of them."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sala.backends.rows import TIE_ULPS
from sala.backends.torch.cache import KVPages
from sala.backends.torch.fast.dispatch import _select_whole
from sala.backends.torch.kernels import block_scores, block_selection, pooling, top_blocks, triton_kernels
from sala.backends.torch.kernels.launch import Config
from sala.backends.torch.ops import sparse as ops
from sala.config import SparseConfig
from tests.kernels.aot import Build

RELEASED = SparseConfig()
SMALL = SparseConfig(kernel_size=4, kernel_stride=2, init_blocks=1, block_size=8, window_size=16, topk=3, dense_len=64)
FORCED_LITTLE = replace(SMALL, init_blocks=0, window_size=8, topk=4)
SHAPES = [(9, 3, 64), (16, 1, 128), (8, 2, 32), (2, 1, 48)]  # heads, kv heads, dimension


def scattered(k: Tensor, sparse: SparseConfig, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [n, G, D] → pooled pages k1, k2 in a random order among pages full of NaN, and the table."""
    torch.manual_seed(seed)
    (n, groups, dim), stride = k.shape, sparse.kernel_stride
    num_blocks = -(-n // sparse.block_size)
    table = torch.randperm(num_blocks + 3)[:num_blocks].to(k.device)
    pools = []
    for factor in (1, 4):
        per_page = sparse.block_size // (factor * stride)
        rows = torch.full((groups, num_blocks * per_page, dim), torch.nan, dtype=k.dtype, device=k.device)
        pooled = ops.pool_keys(k.transpose(0, 1), factor * sparse.kernel_size, factor * stride)
        first = sparse.kernel_size // stride - 1
        rows[:, first : first + pooled.shape[1]] = pooled
        pool = torch.full((groups, num_blocks + 3, per_page, dim), torch.nan, dtype=k.dtype, device=k.device)
        pool[:, table] = rows.unflatten(1, (num_blocks, per_page))
        pools.append(pool)
    return pools[0], pools[1], table


def expected(q: Tensor, k: Tensor, start: int, sparse: SparseConfig, scale: float) -> Tensor:
    keys = k.transpose(0, 1)
    k1 = ops.pool_keys(keys, sparse.kernel_size, sparse.kernel_stride)
    k2 = ops.pool_keys(keys, 4 * sparse.kernel_size, 4 * sparse.kernel_stride)
    positions = torch.arange(start, start + q.shape[0], device=q.device)
    selected = ops.select_blocks(q, k1, k2, positions, -(-k.shape[0] // sparse.block_size), sparse, scale)
    return ascending(selected)


def ascending(selected: Tensor) -> Tensor:
    far = 1 << 30
    ids = selected.masked_fill(selected < 0, far).sort(-1).values
    return ids.masked_fill(ids == far, -1)


def draw(shape: tuple[int, ...], device: torch.device, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def near(shape: tuple[int, ...], device: torch.device, seed: int, levels: int, ulps: int) -> Tensor:
    """Scores of a few values, each up to so many units in the last place away from one of them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(1, levels + 1, shape, generator=generator).float()
    noise = torch.randint(-ulps, ulps + 1, shape, generator=generator, dtype=torch.int32)
    return (values.view(torch.int32) + noise).view(torch.float32).to(device)


@pytest.mark.parametrize(("heads", "groups", "dim"), SHAPES)
@pytest.mark.parametrize(("start", "n"), [(47, 8), (130, 1)])
def test_prefill_chooses_as_the_reference(
    heads: int, groups: int, dim: int, start: int, n: int, device: torch.device
) -> None:
    q, k = draw((n, heads, dim), device, 1), draw((start + n, groups, dim), device, 2)
    k1, k2, table = scattered(k, SMALL)
    got = block_selection.select_prefill(q, k1, k2, table, start, SMALL, dim**-0.5)
    assert torch.equal(got.long(), expected(q, k, start, SMALL, dim**-0.5))


@pytest.mark.parametrize(
    "sparse", [FORCED_LITTLE, replace(FORCED_LITTLE, init_blocks=2), replace(SMALL, kernel_size=2)]
)
def test_prefill_with_other_geometry(sparse: SparseConfig, device: torch.device) -> None:
    q, k = draw((17, 4, 16), device, 3), draw((120, 2, 16), device, 4)
    k1, k2, table = scattered(k, sparse)
    got = block_selection.select_prefill(q, k1, k2, table.int(), 103, sparse, 0.5)
    assert torch.equal(got.long(), expected(q, k, 103, sparse, 0.5))


def test_prefill_with_released_geometry(device: torch.device) -> None:
    sparse = replace(RELEASED, window_size=128, topk=3)
    q, k = draw((5, 16, 128), device, 5), draw((1500, 1, 128), device, 6)
    k1, k2, table = scattered(k, sparse)
    got = block_selection.select_prefill(q, k1, k2, table, 1495, sparse, 128**-0.5)
    assert torch.equal(got.long(), expected(q, k, 1495, sparse, 128**-0.5))


@pytest.mark.parametrize("n", [3, 71, 163, 200])
def test_whole_sequences(n: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = draw((n, 6, 32), device, 13), draw((n, 2, 32), device, 14)
    monkeypatch.setattr(triton_kernels, "why_not", lambda _: None)
    got = _select_whole(q, k.transpose(0, 1), SMALL, 0.3)
    assert torch.equal(got, expected(q, k, 0, SMALL, 0.3))
    odd = _select_whole(q[..., :5], k.transpose(0, 1)[..., :5], SMALL, 0.3)  # rows that the kernels do not know
    assert torch.equal(ascending(odd), expected(q[..., :5], k[..., :5], 0, SMALL, 0.3))


def test_prefill_does_not_depend_on_the_tile(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = draw((70, 2, 16), device, 7), draw((170, 1, 16), device, 8)
    k1, k2, table = scattered(k, SMALL)
    scores = []
    config = block_scores.score_config(4, 16, 227 << 10)
    pools = [pool.index_select(1, table).flatten(1, 2) for pool in (k1, k2)]
    for begin in (0, 3, 60):
        out = torch.full((70 - begin, 1, 20), torch.nan, device=device)
        block_scores.launch_scores(q[begin:], *pools, out, 100 + begin, SMALL, 0.3, config)
        scores.append(out[60 - begin :, :, 1:18])
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores[0], scores[2])
    monkeypatch.setattr(block_scores, "SCORE_BYTES", 1)  # two tiles of queries
    got = block_selection.select_prefill(q[60:], k1, k2, table, 160, SMALL, 0.3)
    assert torch.equal(got.long(), expected(q[60:], k, 160, SMALL, 0.3))


def test_block_scores_are_those_of_the_reference(device: torch.device) -> None:
    q, k, start = draw((40, 9, 64), device, 9), draw((240, 3, 64), device, 10), 200
    k1, k2, table = scattered(k, SMALL)
    pools = [pool.index_select(1, table).flatten(1, 2) for pool in (k1, k2)]
    out = torch.full((40, 3, 28), torch.nan, device=device)
    block_scores.launch_scores(q, *pools, out, start, SMALL, 0.2, block_scores.score_config(4, 64, 227 << 10))
    keys, positions = k.transpose(0, 1), torch.arange(start, start + 40, device=device)
    windows = ops.window_scores(q, ops.pool_keys(keys, 4, 2), ops.pool_keys(keys, 16, 8), positions, SMALL, 0.2)
    reference = ops.block_scores(windows, 30, SMALL)
    for row in range(40):
        high = (start + row) // 8 - 2
        torch.testing.assert_close(out[row, :, 1:high], reference[row, :, 1:high], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("heads", "groups", "dim"), SHAPES)
def test_decode_chooses_as_the_reference(heads: int, groups: int, dim: int, device: torch.device) -> None:
    lengths = [0, 7, 16, 64, 129, 240, 250, -1]
    q = draw((len(lengths), heads, dim), device, 11)
    keys = draw((250, groups, dim), device, 12)
    tables, pools = batch_of(keys, lengths, SMALL)
    given = torch.tensor(lengths, device=device)
    got = block_selection.select_decode(q, *pools, tables, given, SMALL, dim**-0.5, tables.shape[1])
    for row, length in enumerate(lengths):
        want = torch.full_like(got[row], -1)
        if length > 0:
            one = expected(q[row : row + 1], keys[:length], length - 1, SMALL, dim**-0.5)[0]
            want[:, : one.shape[1]] = one
        assert torch.equal(got[row], want)


def batch_of(keys: Tensor, lengths: list[int], sparse: SparseConfig) -> tuple[Tensor, list[Tensor]]:
    """Sequences that begin alike, each in its own pages."""
    width = -(-keys.shape[0] // sparse.block_size) + 2
    tables = torch.full((len(lengths), width), 1 << 20, dtype=torch.int32, device=keys.device)  # padded with nonsense
    parts = []
    base = 0
    for row, length in enumerate(lengths):
        k1, k2, table = scattered(keys[: max(length, 1)], sparse, row)
        tables[row, : len(table)] = table + base
        base += k1.shape[1]
        parts.append((k1, k2))
    return tables, [torch.cat(pools, 1) for pools in zip(*parts, strict=True)]


def test_decode_does_not_depend_on_company(device: torch.device) -> None:
    lengths = [200, 33, 250, 111]
    q, keys = draw((4, 8, 32), device, 13), draw((250, 2, 32), device, 14)
    tables, pools = batch_of(keys, lengths, SMALL)
    given = torch.tensor(lengths, device=device)
    together = block_selection.select_decode(q, *pools, tables, given, SMALL, 0.2, tables.shape[1])
    alone = block_selection.select_decode(q[:1], *pools, tables[:1, :26], given[:1], SMALL, 0.2, 26)
    assert torch.equal(together[:1], alone)
    flags = torch.tensor([True, True, False, False], device=device)
    some = block_selection.select_decode(q, *pools, tables, given, SMALL, 0.2, tables.shape[1], flags)
    assert torch.equal(some[:2], together[:2])
    assert (some[2:] == -1).all()


def test_decode_joins_splits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_scores, "SPLIT", 16)
    monkeypatch.setattr(block_scores, "JOIN", 2)
    q, keys = draw((1, 16, 64), device, 15), draw((1000, 1, 64), device, 16)
    tables, pools = batch_of(keys, [1000], SMALL)
    got = block_selection.select_decode(
        q, *pools, tables, torch.tensor([1000], device=device), SMALL, 0.125, tables.shape[1]
    )
    assert torch.equal(got[0].long(), expected(q, keys, 999, SMALL, 0.125)[0])


@pytest.mark.parametrize(
    ("segments", "size", "part"),
    [(0, 256, 0), (32, 256, 0), (32, 64, 0), (0, 128, 32), (0, 64, 64)],  # held, held after a cut, streamed, two sliced
)
@pytest.mark.parametrize("values", ["random", "equal", "few", "near", "spread", "zero", "rising"])
def test_top_blocks(
    segments: int, size: int, part: int, values: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_blocks, "CANDIDATES", 64)
    sparse, num_blocks = replace(SMALL, topk=14), 199 if values == "few" else 200
    scores = {
        "random": draw((4, 2, num_blocks), device, 17).abs(),
        "equal": torch.ones(4, 2, num_blocks, device=device),
        "few": draw((4, 2, num_blocks), device, 18).abs().mul(3).round(),
        "near": near((4, 2, num_blocks), device, 20, levels=3, ulps=8),
        "spread": near((4, 2, num_blocks), device, 21, levels=1, ulps=3 * TIE_ULPS),
        "zero": torch.zeros(4, 2, num_blocks, device=device),
        "rising": torch.arange(8 * num_blocks, dtype=torch.float32, device=device).view(4, 2, num_blocks) * 1e30,
    }[values]
    positions = torch.tensor([3, 127, 1000, 1590], device=device)
    want = ascending(ops.top_blocks(scores, positions, sparse))
    for row, position in enumerate(positions.tolist()):
        own = position // 8
        scores[row, :, own - 2 if own >= 16 else 0 :] = torch.nan  # none of these may be read
    config = Config({"SIZE": size, "SEGMENTS": segments, "SLICE": part}, 1)
    got = torch.empty(4, 2, 16, dtype=torch.int32, device=device)
    top_blocks.launch_top(scores, got, positions, None, 0, sparse, config)
    assert torch.equal(got.long(), want)


def test_few_long_rows_are_sliced(device: torch.device) -> None:
    """More programs than rows, and about as many candidates as a slice has blocks; others as before."""
    for width, wanted in ((97, 0), (2048, 0), (4096, 0), (4097, 512), (16384, 1024), (16385, 1024), (1 << 17, 2048)):
        tile = top_blocks.top_config(width, 2, RELEASED).tile
        assert tile.get("SLICE", 0) == wanted
        assert tile["SIZE"] <= max(4096, 2 * wanted)
        assert top_blocks.top_config(width, 9999, RELEASED).tile.get("SLICE", 0) == 0
    sparse, num_blocks = replace(SMALL, topk=14), 4200
    scores = draw((3, 1, num_blocks), device, 21).abs().mul(50).round()  # many are equal
    positions = torch.tensor([8 * num_blocks - 1, 900, 8 * 600], device=device)
    got = top_blocks.top_blocks(scores, positions, sparse)
    assert torch.equal(got.long(), ascending(ops.top_blocks(scores, positions, sparse)))


def test_decode_with_slices(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without them; some slices are empty, some rows have no sparse attention."""
    lengths = [250, 0, 129, 33, 250]
    q, keys = draw((5, 8, 32), device, 22), draw((250, 2, 32), device, 23)
    tables, pools = batch_of(keys, lengths, SMALL)
    given = torch.tensor(lengths, device=device)
    flags = torch.tensor([True, True, True, True, False], device=device)
    wanted = block_selection.select_decode(q, *pools, tables, given, SMALL, 0.2, tables.shape[1], flags)
    config = Config({"SIZE": 32, "SEGMENTS": 0, "SLICE": 8}, 1)
    monkeypatch.setattr(top_blocks, "top_config", lambda *_: config)
    found = block_selection.select_decode(q, *pools, tables, given, SMALL, 0.2, tables.shape[1], flags)
    assert torch.equal(found, wanted)


def test_top_blocks_of_few(device: torch.device) -> None:
    scores = draw((9, 1, 4), device, 19).abs()
    positions = torch.arange(9, device=device) * 3
    got = top_blocks.top_blocks(scores, positions, SMALL)
    assert torch.equal(got.long(), ascending(ops.top_blocks(scores, positions, SMALL)))


def pages_of(groups: int, num_pages: int, dim: int, sparse: SparseConfig, device: torch.device) -> KVPages:
    config: Any = SimpleNamespace(sparse_config=sparse, num_key_value_heads=groups, head_dim=dim)
    pages = KVPages(num_pages, config, torch.float32, device)
    for pool in (pages.k, pages.v, pages.k1, pages.k2):
        pool.fill_(torch.nan)
    return pages


@pytest.mark.parametrize("dim", [16, 48])
def test_append_as_the_cache_does(dim: int, device: torch.device) -> None:
    groups, num_pages = 2, 24
    ours, theirs = (pages_of(groups, num_pages, dim, SMALL, device) for _ in range(2))
    torch.manual_seed(0)
    tables = torch.randperm(num_pages)[:20].view(2, 10).to(device)
    lengths = [0, 0]
    for step, counts in enumerate([(19, 0), (14, 5), (1, 1), (1, 2), (6, 1), (1, 17)]):
        starts = list(lengths)
        total = sum(counts) + 2
        k, v = (draw((total, 3 * groups, dim), device, 20 + 2 * step + i)[:, :groups] for i in range(2))
        row_of = torch.zeros(total, dtype=torch.long, device=device)
        positions = torch.full((total,), -1, device=device)
        begin = 1  # padding on both sides
        for row, count in enumerate(counts):
            ends = starts[row] + count
            span: Any = SimpleNamespace(start=starts[row], end=ends, table=tables[row], first_page=None)
            if count:
                theirs.append(span, k[begin : begin + count], v[begin : begin + count])
            row_of[begin : begin + count] = row
            positions[begin : begin + count] = torch.arange(starts[row], starts[row] + count)
            begin += count
            lengths[row] += count
        given = torch.tensor(starts, device=device)
        pooling.append(k, v, ours.k, ours.v, ours.k1, ours.k2, tables, given, row_of, positions, SMALL)
        for name in ("k", "v"):
            assert torch.equal(getattr(ours, name).nan_to_num(7.0), getattr(theirs, name).nan_to_num(7.0))
        for name in ("k1", "k2"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), equal_nan=True)


def test_fp16_agrees(device: torch.device) -> None:
    q, k = draw((9, 8, 32), device, 40).half(), draw((150, 2, 32), device, 41).half()
    k1, k2, table = scattered(k, SMALL)
    got = block_selection.select_prefill(q, k1, k2, table, 141, SMALL, 0.2)
    want = expected(q, k, 141, SMALL, 0.2)
    assert (got.long() == want).float().mean() > 0.98
    q_one, length = q[-1:], torch.tensor([150], device=device)
    one = block_selection.select_decode(q_one, k1, k2, table[None].int(), length, SMALL, 0.2, len(table))
    assert torch.equal(one[0], got[-1])


def test_few_windows_are_visible_before_the_mask_ends() -> None:
    """What needs_mask promises: below the forced blocks of a tile every query sees every window."""
    for sparse in (RELEASED, SMALL, replace(RELEASED, window_size=1024, topk=48)):
        assert not block_scores.needs_mask(sparse, 16)
        ratio = sparse.block_size // sparse.kernel_stride
        before = sparse.kernel_size // sparse.kernel_stride - 1
        first = torch.arange(sparse.num_selected * sparse.block_size - 15, 20000)
        high = (first + 15) // sparse.block_size - sparse.num_window_blocks
        assert (
            high * ratio + before <= ops.num_visible(first, sparse.kernel_size, sparse.kernel_stride) + before
        ).all()
    assert block_scores.needs_mask(FORCED_LITTLE, 16)


POINTERS = ("q", "k1", "k2", "k1_pages", "k2_pages", "k_pages", "v_pages", "k_new", "v_new", "pooled")
FP32 = ("scores", "partial")
INDICES = ("tables", "lengths", "is_sparse", "positions", "scratch", "candidates", "selected", "starts", "row_of")


def build(kernel: Any, constants: dict[str, Any], options: dict[str, Any], dtype: str = "bf16") -> Build:
    kinds = dict.fromkeys(POINTERS, f"*{dtype}") | dict.fromkeys(FP32, "*fp32") | dict.fromkeys(INDICES, "*i32")
    kinds |= {"scale": "fp32"} | dict.fromkeys(constants, "constexpr")
    return Build(kernel, {name: kinds.get(name, "i32") for name in kernel.arg_names}, constants, options)


def score_build(shared_memory: int, config: block_scores.ScoreConfig | None = None) -> Build:
    config = config or block_scores.score_config(2, 128, shared_memory)
    constants = block_scores.score_constants(RELEASED, 16, 128, torch.bfloat16, config)
    return build(
        block_scores._score_kernel, constants, {"num_warps": config.num_warps, "num_stages": config.num_stages}
    )


def top_build(width: int, num_rows: int) -> Build:
    config = top_blocks.top_config(width, num_rows, RELEASED)
    constants = top_blocks.top_constants(RELEASED, 2, RELEASED.num_selected, width, config)
    return build(
        top_blocks._top_kernel,
        constants | {"OFFSET": 0, "HAS_FLAGS": False, "PDL": 0},
        config.options,
    )


def slice_build(width: int) -> Build:
    config = top_blocks.top_config(width, 2, RELEASED)
    constants = top_blocks.top_constants(RELEASED, 2, RELEASED.num_selected, width, config)
    constants = {name: value for name, value in constants.items() if name in top_blocks._slice_kernel.arg_names}
    constants |= {"OFFSET": 1, "HAS_FLAGS": True, "PDL": 0}
    return build(top_blocks._slice_kernel, constants, {"num_warps": 2})


def append_build() -> Build:
    constants = pooling.append_constants(RELEASED, 128) | {"exponents_ptr": None, "PDL": 0}
    constants |= dict.fromkeys(("frames_ptr", "hot_k", "hot_v", "hot_exponents_ptr"))
    return build(pooling._append_kernel, constants, {"num_warps": 4})


def other_builds() -> list[Build]:
    shared = block_scores.decode_constants(RELEASED, 16, 128, torch.bfloat16) | {"PDL": 0}
    more = {"SPLIT": block_scores.SPLIT, "JOIN": block_scores.JOIN, "WINDOW": 32, "MASKED": False, "ROWS": 128}
    return [
        build(block_scores._decode_norm_kernel, shared | {"ROWS": block_scores.SPLIT}, {"num_warps": 4}),
        build(block_scores._decode_score_kernel, shared | more, {"num_warps": 4}),
        top_build(2000, 9999),
        top_build(16384, 9999),
        top_build(4096, 2),
        top_build(16384, 2),
        slice_build(16384),
        append_build(),
    ]


def builds() -> list[Build]:
    return [score_build(227 << 10), *other_builds()]


def small_builds() -> list[Build]:
    return [score_build(99 << 10), *other_builds()]


@pytest.mark.parametrize(
    ("capability", "maker", "limit"), [(80, "small_builds", 99), (90, "builds", 227), (120, "small_builds", 99)]
)
def test_compiles_without_spills(capability: int, maker: str, limit: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-m",
        "tests.kernels.aot",
        str(capability),
        f"tests.kernels.test_block_selection:{maker}",
    ]
    text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    results = json.loads(text)
    assert len(results) == 9
    for result in results:
        assert result["shared"] <= limit << 10, result
        if capability == 90:
            assert result["spills"] == 0, result
    assert results[0]["has_wgmma"] == (capability == 90)

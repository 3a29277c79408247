"""Keys and values kept in FP8: kernels against the definition, and the same bits however a text comes in pieces."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from sala.backends.torch.cache import FP8, HybridCache, raw, rounded
from sala.backends.torch.kernels import pooling
from sala.backends.torch.kernels.attention import prefill
from sala.backends.torch.kernels.decode_attention import decode_attention
from sala.backends.torch.kernels.launch import Config
from tests.kernels.aot import Build
from tests.kernels.test_attention import BLOCK, Memory, choose, prefill_build, split_build
from tests.kernels.test_block_selection import RELEASED, build
from tests.kernels.test_gpu_forward import SHAPE, TWO, Both, make_model, row, tokens

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Narrow(Both):
    """The definition and the kernels, both with pages in FP8."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(make_model(replace(SHAPE, **TWO)), device)
        config = self.model.config
        self.caches = [HybridCache(config, 40, 4, torch.float32, device, FP8) for _ in range(2)]
        for cache in self.caches:
            for pages in cache.pages.values():
                for pool in (pages.k, pages.v):
                    raw(pool).fill_(0x7F)  # not a number
                for pool in (pages.k1, pages.k2):
                    pool.fill_(float("nan"))


def test_the_model_as_it_is_defined(device: torch.device) -> None:
    both = Narrow(device)
    pages, others = (7, 3, 11, 20, 5, 2, 30, 31), (12, 13)
    both.run(row(tokens(1, 78), 0, pages[:5], 0))  # dense, then sparse
    both.run(row(tokens(3, 1), 78, pages[:5], 0), row(tokens(2, 15), 0, others, 2))
    both.run(row(tokens(4, 17), 79, pages, 0))
    both.run(row(tokens(5, 1), 96, pages, 0), row(tokens(6, 1), 15, others, 2))
    for layer, kept in both.caches[0].pages.items():
        found = both.caches[1].pages[layer]
        for name in ("k", "v"):
            one, other = (raw(getattr(pool, name)) for pool in (kept, found))
            assert (one == other).float().mean() > 0.99  # sums of projections may round the other way


@torch.inference_mode()
def test_pieces_do_not_matter(device: torch.device) -> None:
    """Read whole or in chunks, the pages hold the same and the last token sees the same."""
    hidden = []
    for cuts in ((78,), (40, 38), (17, 44, 17)):
        both = Narrow(device)
        start = 0
        for count in cuts:
            both.run(row(tokens(1, 78)[start : start + count], start, (7, 3, 11, 20, 5), 0))
            start += count
        pages = next(iter(both.caches[1].pages.values()))
        hidden.append((raw(pages.k)[:, [7, 3, 11, 20, 5]].clone(), pages.k1[:, [7, 3, 11, 20]].clone()))
    for other in hidden[1:]:
        for found, expected in zip(other, hidden[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_attention_reads_what_the_pages_hold(device: torch.device) -> None:
    """Bit for bit as over the same numbers in fp32."""
    torch.manual_seed(0)
    start, n, groups, heads, dim = 75, 21, 2, 4, 16
    memory = Memory([start + n], groups, dim, BLOCK, device)
    narrow = [rounded(pool.nan_to_num(), FP8) for pool in (memory.k, memory.v)]
    wide = [pool.to(torch.float32) for pool in narrow]
    q, table = torch.randn(n, heads, dim, device=device), memory.tables[0]
    positions = torch.arange(start, start + n)
    selected = choose(positions, groups, 3, BLOCK).to(device)
    for pools in (narrow, wide):
        assert pools[0].is_contiguous()
    config = Config({"TOKENS": 4}, 4, 1)
    found, expected = (prefill(q, *pools, table, selected, start, 0.25, config) for pools in (narrow, wide))
    assert torch.equal(found, expected)
    found, expected = (prefill(q, *pools, table, None, start, 0.25, config) for pools in (narrow, wide))
    assert torch.equal(found, expected)
    lengths, is_sparse = torch.tensor([start + n], device=device), torch.ones(1, dtype=torch.bool, device=device)
    found, expected = (
        decode_attention(q[-1:], *pools, memory.tables, lengths, is_sparse, selected[-1:], 0.25, 16)
        for pools in (narrow, wide)
    )
    assert torch.equal(found, expected)


def test_rounding(device: torch.device) -> None:
    """Floats of every size, and all that lie half-way between two numbers of FP8."""
    upper = torch.arange(0, 1 << 16, 37, dtype=torch.int32) << 16
    codes = torch.arange(0x7E, dtype=torch.uint8).view(FP8).float()
    halves = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([upper.view(torch.float32), halves, -halves])
    x = x[x.isfinite()]
    x = torch.cat([x, x.new_zeros(-len(x) % 16)]).view(-1, 1, 16).to(device)
    config = replace(SHAPE, num_key_value_heads=1).sparse_config
    num_pages = -(-len(x) // BLOCK)
    k, v = (torch.empty(1, num_pages, BLOCK, 16, dtype=FP8, device=device) for _ in range(2))
    k1, k2 = (torch.empty(1, num_pages, BLOCK // stride, 16, device=device) for stride in (4, 16))
    positions = torch.arange(len(x), device=device)
    zeros = torch.zeros(len(x), dtype=torch.long, device=device)
    table = torch.arange(num_pages, device=device)[None]
    pooling.append(x, -x, k, v, k1, k2, table, zeros[:1], zeros, positions, config)
    for pool, expected in ((k, x), (v, -x)):
        found = raw(pool).flatten(0, 2)[: len(x)].cpu()
        wanted = raw(rounded(expected[:, 0], FP8)).cpu()
        assert ((found == wanted) | (wanted & 0x7F == 0) & (found & 0x7F == 0)).all()


def test_what_is_too_large_becomes_the_largest() -> None:
    x = torch.tensor([1e9, -1e9, 448.0, 460.0, 0.3, float("nan")])
    found = rounded(x, FP8).float()
    assert found[:4].tolist() == [448.0, -448.0, 448.0, 448.0]
    assert abs(float(found[4]) - 0.3) < 0.02
    assert found[5].isnan()


CAPABILITIES = {89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}  # with FP8, and their shared memory


def builds_for(capability: int) -> list[Build]:
    """Read from FP8, computed in bf16, at the released shapes."""
    limit = CAPABILITIES[capability]
    append = build(pooling._append_kernel, pooling.append_constants(RELEASED, 128) | {"PDL": 0}, {"num_warps": 4})
    builds = [prefill_build(limit, True), prefill_build(limit, False), split_build(limit), append]
    return [_narrow(build) for build in builds]


builds_89, builds_90, builds_100, builds_120 = (partial(builds_for, capability) for capability in CAPABILITIES)


def _narrow(build: Build) -> Build:
    names = [name for name in ("k_ptr", "v_ptr", "k_pages", "v_pages") if name in build.signature]
    return replace(build, signature={**build.signature, **dict.fromkeys(names, "*fp8e4nv")})


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    builds = f"tests.kernels.test_kv_fp8:builds_{capability}"
    command = [sys.executable, "-m", "tests.kernels.aot", str(capability), builds]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert all(result["shared"] <= CAPABILITIES[capability] for result in results), results
    assert not any(result["spills"] for result in results), results

"""Keys and values kept in FP8: kernels against the definition, and the same bits however a text comes in pieces."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from sala.backends.torch.cache import FP8, HybridCache, from_fp8, raw, to_fp8
from sala.backends.torch.kernels import pooling
from sala.backends.torch.kernels.attention import prefill
from sala.backends.torch.kernels.decode_attention import decode_attention
from sala.backends.torch.kernels.launch import Config
from tests.kernels.aot import Build
from tests.kernels.test_attention import BLOCK, Memory, choose, prefill_build, split_build
from tests.kernels.test_block_selection import append_build
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
                pages.exponents.fill_(0xFF)  # infinite
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
        for name in ("k", "v", "exponents"):
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
        held = [pool[:, [7, 3, 11, 20, 5]].clone() for pool in pages.token_pools]
        hidden.append((*held, pages.k1[:, [7, 3, 11, 20]].clone()))
    for other in hidden[1:]:
        for found, expected in zip(other, hidden[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_attention_reads_what_the_pages_hold(dtype: torch.dtype, device: torch.device) -> None:
    """As over the same numbers in the dtype of the queries, in fp32 bit for bit."""
    largest, tolerance = (30, 0.0) if dtype == torch.float32 else (9, 2e-3)
    torch.manual_seed(0)
    start, n, groups, heads, dim = 75, 21, 2, 4, 16
    memory = Memory([start + n], groups, dim, BLOCK, device)
    sizes = 2.0 ** torch.randint(-largest, largest, memory.k.shape[:3], device=device)[..., None]
    pairs = [to_fp8(pool.nan_to_num() * size) for pool, size in ((memory.k, sizes.sqrt()), (memory.v, sizes))]
    narrow, exponents = [codes for codes, _ in pairs], torch.stack([each for _, each in pairs], -1)
    wide = [from_fp8(*pair, dtype) for pair in pairs]
    q, table = torch.randn(n, heads, dim, device=device).to(dtype), memory.tables[0]
    positions = torch.arange(start, start + n)
    selected = choose(positions, groups, 3, BLOCK).to(device)
    both = [(narrow, exponents), (wide, None)]
    for pools, _ in both:
        assert pools[0].is_contiguous()
    config = Config({"TOKENS": 4}, 4, 1)
    for blocks in (selected, None):
        found, expected = (
            prefill(q, *pools, table, blocks, start, 0.25, config, exponents=each) for pools, each in both
        )
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    lengths, is_sparse = torch.tensor([start + n], device=device), torch.ones(1, dtype=torch.bool, device=device)
    found, expected = (
        decode_attention(q[-1:], *pools, memory.tables, lengths, is_sparse, selected[-1:], 0.25, 16, exponents=each)
        for pools, each in both
    )
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_rounding(device: torch.device) -> None:
    """Floats of every size, rows of every size, and all that lie half-way between two numbers of FP8."""
    upper = torch.arange(0, 1 << 16, 37, dtype=torch.int32) << 16
    codes = torch.arange(0x7E, dtype=torch.uint8).view(FP8).float()
    halves = (codes[1:] + codes[:-1]) / 2
    wild = upper.view(torch.float32)
    wild = wild[wild.isfinite()]
    sizes = 2.0 ** torch.arange(-60, 100, 9)[:, None]
    like = torch.cat([halves, -halves, torch.tensor([448.0, 464.0])])[None] * sizes  # the largest stands in every row
    x = torch.cat([wild[: len(wild) // 16 * 16].view(-1, 16), with_largest(like, sizes)])
    x = torch.cat([x, torch.full((1, 16), float("inf")), torch.zeros(1, 16)])
    x = x.unsqueeze(1).to(device)
    config = replace(SHAPE, num_key_value_heads=1).sparse_config
    num_pages = -(-len(x) // BLOCK)
    k, v = (torch.empty(1, num_pages, BLOCK, 16, dtype=FP8, device=device) for _ in range(2))
    exponents = torch.empty(1, num_pages, BLOCK, 2, dtype=torch.uint8, device=device)
    k1, k2 = (torch.empty(1, num_pages, BLOCK // stride, 16, device=device) for stride in (4, 16))
    positions = torch.arange(len(x), device=device)
    zeros = torch.zeros(len(x), dtype=torch.long, device=device)
    table = torch.arange(num_pages, device=device)[None]
    pooling.append(x, -x, k, v, k1, k2, table, zeros[:1], zeros, positions, config, exponents)
    for index, (pool, expected) in enumerate(((k, x), (v, -x))):
        found = raw(pool).flatten(0, 2)[: len(x)].cpu()
        codes, wanted_exponents = to_fp8(expected[:, 0])
        wanted = raw(codes).cpu()
        assert ((found == wanted) | (wanted & 0x7F == 0) & (found & 0x7F == 0)).all()
        assert torch.equal(exponents.flatten(0, 2)[: len(x), index], wanted_exponents)
    assert not exponents.flatten(0, 2)[len(x) :].any()  # the rest of the last page


def with_largest(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """x [m, n], largest [m, 1] → rows of 16 numbers, 15 of x and 448 times the largest."""
    parts = torch.nn.functional.pad(x, (0, -x.shape[1] % 15)).unflatten(1, (-1, 15))
    return torch.cat([parts, (448 * largest).unsqueeze(1).expand(-1, parts.shape[1], -1)], 2).flatten(0, 1)


def test_a_row_has_the_smallest_exponent_that_fits() -> None:
    for largest in (448.0, 449.0, 1e9, 1e38, 3.0, 2e-10):
        x = torch.tensor([[largest, -largest / 3, largest / 100]])
        codes, exponents = to_fp8(x)
        assert 224 <= float(codes[0, 0].float()) <= 448
        torch.testing.assert_close(from_fp8(codes, exponents, torch.float32), x, rtol=2**-4, atol=0)
    codes, exponents = to_fp8(torch.tensor([[1.0, float("nan")], [0.0, -0.0], [float("inf"), 1.0]]))
    assert codes[0, 1].float().isnan()
    assert from_fp8(codes, exponents, torch.float32)[1].tolist() == [0, 0]
    assert from_fp8(codes, exponents, torch.float32)[2].isfinite().all()


CAPABILITIES = {89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}  # with FP8, and their shared memory


def builds_for(capability: int) -> list[Build]:
    """Read from FP8, computed in bf16, at the released shapes."""
    limit = CAPABILITIES[capability]
    builds = [prefill_build(limit, True), prefill_build(limit, False), split_build(limit), append_build()]
    return [_narrow(build) for build in builds]


builds_89, builds_90, builds_100, builds_120 = (partial(builds_for, capability) for capability in CAPABILITIES)


def _narrow(build: Build) -> Build:
    names = [name for name in ("k_ptr", "v_ptr", "k_pages", "v_pages") if name in build.signature]
    signature = {**build.signature, **dict.fromkeys(names, "*fp8e4nv"), "exponents_ptr": "*i16"}
    constants = {name: value for name, value in build.constants.items() if name != "exponents_ptr"}
    return replace(build, signature=signature, constants=constants)


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
